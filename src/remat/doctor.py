"""`remat doctor`: looks for what is known to go wrong when activations are recomputed, and says what to do.

Each check is a function that yields findings; none leaves a trace on the model. What a check cannot see here
(fragmentation without CUDA, say) is listed as not checked instead of being passed over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import remat
from remat import trees
from remat._torch_private import in_backward
from remat.check.step import call_model, loss_of, run_step
from remat.check.untouched import backward, untouched
from remat.check.verify import Verification, compare
from remat.errors import BudgetError
from remat.jobs import Made
from remat.records import Mode, Plan, Profile
from remat.request import device_of
from remat.run.wrap import wrapped
from remat.trace.discover import find_blocks
from remat.units import format_bytes

__all__ = ["Diagnosis", "Finding", "examine"]

PROBLEM, WARNING, NOTE = "problem", "warning", "note"
_FRAGMENTED = 0.2  # of what the allocator reserved
_SHOWN = 3  # names in a finding


@dataclass(frozen=True)
class Finding:
    """`level`: a problem makes training wrong or impossible, a warning costs time or memory, a note is good
    to know. `what` says what was seen, `remedy` what to do."""

    level: str
    title: str
    what: str
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All findings, worst first; what was looked for and not found; what could not be looked for here."""

    findings: tuple[Finding, ...]
    passed: tuple[str, ...]
    skipped: tuple[str, ...]
    verification: Verification | None = None

    @property
    def ok(self) -> bool:
        """No problem was found; there may be warnings."""
        return not any(finding.level == PROBLEM for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "findings": [asdict(finding) for finding in self.findings],
            "passed": list(self.passed),
            "not_checked": list(self.skipped),
            "verification": None if self.verification is None else str(self.verification),
        }


@dataclass
class _Patient:
    """The job, and what one plain step of it showed."""

    made: Made
    first_runs: Counter[str] = field(default_factory=Counter)  # forward calls of each leaf module
    reruns: Counter[str] = field(default_factory=Counter)  # the same during backward
    frozen_inputs: list[str] = field(default_factory=list)  # blocks that train on inputs without gradient
    nodes: Counter[str] = field(default_factory=Counter)  # of the autograd graph
    on_ctx: dict[str, int] = field(default_factory=dict)  # function -> bytes of tensors on its ctx
    cache: bool = False
    profile: Profile | None = None
    plan: Plan | None = None
    verification: Verification | None = None
    repeated: Verification | None = None  # the plain step against itself
    refused: str = ""  # why no plan could be made

    @property
    def model(self) -> nn.Module:
        return self.made.model


Check = Callable[[_Patient], Iterator[Finding]]


def examine(made: Made, progress: Callable[[str], None] = lambda doing: None) -> Diagnosis:
    """Run the plain step, plan it, run it planned, compare, and go through every check."""
    patient = _Patient(made)
    progress("running the plain step")
    _observe(patient)
    progress("running it twice more, for its own noise")
    patient.repeated = _against_itself(patient)
    progress("planning and verifying")
    _plan(patient)
    findings: list[Finding] = []
    passed, skipped = [], []
    for name, check in _CHECKS.items():
        found = list(check(patient))
        findings += [f for f in found if f.level]
        if any(not f.level for f in found):
            skipped.append(f"{name}: {found[0].what}")
        elif not found:
            passed.append(name)
    rank = [PROBLEM, WARNING, NOTE]
    findings.sort(key=lambda finding: rank.index(finding.level))
    return Diagnosis(tuple(findings), tuple(passed), tuple(skipped), patient.verification)


def _not_checked(why: str) -> Finding:
    return Finding("", "", why)


# --------------------------------------------------------------------------------------------- observing


def _observe(patient: _Patient) -> None:
    """One plain step with hooks that only look; all of them are gone afterwards."""
    model, made = patient.model, patient.made
    with ExitStack() as undo:
        undo.enter_context(untouched(model))
        for name, module in model.named_modules():
            if next(module.children(), None) is None:
                hook = module.register_forward_pre_hook(_counting(patient, name))
                undo.callback(hook.remove)
        for block in find_blocks(model):
            if any(p.requires_grad for p in block.module.parameters()):
                seen = block.module.register_forward_pre_hook(
                    _looking_at_inputs(patient, block.name), with_kwargs=True
                )
                undo.callback(seen.remove)
        with torch.enable_grad():
            output = call_model(model, made.batch)
            patient.cache = getattr(output, "past_key_values", None) is not None
            loss = loss_of(output, made.batch, made.loss)
            del output
            _walk(patient, loss)
            backward(loss)


def _counting(patient: _Patient, name: str) -> Callable[..., None]:
    def count(module: nn.Module, args: Any) -> None:
        (patient.reruns if in_backward() else patient.first_runs)[name] += 1

    return count


def _looking_at_inputs(patient: _Patient, name: str) -> Callable[..., None]:
    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        floating = [t for t in trees.tensors((args, kwargs)) if t.is_floating_point()]
        if floating and not any(t.requires_grad for t in floating) and not in_backward():
            patient.frozen_inputs.append(name)

    return look


def _walk(patient: _Patient, loss: Tensor) -> None:
    seen: set[Any] = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        patient.nodes[name] += 1
        held = trees.tensors(list(getattr(node, "__dict__", {}).values()))
        nbytes = sum(tensor.untyped_storage().nbytes() for tensor in held)
        patient.on_ctx[name] = patient.on_ctx.get(name, 0) + nbytes
        stack.extend(parent for parent, _ in node.next_functions)


def _against_itself(patient: _Patient) -> Verification:
    def run(model: nn.Module, batch: Any) -> Tensor:
        return run_step(model, batch, patient.made.loss)

    return compare(nullcontext, nullcontext, patient.model, patient.made.batch, run=run)


def _plan(patient: _Patient) -> None:
    """A plan for half of the activations, or the least possible, and its step against the plain one."""
    made = patient.made
    if any(wrapped(module) for module in made.model.modules()):
        patient.refused = "remat already runs on this model"
        return
    try:
        patient.profile = remat.profile(made.model, made.batch, loss=made.loss)
        try:
            patient.plan = remat.plan(patient.profile, activations=0.5)
        except BudgetError as error:
            patient.plan = remat.plan(patient.profile, budget=error.needed)
        patient.verification = remat.verify(made.model, made.batch, patient.plan, loss=made.loss)
    except remat.RematError as error:
        patient.refused = str(error)


# ------------------------------------------------------------------------------------------------- checks


def _gradients(patient: _Patient) -> Iterator[Finding]:
    found = patient.verification
    if found is None:
        yield Finding(WARNING, "No plan could be made", patient.refused, "see the sentence above")
    elif not found.ok:
        yield Finding(
            PROBLEM,
            "Planned gradients differ",
            str(found),
            "do not train with this plan; report the model, and use remat.enable meanwhile",
        )


def _untrained(patient: _Patient) -> Iterator[Finding]:
    names = patient.repeated.untrained if patient.repeated is not None else ()
    if names:
        yield Finding(
            WARNING,
            "Trainable parameters without a gradient",
            f"{len(names)} parameters require a gradient and get none: {_some(names)}",
            "freeze them with requires_grad_(False), or look for a detach(), a no_grad block or reentrant "
            "checkpointing between them and the loss",
        )


def _nested(patient: _Patient) -> Iterator[Finding]:
    nested = [n for n, runs in patient.first_runs.items() if patient.reruns[n] > runs]
    if nested:
        total = sum(patient.first_runs[n] + patient.reruns[n] for n in nested)
        needed = 2 * sum(patient.first_runs[n] for n in nested)
        yield Finding(
            PROBLEM,
            "Nested checkpointing",
            f"{len(nested)} modules run more than twice per step ({total} forwards where {needed} would do): "
            f"{_some(nested)}",
            "one checkpoint lies inside another; take one of them off",
        )
    elif patient.reruns:
        total = sum(patient.reruns.values())
        yield Finding(
            WARNING,
            "Another checkpointing is on",
            f"{total} forwards of {len(patient.reruns)} modules run again in backward already",
            "call model.gradient_checkpointing_disable(), or take torch.utils.checkpoint out: remat decides "
            "by itself what is recomputed",
        )


def _switch(patient: _Patient) -> Iterator[Finding]:
    on = [n for n, m in patient.model.named_modules() if getattr(m, "gradient_checkpointing", None) is True]
    if on and not patient.reruns:
        yield Finding(
            WARNING,
            "Checkpointing is switched on and does not run",
            f"gradient_checkpointing is True in {len(on)} modules ({_some(on)}), but nothing ran again in "
            "backward" + ("" if patient.model.training else ": the model is in eval mode"),
            "call model.train(), or leave it off and use remat.fit",
        )


def _reentrant(patient: _Patient) -> Iterator[Finding]:
    count = patient.nodes["CheckpointFunctionBackward"]
    if count:
        yield Finding(
            PROBLEM,
            "Reentrant checkpointing",
            f"{count} calls of torch.utils.checkpoint with use_reentrant=True",
            "pass use_reentrant=False: reentrant checkpoints lose gradients where no input requires one, "
            "and DDP sees parameters twice",
        )


def _cache(patient: _Patient) -> Iterator[Finding]:
    configs = [getattr(module, "config", None) for module in patient.model.modules()]
    asked = any(getattr(config, "use_cache", False) is True for config in configs)
    if patient.cache:
        yield Finding(
            WARNING,
            "A KV cache is filled in training",
            "the output has past_key_values: keys and values of every layer stay alive, and a recomputation "
            "would append to them again",
            "model.config.use_cache = False (remat switches it off while a plan is on)",
        )
    elif asked:
        yield Finding(
            NOTE,
            "use_cache is on",
            "config.use_cache is True, though this step returned no cache",
            "model.config.use_cache = False in training, so that no code path fills one",
        )


def _tied(patient: _Patient) -> Iterator[Finding]:
    names: dict[int, list[str]] = {}
    for name, parameter in patient.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = [group for group in names.values() if len(group) > 1]
    if tied:
        yield Finding(
            NOTE,
            "Tied weights",
            f"{len(tied)} parameters have several names: {'; '.join(' = '.join(g) for g in tied[:_SHOWN])}",
            "nothing to do here: counted once, one gradient. Sharding (FSDP) must keep them in one unit",
        )


def _noise(patient: _Patient) -> Iterator[Finding]:
    found = patient.repeated
    if found is not None and not found.bitwise:
        yield Finding(
            WARNING,
            "The plain step is not reproducible",
            f"run twice from the same state, it differs by up to {found.max_abs_diff:.3g}, most at "
            f"{found.worst}",
            "bit-equality cannot be shown; torch.use_deterministic_algorithms(True) names the operation",
        )


def _kinds(patient: _Patient) -> Iterator[Finding]:
    """Regions without recipes: numbers that change, data-dependent shapes, sparse tensors, ..."""
    if patient.profile is None:
        yield _not_checked("no profile could be made")
        return
    for number, kind in enumerate(patient.profile.kinds):
        if not kind.note:
            continue
        names = [call.name for call in patient.profile.calls if call.kind == number]
        changing = "depend on data or chance" in kind.note
        yield Finding(
            WARNING,
            "Regions whose operations change" if changing else "Regions without recipes",
            f"{_some(names)}: {kind.note}",
            "they are kept or recomputed as a whole, which is right but coarser; "
            + (
                "make the number a tensor, or keep the branch out of the block"
                if changing
                else "mark a smaller part with remat.region if that matters"
            ),
        )


def _random(patient: _Patient) -> Iterator[Finding]:
    if patient.profile is None:
        yield _not_checked("no profile could be made")
        return
    drawn: Counter[str] = Counter()
    for kind in patient.profile.kinds:
        for op in kind.graph.ops if kind.graph is not None else ():
            if "random" in op.reason:
                drawn[f"{op.name.split('.')[1]} ({op.source})"] += 1
    if drawn:
        yield Finding(
            NOTE,
            "Random operations",
            f"{len(drawn)} kinds of random draws inside regions: {_some(drawn)}",
            "nothing to do: their results are kept, not drawn again; they set a floor to what can be freed",
        )


def _frozen(patient: _Patient) -> Iterator[Finding]:
    if patient.frozen_inputs:
        names = list(dict.fromkeys(patient.frozen_inputs))
        yield Finding(
            NOTE,
            "Blocks whose inputs need no gradient",
            f"{len(names)} trained blocks get only inputs without requires_grad: {_some(names)}",
            "nothing to do with remat; reentrant checkpointing would leave them untrained",
        )


def _ctx(patient: _Patient) -> Iterator[Finding]:
    held = {n: size for n, size in patient.on_ctx.items() if n != "CheckpointFunctionBackward" and size}
    if held:
        total = sum(held.values())
        yield Finding(
            WARNING,
            "Tensors kept on ctx",
            f"{format_bytes(total)} are attributes of custom autograd functions ({_some(held)})",
            "no saved-tensor hook sees them, so that nothing can drop them: use ctx.save_for_backward",
        )


def _mode(patient: _Patient) -> Iterator[Finding]:
    if not patient.model.training:
        yield Finding(
            NOTE,
            "The model is in eval mode",
            "dropout is off and BatchNorm uses its statistics; a plan made now is for this mode",
            "call model.train() before planning, if that is how it is trained",
        )


def _compiled(patient: _Patient) -> Iterator[Finding]:
    compiled = [
        name
        for name, module in patient.model.named_modules()
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None)
    ]
    if compiled:
        yield Finding(
            WARNING,
            "Compiled modules",
            f"{len(compiled)} modules are compiled: {_some(compiled)}",
            "an eager plan does not reach into a compiled graph; plan the eager model",
        )


def _head(patient: _Patient) -> Iterator[Finding]:
    plan = patient.plan
    if plan is None:
        yield _not_checked("no plan could be made")
        return
    from remat.planner.simulate import simulate

    peak = simulate(plan.profile, plan.choices).peak
    names = "" if plan.profile.names_head else "give the model get_output_embeddings() for its head, and "
    if peak.call < 0 and "head" in peak.label and peak.working > plan.predicted_peak_bytes // 4:
        yield Finding(
            NOTE,
            "Logits decide the peak",
            f"{format_bytes(peak.working)} of {format_bytes(peak.peak_bytes)} at the peak are head and loss",
            f'{names}allow "chunk": head and loss then run in chunks, equal within rounding',
        )


def _fragmentation(patient: _Patient) -> Iterator[Finding]:
    device = device_of(patient.model)
    if device.type != "cuda":
        yield _not_checked("only CUDA's allocator has it")
        return
    stats = torch.cuda.memory_stats(device)
    reserved = stats.get("reserved_bytes.all.peak", 0)
    idle = stats.get("inactive_split_bytes.all.peak", 0)
    if reserved and idle / reserved > _FRAGMENTED:
        yield Finding(
            WARNING,
            "Fragmentation",
            f"{format_bytes(idle)} of {format_bytes(reserved)} reserved lay unused in pieces",
            "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before torch is imported",
        )


def _fallbacks(patient: _Patient) -> Iterator[Finding]:
    plan = patient.plan
    if plan is None:
        yield _not_checked("no plan could be made")
        return
    modes = [plan.entry(i).mode for i in range(len(plan.choices))]
    whole = [mode for mode in modes if mode in (Mode.FULL, Mode.HOSTED)]
    if len(whole) == len(plan.choices):
        yield Finding(
            NOTE,
            "Only whole regions are recomputed",
            f"at half of the activations all {len(whole)} regions run again as a whole",
            "a larger budget is cheaper per byte here: see remat plan --html for the curve",
        )


def _some(names: Any) -> str:
    listed = [name or "the model itself" for name in names]
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more


_CHECKS: dict[str, Check] = {
    "gradients under a plan": _gradients,
    "trainable parameters without gradient": _untrained,
    "nested checkpointing": _nested,
    "checkpointing that is on and idle": _switch,
    "reentrant checkpointing": _reentrant,
    "KV cache": _cache,
    "tied weights": _tied,
    "reproducibility": _noise,
    "numbers and shapes that change": _kinds,
    "random operations": _random,
    "inputs without gradient": _frozen,
    "tensors on ctx": _ctx,
    "training mode": _mode,
    "compiled modules": _compiled,
    "size of the logits": _head,
    "coarse regions": _fallbacks,
    "fragmentation": _fragmentation,
}
