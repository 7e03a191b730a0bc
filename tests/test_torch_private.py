"""Pins what each private interface of torch does, so that a new version fails here first."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from remat import _torch_private as private
from remat.records import Value
from remat.run import fused


def test_active_saved_tensors_hooks_gives_the_innermost_pair() -> None:
    def identity(x: object) -> object:
        return x

    assert private.active_saved_tensors_hooks() is None
    with saved_tensors_hooks(lambda t: t, lambda t: t), saved_tensors_hooks(identity, identity):
        assert private.active_saved_tensors_hooks() == (identity, identity)
    assert private.active_saved_tensors_hooks() is None


def test_torch_stops_a_recomputation_by_this_exception_from_its_pack_hook() -> None:
    stops = []

    def region(x: torch.Tensor) -> torch.Tensor:
        try:
            return torch.sin(x)
        except private.StopRecomputation:
            stops.append(private.in_backward())
            raise

    checkpoint(region, torch.randn(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert stops == [True]


def test_in_backward() -> None:
    seen = []
    x = torch.randn(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: seen.append(private.in_backward()))
    assert not private.in_backward()
    y.sum().backward()
    assert seen == [True]
    assert not private.in_backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_in_jit_trace() -> None:
    seen = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(private.in_jit_trace())
        return x + 1

    torch.jit.trace(fn, torch.ones(1), check_trace=False)
    assert seen == [True]
    assert not private.in_jit_trace()


def test_any_autocast_enabled() -> None:
    assert not private.any_autocast_enabled()
    for device in ("cpu", "cuda"):
        before = torch.is_autocast_enabled(device)
        torch.set_autocast_enabled(device, True)
        try:
            assert private.any_autocast_enabled()
        finally:
            torch.set_autocast_enabled(device, before)
    assert not private.any_autocast_enabled()


def test_direct_bindings_run_the_operator() -> None:
    x = torch.randn(2, 3, 5, 8)
    calls: dict[str, tuple[Any, dict[str, Any]]] = {
        "silu": ((x,), {}),
        "gelu": ((x,), {"approximate": "tanh"}),
        "_scaled_dot_product_flash_attention_for_cpu": ((x, x, x, 0.0, True), {"scale": 0.25}),
    }
    for packet, (args, kwargs) in calls.items():
        direct = private.direct_binding(f"aten.{packet}.default")
        assert direct is not None
        with SeesOperators() as seen:
            found = direct(*args, **kwargs)
        assert seen.names == [f"aten.{packet}.default"]
        expected = getattr(torch.ops.aten, packet).default(*args, **kwargs)
        pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
        assert all(torch.equal(a, b) for a, b in pairs)
    assert private.direct_binding("aten._scaled_dot_product_efficient_attention.default") is not None
    assert private.direct_binding("aten.gelu_backward.default") is None
    assert private.direct_binding("aten._scaled_dot_product_abacus.default") is None


class SeesOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_empty_on_current() -> None:
    empty = private.empty_on_current("cpu")
    assert empty is not None
    made = empty((2, 3, 4), (12, 1, 3), torch.bfloat16)
    assert (made.shape, made.stride(), made.dtype) == ((2, 3, 4), (12, 1, 3), torch.bfloat16)
    assert made.device.type == "cpu"
    assert not made.requires_grad
    assert private.empty_on_current("abacus") is None


def test_in_functorch() -> None:
    seen = []
    torch.func.grad(lambda x: (seen.append(private.in_functorch()), x.sum())[1])(torch.ones(2))
    assert seen == [True]
    assert not private.in_functorch()


def test_flatten_and_build_again() -> None:
    tree = ((1, [torch.ones(1), None]), {"a": {"b": "text"}})
    leaves, build = private.flatten(tree)
    assert [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] == [tree[0][1][0]]
    assert build(leaves) == tree


def test_storage_refs_are_weak_equal_for_views_and_never_reused() -> None:
    x = torch.randn(64)
    ref = private.storage_ref(x)
    assert ref == private.storage_ref(x[3:])
    assert hash(ref) == hash(private.storage_ref(x.view(8, 8)))
    del x
    gc.collect()
    others = [torch.randn(64) for _ in range(100)]
    assert all(private.storage_ref(other) != ref for other in others)


def test_keeps_graph_is_what_backward_was_asked() -> None:
    seen = []
    x = torch.randn(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: seen.append(private.keeps_graph()))
    loss = y.sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert seen == [True, False]


def test_wrapper_tensor_has_properties_and_no_memory() -> None:
    class Empty(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise NotImplementedError(func)

    made = private.wrapper_tensor(Empty, (2, 3), (1, 2), torch.bfloat16, torch.device("cpu"))
    assert type(made) is Empty
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (1, 2), torch.bfloat16)
    assert made.device.type == "cpu"
    assert made.data_ptr() == 0


def test_below_torch_function_subclasses_are_not_asked() -> None:
    class Refuses(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise NotImplementedError(func)

    with private.below_torch_function():
        assert torch.ones(2).as_subclass(Refuses).requires_grad is False


def test_in_dispatch_mode() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    assert not private.in_dispatch_mode()
    with Mode():
        assert private.in_dispatch_mode()
    assert not private.in_dispatch_mode()


@pytest.mark.filterwarnings("ignore")
def test_any_length_makes_one_graph_for_several_lengths() -> None:
    graphs = []

    def backend(graph, inputs):  # type: ignore[no-untyped-def]
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x * 2, backend=backend)
    for length in (3, 4, 5):
        x = torch.ones(length, 2)
        private.any_length(x)
        assert torch.equal(compiled(x), 2 * x)
    assert len(graphs) == 1


def test_run_backward_leaves_function_modes_on():
    seen = []

    class See(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Negate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return -x

        @staticmethod
        def backward(ctx, gradient):
            return torch.neg(gradient)

    x = torch.ones(2, requires_grad=True)
    loss = Negate.apply(x).sum()
    with See():
        private.run_backward(loss, torch.ones(()))
    assert torch.neg in seen
    assert torch.equal(x.grad, -torch.ones(2))


def test_the_memory_history_has_the_parts_that_a_snapshot_needs() -> None:
    """Without CUDA only their names and arguments can be pinned; test_snapshot.py runs them on a GPU."""
    memory = torch.cuda.memory
    assert "enabled" in inspect.signature(memory._record_memory_history_impl).parameters
    assert list(inspect.signature(memory._set_memory_metadata).parameters) == ["metadata"]
    assert "filename" in inspect.signature(memory._dump_snapshot).parameters


def test_hooks_after_accumulation_are_a_live_dictionary() -> None:
    parameter, ran = torch.nn.Parameter(torch.ones(2)), []
    assert private.after_accumulation(parameter) == {}
    handle = parameter.register_post_accumulate_grad_hook(lambda p: ran.append(p.grad.clone()))
    hooks = private.after_accumulation(parameter)
    taken = dict(hooks)
    assert len(taken) == 1
    hooks.clear()
    parameter.sum().backward()
    assert not ran
    hooks.update(taken)
    parameter.sum().backward()
    assert len(ran) == 1
    handle.remove()
    assert not private.after_accumulation(parameter)


# ---------------------------------------------------------------------------------------- the compiler


def _two_products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x @ w).tanh() @ w).sin()


def _saved_by(decide: object) -> tuple[list[tuple[int, ...]], list[str]]:
    """Shapes that the compiled graph saves, and what its joint graph consists of."""
    targets: list[str] = []

    def look(
        joint: torch.fx.GraphModule, parameters: object, outputs: int, stock: private.Stock
    ) -> dict[torch.fx.Node, bool]:
        nodes = [node for node in joint.graph.nodes if node.op == "call_function"]
        targets.extend(str(node.target) for node in nodes)
        assert outputs == 1
        return {node: decide(str(node.target)) for node in nodes if "tangents" not in str(node.args)}  # type: ignore[operator]

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        return private.compile_joint(graph, inputs, look, "pinned", "aot_eager")

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return _two_products(x, w)

    x, w = torch.randn(6, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    output = torch.compile(run, backend=backend, fullgraph=True)(x, w)
    node = private.compiled_node([output], [])
    shapes = sorted(tuple(t.shape) for t in node.saved_tensors)
    expected = torch.autograd.grad(_two_products(x, w).sum(), (x, w))
    found = torch.autograd.grad(output.sum(), (x, w))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    return shapes, targets


def test_compile_joint_saves_what_it_is_told_to_save() -> None:
    none, targets = _saved_by(lambda target: False)
    assert none == [(4, 4), (6, 4)]  # the inputs, from which everything can be had again
    assert targets.count("aten.mm.default") >= 4  # forward's and backward's
    products, _ = _saved_by(lambda target: target == "aten.mm.default")
    assert products == [(4, 4), (6, 4), (6, 4), (6, 4)]


def test_what_the_compiler_would_save_by_itself() -> None:
    """Asking changes nothing about the graph that is asked about."""
    seen: list[set[str]] = []

    def look(joint: Any, parameters: Any, outputs: int, stock: private.Stock) -> dict[Any, bool]:
        before = str(joint.graph)
        tanh = next(node for node in joint.graph.nodes if "tanh" in str(node.target))
        for decided in ({}, {tanh: True}, {tanh: False}):
            found = stock(decided)
            assert found <= set(joint.graph.nodes)
            seen.append({str(node.target).split(".")[1] for node in found if node.op == "call_function"})
        assert str(joint.graph) == before
        assert not any("recompute" in node.meta for node in joint.graph.nodes)
        return {}

    def backend(graph: Any, inputs: Any) -> Any:
        return private.compile_joint(graph, inputs, look, "pinned", "aot_eager")

    x, w = torch.randn(6, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    torch.compile(lambda x, w: _two_products(x, w), backend=backend)(x, w).sum().backward()
    assert "tanh" in seen[1]
    assert "tanh" not in seen[2]
    assert "mm" in seen[0]


@pytest.mark.filterwarnings("ignore:.*script_method")
@pytest.mark.skipif(bool(private.compiler_problem("cpu")), reason="no C++ compiler")
@pytest.mark.parametrize("can_be_told", [True, False])
def test_the_gradient_of_an_embedding_is_not_taken_apart(
    monkeypatch: pytest.MonkeyPatch, can_be_told: bool
) -> None:
    """In float32 it would take two tables more. Where the compiler cannot be told, it goes its own way."""
    from torch._inductor import lowering

    if not can_be_told:
        monkeypatch.delitem(lowering.lowerings, torch.ops.aten.embedding_dense_backward.default, False)
        monkeypatch.delattr(lowering, "make_fallback")
    targets: list[str] = []

    def look(joint: Any, parameters: Any, outputs: int, stock: private.Stock) -> dict[Any, bool]:
        targets.extend(str(node.target) for node in joint.graph.nodes)
        return {}

    def backend(graph: Any, inputs: Any) -> Any:
        return private.compile_joint(graph, inputs, look, uuid4().hex, "inductor")  # in no cache

    def looked_up(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(ids, table).sin()

    ids, table = torch.tensor([1, 3, 1, 1]), torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True)
    (expected,) = torch.autograd.grad(looked_up(ids, table).sum(), table)
    (found,) = torch.autograd.grad(torch.compile(looked_up, backend=backend)(ids, table).sum(), table)
    assert ("aten.embedding_dense_backward.default" in targets) == can_be_told
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:.*script_method")
@pytest.mark.skipif(bool(private.compiler_problem("cpu")), reason="no C++ compiler")
def test_rows_and_columns_are_not_summed_up_in_one_kernel() -> None:
    """It gives wrong gradients. Forward and backward are compiled without it, and it is on again after."""
    from torch._inductor import config, graph

    seen = []
    really = graph.GraphLowering.run

    def run(self: Any, *args: Any) -> Any:
        seen.append(config.triton.mix_order_reduction)
        return really(self, *args)

    def backend(module: Any, inputs: Any) -> Any:
        return private.compile_joint(module, inputs, lambda *_: {}, uuid4().hex, "inductor")

    before = config.triton.mix_order_reduction
    assert private.sound_options() == {"triton.mix_order_reduction": False}
    with patch.object(graph.GraphLowering, "run", run):
        x = torch.randn(3, requires_grad=True)
        torch.compile(lambda x: x.sin().tanh(), backend=backend)(x).sum().backward()
    assert seen == [False, False]
    assert config.triton.mix_order_reduction == before


@pytest.mark.filterwarnings("ignore:.*script_method")
@pytest.mark.skipif(bool(private.compiler_problem("cpu")), reason="no C++ compiler")
@pytest.mark.parametrize("kept", [True, False])
def test_the_order_of_one_graph_is_kept(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    from torch._inductor import config, memory

    moved = []
    really = memory.reorder_for_peak_memory
    monkeypatch.setattr(
        memory, "reorder_for_peak_memory", lambda *given: moved.append(given) or really(*given)
    )

    def look(joint: Any, parameters: Any, outputs: int, stock: private.Stock) -> dict[Any, bool]:
        if kept:
            private.keep_order()
        return {}

    def backend(graph: Any, inputs: Any) -> Any:
        return private.compile_joint(graph, inputs, look, uuid4().hex, "inductor")  # in no cache

    def eagerly(graph: Any, inputs: Any) -> Any:
        return private.compile_joint(graph, inputs, look, "pinned", "aot_eager")

    x = torch.randn(3, requires_grad=True)
    torch.compile(lambda x: x.cos().exp(), backend=eagerly)(x)
    assert config.reorder_for_peak_memory
    assert not moved
    torch.compile(lambda x: x.sin().exp(), backend=backend)(x).sum().backward()
    forward = [given for given in moved if not any("tangents" in name for name in given[3])]
    assert bool(forward) != kept
    assert config.reorder_for_peak_memory, "for the next one"


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_node_is_not_that_of_an_input_that_is_handed_on() -> None:
    before = torch.compile(torch.sin, backend="aot_eager")(torch.randn(3, requires_grad=True))

    def hand_on(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a, b.exp() * a

    other = torch.randn(3, requires_grad=True)
    outputs = torch.compile(hand_on, backend="aot_eager")(before, other)
    assert outputs[0].grad_fn is before.grad_fn
    assert private.compiled_node(outputs, [before, other]) is outputs[1].grad_fn
    assert private.compiled_node(outputs[:1], [before, other]) is None


def test_compiled_node_is_none_for_eager_code() -> None:
    assert private.compiled_node([torch.ones(1, requires_grad=True) * 2], []) is None
    assert private.compiled_node([torch.ones(1)], []) is None


def test_saved_slots_take_the_place_of_what_a_compiled_graph_holds() -> None:
    """One hook each, in the order of `saved_tensors`; the tensor itself is then free."""
    x, w = torch.randn(6, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    expected = torch.autograd.grad(_two_products(x, w).sum(), (x, w))
    output = torch.compile(_two_products, backend="aot_eager", fullgraph=True)(x, w)
    node = private.compiled_node([output], [])
    slots, tensors = private.saved_slots(node), node.saved_tensors
    assert len(slots) == len(tensors)
    copies, storages = [], []
    for slot, tensor in zip(slots, tensors, strict=True):
        if private.storage_ref(tensor) in (private.storage_ref(x), private.storage_ref(w)):
            continue
        storages.append(weakref.ref(tensor.untyped_storage()))
        slot.register_hooks(
            lambda t: copies.append(t.detach().clone()) or len(copies) - 1, copies.__getitem__
        )
        with pytest.raises(RuntimeError):
            slot.register_hooks(lambda t: t, lambda t: t)
    del slot, slots, tensor, tensors, node
    assert storages
    assert all(storage() is None for storage in storages)
    found = torch.autograd.grad(output.sum(), (x, w))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_problems_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert private.compiler_problem("cpu", "aot_eager") == ""
    assert private.partitioner_problem() == ""
    from torch._functorch import partitioners
    from torch._inductor import cpp_builder

    monkeypatch.delattr(partitioners, "has_recomputable_rng_ops")
    assert "has_recomputable_rng_ops" in private.partitioner_problem()
    monkeypatch.delattr(cpp_builder, "get_cpp_compiler")
    assert "get_cpp_compiler" in private.compiler_problem("cpu")


def test_is_optimized_module() -> None:
    layer = torch.nn.Linear(2, 2)
    assert not private.is_optimized_module(layer)
    wrapped = torch.compile(layer, backend="eager")
    assert private.is_optimized_module(wrapped)
    assert wrapped._orig_mod is layer


def test_compiler_errors_are_what_a_graph_break_raises() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    with pytest.raises(private.compiler_errors()):
        torch.compile(breaks, backend="eager", fullgraph=True)(torch.ones(1))


def test_size_hint() -> None:
    assert private.size_hint(3) == 3
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        values = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        seen.extend(v.shape[0] for v in values if isinstance(v, torch.Tensor))
        return graph.forward

    x = torch.ones(5, 2)
    private.any_length(x)
    torch.compile(lambda x: x + 1, backend=backend, dynamic=True)(x)
    assert isinstance(seen[0], torch.SymInt)
    assert private.size_hint(seen[0]) == 5


def test_dispatch_modes() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    assert private.dispatch_modes() == []
    with Mode() as mode:
        assert private.dispatch_modes() == [mode]


def test_a_launch_without_detours() -> None:
    """The order of what Triton's launcher takes; another order, or no such launcher: None."""

    class Compiled:
        function, packed_metadata = 7, (1, 2)

        def __init__(self) -> None:
            self.launched: list[Any] = []

        def run(self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, a: Any, b: Any,
                c: Any, *arguments: Any) -> None:  # fmt: skip
            assert (y, z, function, metadata, a, b, c) == (1, 1, 7, (1, 2), None, None, None)
            self.launched.append((x, stream, arguments))

    compiled = Compiled()
    launch = private.direct_launch(compiled, 5, 1, 2)
    assert launch is not None
    launch(3, 6, 8, 9)
    assert compiled.launched == [(0, 5, (1, 2)), (3, 6, (8, 9))]
    assert private.direct_launch(object(), 5) is None

    class Inside:
        """With a C function behind it; a kernel that wants memory does not get past `__call__`."""

        global_scratch_size = profile_scratch_size = launch_cooperative_grid = launch_pdl = 0

        def __init__(self) -> None:
            self.launched: list[Any] = []

        def launch(self, x: int, y: int, z: int, stream: int, function: int, cooperative: int, pdl: int,
                   scratch: Any, profile: Any, metadata: Any, a: Any, b: Any, c: Any,
                   *arguments: Any) -> None:  # fmt: skip
            rest = (y, z, function, cooperative, pdl, scratch, profile, metadata, a, b, c)
            assert rest == (1, 1, 7, 0, 0, None, None, (1, 2), None, None, None)
            self.launched.append((x, stream, arguments))

        def __call__(self, gridX, gridY, gridZ, stream, function, *args):  # type: ignore[no-untyped-def]  # noqa: N803
            global_scratch = profile_scratch = None
            self.launch(gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, self.launch_pdl,
                        global_scratch, profile_scratch, *args)  # fmt: skip

    class Otherwise(Inside):
        def __call__(self, *args: Any) -> None:
            raise TypeError

    compiled.run = Otherwise()  # type: ignore[assignment, method-assign]
    assert private.direct_launch(compiled, 5, 1) is None, "its C function may take anything"
    compiled.run = inside = Inside()  # type: ignore[assignment, method-assign]
    launch = private.direct_launch(compiled, 5, 1)
    assert launch is not None
    launch(3, 6, 8)
    assert inside.launched == [(0, 5, (1,)), (3, 6, (8,))]
    inside.global_scratch_size = 8
    assert private.direct_launch(compiled, 5, 1) is not None, "by its Python function"
    compiled.run = lambda grid, stream: None  # type: ignore[assignment, method-assign]
    assert private.direct_launch(compiled, 5) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_launch_without_detours_runs_the_kernel() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert private.current_device_index() == device.index
    x = torch.randn(3, 100, device=device)
    leaf = fused.Leaf(0, (3, 100), (100, 1), 0, "float32")
    made = Value(0, 0, (3, 100), (100, 1), 0, "float32", None, True)
    kernel = fused.kernel(fused.Node("{0} * {0}", (leaf,), "float32", "float32"), made, device)
    assert kernel._launch is not None
    assert torch.equal(kernel(x), x * x)
    memory = torch.randn(301, device=device)[1:].view(3, 100)
    assert torch.equal(kernel(memory), memory * memory), "begins at an odd address"


def test_the_inputs_that_a_compiled_forward_writes_to_are_marked() -> None:
    found: list[bool] = []

    def look(joint: Any, parameters: Any, outputs: int, stock: Any) -> dict[Any, bool]:
        primals = [node for node in joint.graph.nodes if str(node.target).startswith("primals")]
        found.extend(bool(node.meta.get(private.WRITTEN)) for node in primals)
        # Left alone, the compiler would take the copy again from what forward has written over.
        return {node: True for node in joint.graph.nodes if "clone" in str(node.target)}

    def backend(graph: Any, inputs: Any) -> Any:
        return private.compile_joint(graph, inputs, look, "pinned", "aot_eager")

    def forward(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        y = x * mean.clone()
        mean.add_(1)
        return y

    x, mean = torch.ones(3, requires_grad=True), torch.ones(3)
    torch.compile(forward, backend=backend)(x, mean).sum().backward()
    assert sorted(found) == [False, True]
    assert torch.equal(mean, torch.full((3,), 2.0))


def test_code_that_is_compiled_too_often_raises_where_that_is_asked_for() -> None:
    def forward(x: torch.Tensor, number: int) -> torch.Tensor:
        return x * number

    run = torch.compile(forward, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        for number in (3, 4):  # the second runs as it is
            run(torch.ones(2), number)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1), private.strict_recompile_limit():
        run(torch.ones(2), 3)
        with pytest.raises(private.compiler_errors()) as caught:
            run(torch.ones(2), 4)
        assert private.recompile_limit() == 1
    assert "too often" in private.compiler_reason(caught.value)
