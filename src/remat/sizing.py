"""The same step at other sizes: measured, and put together to one family that says what any size takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from remat import ranks
from remat.check.live import storages_of
from remat.check.untouched import remember_random_state, untouched
from remat.errors import InputError
from remat.planner.sizes import Family, MisfitError, chord, family
from remat.profiling import build_profile
from remat.records import Plan, Profile
from remat.request import Request
from remat.run.quiet import quiet
from remat.trace.sizes import Chart, Shapes, shapes_of, text
from remat.trees import tensors

__all__ = ["Knot", "Measured", "Trials", "chart_and_family", "measure_sizes", "one_call_a_step"]

_TOLERANCE = 0.002  # of what operations make: within what adaptive plans leave free


@dataclass(frozen=True)
class Knot:
    """A size that was measured."""

    shapes: Shapes
    profile: Profile


@dataclass(frozen=True)
class Trials:
    """Steps that run forward only. `lengths`: at lengths that models may pad; `doubled`: a short one with its
    rows twice, and one of twice that length; none where the batch has no sequences."""

    lengths: tuple[Callable[[], torch.Tensor], ...] = ()
    doubled: tuple[Callable[[], torch.Tensor], ...] = ()


@dataclass(frozen=True)
class Measured:
    """What `fit` measured: the step itself first, then other sizes of it."""

    knots: tuple[Knot, ...]
    notes: tuple[str, ...] = ()
    stepped: bool = False  # memory does not lie below the chords between the sizes
    rows_as_length: bool = True  # see Chart


def measure_sizes(
    request: Request,
    found: Profile,
    runs: Sequence[tuple[Callable[[], torch.Tensor], str, int]],
    trials: Trials,
    progress: Callable[[str], None],
) -> Measured:
    """Profile the same step with other batches: (run, signature, bytes of the batch) each. One that does not
    run on every rank, or differs in more than numbers, is left out and named."""
    used = [request.run]
    knots = [Knot(ranks.agree(_shapes_seen(request.model, request.run)), found)]
    notes: list[str] = []
    for run, signature, batch_bytes in runs:
        progress(f"measuring {signature}")
        other = replace(request, run=run, signature=signature, batch_bytes=batch_bytes, like=found)
        shapes, problem = _on_all_ranks(partial(_shapes_if_it_runs, request.model, run))
        if not problem:
            profile, problem = _on_all_ranks(partial(build_profile, other, progress))
        if problem:
            notes.append(f"{signature} cannot be measured ({problem})")
        else:
            knots.append(ranks.agree(Knot(shapes, profile)))
            used.append(run)
    chart = Chart.of([knot.shapes for knot in knots])
    if chart is None or len(chart.shapes) == 1:
        return Measured(tuple(knots), tuple(notes))
    progress("trying lengths between the measured sizes")
    made = {knot.shapes: _bytes_made(request.model, run) for knot, run in zip(knots, used, strict=True)}
    stepped = not _below_chords(request.model, chart, made, trials.lengths)
    if stepped:
        notes.append(
            "memory grows in steps with the length, as of a model that pads inside: a length that was not "
            "measured is planned as the next larger one that was (adaptive=[...] takes more to measure)"
        )
    return Measured(tuple(knots), tuple(notes), stepped, _rows_as_length(request.model, trials.doubled))


def _below_chords(
    model: nn.Module,
    chart: Chart,
    measured: dict[Shapes, int | None],
    trials: Sequence[Callable[[], torch.Tensor]],
) -> bool:
    """Whether what operations make at other lengths lies below the chords between the measured ones."""
    at_sizes = [measured[shapes] for shapes in chart.shapes]
    values = [made for made in at_sizes if made is not None]
    if len(values) < len(at_sizes):
        return False
    for run in trials:
        shapes, problem = _on_all_ranks(partial(_shapes_seen, model, run))
        place = None if problem else chart.place(ranks.agree(shapes))
        if place is None or not place.exact or not chart.sizes[0] < place.size < chart.sizes[-1]:
            continue
        made = _bytes_made(model, run)
        if made is None or made > chord(chart.sizes, values, place.size) * (1 + _TOLERANCE):
            return False
    return True


def _rows_as_length(model: nn.Module, runs: Sequence[Callable[[], torch.Tensor]]) -> bool:
    if not runs:
        return False
    more_rows, longer = (_bytes_made(model, run) for run in runs)
    return more_rows is not None and longer is not None and more_rows <= longer * (1 + _TOLERANCE)


class _BytesMade(TorchDispatchMode):
    """Adds up the bytes of all tensors that operations make."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for tensor in tensors([args, kwargs]) for storage, _ in storages_of(tensor)}
        out = func(*args, **(kwargs or {}))
        found = {s._cdata: s.nbytes() for tensor in tensors([out]) for s, _ in storages_of(tensor)}
        self.total += sum(nbytes for storage, nbytes in found.items() if storage not in given)
        return out


def _bytes_made(model: nn.Module, run: Callable[[], torch.Tensor]) -> int | None:
    """By a forward, which holds none of it; None if it does not run."""

    made = _BytesMade()

    def forward() -> None:
        with untouched(model), quiet(model), torch.no_grad(), made:
            run()

    try:
        _, problem = _on_all_ranks(forward)
    except torch.OutOfMemoryError:
        return None
    return None if problem else ranks.most(made.total)


def _on_all_ranks(call: Callable[[], Any]) -> tuple[Any, str]:
    """What the call returns, and why it, or that of another rank, did not."""
    found, problem = None, ""
    try:
        found = call()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model says of a batch that it was not made for
        problem = f"{type(error).__name__}: {str(error)[:200]}"
    problems = ranks.gathered(problem)
    return found, problem or next((f"on another rank: {p}" for p in problems if p), "")


def _shapes_if_it_runs(model: nn.Module, run: Callable[[], torch.Tensor]) -> Shapes:
    """Among several ranks a batch that one of them cannot run has to be known before they measure together:
    it would leave the others waiting there."""
    if ranks.several():
        with untouched(model), torch.no_grad():
            run()
    return _shapes_seen(model, run)


class _SeenError(Exception):
    """Stops a forward whose inputs have been read."""


@contextmanager
def _watched(model: nn.Module, see: Callable[[Shapes], None]) -> Iterator[None]:
    """Inside, `see` is given the inputs of each call of the model that gradients go through."""
    read = shapes_of(model)

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            see(read(args, kwargs))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def one_call_a_step(model: nn.Module, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The same step, which raises InputError if it calls the model several times. A handle takes each call
    for a step of its own, with the whole budget for it: what the calls before it hold would come on top."""

    def checked() -> torch.Tensor:
        seen: list[Shapes] = []
        with _watched(model, seen.append):
            loss = run()
        if len(seen) > 1:
            raise InputError(
                f"this step calls {type(model).__name__} {len(seen)} times ({'; '.join(map(text, seen))}), "
                "and an adaptive plan is for one call: leave out adaptive= (adaptive=False for a callback) "
                "and fit with the largest batch, or make one call of it, its inputs joined along their rows"
            )
        return loss

    return checked


def _shapes_seen(model: nn.Module, run: Callable[[], torch.Tensor]) -> Shapes:
    """What the model is called with when the step runs."""
    seen: list[Shapes] = []

    def stop(shapes: Shapes) -> None:
        seen.append(shapes)
        raise _SeenError

    put_back = remember_random_state()  # the step may draw before it calls the model
    try:
        with _watched(model, stop):
            run()
    except _SeenError:
        pass
    finally:
        put_back()
    if not seen:
        raise InputError(
            f"the step does not call {type(model).__name__} itself, so that the size of its inputs is not "
            "seen; adaptive=True needs a step that calls the model"
        )
    return seen[0]


def chart_and_family(measured: Measured, fitted: Plan) -> tuple[Chart, Family, tuple[str, ...]]:
    """All sizes if they go together, otherwise the fitted one alone."""
    knots = measured.knots
    alone = Family((1,), (fitted.profile,))
    chart = Chart.of([knot.shapes for knot in knots])
    single = Chart((knots[0].shapes,))
    if chart is None:
        return single, alone, ("the sizes that were measured do not lie on one line: only one is used",)
    if len(chart.shapes) == 1:
        return single, alone, ("no other size could be measured: smaller ones run as the fitted one does",)
    by_shapes = {knot.shapes: knot.profile for knot in reversed(knots)}  # of equal ones, the fitted one
    try:
        made = family([(size, by_shapes[s]) for size, s in zip(chart.sizes, chart.shapes, strict=True)])
    except MisfitError as error:
        return single, alone, (f"the step is another one at other sizes: {error}",)
    chart = replace(chart, rows_as_length=measured.rows_as_length)
    return chart, replace(made, stepped=measured.stepped), made.notes
