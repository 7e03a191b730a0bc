"""Fused replay: the text of the kernels, run on the CPU by a stand-in for Triton, against torch's operations.

On CUDA the kernels themselves are compared with torch's, bit for bit.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import remat
from models import ZOO, Case, squared
from planning import (
    CPU,
    LEAST,
    assert_equal,
    assert_planned_equals_plain,
    fallbacks,
    recipe_at,
    regions_at,
    survey_of,
    train,
)
from remat import menus
from remat.records import Op, Ref, Value
from remat.run import fused
from remat.run.recipe import compile_recipe
from remat.trace.price import fused_prices

# ------------------------------------------------------------------------------------- a stand-in for Triton


class _Pointer:
    def __init__(self, tensor: Tensor, index: Any = 0) -> None:
        size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        self.flat = tensor.as_strided((size,), (1,)) if size else tensor.flatten()
        self.index = index

    def __add__(self, index: Any) -> _Pointer:
        moved = object.__new__(_Pointer)
        moved.flat, moved.index = self.flat, self.index + index
        return moved


class _Language:
    """The few words of Triton that the kernels use, on CPU tensors."""

    float32, bfloat16, float16, int64 = torch.float32, torch.bfloat16, torch.float16, torch.int64
    program = 0

    def program_id(self, axis: int) -> Any:
        return torch.tensor(self.program)

    arange = staticmethod(torch.arange)
    full = staticmethod(lambda shape, value, dtype: torch.full(shape, value, dtype=dtype))
    fma = staticmethod(lambda a, b, c: (a.double() * b.double() + c.double()).float())
    div_rn = staticmethod(lambda a, b: a / b)
    where = staticmethod(torch.where)

    @staticmethod
    def load(pointer: _Pointer, inside: Tensor) -> Tensor:
        index = torch.where(inside, pointer.index, 0)
        assert int(index.min()) >= 0
        return pointer.flat[index]

    @staticmethod
    def store(pointer: _Pointer, value: Tensor, inside: Tensor) -> None:
        pointer.flat[pointer.index[inside]] = value[inside]


class _Libdevice:
    exp, tanh, erf = staticmethod(torch.exp), staticmethod(torch.tanh), staticmethod(torch.erf)


class _Launcher:
    def __init__(self, text: str) -> None:
        self.tl = _Language()
        self.space: dict[str, Any] = {"tl": self.tl, "libdevice": _Libdevice()}
        exec(text, self.space)
        self.launches = 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*tensors: Any, num_warps: int = 4, enable_fp_fusion: bool = False) -> _Launcher:
            assert not enable_fp_fusion, "a contraction would change bits"
            with _disable_current_modes():  # what the stand-in takes is not the kernel's
                for program in range(grid[0]):
                    self.tl.program = program
                    self.space["fused"](*(t if isinstance(t, int) else _Pointer(t) for t in tensors))
                    self.launches += 1
            return self

        return launch


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> dict[str, _Launcher]:
    """Kernels run on the CPU. Only what the CPU rounds the same way however it is vectorised."""
    made: dict[str, _Launcher] = {}
    monkeypatch.setattr(fused, "jit", lambda text: made.setdefault(text, _Launcher(text)))
    monkeypatch.setattr(fused, "can_fuse", lambda device: True)
    monkeypatch.setattr(fused, "_kernels", {})
    monkeypatch.setattr(fused, "_seen", set())
    exact = ("aten._to_copy.default", "aten.neg.default", "aten.relu.default")
    monkeypatch.setattr(fused, "_UNARY", {name: fused._UNARY[name] for name in exact})
    monkeypatch.setattr(fused, "_GELU", {})
    return made


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "vit", "paligemma", "resnet"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_recipes_give_the_same_gradients(
    name: str, dtype: torch.dtype, stand_in: dict[str, _Launcher]
) -> None:
    case = ZOO[name]()
    case.model.to(dtype)
    if isinstance(case.batch, dict):
        floats = {k: v.to(dtype) for k, v in case.batch.items() if v.is_floating_point()}
        case = replace(case, batch=case.batch | floats)
    elif name == "resnet":
        case = replace(case, batch=case.batch.to(dtype))
    expected = train(copy.deepcopy(case.model), case.run)
    planned = regions_at(survey_of(case.model, case.run), LEAST, fused=True)
    assert_planned_equals_plain(case.model, case.run, planned, expected)
    assert not fallbacks(planned)
    if name in ("llama", "gpt2", "t5", "resnet"):
        assert sum(launcher.launches for launcher in stand_in.values()) > 0, "nothing was fused"


def test_a_norm_is_one_kernel_that_loads_no_intermediate(stand_in: dict[str, _Launcher]) -> None:
    """cast, multiply by the kept root, cast back, weight: what Llama's norm does in bfloat16."""
    case = ZOO["llama"]()
    case.model.to(torch.bfloat16)
    found = survey_of(case.model, case.run)
    (species,) = found.species
    assert species.graph is not None
    plain = compile_recipe(species.graph, recipe_at(species.graph, LEAST), CPU)
    together = compile_recipe(species.graph, replace(recipe_at(species.graph, LEAST), fused=True), CPU)
    assert together.text.count("def g") < plain.text.count("def g")
    norms = [text for text in stand_in if text.count("bfloat16") >= 2 and text.count("tl.load") == 3]
    assert norms, "input, root and weight are loaded, and nothing between"


def value(shape: tuple[int, ...], dtype: str = "float32", stride: tuple[int, ...] | None = None) -> Value:
    stride = torch.empty(shape).stride() if stride is None else stride
    return Value(0, 0, shape, stride, 0, dtype, None, True)


def leaf(number: int, tensor: Tensor) -> fused.Leaf:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return fused.Leaf(number, tuple(tensor.shape), tensor.stride(), 0, dtype)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)])
def test_strides_and_broadcasts(order: tuple[int, int, int], stand_in: dict[str, _Launcher]) -> None:
    """The result may lie transposed, an operand may be a column, a row, a transposed or a sliced tensor."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(5, 6, 7, generator=generator).permute(order)
    column = torch.randn(*a.shape[:2], 1, generator=generator)
    row = torch.randn(a.shape[-1], generator=generator)
    sliced = torch.randn(*a.shape[:2], 2 * a.shape[-1], generator=generator)[..., ::2]
    inner = fused.Node("{0} * {1}", (leaf(0, a), leaf(1, column)), "float32", "float32")
    tree = fused.Node(
        "{0} - {1}",
        (fused.Node("{0} + {1}", (inner, leaf(2, row)), "float32", "float32"), leaf(3, sliced)),
        "float32", "float32",
    )  # fmt: skip
    expected = torch.empty_like(a).copy_(a * column + row - sliced)
    made = value(tuple(a.shape), stride=expected.stride())
    result = fused.kernel(tree, made, CPU)(a, column, row, sliced)
    assert torch.equal(result, expected)
    assert result.stride() == expected.stride()


def test_a_kernel_gives_the_view_that_is_wanted(stand_in: dict[str, _Launcher]) -> None:
    """The same memory in the same order, under another shape; anything else is left to as_strided."""
    x = torch.randn(2, 3, 8)
    made = value((2, 3, 8))
    tree = fused.Node("{0} * {0}", (leaf(0, x),), "float32", "float32")
    for view in (value((6, 8)), value((2, 8, 3), stride=(24, 1, 8)), value((48,))):
        assert fused.is_given(view, made)
        result = fused.kernel(tree, made, CPU, given=view)(x)
        assert (result.shape, result.stride()) == (view.shape, view.stride)
        assert torch.equal(result, (x * x).as_strided(view.shape, view.stride))
    assert len(stand_in) == 1, "one code for all"
    others = [
        value((3, 8)), value((6, 8), stride=(16, 1)), value((6, 8), "int32"),
        replace(value((6, 8)), offset=1), replace(value((6, 8)), epoch=1),
    ]  # fmt: skip
    assert not any(fused.is_given(view, made) for view in others)


def test_kernels_of_a_recipe_give_what_its_linears_saved(stand_in: dict[str, _Launcher]) -> None:
    """Rows of a matrix, from operations on a batch of sequences."""
    case = ZOO["llama"]()
    case.model.to(torch.bfloat16)
    (species,) = survey_of(case.model, case.run).species
    assert species.graph is not None
    text = compile_recipe(species.graph, replace(recipe_at(species.graph, LEAST), fused=True), CPU).text
    lines = text.splitlines()
    kernels = {line.split()[1].split("(")[0] for line in lines if line.startswith("def g")} & {
        before.split()[1].split("(")[0]
        for before, line in itertools.pairwise(lines)
        if line.startswith("    r = k")
    }
    assert kernels, "not in the memo"
    assert not [line for line in lines if any(f"{name}(s, m).as_strided" in line for name in kernels)]


def test_a_direct_launch_takes_addresses_and_leaves_the_unusual_to_triton(
    stand_in: dict[str, _Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = torch.randn(3, 700), torch.randn(3, 700)
    made = value((3, 700))
    tree = fused.Node("{0} + {1}", (leaf(0, a), leaf(1, b)), "float32", "float32")
    kernel = fused.kernel(tree, made, CPU)
    launched: list[tuple[int, ...]] = []

    def launch(programs: int, stream: int, out: int, count: int, *addresses: int) -> None:
        launched.append((programs, stream, count, *addresses))
        memory = [(ctypes.c_float * count).from_address(at) for at in (out, *addresses)]
        memory[0][:] = (torch.tensor(memory[1][:]) + torch.tensor(memory[2][:])).tolist()

    device: list[Any] = [CPU.index]
    monkeypatch.setattr(fused, "current_device_index", lambda: device[0])
    monkeypatch.setattr(fused, "current_stream_handle", lambda _: 9)
    kernel._launch = launch
    assert torch.equal(kernel(a, b), a + b)
    assert launched == [(3, 9, 2100, a.data_ptr(), b.data_ptr())]
    (stand,) = stand_in.values()
    assert stand.launches == 0
    odd = torch.randn(2101)[1:].view(3, 700)
    assert odd.data_ptr() % 16
    assert torch.equal(kernel(a, odd), a + odd)
    assert torch.equal(kernel(odd, b), odd + b)
    device[0] = 1
    assert torch.equal(kernel(a, b), a + b)
    device[0] = CPU.index
    kernel._empty = None
    assert torch.equal(kernel(a, b), a + b)
    assert len(launched) == 1
    assert stand.launches == 4 * 3


def test_what_is_written_in_place_is_fused_into_memory_of_its_own(stand_in: dict[str, _Launcher]) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y = (y * 2.0).add_(x).mul_(0.5).relu_()
            return self.linear(y)

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    x = torch.randn(4, 8)
    case = Case(model, x, squared)
    expected = train(copy.deepcopy(case.model), case.run)
    planned = regions_at(survey_of(case.model, case.run), LEAST, fused=True)
    assert_planned_equals_plain(case.model, case.run, planned, expected)
    assert not fallbacks(planned)
    chains = [text for text, launcher in stand_in.items() if launcher.launches and "tl.where" in text]
    assert any(text.count("    t") > 3 for text in chains), "mul, add_, mul_ and relu_ in one kernel"
    partial_write = Op("aten.add_.Tensor", (Ref(0), Ref(1)), (), (0, 1), (3,), written=((0, 2),))
    assert fused.operands(partial_write) is None, "what it gives is not what it wrote"


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_batch_norm_from_its_statistics_and_the_relu_behind_it(
    layout: torch.memory_format, stand_in: dict[str, _Launcher]
) -> None:
    """torch's kernel computes w (x - m) / s + b in float32, the last product and sum as one."""
    x = torch.randn(2, 5, 3, 4).bfloat16().to(memory_format=layout)
    w, b, m, r = torch.rand(4, 5).unbind()
    made = value(tuple(x.shape), "bfloat16", x.stride())
    wide = [replace(value((5,)), storage=i) for i in range(1, 5)]
    op = Op(fused._NORM, (*map(Ref, range(5)), 1e-5), (), tuple(range(5)), (5,))
    relu = Op("aten.relu_.default", (Ref(5),), (), (5,), (6,), written=((0, 6),))
    graph = Mock(values=[made, *wide, made, made])
    assert fused.is_fusible(graph, op)
    given = tuple(leaf(i, tensor) for i, tensor in enumerate((x, w, b, m, r)))
    tree = fused.node(graph, relu, (fused.node(graph, op, given),))
    result = fused.kernel(tree, made, CPU)(x, w, b, m, r)
    w, b, m, r = (each[:, None, None] for each in (w, b, m, r))
    normed = ((w * (x.float() - m)).double() * r + b).float().bfloat16()
    assert torch.equal(result, normed.relu())
    assert result.stride() == x.stride()
    without_weight = replace(op, args=(Ref(0), None, None, Ref(3), Ref(4), 1e-5))
    assert fused.operands(without_weight) is None


def test_every_operation_rounds(stand_in: dict[str, _Launcher]) -> None:
    """bfloat16 after bfloat16: 1 + 1/256 + 1/256 stays 1, and would not if it were rounded once."""
    one, small = torch.ones(4).bfloat16(), torch.full((4,), 1 / 256).bfloat16()
    inner = fused.Node("{0} + {1}", (leaf(0, one), leaf(1, small)), "bfloat16", "bfloat16")
    tree = fused.Node("{0} + {1}", (inner, leaf(1, small)), "bfloat16", "bfloat16")
    assert torch.equal(fused.kernel(tree, value((4,), "bfloat16"), CPU)(one, small), one)


def test_a_kernel_that_does_not_compile_is_replaced_by_its_operations(
    stand_in: dict[str, _Launcher], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(text: str) -> Any:
        raise RuntimeError("no compiler")

    fused._tried.cache_clear()
    monkeypatch.setattr(fused, "jit", refuse)
    case = ZOO["llama"]()
    expected = train(copy.deepcopy(case.model), case.run)
    planned = regions_at(survey_of(case.model, case.run), LEAST, fused=True)
    assert_planned_equals_plain(case.model, case.run, planned, expected)
    assert "no compiler" in caplog.text
    fused._tried.cache_clear()


def test_fit_measures_fused_recipes_and_keeps_those_that_are_exact(
    stand_in: dict[str, _Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(menus, "can_fuse", fused.can_fuse)
    for exact in (True, False):
        case = ZOO["llama"]()
        case.model.to(torch.bfloat16)
        expected = train(copy.deepcopy(case.model), case.run)
        monkeypatch.setattr(fused, "_kernels", {})
        if not exact:
            monkeypatch.setattr(fused, "_BINARY", fused._BINARY | {"mul": "{0} * {1} * 2.0"})
            monkeypatch.setattr(fused, "_PLAIN", {*fused._PLAIN, "{0} * {1} * 2.0"})
        stand_in.clear()
        with remat.fit(case.model, case.batch, activations=0.6, loss=case.loss) as handle:
            recipes = [v.program.recipe for r in handle.regions for v in r.variants.values() if v.program]
            assert recipes
            assert all(recipe.fused for recipe in recipes) == exact
            assert handle.verification.bitwise
            assert_equal(expected, train(case.model, case.run))


def test_fused_prices_count_what_leaves_the_kernel() -> None:
    """A chain of two operations, of which only the second is saved: the first costs its load alone."""
    case = ZOO["llama"]()
    case.model.to(torch.bfloat16)
    graph = survey_of(case.model, case.run).species[0].graph
    assert graph is not None
    cheaper = fused_prices(graph)
    pairs = list(zip(graph.ops, cheaper.ops, strict=True))
    assert all(after.seconds <= before.seconds for before, after in pairs)
    changed = [before.name for before, after in pairs if after.seconds < before.seconds]
    assert changed
    assert not any("mm" in name or "attention" in name for name in changed)


def test_a_formula_that_rounds_otherwise_is_not_used(
    stand_in: dict[str, _Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    silu = Op("aten.silu.default", (Ref(0),), (), (0,), (1,))
    fused._tried.cache_clear()
    monkeypatch.setattr(fused, "_UNARY", {silu.name: "{0} * tl.div_rn(1.0, 1.0 + libdevice.exp(-{0}))"})
    assert not fused.is_exact(silu, "float32", CPU)
    monkeypatch.setattr(fused, "_UNARY", {silu.name: "tl.div_rn({0}, 1.0 + libdevice.exp(-{0})) + 0 * {0}"})
    assert fused.is_exact(silu, "bfloat16", CPU), "the CPU computes it just so"
    fused._tried.cache_clear()


def test_kernels_are_told_apart_by_what_they_load(stand_in: dict[str, _Launcher]) -> None:
    """Loads say nothing of a dtype: the same text for others must not be the same compiled code."""
    wide, narrow = torch.randn(16), torch.randn(16).bfloat16()
    made = value((16,))
    pairs = [(wide, narrow), (narrow, wide), (wide, wide)]
    trees = [fused.Node("{0} + {1}", (leaf(0, a), leaf(1, b)), "float32", "float32") for a, b in pairs]
    assert len({fused.source_text(tree, made) for tree in trees}) == 1
    assert len({id(fused.kernel(tree, made, CPU)) for tree in trees}) == 3


def test_a_tensor_without_dimensions_is_left_to_torch(stand_in: dict[str, _Launcher]) -> None:
    """It may lie on the host, where a kernel cannot read it."""
    graph = Mock(values=[value((4,)), value(()), value((4,))])
    op = Op("aten.mul.Tensor", (Ref(0), Ref(1)), (), (0, 1), (2,))
    assert not fused.is_fusible(graph, op)
    graph.values[1] = value((1,))
    assert fused.is_fusible(graph, op)


def test_a_number_picked_from_a_tensor_is_loaded_once_per_element(stand_in: dict[str, _Launcher]) -> None:
    x, table = torch.randn(6), torch.randn(5)
    picked = fused.Leaf(1, (1,), (1,), 3, "float32")
    tree = fused.Node("{0} * {1}", (leaf(0, x), picked), "float32", "float32")
    assert "i * 0 + 3" in fused.source_text(tree, value((6,)))
    assert torch.equal(fused.kernel(tree, value((6,)), CPU)(x, table), x * table[3])


def test_reading_a_value_twice_does_not_double_the_work(stand_in: dict[str, _Launcher]) -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            for _ in range(40):  # 2 to the 40th, if each were looked at as often as it is read
                y = y + y * 0.1
            return x + y.sin()

    case = Case(nn.Sequential(Doubling(), Doubling()), torch.randn(5, 8), squared)
    expected = train(copy.deepcopy(case.model), case.run)
    planned = regions_at(survey_of(case.model, case.run), LEAST, fused=True)
    assert_planned_equals_plain(case.model, case.run, planned, expected)
    assert not fallbacks(planned)


def test_another_batch_size_needs_no_other_kernel(stand_in: dict[str, _Launcher]) -> None:
    """A norm's kernel knows the width and is told the count; a transposed layout knows more."""
    trees, texts = [], []
    for rows in (3, 5):
        x, root = torch.randn(rows, 8), torch.randn(rows, 1)
        trees.append(fused.Node("{0} * {1}", (leaf(0, x), leaf(1, root)), "float32", "float32"))
        texts.append(fused.source_text(trees[-1], value((rows, 8))))
    assert texts[0] == texts[1]
    with pytest.raises(fused.NotCompiledError):
        fused.kernel(trees[0], value((3, 8)), CPU, compile_new=False)
    fused.kernel(trees[0], value((6, 8)), CPU)
    x, root = torch.randn(2, 8), torch.randn(2, 1)
    tree = fused.Node("{0} * {1}", (leaf(0, x), leaf(1, root)), "float32", "float32")
    assert torch.equal(fused.kernel(tree, value((2, 8)), CPU, compile_new=False)(x, root), x * root)


def test_where_there_is_no_time_recipes_run_with_the_kernels_that_there_are(
    stand_in: dict[str, _Launcher],
) -> None:
    case = ZOO["llama"]()
    graph = survey_of(case.model, case.run).species[0].graph
    assert graph is not None
    recipe = replace(recipe_at(graph, LEAST), fused=True)
    without = compile_recipe(graph, recipe, CPU, compile_kernels=False)
    assert without.text == compile_recipe(graph, replace(recipe, fused=False), CPU).text
    compiled = compile_recipe(graph, recipe, CPU)
    assert compiled.text != without.text
    assert compile_recipe(graph, recipe, CPU, compile_kernels=False).text == compiled.text


def test_nothing_is_fused_without_triton() -> None:
    assert not fused.can_fuse(CPU)


# ------------------------------------------------------------------------------------------- Triton's kernels


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_each_formula_gives_the_bits_of_torch(dtype: str) -> None:
    """But for those of a library, which depend on its version: they are tried before they are used."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert fused.can_fuse(device)
    run = {
        "aten.exp.default": torch.exp, "aten.neg.default": torch.neg, "aten.sigmoid.default": torch.sigmoid,
        "aten.silu.default": nn.functional.silu, "aten.tanh.default": torch.tanh,
    }  # fmt: skip
    formulas = {key: (fused._UNARY[key], function) for key, function in run.items()}
    for kind, text in fused._GELU.items():
        formulas[f"gelu {kind}"] = (text, partial(nn.functional.gelu, approximate=kind))
    for power, text in fused._POWER.items():
        formulas[f"pow {power}"] = (text, partial(torch.pow, exponent=power))
    exact = {key: fused._gives_torch_bits(text, run, dtype, device) for key, (text, run) in formulas.items()}
    print(dtype, exact)
    assert exact["aten.neg.default"]
    assert exact["aten.silu.default"]
    assert exact["pow 2"]


@pytest.mark.gpu
@needs_cuda
def test_fit_uses_fused_recipes_with_the_same_bits() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=512, use_cache=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16().train()
    ids = torch.randint(0, 512, (8, 512), device="cuda")
    with remat.fit(model, {"input_ids": ids, "labels": ids}, activations=0.5) as handle:
        recipes = [v.program.recipe for r in handle.regions for v in r.variants.values() if v.program]
        assert recipes
        assert all(recipe.fused for recipe in recipes)
        assert handle.verification.bitwise


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batch_norms_are_replayed_from_their_statistics_with_the_same_bits(
    layout: torch.memory_format,
) -> None:
    torch.manual_seed(0)
    case = ZOO["resnet"]()
    model = case.model.cuda().to(memory_format=layout)
    images = torch.randn(64, 3, 32, 32, device="cuda").to(memory_format=layout)

    assert fused._norm_is_exact("bfloat16", torch.device("cuda", 0))
    model.forward = torch.autocast("cuda", torch.bfloat16)(model.forward)
    profile = remat.profile(model, images, loss=squared)
    norms = [op for kind in profile.kinds if kind.graph for op in kind.graph.ops if "norm" in op.name]
    assert norms
    assert {op.name for op in norms} == {fused._NORM}
    with remat.apply(model, remat.plan(profile, activations=0.7)) as handle:
        programs = [v.program for r in handle.regions for v in r.variants.values() if v.program]
        assert any(f"# {op}" in p.text for p in programs for op in (fused._NORM, "aten.relu_.default"))
        assert remat.verify(model, images, loss=squared).bitwise
