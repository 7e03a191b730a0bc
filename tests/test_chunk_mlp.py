"""Token-wise modules are recognised, and run in chunks with the same values and gradients."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import ZOO, LoraLinear, MlpBlock
from reference import step
from remat.check.live import LiveBytes
from remat.errors import InputError, RematError
from remat.run.chunk_mlp import ChunkedModule, token_wise
from remat.run.wrap import unwrap, wrap

WIDTH = 8


class GatedMlp(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(width, 4 * width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Causal(nn.Module):
    """Each position sees the one before: only the first half of a sequence can be run alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


class Numbered(nn.Module):
    """Adds a position encoding: a chunk would be numbered from zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1])[:, None]


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class MixingFromZero(nn.Module):
    """Its positions see each other by way of weights that begin as zero."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gamma = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.inner(x))
        return self.outer(x + self.gamma * x * x.norm(dim=1, keepdim=True))


class OverPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


MODULES: list[tuple[Callable[[], nn.Module], bool]] = [
    (GatedMlp, True),
    (lambda: MlpBlock(WIDTH, dropout=0.0), True),
    (lambda: nn.LayerNorm(WIDTH), True),
    (lambda: LoraLinear(nn.Linear(WIDTH, 3)), True),
    (lambda: MlpBlock(WIDTH, dropout=0.5).eval(), True),
    (lambda: MlpBlock(WIDTH, dropout=0.5), False),
    (Attention, False),
    (Convolution, False),
    (Causal, False),
    (Numbered, False),
    (Pair, False),
    (Pooled, False),
    (Noisy, False),
    (OverPositions, False),
    (MixingFromZero, False),
    (lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True), False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("build", "expected"), MODULES)
def test_token_wise(build: Callable[[], nn.Module], expected: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = build().to(dtype)
    before = copy.deepcopy(module.state_dict())
    x = torch.randn(2, 9, WIDTH).to(dtype)
    random = torch.get_rng_state()
    assert token_wise(module, x) is expected
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("x", [torch.ones(3), torch.ones(2, 1, 3), "x"])
def test_token_wise_needs_two_positions(x: Any) -> None:
    with pytest.raises(InputError, match="at least two positions"):
        token_wise(nn.Identity(), x)


# --------------------------------------------------------------------------------------- in chunks


class Split(nn.Module):
    """The same chunks, all kept."""

    def __init__(self, inner: nn.Module, size: int) -> None:
        super().__init__()
        self.inner, self.size = inner, size

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.inner(piece) for piece in torch.split(x, self.size, 1)], 1)


@contextmanager
def in_chunks(module: nn.Module, size: int) -> Iterator[ChunkedModule]:
    around = ChunkedModule("mlp", size)
    wrap(module, around)
    try:
        yield around
    finally:
        assert unwrap(module)


def gradients(
    module: nn.Module, x: Tensor, context: Callable[[], Any] = nullcontext, grad: bool = True
) -> dict[str, Tensor]:
    module.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_(grad)
    torch.manual_seed(3)
    with context():
        y = module(x)
    y.float().square().sum().backward() if y.dtype != torch.float64 else y.square().sum().backward()
    found = {"y": y.detach(), **{n: p.grad for n, p in module.named_parameters() if p.grad is not None}}
    return {**found, "x": x.grad} if grad else found


def assert_close(expected: dict[str, Tensor], found: dict[str, Tensor], rounding: float) -> None:
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        slack = rounding * float(value.abs().max())
        torch.testing.assert_close(found[name].double(), value.double(), rtol=0, atol=slack)
        assert found[name].dtype == value.dtype


@pytest.mark.parametrize("size", [1, 3, 4, 10, 99])
@pytest.mark.parametrize("grad", [True, False])
def test_equal_to_one_pass(size: int, grad: bool) -> None:
    torch.manual_seed(0)
    module, x = GatedMlp().double(), torch.randn(2, 10, WIDTH).double()
    expected = gradients(module, x, grad=grad)
    with in_chunks(module, size) as around:
        found = gradients(module, x, grad=grad)
    assert_close(expected, found, 1e-13)
    assert around.chunks == -(-10 // size)


def test_frozen_and_partly_frozen() -> None:
    torch.manual_seed(0)
    module, x = LoraLinear(nn.Linear(WIDTH, 3)).double(), torch.randn(2, 10, WIDTH).double()
    expected = gradients(module, x)
    with in_chunks(module, 4):
        assert_close(expected, gradients(module, x), 1e-13)
    module.requires_grad_(False)
    expected = gradients(module, x)
    with in_chunks(module, 4):
        assert_close(expected, gradients(module, x), 1e-13)


def test_dropout_is_replayed() -> None:
    """Bit for bit the masks of the same chunks without recomputation."""
    torch.manual_seed(0)
    module, x = MlpBlock(WIDTH, dropout=0.5), torch.randn(2, 10, WIDTH)
    expected = {name.removeprefix("inner."): g for name, g in gradients(Split(module, 4), x).items()}
    with in_chunks(module, 4):
        torch.manual_seed(3)
        found = gradients(module, x)
        after = torch.rand(1)
    assert torch.equal(found["y"], expected["y"])
    assert_close(expected, found, 1e-6)
    torch.manual_seed(3)
    module(x[:, :4]), module(x[:, 4:8]), module(x[:, 8:])
    assert torch.equal(after, torch.rand(1))  # backward drew nothing


def test_autocast_is_replayed() -> None:
    torch.manual_seed(0)
    module, x = GatedMlp(), torch.randn(2, 10, WIDTH)
    context = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    expected = gradients(module, x, context)
    assert expected["y"].dtype == torch.bfloat16
    with in_chunks(module, 4):
        assert_close(expected, gradients(module, x, context), 2e-2)


def test_bf16_gradients_are_summed_in_fp32() -> None:
    torch.manual_seed(0)
    module, x = GatedMlp().bfloat16(), torch.randn(2, 64, WIDTH).bfloat16()
    reference = gradients(copy.deepcopy(module).double(), x.double())["down.weight"]
    naive = gradients(Split(module, 2), x)["inner.down.weight"].double()  # autograd adds the chunks in bf16
    with in_chunks(module, 2):
        own = gradients(module, x)["down.weight"].double()
    assert (own - reference).norm() < 0.7 * (naive - reference).norm()


def test_parameter_hooks_fire_once() -> None:
    module = GatedMlp()
    fired: list[str] = []
    for name, p in module.named_parameters():
        p.register_hook(lambda g, n=name: fired.append(n))
        p.register_post_accumulate_grad_hook(lambda _, n=name: fired.append(n))
    with in_chunks(module, 2):
        gradients(module, torch.randn(2, 10, WIDTH))
    assert sorted(fired) == sorted(2 * [n for n, _ in module.named_parameters()])


def test_the_peak_falls() -> None:
    torch.manual_seed(0)
    module, x = GatedMlp(32), torch.randn(1, 512, 32)

    def peak() -> int:
        module.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_()
        with LiveBytes("cpu") as live:
            module(leaf).sum().backward()
            return live.peak_bytes

    plain = peak()
    with in_chunks(module, 32):
        own = peak()
    assert plain > 5 * 512 * 128 * 4
    assert own < plain / 3


def test_steps_leak_nothing() -> None:
    module, x = GatedMlp(), torch.randn(2, 10, WIDTH)
    levels = []
    with in_chunks(module, 3), LiveBytes("cpu") as live:
        for _ in range(50):
            module.zero_grad(set_to_none=True)
            module(x).sum().backward()
            levels.append(live.current_bytes)
    assert len(set(levels[1:])) == 1


def test_in_a_model_beside_plain_blocks() -> None:
    case = ZOO["llama"]()
    expected = step(case, copy.deepcopy(case.model), passes=2)
    mlps = [m for n, m in case.model.named_modules() if n.endswith(".mlp")]
    assert all(token_wise(m, torch.randn(2, 8, 16)) for m in mlps)
    for m in mlps:
        wrap(m, ChunkedModule("mlp", 3))
    found = step(case, case.model, passes=2)
    assert_close(
        {k: v for k, v in expected.items() if v.numel()}, {k: v for k, v in found.items() if v.numel()}, 1e-5
    )


def test_retain_graph_and_second_derivatives() -> None:
    module, x = GatedMlp(), torch.randn(2, 10, WIDTH)
    with in_chunks(module, 3):
        y = module(x).sum()
        y.backward(retain_graph=True)
        once = module.up.weight.grad.clone()
        y.backward()
        assert torch.equal(module.up.weight.grad, 2 * once)
        with pytest.raises(RematError, match="no second derivative"):
            torch.autograd.grad(module(x).sum(), list(module.parameters()), create_graph=True)


def test_a_weight_written_before_backward_is_an_error() -> None:
    module, x = GatedMlp(), torch.randn(2, 10, WIDTH)
    with in_chunks(module, 3):
        y = module(x).sum()
        with torch.no_grad():
            module.up.weight.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_an_exception_leaves_the_parameters() -> None:
    calls = itertools.count(1)

    class Moody(GatedMlp):
        def forward(self, x: Tensor) -> Tensor:
            if next(calls) == 6:
                raise RuntimeError("moody")
            return super().forward(x)

    module, x = Moody(), torch.randn(2, 10, WIDTH)
    parameters = dict(module.named_parameters())
    with in_chunks(module, 3):
        y = module(x).sum()
        with pytest.raises(RuntimeError, match="moody"):
            y.backward()
    assert all(p is parameters[n] for n, p in module.named_parameters())


def test_with_a_borrowed_weight_it_runs_as_a_whole() -> None:
    """Its gradient would be lost."""
    lender = nn.Linear(WIDTH, WIDTH)

    class Borrowing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(lender(x))

    module, x = Borrowing(WIDTH, WIDTH), torch.randn(2, 10, WIDTH)
    module(x).sum().backward()
    expected, lender.weight.grad = lender.weight.grad, None
    with in_chunks(module, 3) as around:
        module(x).sum().backward()
        assert "neither inputs nor parameters of it" in around.reason
    assert expected is not None
    assert torch.equal(lender.weight.grad, expected)


def test_other_calls_run_plainly() -> None:
    module = MlpBlock(WIDTH, 0.0)
    with in_chunks(module, 3) as around:
        module(torch.randn(WIDTH))
        assert "1 dimensions" in around.reason
        module(x=torch.randn(2, 4, WIDTH))
        assert "one plain tensor" in around.reason
        module.requires_grad_(False)
        module(torch.randn(2, 4, WIDTH))
        assert around.reason == "nothing needs a gradient"
        row = around.status()
        assert (row.calls, row.fallbacks, row.active) == (3, 3, False)


def test_a_result_that_cannot_be_joined_is_an_error() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, 4), nn.Flatten())
    with in_chunks(module, 3), pytest.raises(RematError, match="a value per position"):
        module(torch.randn(2, 10, WIDTH))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_runs_its_own_weights(copied: Callable[[nn.Module], nn.Module]) -> None:
    module, x = GatedMlp(), torch.randn(2, 10, WIDTH)
    with in_chunks(module, 3) as around:
        twin = copied(module)
        twin(x).sum().backward()
        assert around.calls == 0
        assert all(p.grad is None for p in module.parameters())
        assert all(p.grad is not None for p in twin.parameters())


@pytest.mark.parametrize("size", [0, -1, True, "3"])
def test_bad_size(size: Any) -> None:
    with pytest.raises(InputError, match="size="):
        ChunkedModule("mlp", size)
