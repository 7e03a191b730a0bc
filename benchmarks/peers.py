"""The other ways to spend less memory on a training step, each as a context in which the step is run.

Every context leaves the model as it was. What is not installed, or makes no sense on this machine, is listed
with the reason.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from workloads import CUDA, Job

__all__ = [
    "COMPILED",
    "EAGER",
    "Absent",
    "Method",
    "compiled_alone",
    "forwards",
    "peers",
    "selective",
    "stock_budget",
    "switch",
]

STOCK_BUDGETS = (1.0, 0.5, 0.25, 0.0)
LOSS_ROWS = 2048  # of a chunk of the chunked loss
Context = Callable[[], AbstractContextManager[Any]]
Run = Callable[..., Any]


@dataclass(frozen=True)
class Method:
    """One way to run the step. `context` puts it on the model, `compiling` surrounds its first step. What is
    `slow` is measured once and not raced."""

    label: str
    group: str
    context: Context
    compiled: bool = False
    ours: bool = False
    slow: bool = False
    compiling: Context = nullcontext
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Absent:
    """A method that cannot be run here, and why."""

    label: str
    group: str
    why: str
    compiled: bool = False


@contextmanager
def forwards(modules: Sequence[nn.Module], run: Callable[[nn.Module], Run]) -> Iterator[None]:
    """Each module's forward replaced by `run(module)`."""
    for module in modules:
        module.forward = run(module)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


@contextmanager
def hooks_restored(model: nn.Module) -> Iterator[None]:
    """Hooks that a library puts on and forgets (an embedding's output made to require gradients) come off."""
    tables = [
        there for module in model.modules() for there in (module._forward_hooks, module._forward_pre_hooks)
    ]
    before = [set(there) for there in tables]
    try:
        yield
    finally:
        for there, kept in zip(tables, before, strict=True):
            for key in set(there) - kept:
                del there[key]


def own_forward(module: nn.Module) -> Run:
    return partial(type(module).forward, module)


# ------------------------------------------------------------------------------------ torch's checkpoint


def checkpointed(module: nn.Module, **options: Any) -> Run:
    inner = own_forward(module)

    def run(*args: Any, **kwargs: Any) -> Any:  # the reentrant one takes no keyword arguments
        return checkpoint(partial(inner, **kwargs), *args, **options)

    return run


@contextmanager
def switch(job: Job, **options: Any) -> Iterator[None]:
    """transformers' own switch, where the model has it; else every block, which is what it does."""
    model: Any = job.model
    if not getattr(model, "supports_gradient_checkpointing", False):
        with forwards(job.blocks, partial(checkpointed, use_reentrant=False)):
            yield
        return
    with hooks_restored(model):
        model.gradient_checkpointing_enable(**options)
        try:
            yield
        finally:
            model.gradient_checkpointing_disable()


def every_second(job: Job) -> AbstractContextManager[None]:
    return forwards(job.blocks[::2], partial(checkpointed, use_reentrant=False))


def reentrant(job: Job) -> AbstractContextManager[None]:
    return forwards(job.blocks, partial(checkpointed, use_reentrant=True))


def checkpoint_group(job: Job, group: str) -> list[Method | Absent]:
    by_switch = getattr(job.model, "supports_gradient_checkpointing", False)
    label = "transformers checkpointing" if by_switch else "checkpoint, every block"
    methods: list[Method | Absent] = [
        Method(label, group, partial(switch, job)),
        Method("checkpoint, every 2nd block", group, partial(every_second, job)),
    ]
    if all(p.requires_grad for p in job.model.parameters()):
        methods.append(Method("checkpoint, reentrant", group, partial(reentrant, job)))
    else:
        why = "the first block's input requires no gradient: it would go untrained"
        methods.append(Absent("checkpoint, reentrant", group, why))
    return methods


_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten._grouped_mm.default", "aten.convolution.default")


def selective_contexts(mode: str) -> Callable[[], Any]:
    """torch's selective checkpointing: what attention returns is kept, and of matrix products (convolutions
    too) none, every second one, or all."""

    def contexts() -> Any:
        seen: dict[bool, int] = {}

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            name = str(op)
            if "scaled_dot_product" in name:
                return CheckpointPolicy.MUST_SAVE
            if name in _PRODUCTS and mode != "attention":
                seen[ctx.is_recompute] = seen.get(ctx.is_recompute, 0) + 1
                if mode == "all matmuls" or seen[ctx.is_recompute] % 2 == 0:
                    return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]

    return contexts


def selective(job: Job, mode: str) -> AbstractContextManager[None]:
    run = partial(checkpointed, use_reentrant=False, context_fn=selective_contexts(mode))
    return forwards(job.blocks, run)


def selective_group(job: Job, group: str, attention: bool = True) -> list[Method | Absent]:
    modes = (*(("attention",) if attention else ()), "every 2nd matmul", "all matmuls")
    return [Method(f"selective, {mode}", group, partial(selective, job, mode)) for mode in modes]


# ------------------------------------------------------------------------------------------ chunked loss


def chunked_loss_forward(model: Any) -> Run:
    """Head and loss over pieces of the tokens, each piece under torch's checkpoint: the plain-torch way."""

    def piece(hidden: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(model.lm_head(hidden).float(), labels, reduction="sum")

    def run(input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = model.get_decoder()(input_ids).last_hidden_state[:, :-1].flatten(0, 1)
        wanted = labels[:, 1:].flatten()
        total: Tensor = hidden.new_zeros((), dtype=torch.float32)
        pieces = zip(torch.split(hidden, LOSS_ROWS), torch.split(wanted, LOSS_ROWS), strict=True)
        for rows, targets in pieces:
            total = total + checkpoint(piece, rows, targets, use_reentrant=False)
        return total / wanted.numel()

    return run


@contextmanager
def with_chunked_loss(job: Job, inner: Context) -> Iterator[None]:
    with inner(), forwards([job.model], chunked_loss_forward):
        yield


@contextmanager
def with_liger(job: Job, inner: Context) -> Iterator[None]:
    """Liger's fused linear cross entropy, and nothing else of it."""
    lce_forward = import_module("liger_kernel.transformers.model.llama").lce_forward
    with inner(), forwards([job.model], lambda model: partial(lce_forward, model)):
        yield


def chunked_loss_group(job: Job, group: str) -> list[Method | Absent]:
    checkpointing = partial(switch, job)
    methods: list[Method | Absent] = []
    if hasattr(job.model, "lm_head") and hasattr(job.model, "get_decoder"):
        context = partial(with_chunked_loss, job, checkpointing)
        methods.append(Method("checkpointing + chunked loss", group, context))
    if type(job.model).__name__ == "LlamaForCausalLM":
        if find_spec("liger_kernel") is None:
            return [*methods, Absent("Liger fused loss", group, "liger-kernel is not installed")]
        methods += [
            Method("Liger fused loss", group, partial(with_liger, job, nullcontext)),
            Method("Liger fused loss + checkpointing", group, partial(with_liger, job, checkpointing)),
        ]
    return methods


# ----------------------------------------------------------------------------------------------- offload


@contextmanager
def checkpointing_on_host(job: Job) -> Iterator[None]:
    """The inputs of checkpointed blocks wait in pinned memory: what transformers' `offload` does, by itself
    where the installed version has it."""
    if offload_option(job.model):
        with switch(job, offload=True):
            yield
        return
    inner = partial(checkpointed, use_reentrant=False)

    def run(module: nn.Module) -> Run:
        call = inner(module)

        def on_host(*args: Any, **kwargs: Any) -> Any:
            with save_on_cpu(pin_memory=True):
                return call(*args, **kwargs)

        return on_host

    with forwards(job.blocks, run):
        yield


def offload_option(model: nn.Module) -> bool:
    enable = getattr(model, "gradient_checkpointing_enable", None)
    there = enable is not None and "offload" in inspect.signature(enable).parameters
    return there and bool(getattr(model, "supports_gradient_checkpointing", False))


@contextmanager
def trl_offloading(job: Job, inner: Context) -> Iterator[None]:
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    with inner(), hooks_restored(job.model), get_act_offloading_ctx_manager(job.model, warn_if_no_head=False):
        yield


NO_HOST = "needs an accelerator: here the host is the device"
NO_TRL = "trl is not installed"


def offload_group(job: Job, group: str) -> list[Method | Absent]:
    """The inputs of checkpointed blocks on the host."""
    own = offload_option(job.model)
    label = "transformers checkpointing, offload" if own else "checkpoint in save_on_cpu"
    trl = "TRL offloading + checkpointing"
    if not CUDA:
        return [Absent(label, group, NO_HOST), Absent(trl, group, NO_HOST)]
    first = Method(label, group, partial(checkpointing_on_host, job))
    if find_spec("trl") is None:
        return [first, Absent(trl, group, NO_TRL)]
    return [first, Method(trl, group, partial(trl_offloading, job, partial(switch, job)))]


def offload_all_group(job: Job, group: str) -> list[Method | Absent]:
    """Everything on the host: several times the plain step's time, and all of its saved bytes pinned."""
    if not CUDA:
        return [Absent(label, group, NO_HOST) for label in ("save_on_cpu", "TRL offloading")]
    methods: list[Method | Absent] = [
        Method("save_on_cpu", group, partial(save_on_cpu, pin_memory=True), slow=True)
    ]
    if find_spec("trl") is None:
        return [*methods, Absent("TRL offloading", group, NO_TRL)]
    return [*methods, Method("TRL offloading", group, partial(trl_offloading, job, nullcontext), slow=True)]


# ---------------------------------------------------------------------------------------------- compiled


def compiled_alone(name: str, backend: str, **options: Any) -> Run:
    """torch.compile of a call, by a function of its own: compiled code belongs to a function's code, and two
    budgets must not share it."""

    def call(function: Run, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    label = "".join(c if c.isalnum() else "_" for c in name)
    own = types.FunctionType(call.__code__.replace(co_name=f"bench_{label}"), globals())
    made: list[Run] = []

    def run(*args: Any, **kwargs: Any) -> Any:  # made at the first call: what fails then is recorded
        if not made:
            made.append(torch.compile(own, backend=backend, **options))
        return made[0](*args, **kwargs)

    return run


@contextmanager
def stock_budget(budget: float) -> Iterator[None]:
    """torch's own activation memory budget, and room for as many kinds of blocks as a model may have."""
    with ExitStack() as patches:
        patches.enter_context(torch._functorch.config.patch(activation_memory_budget=budget))
        patches.enter_context(torch._dynamo.config.patch(recompile_limit=64))
        yield


def forward_by(run: Run) -> Callable[[nn.Module], Run]:
    """A module's own forward, as an argument of `run`."""

    def made(module: nn.Module) -> Run:
        return partial(run, type(module).forward, module)

    return made


def regional_group(job: Job, group: str, backend: str) -> list[Method | Absent]:
    methods: list[Method | Absent] = []
    for budget in STOCK_BUDGETS:
        run = compiled_alone(f"regional {budget}", backend, fullgraph=True, dynamic=False)
        context = partial(forwards, job.blocks, forward_by(run))
        compiling = partial(stock_budget, budget)
        methods.append(Method(f"regional {budget}", group, context, compiled=True, compiling=compiling))
    inside = compiled_alone("regional in checkpoint", backend, fullgraph=True, dynamic=False)

    def around(module: nn.Module) -> Run:
        return partial(checkpoint, forward_by(inside)(module), use_reentrant=False)

    context = partial(forwards, job.blocks, around)
    compiling = partial(stock_budget, 1.0)
    methods.insert(1, Method("regional in checkpoint", group, context, compiled=True, compiling=compiling))
    return methods


def whole_group(job: Job, group: str, backend: str) -> list[Method | Absent]:
    methods: list[Method | Absent] = []
    for budget in STOCK_BUDGETS:
        run = compiled_alone(f"whole {budget}", backend, dynamic=False)
        context = partial(forwards, [job.model], forward_by(run))
        compiling = partial(stock_budget, budget)
        methods.append(Method(f"whole {budget}", group, context, compiled=True, compiling=compiling))
    return methods


EAGER = ("checkpoint", "selective", "chunked-loss", "offload")
COMPILED = ("regional", "whole")


def peers(job: Job, group: str, backend: str, attention: bool) -> list[Method | Absent]:
    """The methods of one group."""
    if group == "selective":
        return selective_group(job, group, attention)
    if group in COMPILED:
        return (regional_group if group == "regional" else whole_group)(job, group, backend)
    made = {
        "checkpoint": checkpoint_group,
        "chunked-loss": chunked_loss_group,
        "offload": offload_group,
        "offload-all": offload_all_group,
    }
    return made[group](job, group)
