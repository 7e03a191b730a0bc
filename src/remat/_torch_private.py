"""Every private interface of torch that remat uses, one function each.

tests/test_torch_private.py pins what each one does, so that a new torch version fails there first.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import operator
import os
import shutil
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _python_dispatch, _pytree

from remat.trees import field_names, with_fields

__all__ = [
    "WRITTEN",
    "Stock",
    "StopRecomputation",
    "active_saved_tensors_hooks",
    "after_accumulation",
    "any_autocast_enabled",
    "any_length",
    "at_end_of_backward",
    "below_autograd",
    "below_torch_function",
    "compile_joint",
    "compiled_node",
    "compiler_errors",
    "compiler_problem",
    "compiler_reason",
    "current_backward",
    "current_device_index",
    "current_stream_handle",
    "direct_binding",
    "direct_launch",
    "dispatch_modes",
    "empty_on_current",
    "flatten",
    "has_compiler",
    "in_backward",
    "in_dispatch_mode",
    "in_functorch",
    "in_jit_trace",
    "is_optimized_module",
    "keep_order",
    "keeps_graph",
    "label_allocations",
    "partitioner_problem",
    "recompile_limit",
    "record_allocations",
    "run_backward",
    "save_allocations",
    "saved_slots",
    "sequence_number",
    "size_hint",
    "sound_options",
    "storage_ref",
    "strict_recompile_limit",
    "wrapper_tensor",
]

# torch.utils.checkpoint raises this in its pack hook when a recomputation has saved all that is needed.
StopRecomputation: type[Exception] = torch.utils.checkpoint._StopRecomputationError


def below_autograd() -> AbstractContextManager[None]:
    """Operations inside are not recorded by autograd, whatever the grad mode."""
    return torch._C._AutoDispatchBelowAutograd()


def below_torch_function() -> AbstractContextManager[None]:
    """Tensor subclasses are not asked (`__torch_function__`) about what is done to them inside."""
    return torch._C.DisableTorchFunctionSubclass()


def after_accumulation(parameter: torch.Tensor) -> dict[int, Any]:
    """The hooks that run when this parameter's gradient is ready: a live dictionary, empty if there are none.

    What is taken out of it does not run until it is put back.
    """
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return hooks if hooks is not None else {}


def at_end_of_backward(callback: Callable[[], None]) -> bool:
    """Call `callback` when the running backward pass ends; an exception in it is raised by backward() itself.

    False (and nothing queued) outside of a backward pass.
    """
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True


# Whether this thread autocasts for any kind of device: a third of the time that asking for one takes.
any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled


def direct_binding(name: str) -> Callable[..., Any] | None:
    """A function that Python reaches faster than an operator ("aten.silu.default"), with the same arguments:
    below autograd it dispatches to the same kernel. Of those that torch has under no public name."""
    packet = name.removeprefix("aten.").removesuffix(".default")
    if packet in ("silu", "gelu"):
        return getattr(torch._C._nn, packet, None)
    return getattr(torch, packet, None) if packet.startswith("_scaled_dot_product_") else None


def in_functorch() -> bool:
    """Inside torch.func's vmap, grad, jvp: tensors are wrapped and graphs belong to a level."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def sequence_number(node: Any) -> int:
    """Autograd runs the node with the highest number first: backward reverses the order of making."""
    return int(node._sequence_nr())


def active_saved_tensors_hooks() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """The (pack, unpack) pair that autograd would call now for a tensor it saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def in_backward() -> bool:
    """Whether this thread is inside a backward pass: a forward that runs here is somebody's recomputation."""
    return current_backward() != -1


def in_jit_trace() -> bool:
    return torch._C._get_tracing_state() is not None


def flatten(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Leaves of a pytree, in which dataclasses are looked into, and the function that builds the tree from
    such a list."""
    leaves, spec = _pytree.tree_flatten(tree)
    if not any(field_names(leaf) for leaf in leaves):
        return leaves, lambda new: _pytree.tree_unflatten(new, spec)
    parts = [_fields(leaf) for leaf in leaves]
    makers = [(len(inner), make) for inner, make in parts]  # which hold none of the leaves

    def build(new: list[Any]) -> Any:
        following = iter(new)
        built = [make([next(following) for _ in range(count)]) for count, make in makers]
        return _pytree.tree_unflatten(built, spec)

    return [leaf for inner, _ in parts for leaf in inner], build


def _fields(leaf: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    names = field_names(leaf)
    if not names:
        return [leaf], lambda new: new[0]
    inner, make = flatten(tuple(getattr(leaf, name) for name in names))
    empty = with_fields(leaf, dict.fromkeys(names))  # what builds it must not hold its tensors
    return inner, lambda new: with_fields(empty, dict(zip(names, make(new), strict=True)))


def storage_ref(tensor: torch.Tensor) -> Hashable:
    """A weak key of a tensor's storage. While the key lives, no other storage has an equal one."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


# A number for the backward pass that runs in this thread (also in its worker threads); -1: none.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


def current_stream_handle(device: torch.device) -> int:
    """The CUDA stream of this thread, as a number: much cheaper to ask for than the stream itself."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def current_device_index() -> int:
    """The CUDA device of this thread; cheaper than torch.cuda.current_device()."""
    return torch._C._cuda_getDevice()


def empty_on_current(device_type: str) -> Callable[..., torch.Tensor] | None:
    """torch.empty_strided(shape, stride, dtype) on this thread's current device of that type, without asking
    the dispatcher: in half the time. What the compiler's own code calls. None if this torch has none."""
    found: Callable[..., torch.Tensor] | None
    found = getattr(torch._C._dynamo.guards, f"_empty_strided_{device_type}", None)
    return found


def direct_launch(compiled: Any, stream: int, *trial: Any) -> Callable[..., None] | None:
    """What Triton's compiled[(programs, 1, 1)](*arguments) does, as launch(programs, stream, *arguments):
    without asking for device, stream and hooks each time. Arguments must be such as it was compiled for;
    tensors may be given as addresses. Tried with `trial` and no programs; None if Triton has it otherwise.
    """
    for find in (_innermost_launch, _inner_launch):
        try:
            launch = find(compiled)
            launch(0, stream, *trial)
        except (AttributeError, TypeError):
            continue
        return launch
    return None


_C_LAUNCH = (
    "self.launch(gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, self.launch_pdl, "
    "global_scratch, profile_scratch, *args)"
)


def _innermost_launch(compiled: Any) -> Callable[..., None]:
    """Triton's C function, for kernels that need no memory of their own; only where Triton's own Python calls
    it so."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    if run.global_scratch_size or run.profile_scratch_size:
        raise AttributeError("it wants memory")
    try:
        source = inspect.getsource(type(run).__call__)
    except OSError:
        source = ""
    if _C_LAUNCH not in " ".join(source.split()):
        raise AttributeError("it is launched in another way")
    c_launch, options = run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)

    def launch(programs: int, stream: int, *arguments: Any) -> None:
        c_launch(programs, 1, 1, stream, function, *options, metadata, None, None, None, *arguments)

    return launch


def _inner_launch(compiled: Any) -> Callable[..., None]:
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def launch(programs: int, stream: int, *arguments: Any) -> None:
        run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)

    return launch


def keeps_graph() -> bool:
    """Inside a backward pass: whether it was asked to keep the graph, so that it may run once more."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def wrapper_tensor(
    cls: type[torch.Tensor],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """A tensor subclass's instance that has these properties and no memory."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, strides=stride, dtype=dtype, device=device)


def in_dispatch_mode() -> bool:
    """Whether a TorchDispatchMode (a profiler, a counter, a fake-tensor mode) sees every operation now."""
    return _python_dispatch._get_current_dispatch_mode() is not None


def any_length(tensor: torch.Tensor) -> None:
    """Tell the compiler not to fix the first dimension of this tensor. Imports the compiler."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)


def run_backward(
    loss: torch.Tensor,
    gradient: torch.Tensor,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """loss.backward(gradient) that torch function modes do not handle: a mode is off while it handles a call,
    and would be off in all that backward runs."""
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,),
        (gradient,),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        () if inputs is None else tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def record_allocations(on: bool) -> None:
    """From now on CUDA's allocator writes down what it gives and takes, with stack traces; or no longer."""
    torch.cuda.memory._record_memory_history("all" if on else None)


def label_allocations(label: str) -> None:
    """What the allocator writes down from now on carries this text."""
    torch.cuda.memory._set_memory_metadata(label)


def save_allocations(path: str) -> None:
    """What was written down, as the file that pytorch.org/memory_viz reads."""
    torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]


# ------------------------------------------------------------------------------------------ the compiler
#
# torch._dynamo, torch._inductor and torch._functorch are imported inside the functions: they take a second.

Decisions = Mapping[torch.fx.Node, bool]
Stock = Callable[[Decisions], frozenset[torch.fx.Node]]
Decide = Callable[[torch.fx.GraphModule, Sequence[int], int, Stock], Decisions]


def compiler_problem(device_type: str, backend: str = "inductor") -> str:
    """Why torch.compile cannot be used here; "" if it can."""
    if backend != "inductor":
        return ""
    try:
        if device_type == "cuda":
            from torch.utils._triton import has_triton

            return "" if has_triton() else "triton, which compiles for CUDA, is not installed"
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except Exception as error:  # no compiler, or a torch in which these are elsewhere
        return f"torch.compile cannot be used here: {type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def partitioner_problem() -> str:
    """Why compiled graphs cannot be split by our own decisions; "" if they can. The public way then is
    selective checkpointing."""
    try:
        from torch._functorch import partitioners
        from torch._inductor import config, custom_graph_pass
    except ImportError as error:
        return str(error)
    wanted = [
        (config, "custom_partitioner_fn"),
        (custom_graph_pass, "CustomPartitionerFn"),
        (partitioners, "min_cut_rematerialization_partition"),
        (partitioners, "has_recomputable_rng_ops"),
    ]
    missing = [f"{owner.__name__}.{name}" for owner, name in wanted if not hasattr(owner, name)]
    return f"torch {torch.__version__} has no {missing[0]}" if missing else ""


def has_compiler(device_type: str) -> bool:
    """Whether torch.compile is likely to work, found out without importing it."""
    if device_type == "cuda":
        return importlib.util.find_spec("triton") is not None
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "g++", "clang++"))


WRITTEN = "remat_written"


def compile_joint(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], decide: Decide, key: str, backend: str
) -> Callable[..., Any]:
    """Compile what dynamo captured; of the joint graph of forward and backward, `decide` says which values
    are saved for backward (True) and which are computed again (False).

    `decide(joint, parameters, outputs, stock)`: the joint graph, which of its primals are parameters as far
    as the compiler knows, how many of its outputs are those of forward, and a function of some decisions that
    tells which nodes the compiler would save with nothing else decided (it takes as long as splitting the
    graph does). `key` names the decision in the compiler's caches on disk. A decision for a node that yields
    no tensor, or a view, is not looked at. Primals that forward writes to have WRITTEN in their `meta`.
    """

    def partition(joint: torch.fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        from torch._functorch import config, partitioners
        from torch._functorch.compile_utils import fx_graph_cse
        from torch.utils.checkpoint import CheckpointPolicy

        for primal in _written(joint.graph):
            primal.meta[WRITTEN] = True
        joint.graph.eliminate_dead_code()
        joint.graph = fx_graph_cse(joint.graph)  # as the partitioner itself would: nodes must not change
        static = options.get("static_lifetime_input_indices") or ()
        outputs = options["num_fwd_outputs"]

        def split(module: torch.fx.GraphModule, decisions: Mapping[str, bool]) -> Any:
            for node in module.graph.nodes:
                if node.name in decisions:
                    keep = decisions[node.name]
                    mark = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.MUST_RECOMPUTE
                    node.meta["recompute"] = mark
                if node.target is operator.getitem and "recompute" in node.args[0].meta:
                    node.meta["recompute"] = node.args[0].meta["recompute"]
            # The stock budget would overrule the marks. And attention is tagged as random also where it drops
            # nothing: the partitioner would save the generator's state for it. What is random is saved here.
            # Only one thread at a time compiles.
            with (
                config.patch(activation_memory_budget=1.0),
                mock.patch.object(partitioners, "has_recomputable_rng_ops", return_value=False),
            ):
                return partitioners.min_cut_rematerialization_partition(module, joint_inputs, **options)

        def stock(decisions: Decisions) -> frozenset[torch.fx.Node]:
            twin = torch.fx.GraphModule(joint, copy.deepcopy(joint.graph))
            forward, _ = split(twin, {node.name: keep for node, keep in decisions.items()})
            results = forward.graph.output_node().args[0][outputs:]
            saved = {node.name for node in results if isinstance(node, torch.fx.Node)}
            return frozenset(node for node in joint.graph.nodes if node.name in saved)

        decisions = decide(joint, static, outputs, stock)
        return split(joint, {node.name: keep for node, keep in decisions.items()})

    from torch._inductor import config as inductor_config

    with inductor_config.patch(reorder_for_peak_memory=inductor_config.reorder_for_peak_memory):  # keep_order
        if backend == "inductor":
            from torch._inductor import compile_fx

            options = {"custom_partitioner_fn": _partitioner_class()(key, partition), **sound_options()}
            # As an argument, decompositions would end the compiler's caching.
            with mock.patch.object(compile_fx, "select_decomp_table", _decompositions):
                return compile_fx.compile_fx(graph, inputs, config_patches=options)  # type: ignore[return-value]
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.debugging import boxed_nop

        compiler = aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partition)
        return compiler(graph, inputs)


def sound_options() -> dict[str, Any]:
    """Inductor's options without what is known to give wrong gradients: reductions along rows and along
    columns in one kernel, which in torch 2.11 lose part of the gradient of a modulation over 15,600 tokens
    (0.27 of its norm, on an H200)."""
    from torch._inductor import config

    return {"triton.mix_order_reduction": False} if hasattr(config.triton, "mix_order_reduction") else {}


def keep_order() -> None:
    """Called by a `decide`: operations of this forward that read nothing of each other run in the graph's
    order. Else inductor moves them to where they hold least memory, which depends on what is saved."""
    from torch._inductor import config

    config.reorder_for_peak_memory = False  # until `compile_joint` puts it back


def _decompositions() -> dict[Any, Any]:
    """The compiler's own, but for the gradient of an embedding: taken apart, it is summed up in float32,
    which in bfloat16 takes two tables more than the one that is wanted."""
    from torch._inductor.decomposition import select_decomp_table

    table = dict(select_decomp_table())
    if _runs_as_it_is(torch.ops.aten.embedding_dense_backward.default):
        table.pop(torch.ops.aten.embedding_dense_backward.default, None)
    return table


def _runs_as_it_is(op: Any) -> bool:
    """Whether inductor calls torch's own kernel for this operation, if it is not taken apart. Before 2.13 it
    has to be told so for an operation that it could take apart."""
    from torch._inductor import lowering

    if op not in lowering.lowerings:
        try:
            lowering.make_fallback(op, lowering.require_contiguous, warn=False, override_decomp=True)  # type: ignore[no-untyped-call]
        except (AttributeError, TypeError, AssertionError):
            return False
    return op in lowering.lowerings


def _written(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The inputs of a joint graph that forward writes to: in the graph, or with what the graph returns."""
    results = graph.output_node().meta.get("desc") or ()
    names = {getattr(result, "mutated_input", None) for result in results} - {None}
    copies = {node.args[0] for node in graph.nodes if node.target is torch.ops.aten.copy_.default}
    return [n for n in graph.nodes if n.op == "placeholder" and (n in copies or n.meta.get("desc") in names)]


@functools.cache
def _partitioner_class() -> Any:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        """The configuration that it is part of is copied, pickled and hashed for the compiler's caches."""

        def __init__(self, key: str, partition: Callable[..., Any]) -> None:
            self.key, self.partition = key, partition

        def __call__(self, gm: Any, joint_inputs: Any, **options: Any) -> Any:
            return self.partition(gm, joint_inputs, **options)

        def uuid(self) -> Any:
            # The caches do not see which operations are taken apart, and which graphs keep their order.
            return ("remat", "embedding", "order", "reductions", self.key)

        def __deepcopy__(self, memo: Any) -> Any:
            return self

        def __reduce__(self) -> Any:
            return tuple, (self.uuid(),)

    return Partitioner


def compiler_errors() -> tuple[type[Exception], ...]:
    """What torch.compile raises about code that it cannot compile: a graph break, a backend that fails, code
    that was compiled too often already."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def compiler_reason(error: Exception) -> str:
    """One line about one of `compiler_errors`."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    if isinstance(error, FailOnRecompileLimitHit):  # it says only which setting made it raise
        return "it was compiled too often, see torch._dynamo.config.recompile_limit"
    return f"it cannot be compiled: {str(error).splitlines()[0]}"


def strict_recompile_limit() -> AbstractContextManager[None]:
    """Inside, code that was compiled too often raises one of `compiler_errors` instead of running as it is,
    which the compiler does without fullgraph. For this thread only."""
    from torch._dynamo import config

    if config.suppress_errors:  # the compiler refuses both together
        return nullcontext()
    return config.patch(fail_on_recompile_limit_hit=True)  # type: ignore[no-any-return]


def recompile_limit() -> int:
    """How often the compiler compiles one function."""
    from torch._dynamo import config

    return int(config.recompile_limit)


def is_optimized_module(module: torch.nn.Module) -> bool:
    """What torch.compile(module) returns. The module itself is its `_orig_mod`."""
    import sys

    frame = sys.modules.get("torch._dynamo.eval_frame")  # not imported: nothing was compiled
    return frame is not None and isinstance(module, frame.OptimizedModule)


def compiled_node(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Any:
    """The autograd node of the compiled graph that made these tensors from those; its `saved_tensors` are
    what the graph holds for backward. None if there is none."""
    before = [tensor.grad_fn for tensor in inputs]  # may be another compiled graph's
    stack = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    for _ in range(16):  # an output may be a view that was taken outside of the graph
        while stack and any(stack[0] is node for node in before):
            stack.pop(0)
        if not stack:
            return None
        node = stack.pop(0)
        if node.name() == "CompiledFunctionBackward":
            return node
        stack += [parent for parent, _ in node.next_functions if parent is not None]
    return None


def saved_slots(node: Any) -> Sequence[Any]:
    """What a Python function's node saved, in the order of `saved_tensors`: each takes one pair of hooks, by
    which another object then stands for the tensor."""
    return node._raw_saved_tensors  # type: ignore[no-any-return]


def size_hint(size: Any) -> int:
    """A dimension as a number: of a symbolic one, its value when the graph was captured."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return int(hint) if hint is not None else 1


def dispatch_modes() -> list[Any]:
    """The TorchDispatchModes that see every operation now, outermost first."""
    return list(_python_dispatch._get_current_dispatch_mode_stack())
