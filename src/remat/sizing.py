"""The same step at other sizes: measured, and put together to one family that says what any size takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from remat import ranks
from remat.check.untouched import remember_random_state, untouched
from remat.errors import InputError
from remat.planner.sizes import Family, MisfitError, family
from remat.profiling import Request, build_profile
from remat.records import Plan, Profile
from remat.trace.sizes import Chart, Shapes, shapes_of, text

__all__ = ["Knot", "Measured", "chart_and_family", "measure_sizes", "one_call_a_step"]


@dataclass(frozen=True)
class Knot:
    """A size that was measured."""

    shapes: Shapes
    profile: Profile


@dataclass(frozen=True)
class Measured:
    """What `fit` measured: the step itself first, then other sizes of it."""

    knots: tuple[Knot, ...]
    notes: tuple[str, ...] = ()


def measure_sizes(
    request: Request,
    found: Profile,
    runs: Sequence[tuple[Callable[[], torch.Tensor], str, int]],
    progress: Callable[[str], None],
) -> Measured:
    """Profile the same step with other batches: (run, signature, bytes of the batch) each. One that does not
    run on every rank, or differs in more than numbers, is left out and named."""
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
    return Measured(tuple(knots), tuple(notes))


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
    return chart, made, made.notes
