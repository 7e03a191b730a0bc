"""Progress on work that takes more than a second: on the terminal's error stream, and only if it is one."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["showing"]

_PATIENCE_SECONDS = 1.0


_outer: ContextVar[Callable[[str], None] | None] = ContextVar("_outer", default=None)


@contextmanager
def showing(title: str) -> Iterator[Callable[[str], None]]:
    """Gives a function to call with what is being done now; it is shown once the work has taken a second.

    Inside another one, its words go there: a terminal has one line for progress.
    """
    outer = _outer.get()
    if outer is not None:
        yield lambda doing: outer(f"{title.removeprefix('remat: ')}: {doing}")
        return
    with _line(title) as say:
        token = _outer.set(say)
        try:
            yield say
        finally:
            _outer.reset(token)


@contextmanager
def _line(title: str) -> Iterator[Callable[[str], None]]:
    try:
        with _same_random_numbers():
            from rich.console import Console
            from rich.markup import escape
            from rich.status import Status

            console = Console(stderr=True)
            line = Status(title, console=console)
    except ImportError:  # rich is for people; a machine without it gets plain lines
        with _plain(title) as plain_say:
            yield plain_say
        return
    if not console.is_terminal:
        yield lambda doing: None
        return
    start = time.monotonic()
    shown = False

    def say(doing: str) -> None:
        nonlocal shown
        elapsed = time.monotonic() - start
        with _same_random_numbers():
            line.update(f"{escape(title)}: {escape(doing)} [dim]{elapsed:.0f} s[/dim]")
            if not shown and elapsed > _PATIENCE_SECONDS:
                line.start()
                shown = True

    try:
        yield say
    finally:
        with _same_random_numbers():
            line.stop()


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """rich numbers its styles by chance; the model's own chance must not notice."""
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)


@contextmanager
def _plain(title: str) -> Iterator[Callable[[str], None]]:
    start = time.monotonic()

    def say(doing: str) -> None:
        if sys.stderr.isatty() and time.monotonic() - start > _PATIENCE_SECONDS:
            print(f"{title}: {doing}", file=sys.stderr)

    yield say
