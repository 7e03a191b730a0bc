"""Blocks that the compiler runs, each with a saved set that was chosen for it.

A block's forward is traced and compiled as one graph; of the joint graph of forward and backward, the values
named in `keep` are saved and everything else is computed again inside the compiled backward, fused. The model
is not touched: its blocks' `forward` is wrapped like that of any other region, and the compiled code belongs
to the wrapper.

Blocks of one class that run with one saved set share the compiled code: parameters are inputs of the graph.
Each saved set has a function of its own to compile, so that the compiler's limit of recompilations counts per
saved set, and a length that was not seen before makes one graph for all lengths.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from remat import _torch_private as private
from remat.check.live import LiveBytes
from remat.errors import CaptureError
from remat.records import Recipe, RegionGraph
from remat.run.meter import SavedBytes, storages_of
from remat.run.onegraph import blocks_in, blocks_of, placed_decisions
from remat.run.replay import overload
from remat.trace.joint import Joint, kept_labels, labels, read_joint
from remat.trace.record import RANDOM
from remat.trees import tensors

__all__ = [
    "BACKENDS",
    "DEFAULT_BACKEND",
    "PUBLIC",
    "WHOLE",
    "CompiledBlock",
    "block_for",
    "compiled_block",
    "decompiled",
    "is_compiled",
    "probe",
    "saved_bytes",
    "uncompiled",
]

DEFAULT_BACKEND = "inductor"
BACKENDS = (DEFAULT_BACKEND, "aot_eager")  # the second runs the split graphs operation by operation
PUBLIC = "checkpoint+"  # before the name of a stock backend: selective checkpointing inside of it
WHOLE = "whole+"  # before the name of a backend: the model as one graph, `keep` names blocks and operations

_CACHE_SIZE = 64
_cache: dict[tuple[str, frozenset[str], str], CompiledBlock] = {}
_cache_lock = threading.Lock()


def compiled_block(kind: str, keep: Iterable[str], backend: str = "inductor") -> CompiledBlock:
    """One object per (kind of block, saved set, backend) in this process: what was compiled while measuring
    runs in training."""
    key = (kind, frozenset(keep), backend)
    with _cache_lock:
        block = _cache.pop(key, None) or CompiledBlock(*key)
        _cache[key] = block
        while len(_cache) > _CACHE_SIZE:
            _cache.pop(next(iter(_cache)))
    return block


def block_for(signature: str, graph: RegionGraph, recipe: Recipe, backend: str) -> CompiledBlock:
    """The compiled block that carries out a recipe for a joint graph."""
    constants = (repr(op.args) for op in graph.ops)
    digest = hashlib.sha256("\n".join((signature, *labels(graph.ops), *constants)).encode())
    return compiled_block(digest.hexdigest()[:16], kept_labels(graph, recipe), backend)


class CompiledBlock:
    """Runs blocks of one kind, compiled, with one saved set. Holds no module and no tensor."""

    def __init__(self, kind: str, keep: frozenset[str], backend: str = "inductor") -> None:
        self.kind = kind
        self.keep = keep
        self.backend = backend
        self.graphs = 0  # that were compiled so far, or taken from the compiler's cache on disk
        # Of a whole model, by the code of its forward: those that were found in graphs that were split here,
        # and not taken from the compiler's cache. Models of one kind may differ in that code.
        self._found: dict[Any, frozenset[str]] = {}
        self._code: Any = None  # of the forward that ran last
        digest = hashlib.sha256("\n".join((kind, backend, *sorted(keep))).encode())
        self.key = digest.hexdigest()[:16]
        self._run: Callable[..., Any] | None = None

    @property
    def lost(self) -> frozenset[str]:
        """Blocks of a whole model that are in none of its graphs: nothing was decided for them."""
        found = self._found.get(self._code)
        return frozenset() if found is None else blocks_of(self.keep) - found

    def __deepcopy__(self, memo: Any) -> CompiledBlock:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return compiled_block, (self.kind, tuple(sorted(self.keep)), self.backend)

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run `forward`, the module's own, compiled."""
        if self._run is None:
            self._run = self._made()
        with private.strict_recompile_limit() if self._may_reach_limit() else nullcontext():
            function, bound = _code_of(module, forward)
            self._code = getattr(function, "__code__", None)
            output = self._run(function, bound, args, kwargs)
        meters = [mode for mode in private.dispatch_modes() if isinstance(mode, LiveBytes)]
        if meters:
            _show(meters, module, (args, kwargs), output)
        return output

    def _may_reach_limit(self) -> bool:
        """Whether this call may be one compilation too many. Not where the model is one graph that was
        compiled once, and its code is nobody else's: then the limit, which takes longer to watch than some
        models to call, is far off. (Parts behind a break are code that others may have had compiled.)"""
        return self.backend.startswith(WHOLE) and (self.graphs != 1 or private.recompile_limit() < 2)

    def _made(self) -> Callable[..., Any]:
        if self.backend.startswith(WHOLE):  # a graph break costs time, and nothing else
            return _compiled(self.key, self._compile, fullgraph=False)
        if not self.backend.startswith(PUBLIC):
            return _compiled(self.key, self._compile)
        names = sorted({label.partition("#")[0] for label in self.keep})
        contexts = functools.partial(create_selective_checkpoint_contexts, [overload(name) for name in names])
        stock = self.backend.removeprefix(PUBLIC)
        self.graphs += 1
        options = private.sound_options() if stock == DEFAULT_BACKEND else None
        return _compiled(self.key, stock, functools.partial(_selectively, contexts), options=options)

    def _compile(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend that dynamo calls with what it captured."""
        self.graphs += 1

        def decide(
            joint: fx.GraphModule, parameters: Sequence[int], outputs: int, stock: private.Stock
        ) -> Mapping[fx.Node, bool]:
            found = read_joint(joint, parameters, outputs)
            if sum(op.reason == RANDOM for op in found.graph.ops) > 1:
                private.keep_order()  # in which random numbers are drawn: the same for every saved set
            if not self.backend.startswith(WHOLE):
                return decisions(found, self.keep)
            before = self._found.get(self._code, frozenset())
            self._found[self._code] = before | blocks_in(found, self.keep)
            return placed_decisions(found, self.keep, stock)

        return private.compile_joint(graph, inputs, decide, self.key, self.backend.removeprefix(WHOLE))


def decisions(joint: Joint, keep: frozenset[str]) -> dict[fx.Node, bool]:
    """For every node of forward that makes tensors: is it saved? Whatever draws random numbers is,
    and whatever reads a tensor that forward writes to.

    Everything else can be computed again, so that any set of labels gives right gradients, also in a graph
    that is not the one that the set was chosen for (another length, an input without gradient).
    """
    names = labels(joint.graph.ops)
    found = {
        node: not op.replayable or name in keep
        for op, node, name in zip(joint.graph.ops, joint.nodes, names, strict=True)
        if not op.view
    }
    again = [*joint.backward, *(n for o, n in zip(joint.graph.ops, joint.nodes, strict=True) if o.view)]
    return {**dict.fromkeys(again, False), **found}


def _selectively(contexts: Callable[..., Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Save what the operations of the policy give, and compute the rest again: torch's public way, by the
    kind of an operation and not by its place."""
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _compiled(
    key: str,
    backend: Callable[..., Any] | str,
    around: Callable[..., Any] | None = None,
    *,
    fullgraph: bool = True,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    def run_block(
        forward: Callable[..., Any], bound: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if around is not None:
            return around(forward, *bound, *args, **kwargs)
        return forward(*bound, *args, **kwargs)

    # What the compiler knows of a function (graphs, lengths that vary), it keeps by its code and its name.
    code = run_block.__code__.replace(co_name=f"remat_block_{key}")
    return torch.compile(
        types.FunctionType(code, globals(), code.co_name, None, run_block.__closure__),
        backend=backend,
        fullgraph=fullgraph,
        dynamic=None,
        options=options,
    )


def _code_of(module: nn.Module, forward: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(function, leading arguments): a method is taken apart, so that all modules of a class share it."""
    inner = uncompiled(module)
    if inner is not module:
        return type(inner).__call__, (inner,)
    if isinstance(forward, types.MethodType) and forward.__self__ is module:
        return forward.__func__, (module,)
    return forward, ()


# ---------------------------------------------------------------------------- what users have compiled


def is_compiled(module: nn.Module) -> bool:
    """By its user: with module.compile(), or as torch.compile(module)."""
    return module._compiled_call_impl is not None or uncompiled(module) is not module


def uncompiled(module: nn.Module) -> nn.Module:
    """The module behind torch.compile(module), or the module itself."""
    while private.is_optimized_module(module):
        module = module._orig_mod  # type: ignore[assignment]
    return module


@contextmanager
def decompiled(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, modules that their user has compiled run their own code, so that it can be planned."""
    with ExitStack() as undo:
        for module in modules:
            inner = uncompiled(module)
            if inner is not module:
                undo.callback(setattr, module, "forward", module.__dict__["forward"])
                module.forward = inner.__call__
            if inner._compiled_call_impl is not None:
                undo.callback(setattr, inner, "_compiled_call_impl", inner._compiled_call_impl)
                inner._compiled_call_impl = None
        yield


# ------------------------------------------------------------------------------------------ the joint graph


class _SeenError(Exception):
    """Ends a compilation as soon as the joint graph is known."""


def probe(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: str = "inductor",
) -> Joint:
    """The joint graph of this call of a block. Nothing is compiled. CaptureError says why there is none."""
    found: list[Joint] = []
    resident = storages_of([module])
    given = tensors((args, kwargs))

    def look(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        parameters = {i for i, t in enumerate(inputs) if _is_resident(t, resident)}

        def decide(
            joint: fx.GraphModule, static: Sequence[int], outputs: int, stock: private.Stock
        ) -> Mapping[fx.Node, bool]:
            places = [_place(inputs, tensor) for tensor in given]
            found.append(read_joint(joint, parameters | set(static), outputs, places))
            raise _SeenError

        return private.compile_joint(graph, inputs, decide, f"probe {id(found)}", backend)

    run = _compiled(f"probe_{id(found)}", look)
    try:
        with torch.enable_grad():
            run(*_code_of(module, forward), args, kwargs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if found:
            return found[0]
        raise CaptureError(f"it cannot be compiled as one graph: {_reason(error)}") from error
    raise CaptureError("the compiled graph has no backward")


def _is_resident(value: Any, resident: set[Any]) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return isinstance(value, nn.Parameter) or private.storage_ref(value) in resident


def _place(inputs: Sequence[Any], tensor: torch.Tensor) -> int:
    for place, value in enumerate(inputs):
        if value is tensor:
            return place
    for place, value in enumerate(inputs):
        if isinstance(value, torch.Tensor) and _same_view(value, tensor):
            return place
    return -1


def _same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype) and a.data_ptr() == b.data_ptr()


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"


# ---------------------------------------------------------------------------------------------- metering


def saved_bytes(module: nn.Module, inputs: Any, output: Any) -> int | None:
    """Bytes that a compiled block holds for its backward beside its inputs and parameters, each storage
    once; None if what made `output` is not a compiled graph."""
    node = private.compiled_node(tensors(output), tensors(inputs))
    if node is None:
        return None
    count = SavedBytes((module,))
    count.add_all(tensors(inputs))
    before = count.nbytes
    count.add_all(t for t in node.saved_tensors if t is not None)
    return count.nbytes - before


def _show(meters: list[LiveBytes], module: nn.Module, inputs: Any, output: Any) -> None:
    """A meter without accelerator does not see what compiled code allocates: show it what stays. What lives
    only while the compiled code runs, it never sees."""
    node = private.compiled_node(tensors(output), tensors(inputs))
    if node is None:
        return
    known = storages_of([module]) | {private.storage_ref(tensor) for tensor in tensors(inputs)}

    def watch(found: Iterable[Any]) -> None:
        fresh = [t for t in found if t is not None and private.storage_ref(t) not in known]
        for meter in meters:
            meter.watch(fresh)

    watch((*tensors(output), *node.saved_tensors))
    node.register_hook(lambda gradients, _: watch(gradients))
