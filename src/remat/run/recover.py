"""A step that runs out of memory, put back to where it began and run again.

Before a step everything that it changes is remembered: random state, buffers, gradients. Parameters are not
copied, they must not change. Nor are gradients, although a step adds to those of the steps before it: each is
complete once autograd has added to it, and running the step again gives the same, so what was added already
is not added a second time (`Gradients`).
"""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from remat.check.untouched import leaves_of, remember_buffers, remember_random_state
from remat.errors import InputError, RecoveryError
from remat.layouts import bytes_of
from remat.run.ranks import Ranks
from remat.units import format_bytes

__all__ = [
    "Failure",
    "Gradients",
    "is_out_of_memory",
    "recovering",
    "remembered_bytes",
    "step_optimizer",
]

_PHRASES = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """torch.OutOfMemoryError; on the host, in cuBLAS and in cuDNN it is a RuntimeError that says so."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, RecoveryError)
        and any(phrase in text for phrase in _PHRASES)
    )


@dataclass(frozen=True)
class Failure:
    """`reserved_bytes`: what the allocator had got from the device when it could get no more (0: unknown);
    `allocated_bytes`: how much of that was in use. `mine`: this process ran out, not another rank."""

    text: str
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    mine: bool = True


def recovering(
    model: nn.Module,
    fn: Callable[[], Tensor],
    backward: Callable[[Tensor], Any],
    tighten: Callable[[Failure], str | None],
    ranks: Ranks,
    tries: int,
    outside: Sequence[Tensor] = (),
) -> tuple[Tensor, list[str]]:
    """Run fn and backward until both succeed on every rank; (loss, what was done about each failure).

    `tighten` takes the next tighter plan and says which, or gives None where there is none: then the step is
    run again with what freeing has won. `outside`: leaves known to be trained beside the model; those in the
    loss's graph are found.
    """
    before: _Before | None = None
    tried: list[str] = []
    # Copying buffers may fail, on some ranks only: all know of it before any of them begins to run.
    ready = next(model.buffers(), None) is None
    try:
        while True:
            loss, failure = None, None
            if before is None:
                before, failure = _remembered(model, outside)
            ready = ready or ranks.agree(failure is None)
            if ready and before is not None:
                loss, failure = _attempt(fn, backward, before, ranks)
            if ready and ranks.agree(failure is None):
                assert loss is not None
                assert before is not None
                before.gradients.finish()
                ranks.average_gradients()
                return loss, tried
            failure = failure or Failure("another rank ran out of memory", mine=False)
            del loss
            free(model)
            if before is not None:
                before.put_back()
            ranks.refuse_alone(failure)
            if len(tried) + 1 >= tries:
                raise _gave_up(tried, failure, before.gradients.added if before is not None else 0)
            tried.append(f"{failure.text}; then {tighten(failure) or 'freed memory, no tighter plan'}")
    finally:
        if before is not None:
            before.gradients.finish()


def _remembered(model: nn.Module, outside: Sequence[Tensor]) -> tuple[_Before | None, Failure | None]:
    """Buffers are copied, which takes memory that may not be there either."""
    try:
        return _Before(model, outside), None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None, _failure(error)


def _attempt(
    fn: Callable[[], Tensor], backward: Callable[[Tensor], Any], before: _Before, ranks: Ranks
) -> tuple[Tensor | None, Failure | None]:
    before.gradients.begin()
    try:
        with ranks.apart():
            loss = fn()
            if not isinstance(loss, Tensor):
                raise InputError(
                    f"the step's function returned a {type(loss).__name__}; it must return the loss, and "
                    "leave backward to handle.step"
                )
            before.gradients.cover(leaves_of(loss))
            backward(loss)
        return loss.detach(), None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None, _failure(error)


def _failure(error: BaseException) -> Failure:
    """What is to be said of the error, which is let go of with all that it holds."""
    reserved_bytes = allocated_bytes = 0
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        reserved_bytes, allocated_bytes = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    text = str(error).split("\n")[0][:300]
    _let_go(error)
    return Failure(text, reserved_bytes, allocated_bytes)


def _let_go(error: BaseException | None) -> None:
    """A traceback holds every local variable on its way, and with them the failed step's tensors."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def free(model: nn.Module) -> None:
    """Give back what the failed step has left behind."""
    gc.collect()
    if any(p.device.type == "cuda" for p in model.parameters()):
        torch.cuda.empty_cache()


def _gave_up(tried: list[str], failure: Failure, added: int) -> RecoveryError:
    lines = [f"the step ran out of memory {len(tried) + 1} times and was given up; last: {failure.text}"]
    lines += [f"  tried: {line}" for line in tried]
    if failure.reserved_bytes:
        lines.append(
            f"  this process had {format_bytes(failure.reserved_bytes)} of the device, "
            f"{format_bytes(failure.allocated_bytes)} of it in use"
        )
    lines.append("use a smaller batch, a lower budget, or free memory that others hold on the device")
    if added:
        lines.append(
            f"gradients of {added} parameters contain this batch already: call zero_grad() before going on"
        )
    return RecoveryError("\n".join(lines))


def remembered_bytes(model: nn.Module, device: torch.device) -> int:
    """What remembering takes on this device while a step runs: buffers, on the host also generators."""
    buffers = sum(bytes_of(b) for b in model.buffers() if b.device.type == device.type)
    if device.type != "cpu":
        return buffers
    return buffers + 2 * torch.get_rng_state().nbytes  # one is being read while another is kept


class _Before:
    """The state that a step changes, as it was before the step."""

    def __init__(self, model: nn.Module, outside: Sequence[Tensor]) -> None:
        self._parameters = [(name, p, p._version) for name, p in model.named_parameters()]
        self._put_back = (remember_random_state(), remember_buffers(model))
        self.gradients = Gradients((*model.parameters(), *outside))

    def put_back(self) -> None:
        written = [name for name, p, version in self._parameters if p._version != version]
        if written:
            raise RecoveryError(
                f"the step ran out of memory after it had changed {len(written)} parameters, first "
                f"{written[0]}: it cannot be run again. Let handle.step run forward and backward only, and "
                "the optimizer afterwards: handle.step(fn, optimizer=optimizer)"
            )
        self.gradients.put_back()
        for put_back in self._put_back:
            put_back()


class Gradients:
    """Gradients of a step that may be run again.

    A parameter without gradient starts without one again. One that has a gradient from earlier steps is added
    to in place. How often autograd has added to it is counted; when the step runs again, so many additions
    are skipped, because the gradient has them. So nothing is copied, and the bits are those of one run.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        trained = [p for p in parameters if p.requires_grad]
        self._fresh: set[Tensor] = set()
        self._had: set[Tensor] = set()
        self._passing: list[Tensor] = []  # of `_fresh`, those that the next run may not use again
        self._done: Counter[Tensor] = Counter()  # additions of earlier runs that the gradient has
        self._now: Counter[Tensor] = Counter()  # additions of this run
        self._aside: dict[Tensor, Tensor] = {}  # gradients waiting for this run to get as far
        self._hooks: list[Any] = []
        self._watch(trained)

    def cover(self, leaves: Iterable[Tensor]) -> None:
        """More tensors whose gradients backward is about to add to, such as those of a head beside the model;
        before backward. Those of `parameters` are known already."""
        new = [t for t in leaves if t.requires_grad and t not in self._fresh and t not in self._had]
        self._passing += [leaf for leaf in new if leaf.grad is None]
        self._watch(new)

    def _watch(self, leaves: Iterable[Tensor]) -> None:
        for leaf in leaves:
            if leaf.grad is None:
                self._fresh.add(leaf)
            elif leaf not in self._had:
                self._had.add(leaf)
                hook = leaf.register_post_accumulate_grad_hook(self._added)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    @property
    def added(self) -> int:
        """How many gradients of earlier steps the runs have added to."""
        return len(self._done)

    def begin(self) -> None:
        self._now.clear()
        for parameter in self._aside:
            parameter.grad = None

    def _added(self, parameter: Any) -> None:
        self._now[parameter] += 1
        if parameter in self._aside:
            complete = self._now[parameter] == self._done[parameter]
            parameter.grad = self._aside.pop(parameter) if complete else None

    def put_back(self) -> None:
        """After a run that failed."""
        for parameter in self._fresh:
            parameter.grad = None
        self._fresh.difference_update(self._passing)  # a tensor of the failed run is not kept in memory
        self._passing.clear()
        for parameter in self._had:
            if self._now[parameter] and parameter not in self._aside:
                assert parameter.grad is not None
                self._done[parameter] = self._now[parameter]
                self._aside[parameter] = parameter.grad
        self._return()

    def _return(self) -> None:
        for parameter, gradient in self._aside.items():
            parameter.grad = gradient

    def finish(self) -> None:
        """No more runs. A second call does nothing."""
        self._return()
        self._aside.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


# --------------------------------------------------------------------------------------------- the optimizer


def step_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tries: int) -> int:
    """optimizer.step(), again if it runs out of memory before it has written anything; how often it did.

    Most often it does so when it makes its state, in the first step: what it had made by then is taken away
    again. An optimizer that has updated some parameters and not others cannot be helped; that is said.
    """
    for failures in range(tries):
        state = {key: dict(value) for key, value in optimizer.state.items()}
        versions = [(t, t._version) for t in _written_by(optimizer, state)]
        try:
            optimizer.step()
            return failures
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = _failure(error)
        changed = sum(tensor._version != version for tensor, version in versions)
        if changed:
            raise RecoveryError(
                f"the optimizer ran out of memory after it had written to {changed} of {len(versions)} "
                "parameters and state tensors, so its step can be neither finished nor run again: load the "
                "last saved state. foreach=False or fused=True makes it take less memory, and giving "
                f"optimizer= to remat.fit plans for it. Last: {failure.text}"
            )
        for key in [key for key in optimizer.state if key not in state]:
            del optimizer.state[key]
        for key, value in state.items():
            optimizer.state[key].clear()
            optimizer.state[key].update(value)
        free(model)
    raise RecoveryError(
        f"the optimizer ran out of memory {tries} times, before it had written anything; last: "
        f"{failure.text}. foreach=False or fused=True makes it take less, and giving optimizer= to remat.fit "
        "plans for it"
    )


def _written_by(optimizer: torch.optim.Optimizer, state: dict[Any, dict[Any, Any]]) -> list[Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [*parameters, *(t for value in state.values() for t in value.values() if isinstance(t, Tensor))]
