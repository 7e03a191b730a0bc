"""fit and its parts. Everything here composes; what is decided is decided in planner/, run/ and check/."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from remat.check import verify as check_verify
from remat.check.peak import step_peak
from remat.check.step import Loss, run_step, signature, tensors_of
from remat.check.untouched import untouched
from remat.check.verify import Verification
from remat.errors import InputError, RematError
from remat.handle import Handle, apply
from remat.planner.schedule import keep_everything, schedule
from remat.planner.simulate import simulate
from remat.profiling import Request, build_profile, device_of
from remat.records import Action, Plan, Profile
from remat.show.progress import showing
from remat.units import format_bytes, parse_bytes

__all__ = ["Handle", "apply", "fit", "plan", "profile", "verify"]

Step = Callable[[], torch.Tensor]
_TRIES = 4  # plans that are measured before fit gives up on meeting a budget
_ACTIONS = (Action.KEEP, Action.RECOMPUTE)


def profile(
    model: nn.Module,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    step: Step | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: bool | int = False,
) -> Profile:
    """Measure what planning needs to know of one training step. The model is left as it was.

    `batch`: a dict is keyword arguments, a tuple or list positional ones, a tensor the only one. `loss` takes
    (output, batch); by default it is output.loss, or the output itself if it is a scalar. Or `step`: a
    callable that runs forward and returns the loss. With `optimizer` its state and its own step count, and
    with `accumulate` (True, or the number of micro-steps) gradients are resident when a step starts.
    """
    request = _request(model, batch, loss, step, optimizer, accumulate)
    with showing(f"remat: profiling {type(model).__name__}") as progress:
        return build_profile(request, progress)


def plan(
    profile: Profile,
    budget: int | str | None = None,
    *,
    activations: float | None = None,
    allow: Sequence[Action | str] = _ACTIONS,
) -> Plan:
    """The fastest way to run this step within a budget. Pure: looks at the profile only."""
    return schedule(profile, _budget_bytes(profile, budget, activations), allow=_actions(allow))


def fit(
    model: nn.Module,
    batch: Any = None,
    budget: int | str | None = None,
    *,
    activations: float | None = None,
    loss: Loss | None = None,
    step: Step | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: bool | int = False,
    allow: Sequence[Action | str] = _ACTIONS,
    check: bool = True,
) -> Handle:
    """Make this model's training step fit into `budget` bytes, with the least slowdown: profile, plan, apply,
    verify. The plan is run once and its peak measured; if it is over, a tighter plan is made.

    `budget`: bytes, "16GiB", "16GB" or "80%" of the device, over the whole step; or `activations`: a share of
    the step's own activation peak. Raises BudgetError (with `.needed` bytes) and leaves the model untouched if
    that is out of reach.
    """
    request = _request(model, batch, loss, step, optimizer, accumulate)
    allowed = _actions(allow)
    _check_budget_arguments(budget, activations)
    _parse_early(model, budget)
    with showing(f"remat: fitting {type(model).__name__}") as progress:
        found = build_profile(request, progress)
        budget_bytes = _budget_bytes(found, budget, activations)
        return _fitted(request, found, budget_bytes, allowed, check, progress)


def verify(
    model: nn.Module,
    batch: Any = None,
    plan: Plan | None = None,
    *,
    loss: Loss | None = None,
    step: Step | None = None,
) -> Verification:
    """Compare the planned (or enabled) step with the untouched one: loss, every gradient, buffers.

    The model is left as it was. Needs the memory of the untouched step: where that does not fit, see
    `Handle.verification`, which compares region by region.
    """
    run = (lambda model, batch: step()) if step is not None else None
    planned = None if plan is None else (lambda: apply(model, plan))
    return check_verify.verify(model, batch, planned, loss=loss, run=run, inputs=step is None)


# ------------------------------------------------------------------------------------------------- parts


def _request(
    model: nn.Module,
    batch: Any,
    loss: Loss | None,
    step: Step | None,
    optimizer: torch.optim.Optimizer | None,
    accumulate: bool | int,
) -> Request:
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; pass an nn.Module")
    if (batch is None) == (step is None):
        raise InputError("give a batch (and loss= if the model returns none), or step=, a callable that returns the loss")
    if step is not None:
        run: Step = step
    else:
        def run() -> torch.Tensor:
            return run_step(model, batch, loss)
    device = device_of(model)
    given = [] if batch is None else [t for t in tensors_of(batch) if t.device.type == device.type]
    seen = any(p.grad is not None for p in model.parameters())
    return Request(
        model=model,
        run=run,
        signature="custom step" if batch is None else signature(batch),
        batch_bytes=sum(t.untyped_storage().nbytes() for t in given),
        optimizer=optimizer,
        accumulate=seen or (accumulate is True) or (not isinstance(accumulate, bool) and accumulate > 1),
    )


def _actions(allow: Sequence[Action | str]) -> tuple[Action, ...]:
    try:
        return tuple(Action(action) for action in allow)
    except ValueError:
        names = ", ".join(action.value for action in Action)
        raise InputError(f"allow={list(allow)!r}: the actions are {names}") from None


def _check_budget_arguments(budget: int | str | None, activations: float | None) -> None:
    if (budget is None) == (activations is None):
        raise InputError('give exactly one of budget= (bytes, "16GiB", "80%") and activations= (a share, like 0.4)')
    if activations is not None and not (isinstance(activations, (int, float)) and 0 < activations <= 1):
        raise InputError(f"activations={activations!r} must be a number above 0 and at most 1")


def _parse_early(model: nn.Module, budget: int | str | None) -> None:
    """A budget that cannot be read is refused before any work is done."""
    if budget is not None:
        device = device_of(model)
        total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        parse_bytes(budget, total=total)


def _budget_bytes(profile: Profile, budget: int | str | None, activations: float | None) -> int:
    _check_budget_arguments(budget, activations)
    if budget is not None:
        return parse_bytes(budget, total=profile.environment.total_bytes or None)
    assert activations is not None
    resident = profile.step.resident + (profile.step.gradients if profile.accumulate else 0)
    plain = simulate(profile, keep_everything(profile)).peak_bytes
    return resident + int((plain - resident) * activations)


def _fitted(
    request: Request,
    found: Profile,
    budget_bytes: int,
    allowed: tuple[Action, ...],
    check: bool,
    progress: Callable[[str], None],
) -> Handle:
    """Plan, run the plan, and tighten until the measured peak is within the budget."""
    aim = budget_bytes
    for _ in range(_TRIES):
        made = replace(schedule(found, aim, allow=allowed), budget_bytes=budget_bytes)
        handle = apply(request.model, made, check=check)
        try:
            progress("running the plan once")
            over = _measured_excess(request, handle)
            if made.predicted_peak_bytes + over <= budget_bytes:
                handle.plan = replace(made, predicted_peak_bytes=made.predicted_peak_bytes + over)
                progress("verifying")
                _verify_handle(request, handle)
                return handle
        except BaseException:
            handle.remove()
            raise
        handle.remove()
        aim = budget_bytes - over
    raise RematError(f"no plan was found whose measured peak is within {format_bytes(budget_bytes)} after {_TRIES} tries")


def _measured_excess(request: Request, handle: Handle) -> int:
    """By how many bytes the real step peaks above what was predicted for it (below 0: it peaks lower)."""
    profile = handle.plan.profile
    alone = replace(
        profile, accumulate=False, step=replace(profile.step, optimizer_state=0, optimizer_temporary=0)
    )
    predicted = simulate(alone, handle.plan.choices).peak_bytes - alone.step.resident
    with untouched(request.model, request.optimizer):
        handle.measured = step_peak(request.model, request.run, device_of(request.model))
    return handle.measured.above_bytes - predicted


def _verify_handle(request: Request, handle: Handle) -> None:
    """Bits were compared region by region while the menu was measured; compare the whole step where it fits."""
    handle.verification = None
