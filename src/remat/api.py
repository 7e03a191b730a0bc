"""fit and its parts. Everything here composes; what is decided is decided in planner/, run/ and check/."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from remat import ranks
from remat._torch_private import compiler_problem, partitioner_problem
from remat.adaptive import FIRST_STEP_BYTES, AdaptiveHandle
from remat.check import verify as check_verify
from remat.check.chance import SeededRun
from remat.check.step import Loss, Output, casting_anew, run_step, signature, tensors_of
from remat.check.verify import Verification
from remat.devices import Device
from remat.errors import BudgetError, InputError
from remat.estimating import OptimizerLike, estimate_profile
from remat.fitting import fitted, rounding
from remat.handle import Handle, apply, at_work, chunked_head
from remat.planner.schedule import keep_everything, refusal, schedule
from remat.planner.simulate import simulate
from remat.planner.ties import tied_calls
from remat.profiling import build_profile
from remat.records import Action, Mode, Plan, Profile
from remat.request import Request, device_of
from remat.run.compiled import BACKENDS, DEFAULT_BACKEND, PUBLIC, WHOLE, is_compiled
from remat.run.functions import functions
from remat.run.journal import Event
from remat.run.recover import remembered_bytes
from remat.run.region import PlannedRegion
from remat.run.wrap import wrapped
from remat.show.progress import showing
from remat.sizing import Trials, measure_sizes, one_call_a_step
from remat.trace.discover import find_blocks
from remat.trace.sizes import doubled, lengths_to_try, smaller_batches
from remat.units import parse_bytes

__all__ = ["Handle", "apply", "fit", "plan", "profile", "verify"]

Step = Callable[..., torch.Tensor]
_ACTIONS = (Action.KEEP, Action.RECOMPUTE)


def profile(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any = None,
    *,
    loss: Loss | None = None,
    step: Step | None = None,
    optimizer: torch.optim.Optimizer | OptimizerLike | None = None,
    accumulate: bool | int = False,
    allow: Sequence[Action | str] | None = None,
    compile: bool | str | None = None,
    device: str | Device | None = None,
    dtype: torch.dtype | None = None,
) -> Profile:
    """Measure what planning needs to know of one training step. The model is left as it was.

    `batch`: a dict is keyword arguments, a tuple or list positional ones, a tensor the only one. `loss` takes
    (output, batch); by default it is output.loss, or the output itself if it is a scalar. Or `step`: a
    callable that runs forward and returns the loss, and is given the batch if there is one. With `optimizer`
    its state and its own step count, and with `accumulate` (True, or the number of micro-steps) gradients are
    resident when a step starts. With "chunk" in `allow` the step is measured with its head and loss in
    chunks, too, and with "offload" (in the default on an accelerator) the link to the host. With
    `compile=True` blocks are compiled, with a few saved sets each, and measured so (see `fit`).

    With `device` ("h100-80gb", or a remat.devices.Device) nothing is measured: the step is estimated for that
    device without having it, and without memory for weights. Then `model` and `batch` may be functions that
    make them, `optimizer` a name ("adamw") or a function of parameters, and `dtype` what weights are cast to.
    """
    if device is not None:
        if step is not None or batch is None:
            raise InputError("an estimate needs a batch, or a function that makes it, and no step=")
        if compile:
            raise InputError(
                f"compile={compile!r} needs the device: compiled blocks are measured, not estimated; leave "
                "device= or compile= out"
            )
        allowed = _actions(allow, offload=True)
        with showing("remat: estimating a step") as progress:
            return estimate_profile(
                model, batch, device, loss=loss, optimizer=optimizer,  # type: ignore[arg-type]
                accumulate=accumulate, dtype=dtype, progress=progress,
                offload=Action.OFFLOAD in allowed, chunk=Action.CHUNK in allowed,
            )  # fmt: skip
    if dtype is not None:
        raise InputError("dtype= belongs to an estimate (device=...); cast the model itself: model.to(dtype)")
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model is a {type(model).__name__}; pass an nn.Module (a function that makes one needs device=)"
        )
    allowed = allowed_actions(model, allow, compile)
    batch = ranks.largest(batch, signature(batch))
    request = _request(model, batch, loss, step, optimizer, accumulate, allowed, compile)
    with showing(f"remat: profiling {type(model).__name__}") as progress:
        return ranks.agree(build_profile(request, progress))


def plan(
    profile: Profile,
    budget: int | str | None = None,
    *,
    activations: float | None = None,
    allow: Sequence[Action | str] | None = None,
) -> Plan:
    """The fastest way to run this step within a budget. Pure: looks at the profile only.

    `allow`: what it may do, by default all that gives the same gradients to the bit and that the profile has
    measured ("keep", "recompute", and "offload" where the link to the host was measured). A profile of a step
    with its head in chunks (a plan's, or one whose logits do not fit) takes "chunk".
    """
    allowed = _actions(allow, offload=profile.link is not None)
    _refuse_chunks(profile, allowed)
    return schedule(profile, _budget_bytes(profile, budget, activations), allow=allowed)


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
    allow: Sequence[Action | str] | None = None,
    compile: bool | str | None = None,
    check: bool = True,
    adaptive: bool | Sequence[Any] = False,
    on_event: Callable[[Event], None] | None = None,
) -> Handle:
    """Make this model's training step fit into `budget` bytes, with the least slowdown: profile, plan, apply,
    verify. The plan is run once and its peak measured; if it is over, a tighter plan is made.

    `budget`: bytes, "16GiB", "16GB" or "80%" of the device, over the whole step; or `activations`: a share of
    the step's own activation peak. Raises BudgetError (with `.needed` bytes) and leaves the model untouched
    if that is out of reach.

    `allow`: "keep", "recompute" and "offload" give the same gradients to the bit, and are the default on an
    accelerator. "offload" moves saved tensors to pinned host memory and back, behind compute; on the CPU,
    where that is the same memory, it is simulated and has to be asked for. "chunk" computes head and loss in
    chunks, so that the logits never exist as a whole, and may run the MLP of a block over pieces of a long
    sequence: equal within rounding.

    `compile=True`: repeated blocks run through torch.compile, each with a saved set that was chosen for it;
    gradients are those of the compiled blocks, equal to the eager ones within rounding. Blocks that cannot be
    compiled as one graph run as without it, and the report says why. A text names the backend: "inductor",
    or "aot_eager", which needs no compiler. By default blocks are compiled only if you have compiled them
    yourself (block.compile(), torch.compile(block)). `compile="whole"` runs the model as one compiled graph
    in which each block has its saved set: faster where the device waits for the host, but it compiles for as
    long as torch.compile(model) does, and nothing is offloaded. Where the budget is out of its reach, and
    "chunk" is allowed, the graph is that of the trunk (all but the head), and head and loss run in chunks.

    `adaptive`: inputs of other sizes get plans of their own under the same budget, a short batch one that
    keeps more. Give the largest batch; it is cut to measure two smaller sizes, or pass batches of other sizes
    to measure instead of True. A batch that no plan holds raises BudgetError before it runs; so do inputs of
    another kind (one more argument, another width) that hold more than was measured, if recomputing all of it
    may be over the budget. With "offload" a long batch sends to the host what a short one keeps; host memory
    for all of these plans is pinned by `fit`. `on_event` is called with all that changes while training.
    """
    allowed = allowed_actions(model, allow, compile)
    batch = ranks.largest(batch, signature(batch))
    request = _request(model, batch, loss, step, optimizer, accumulate, allowed, compile)
    request = replace(request, parts=request.parts and adaptive is False)
    others, trials = _other_sizes(model, batch, loss, step, adaptive, request.output)
    if adaptive is not False and request.compiler:
        raise InputError(
            "adaptive plans do not compile blocks: every new size would compile them again; leave out "
            "adaptive=, or compile="
        )
    if adaptive is not False:
        request = replace(request, run=one_call_a_step(request.model, request.run))
    check_budget_arguments(budget, activations)
    _parse_early(model, budget)
    with showing(f"remat: fitting {type(model).__name__}") as progress:
        found = ranks.agree(build_profile(request, progress))
        if adaptive is not False:
            found = replace(found, stem=None)  # plans of many sizes do not send it
        budget_bytes = ranks.least(_budget_bytes(found, budget, activations))
        if adaptive is False:
            handle = fitted(request, found, budget_bytes, allowed, check, progress)
            handle.on_event = on_event
            return handle
        measured = measure_sizes(request, found, others, trials, progress)
        room = FIRST_STEP_BYTES + remembered_bytes(model, device_of(model))  # handle.step shall find it
        try:
            handle = fitted(request, found, budget_bytes - room, allowed, check, progress)
        except BudgetError as error:
            raise refusal(budget_bytes, error.needed + room, error.hints, error.where) from None
        handle.plan = replace(handle.plan, budget_bytes=budget_bytes)
        progress("planning for other sizes")
        adapting = AdaptiveHandle(handle, measured, check, on_event)
        try:
            adapting.plan_ahead()
        except BaseException:  # of `on_event`, or Ctrl-C: nobody has the handle yet
            adapting.remove()
            raise
        return adapting


def verify(
    model: nn.Module,
    batch: Any = None,
    plan: Plan | None = None,
    *,
    loss: Loss | None = None,
    step: Step | None = None,
) -> Verification:
    """Compare the planned (or enabled) step with the untouched one: loss, every gradient, buffers.

    The model is left as it was: what a handle has put on it is off meanwhile, and on again afterwards. `step`
    is given the batch if there is one. Needs the memory of the untouched step: where that does not fit, see
    `Handle.verification`, which compares region by region.
    """

    def run(model: nn.Module, batch: Any) -> torch.Tensor:
        return _run(model, batch, loss, step)

    handle = at_work(model)
    shown = handle.plan if plan is None and handle is not None else plan
    entries = [] if shown is None else [shown.entry(call) for call in range(len(shown.choices))]
    modes = {entry.mode for entry in entries}
    tolerance, how = 0.0, "whole step"
    if shown is not None and (chunked_head(shown) is not None or any(e.in_chunks for e in entries)):
        tolerance = rounding(model)
        parts = chunked_head(shown) or "blocks, or parts of them,"
        how += f", {parts} in chunks (rounding may differ by {tolerance:g} of a tensor's magnitude)"
    planned_here = _runs_a_plan(model)
    if shown is None or (plan is None and Mode.COMPILED not in modes):
        # Where a plan runs, inputs must not require gradients: the regions were captured without.
        inputs = step is None and not planned_here
        return check_verify.verify(model, batch, run=run, inputs=inputs, tolerance=tolerance, how=how)
    if handle is None and planned_here:
        raise InputError(
            f"this {type(model).__name__} runs a plan whose handle is not there (it is a copy, or the handle "
            "was let go of); remat.verify(model, batch), without a plan, compares what runs on it"
        )
    with nullcontext() if handle is None else handle.paused():
        if Mode.COMPILED in modes:
            return _verify_compiled(model, batch, shown, run)
        return check_verify.verify(
            model, batch, lambda: apply(model, shown), run=run, inputs=False, tolerance=tolerance, how=how
        )


def _runs_a_plan(model: nn.Module) -> bool:
    arounds = [there.around for there in map(wrapped, model.modules()) if there is not None]
    return bool(functions(model)) or any(isinstance(around, PlannedRegion) for around in arounds)


def _verify_compiled(
    model: nn.Module, batch: Any, plan: Plan, run: Callable[[nn.Module, Any], torch.Tensor]
) -> Verification:
    """Against the same compiled blocks with nothing planned: each with its largest saved set."""
    choices = list(plan.choices)
    calls = plan.profile.calls
    groups = (group for group in tied_calls(plan.profile) if len({calls[i].kind for i in group}) == 1)
    for index in itertools.chain(*groups):  # tied calls of several kinds have no saved set in common
        call = calls[index]
        menu = plan.profile.kinds[call.kind].menu
        sets = [i for i, entry in enumerate(menu) if entry.mode is Mode.COMPILED]
        choices[index] = max(sets, key=lambda i: menu[i].resident_bytes) if sets else 0
    unplanned = replace(plan, choices=tuple(choices))
    return check_verify.compare(
        lambda: apply(model, unplanned),
        lambda: apply(model, plan),
        model,
        batch,
        run=run,
        tolerance=rounding(model),
        how="whole step, against the same compiled blocks without a plan",
    )


# ------------------------------------------------------------------------------------------------- parts


def _request(
    model: nn.Module,
    batch: Any,
    loss: Loss | None,
    step: Step | None,
    optimizer: Any,
    accumulate: bool | int,
    allow: tuple[Action, ...] = _ACTIONS,
    compile: bool | str | None = None,
) -> Request:
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; pass an nn.Module")
    if not torch.is_grad_enabled():
        raise InputError(
            "gradients are switched off here, by torch.no_grad() or torch.inference_mode(): a training step "
            "is measured, so call this outside of it"
        )
    _refuse_arguments(loss, step, optimizer, accumulate)
    model, quietly = ranks.unwrap(model)
    if batch is None and step is None:
        raise InputError(
            "give a batch (and loss= if the model returns none), or step=, a callable that returns the loss"
        )

    # With an optimizer there is a loop, which may hold what one step gives until the next. A `step` that the
    # caller has written gives a loss and nothing else.
    output = Output() if optimizer is not None and step is None else None

    def run() -> torch.Tensor:
        with quietly():
            return _run(model, batch, loss, step, output)

    whole = _in_one_graph(compile)
    if whole and Action.OFFLOAD in allow:
        raise InputError(
            f"compile={compile!r} runs the model as one graph, where offload cannot be; leave that out of "
            "allow=, or compile blocks one by one with compile=True"
        )
    seen = any(p.grad is not None for p in model.parameters())
    return Request(
        model=model,
        run=SeededRun(run),
        signature="custom step" if batch is None else signature(batch),
        batch_bytes=0 if batch is None else _batch_bytes(model, batch),
        optimizer=optimizer,
        output=output,
        accumulate=seen or (accumulate is True) or (not isinstance(accumulate, bool) and accumulate > 1),
        chunk=Action.CHUNK in allow,
        offload=Action.OFFLOAD in allow,
        parts=Action.CHUNK in allow and not whole,  # inside of one graph nothing runs in chunks
        compiler=_compiler(model, compile, device_of(model)),
        one_graph=whole,
    )


def _refuse_arguments(loss: Any, step: Any, optimizer: Any, accumulate: Any) -> None:
    for name, given in (("loss", loss), ("step", step)):
        if given is not None and not callable(given):
            raise InputError(f"{name}={given!r} is not callable")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"optimizer={optimizer!r} is not a torch.optim.Optimizer: pass the optimizer itself; a name or a "
            "function is for estimates (device=...)"
        )
    if not isinstance(accumulate, int) or accumulate < 0:
        raise InputError(f"accumulate={accumulate!r}; say True, False, or the number of micro-steps")


def _in_one_graph(compile: bool | str | None) -> bool:
    """Whether the model is to be one graph: "whole", or "whole+" and the name of a backend."""
    return isinstance(compile, str) and (compile + "+").startswith(WHOLE)


def _compiler(model: nn.Module, compile: bool | str | None, device: torch.device) -> str:
    """The backend to compile blocks with, "" for none; refuses what cannot be done."""
    if is_compiled(model):
        raise InputError(
            f"this {type(model).__name__} is compiled as a whole, and what happens inside one compiled graph "
            "cannot be planned; pass the model as it was before torch.compile, with compile=True: its blocks "
            "are then compiled one by one"
        )
    theirs = [block.name for block in find_blocks(model) if is_compiled(block.module)]
    if compile is None:
        compile = bool(theirs)
    if compile is False:
        if theirs:
            raise InputError(
                f"{theirs[0]} and {len(theirs) - 1} more blocks are compiled, which compile=False cannot "
                "plan; leave it out, or pass compile=True: each is then compiled with its planned saved set"
            )
        return ""
    whole = _in_one_graph(compile)
    backend = compile.removeprefix(WHOLE) if isinstance(compile, str) else compile
    if backend is True or compile == WHOLE.removesuffix("+"):
        backend = DEFAULT_BACKEND
    if not isinstance(backend, str) or backend not in BACKENDS:
        known = ", ".join(map(repr, (*BACKENDS, WHOLE.removesuffix("+"))))
        raise InputError(f"compile={compile!r}: True, False, or one of {known}")
    problem = compiler_problem(device.type, backend)
    if problem:
        raise InputError(f"compile={compile!r} is not possible here: {problem}; leave it out to run eagerly")
    if partitioner_problem() and whole:
        raise InputError(
            f"compile={compile!r} is not possible with this torch: {partitioner_problem()}; compile=True "
            "compiles blocks one by one"
        )
    if partitioner_problem():
        return PUBLIC + (backend if backend == DEFAULT_BACKEND else "aot_eager_decomp_partition")
    return backend


def _run(
    model: nn.Module, batch: Any, loss: Loss | None, step: Step | None, output: Output | None = None
) -> torch.Tensor:
    """Forward and loss, as the caller has them: the model's own, a function's, a function of the batch."""
    if step is None:
        return run_step(model, batch, loss, output)
    with casting_anew():
        return step() if batch is None else step(batch)


def _other_sizes(
    model: nn.Module,
    batch: Any,
    loss: Loss | None,
    step: Step | None,
    adaptive: bool | Sequence[Any],
    output: Output | None,
) -> tuple[list[tuple[Step, str, int]], Trials]:
    """Batches of other sizes to measure, each with a function that runs it, and what is only tried."""
    if adaptive is False:
        return [], Trials()
    if adaptive is not True and not isinstance(adaptive, (list, tuple)):
        raise InputError(
            f"adaptive={adaptive!r}; say True, or give a list of batches of other sizes to measure"
        )
    if adaptive is True:
        batches = [] if batch is None else smaller_batches(batch)
    else:
        batches = list(adaptive)
        if not ranks.all_equal(len(batches)):
            raise InputError("adaptive= has more batches on some ranks than on others; give all as many")
        batches = [ranks.largest(other, signature(other)) for other in batches]
    model, quietly = ranks.unwrap(model)

    def run(other: Any) -> torch.Tensor:
        with quietly():
            return _run(model, other, loss, step, output)

    others: list[tuple[Step, str, int]] = [
        (SeededRun(partial(run, other)), signature(other), _batch_bytes(model, other)) for other in batches
    ]
    given = batches if batch is None else [batch]
    if not given:
        return others, Trials()
    longest = max(given, key=partial(_batch_bytes, model))
    made = lengths_to_try(longest), doubled(longest) or ()
    return others, Trials(*(tuple(SeededRun(partial(run, trial)) for trial in part) for part in made))


def _batch_bytes(model: nn.Module, batch: Any) -> int:
    device = device_of(model)
    given = [t for t in tensors_of(batch) if t.device.type == device.type]
    return sum(t.untyped_storage().nbytes() for t in given)


def allowed_actions(
    model: nn.Module, allow: Sequence[Action | str] | None, compile: bool | str | None = None
) -> tuple[Action, ...]:
    """What may be done to this model; by default also offload where it is on an accelerator."""
    on_device = isinstance(model, nn.Module) and device_of(model).type == "cuda"
    return _actions(allow, offload=on_device and not _in_one_graph(compile))


def _actions(allow: Sequence[Action | str] | None, *, offload: bool) -> tuple[Action, ...]:
    """What is allowed; `offload` says whether it is among the default."""
    if allow is None:
        return (*_ACTIONS, Action.OFFLOAD) if offload else _ACTIONS
    if isinstance(allow, str):
        raise InputError(f"allow={allow!r} is one text; give a list, as in allow=[{allow!r}]")
    try:
        actions = tuple(Action(action) for action in allow)
    except ValueError:
        names = ", ".join(action.value for action in Action)
        raise InputError(f"allow={list(allow)!r}: the actions are {names}") from None
    return actions


def _refuse_chunks(profile: Profile, allowed: tuple[Action, ...]) -> None:
    """Such a profile no longer has, or never had, what the head as it is would take."""
    if profile.head is None or not profile.chunked or Action.CHUNK in allowed:
        return
    raise InputError(
        f"this profile is of the step with {profile.head.head} in chunks, which is equal within rounding "
        f'only, and allow={[action.value for action in allowed]} is without "chunk": add it, or profile the '
        "step again with this allow=, which takes room for the logits as a whole"
    )


def check_budget_arguments(budget: int | str | None, activations: float | None) -> None:
    if (budget is None) == (activations is None):
        raise InputError(
            'give exactly one of budget= (bytes, "16GiB", "80%") and activations= (a share, like 0.4)'
        )
    if activations is not None and (
        isinstance(activations, bool) or not isinstance(activations, (int, float)) or not 0 < activations <= 1
    ):
        raise InputError(f"activations={activations!r} must be a number above 0 and at most 1")


def _parse_early(model: nn.Module, budget: int | str | None) -> None:
    """A budget that cannot be read is refused before any work is done."""
    if budget is not None:
        device = device_of(model)
        total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        parse_bytes(budget, total=total)


def _budget_bytes(profile: Profile, budget: int | str | None, activations: float | None) -> int:
    check_budget_arguments(budget, activations)
    if budget is not None:
        return parse_bytes(budget, total=profile.environment.total_bytes or None)
    assert activations is not None
    resident = profile.step.resident + (profile.step.gradients if profile.accumulate else 0)
    plain = simulate(profile, keep_everything(profile)).peak_bytes
    return resident + int((plain - resident) * activations)
