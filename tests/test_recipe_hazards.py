"""Small modules, one per trap: in-place operations, views, chance, hidden state, odd inputs and outputs.

Each runs two steps with a weight update in between, at half of its saved bytes and at the least that is
possible: bit for bit as the plain module, and no exception that the plain module does not raise. Where a
region has no recipe or falls back, the table says why, and the test asserts it.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from planning import LEAST, Host, assert_planned_equals_plain, fallbacks, regions_at, survey_of, train
from remat.records import Mode
from remat.trace.discover import Block


@dataclass
class Hazard:
    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    no_recipe: str = ""  # part of the note that says why there is none
    falls_back: str = ""  # part of the reason for keeping everything at run time
    drops: bool = True  # something can be dropped
    least_only: bool = False  # at half of the bytes there is a recipe

    def run(self, model: nn.Module) -> Tensor:
        random.seed(7)
        return model(*self.args, **self.kwargs)


HAZARDS: dict[str, Callable[[], Hazard]] = {}


def hazard(build: Callable[[], Hazard]) -> Callable[[], Hazard]:
    def seeded() -> Hazard:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return build()

    HAZARDS[build.__name__] = seeded
    return seeded


class Fn(nn.Module):
    """A module made of parts and a function of them."""

    def __init__(self, fn: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.fn = fn
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            elif isinstance(part, nn.Parameter):
                self.register_parameter(name, part)
            elif isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(self, *args, **kwargs)


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*(shape or (6, 8)), dtype=dtype)


def linears(count: int = 2, width: int = 8) -> dict[str, nn.Module]:
    return {f"l{i}": nn.Linear(width, width) for i in range(count)}


# ------------------------------------------------------------------------------------ in place, and views


@hazard
def in_place_chain() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x).sin()
        y.mul_(2).add_(1).tanh_()
        return m.l1(y).sigmoid_().exp()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def in_place_between_two_readers() -> Hazard:
    """The value before the write and the one after it are both needed."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x)
        a = y * 2
        y.add_(1)
        b = (y + 0).cos() * a.sin()
        y.mul_(3)
        return m.l1(b) + y.tanh()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def in_place_on_a_view() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x).exp() + 0
        y[:, :4].mul_(2)
        y[1].add_(y[2].detach())
        return m.l1(y.sin()).tanh()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def chunk_with_in_place() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        a, b = m.up(x).chunk(2, dim=-1)
        a = a.clone().relu_()
        return m.down(F.silu(a) * b.sigmoid())

    return Hazard(Fn(run, up=nn.Linear(8, 16), down=nn.Linear(8, 8)), (x(),))


@hazard
def split_then_write_one_part() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x) * 1.5
        parts = y.narrow(1, 0, 4), y.narrow(1, 4, 4)
        parts[0].tanh_()
        return torch.cat([parts[1].sin(), parts[0].cos()], dim=1) * m.l1(x).exp()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def write_through_a_transpose() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x).cos() + 1
        y.t()[0].mul_(3)
        return m.l1(y.sin() * y).tanh()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def writes_its_input() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        y = m.l0(x).sin()
        return m.l1(y.exp()).tanh()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def writes_its_input_after_reading_it() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = (x * 3).sin().exp()
        x.add_(1)
        return m.l0(y).tanh() * m.l1(x).sigmoid()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def stride_zero() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        bias = m.l0(x)[:1].sin().expand(6, 8)
        return (m.l1(x).exp() * bias).tanh() * bias.exp()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def transpose_beside_its_base() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x).sin()
        return (y @ y.t()).tanh() @ y * y

    return Hazard(Fn(run, **linears(1)), (x(8, 8),))


@hazard
def saved_twice() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x).sin()
        return y * y + y.pow(2) * y.exp() + m.l1(y) * m.l1(y)

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def view_chain() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x).view(3, 2, 8).permute(2, 0, 1)[1:5].transpose(0, 2).sin()
        return y.reshape(-1).exp().unfold(0, 4, 2).cos().flatten().tanh()

    return Hazard(Fn(run, **linears(1)), (x(),))


@hazard
def as_strided_view() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x).sin()
        return y.as_strided((5, 8), (8, 1), 8).exp().tanh() * y.as_strided((5, 8), (8, 1)).cos()

    return Hazard(Fn(run, **linears(1)), (x(),))


@hazard
def metadata_written_in_place() -> Hazard:
    """unsqueeze_ and t_ change the tensor, not its memory."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x) + 1
        y.t_().unsqueeze_(0)
        return y.sin().tanh().exp() * 2

    return Hazard(Fn(run, **linears(1)), (x(8, 8),))


@hazard
def copy_into_slices() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        out = x.new_zeros(6, 16)
        out[:, :8] = m.l0(x).sin()
        out[:, 8:].copy_(m.l1(x).cos())
        return (out.exp() * out).tanh()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def uninitialised_then_filled() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        out = torch.empty(6, 8)
        out.fill_(0.5)
        more = torch.empty_like(x).zero_()
        return (m.l0(x).sin() * out).exp() + (more + x).cos() * out

    return Hazard(Fn(run, **linears(1)), (x(),))


@hazard
def relu_of_relu_in_place() -> Hazard:
    return Hazard(
        nn.Sequential(
            nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU6(inplace=True), nn.Linear(8, 8)
        ),
        (x(),),
    )


@hazard
def residual_added_in_place() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l1(F.gelu(m.l0(x)))
        y += x
        z = y.sin()
        z *= y
        return z

    return Hazard(Fn(run, **linears()), (x(),))


# --------------------------------------------------------------------------------------- inputs and outputs


@hazard
def empty_tensors() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        none = m.l0(x[:0]).sin().exp()
        return torch.cat([none, m.l1(x).sin().exp()]).tanh()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def input_not_contiguous() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.l1(m.l0(x).sin().exp()).tanh()

    return Hazard(Fn(run, **linears()), (x(8, 6).t(),))


@hazard
def one_input_twice() -> Hazard:
    def run(m: Any, a: Tensor, b: Tensor) -> Tensor:
        return (m.l0(a).sin() * m.l1(b).cos()).exp()

    same = x()
    return Hazard(Fn(run, **linears()), (same, same))


@hazard
def output_is_a_view_of_the_input() -> Hazard:
    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(-1), m.l1(m.l0(x).sin().exp()).tanh()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def output_is_the_input() -> Hazard:
    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, m.l1(m.l0(x).sin().exp()).tanh()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def one_output_without_gradient() -> Hazard:
    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = m.l0(x).sin()
        return y.argmax(-1), y.detach() * 2, m.l1(y.exp()).tanh()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def nested_outputs() -> Hazard:
    def run(m: Any, x: Tensor) -> dict[str, Any]:
        y = m.l0(x).sin()
        return {"a": [y.exp(), None], "b": ({"c": m.l1(y).tanh().cos()}, 3, "text"), "d": y}

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def keyword_inputs() -> Hazard:
    def run(m: Any, *, a: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
        y = (m.l0(a).sin() * scale).exp()
        return y if mask is None else (y * mask).tanh()

    return Hazard(Fn(run, **linears(1)), (), {"a": x(), "scale": 0.3, "mask": (x() > 0).float()})


@hazard
def output_is_an_output_twice() -> Hazard:
    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = m.l0(x).sin().exp()
        return y, y, y[:2]

    return Hazard(Fn(run, **linears(1)), (x(),))


@hazard
def no_gradient_through_the_input() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.l1(m.l0(x.detach()).sin().exp()).tanh()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def integer_inputs() -> Hazard:
    def run(m: Any, tokens: Tensor, scale: Tensor) -> Tensor:
        y = m.embed(tokens)
        return m.l0((y * scale).sin().exp()).tanh()

    return Hazard(Fn(run, embed=nn.Embedding(9, 8), **linears(1)), (torch.randint(9, (3, 4)), x(8)))


@hazard
def in_float64() -> Hazard:
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).double()
    return Hazard(block, (x(dtype=torch.float64),))


@hazard
def several_dtypes() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x).double().sin()
        z = y.to(torch.bfloat16).exp()
        return m.l1((z.float() * y.float()).tanh()) * z

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def input_alias_pair() -> Hazard:
    """Two inputs that are parts of one memory (q and k of a fused projection)."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qk = nn.Linear(8, 16)
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.qk(x).chunk(2, dim=-1)
            return (self.inner(q).sin() * k[:, 1:2].exp() * k.tanh()).cos()

    return Hazard(Outer(), (x(),))


# ------------------------------------------------------------------------------------------ foreign tensors


@hazard
def attribute_that_is_no_buffer() -> Hazard:
    block = Fn(lambda m, x: m.l1((m.l0(x).sin() * m.table[0]).exp()).tanh(), **linears())
    block.table = [torch.randn(8)]
    return Hazard(block, (x(),))


@hazard
def closure_over_a_tensor() -> Hazard:
    table = torch.randn(8)
    return Hazard(Fn(lambda m, x: m.l1((m.l0(x).sin() * table).exp()).tanh(), **linears()), (x(),))


@hazard
def closure_that_needs_gradients() -> Hazard:
    """A tensor with a graph of its own, made outside of the region."""

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l0, self.w = nn.Linear(8, 8), nn.Parameter(torch.randn(8))
            self.side: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            (side,) = self.side
            return (self.l0(x).sin() * side.exp()).tanh()

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Outside()

        def forward(self, x: Tensor) -> Tensor:
            self.inner.side[:] = [(self.inner.w.sin() * 2).tanh()]
            try:
                return self.inner(x)
            finally:
                self.inner.side.clear()

    return Hazard(Caller(), (x(),))


@hazard
def constants_made_inside() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        scale = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])
        return m.l1((m.l0(x).sin() * scale).exp().tanh() + torch.arange(8) * torch.full((8,), 0.5))

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def view_of_a_parameter_as_attribute() -> Hazard:
    block = Fn(
        lambda m, x: m.l0((x * m.half[0]).sin().exp()).tanh(), **linears(1), w=nn.Parameter(torch.randn(16))
    )
    block.half = [block.w.detach()[4:12]]
    return Hazard(block, (x(),))


@hazard
def parameter_through_data() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        return (F.linear(x, m.l0.weight.data).sin() * m.l1(x)).exp()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def tied_weights() -> Hazard:
    parts = linears()
    parts["l1"].weight = parts["l0"].weight
    return Hazard(Fn(lambda m, x: m.l1(m.l0(x).sin().exp()).tanh(), **parts), (x(),))


# ---------------------------------------------------------------------------------------------- hidden state


@hazard
def batch_norm() -> Hazard:
    return Hazard(
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.GELU()), (x(),)
    )


@hazard
def batch_norm_in_eval() -> Hazard:
    block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.GELU())
    block[1].eval()
    return Hazard(block, (x(),))


@hazard
def batch_norm_whose_statistics_are_read() -> Hazard:
    """The running mean is read before and after the layer that moves it."""

    def run(m: Any, x: Tensor) -> Tensor:
        before = (m.l0(x) * m.norm.running_mean).sin()
        y = m.norm(x) * before.exp()
        return (y * m.norm.running_mean).tanh().cos()

    return Hazard(Fn(run, norm=nn.BatchNorm1d(8), **linears(1)), (x(),))


@hazard
def buffer_written_in_place() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = (m.l0(x) + m.mean).sin().exp()
        m.mean.lerp_(y.detach().mean(0), 0.5)
        return m.l1(y + m.mean).tanh().cos()

    return Hazard(Fn(run, mean=torch.ones(8), **linears()), (x(),))


@hazard
def buffer_replaced() -> Hazard:
    """A new tensor under the old name: a lookup after forward finds the wrong one."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = (m.l0(x) * m.mean).sin().exp()
        m.mean = 0.5 * m.mean + 0.5 * y.detach().mean(0)
        return m.l1(y).tanh()

    return Hazard(Fn(run, mean=torch.ones(8), **linears()), (x(),))


@hazard
def buffer_replaced_and_read_again() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = (m.l0(x) * m.mean).sin().exp()
        m.mean = 0.5 * m.mean + 0.5 * y.detach().mean(0)
        return m.l1(y * m.mean).tanh().cos()

    return Hazard(Fn(run, mean=torch.ones(8), **linears()), (x(),))


@hazard
def spectral_norm() -> Hazard:
    linear = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    return Hazard(nn.Sequential(linear, nn.Tanh(), nn.Linear(8, 8), nn.GELU()), (x(),))


@hazard
def weight_norm() -> Hazard:
    linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    return Hazard(nn.Sequential(linear, nn.Tanh(), nn.Linear(8, 8), nn.GELU()), (x(),))


@hazard
def group_norm() -> Hazard:
    return Hazard(
        nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 4, 1)),
        (x(2, 4, 5, 5),),
    )


@hazard
def counter_in_python() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        m.calls[0] += 1
        return m.l1(m.l0(x).sin().exp()).tanh()

    block = Fn(run, **linears())
    block.calls = [0]
    return Hazard(block, (x(),))


# -------------------------------------------------------------------------------------------------- chance


@hazard
def dropout_in_several_places() -> Hazard:
    drop = nn.Dropout(0.3)
    parts = {**linears(3), "drop": drop}
    return Hazard(
        Fn(lambda m, x: m.l2(m.drop(m.l1(m.drop(m.l0(m.drop(x)).sin())).exp())).tanh(), **parts), (x(),)
    )


@hazard
def dropout_in_place() -> Hazard:
    return Hazard(
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3, inplace=True), nn.Linear(8, 8), nn.Tanh()), (x(),)
    )


@hazard
def alpha_dropout() -> Hazard:
    return Hazard(
        nn.Sequential(nn.Linear(8, 8), nn.SELU(), nn.AlphaDropout(0.3), nn.Linear(8, 8), nn.Tanh()), (x(),)
    )


@hazard
def rrelu() -> Hazard:
    return Hazard(nn.Sequential(nn.Linear(8, 8), nn.RReLU(0.1, 0.9), nn.Linear(8, 8), nn.RReLU()), (x(),))


@hazard
def noise() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x).sin() + torch.randn_like(x)
        z = (y * torch.rand(8)).exp() * torch.bernoulli(torch.full((6, 8), 0.5))
        return m.l1(z).tanh() + torch.empty(6, 8).uniform_().sin() * y

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def generator_of_its_own() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        g = torch.Generator().manual_seed(5)
        return m.l1((m.l0(x).sin() * torch.rand(6, 8, generator=g)).exp()).tanh()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def python_random_branch() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x).sin()
        return (m.l1(y) if random.random() < 2 else y).exp().tanh()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def random_permutation() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        order = torch.randperm(6)
        return m.l1(m.l0(x[order]).sin().exp()).tanh()

    return Hazard(Fn(run, **linears()), (x(),))


# ----------------------------------------------------------------------------------- data and Python numbers


@hazard
def data_dependent_branch() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x).sin()
        return (m.l1(y) if y.sum() > -1e9 else y).exp().tanh()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def data_dependent_number() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x).sin()
        return (m.l1(y) * y[0, 0].item()).exp().tanh()

    return Hazard(Fn(run, **linears()), (x(),), no_recipe="depend on data or chance")


@hazard
def largest_input_as_a_number() -> Hazard:
    """Turning the data around does not change its largest element."""

    def run(m: Any, x: Tensor) -> Tensor:
        return (m.l0(x) / x.abs().max().item()).sin().exp().tanh()

    return Hazard(Fn(run, **linears(1)), (x(),), no_recipe="depend on data or chance")


@hazard
def number_from_the_weights() -> Hazard:
    """No other input would change it, but the next optimizer step does."""

    def run(m: Any, x: Tensor) -> Tensor:
        return (m.l0(x) / m.l0.weight.norm().item()).sin().exp().tanh()

    return Hazard(Fn(run, **linears(1)), (x(),), no_recipe="a number from the weights")


@hazard
def nonzero() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        rows = (x[:, 0] > -9).nonzero().squeeze(1)
        return m.l1(m.l0(x[rows]).sin().exp()).tanh()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def boolean_index() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x).sin()
        return m.l1(y).exp() + y[y > 0].sin().sum().tanh()

    return Hazard(Fn(run, **linears()), (x(),), no_recipe="depend on data or chance")


@hazard
def masked_fill() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x).sin()
        y = y.masked_fill(y < 0, -1.0).exp()
        return m.l1(y).masked_fill_(x > 1, 0.0).tanh()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def index_put() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x).sin() + 0
        y[torch.tensor([0, 2])] = x[torch.tensor([1, 3])] * 2
        y.index_put_((torch.tensor([4]),), y[5:].detach().exp())
        return m.l1(y.exp()).tanh()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def scatter_and_gather() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x).sin()
        index = y.argsort(-1)
        z = y.gather(1, index).exp()
        z = torch.zeros_like(z).scatter(1, index, z).scatter_add(1, index, y.cos())
        return m.l1(z.index_select(1, index[0]).tanh())

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def sort_topk_cumsum_logsumexp() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y, _ = m.l0(x).sin().sort(-1)
        top = y.exp().topk(3, dim=-1).values
        return m.l1(y.cumsum(0).tanh()).exp() + top.logsumexp(-1, keepdim=True) * y.cumprod(1)

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def max_min_median() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x).sin().exp()
        return (
            y.max(1).values.tanh()
            + y.amin(1).cos()
            + y.median(1).values.sin()
            + y.std(1)
            + m.l1(y).norm(dim=1)
        )

    return Hazard(Fn(run, **linears()), (x(),))


# ---------------------------------------------------------------------------------------- autograd Functions


class Scaled(torch.autograd.Function):
    """Saves a tensor made inside, one input, and a number on ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        y = (x * scale).sin()
        ctx.save_for_backward(x, y.exp(), None)
        ctx.scale = scale
        return y * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, e, _ = ctx.saved_tensors
        return grad * ctx.scale * (x * ctx.scale).cos() * 2 + 0 * e, None


class TensorOnCtx(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mine = x.exp()
        return ctx.mine * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.mine


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 + 0 * ctx.saved_tensors[0]


class WithIndex(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y, index = x.sort(-1)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(index)
        return y, index

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        (index,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter(1, index, grad)


@hazard
def function_with_saved_tensors() -> Hazard:
    return Hazard(Fn(lambda m, x: m.l1(Scaled.apply(m.l0(x).sin(), 0.7).exp()).tanh(), **linears()), (x(),))


@hazard
def function_with_a_tensor_on_ctx() -> Hazard:
    return Hazard(Fn(lambda m, x: m.l1(TensorOnCtx.apply(m.l0(x).sin()).exp()).tanh(), **linears()), (x(),))


@hazard
def function_that_marks_dirty() -> Hazard:
    return Hazard(Fn(lambda m, x: m.l1(Dirty.apply(m.l0(x).sin() + 0).exp()).tanh(), **linears()), (x(),))


@hazard
def function_with_an_output_without_gradient() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y, index = WithIndex.apply(m.l0(x).sin())
        return m.l1(y.exp().gather(1, index)).tanh()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def checkpoint_inside() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = torch.utils.checkpoint.checkpoint(lambda z: m.l0(z).sin().exp(), x, use_reentrant=False)
        return m.l1(y.tanh()).cos()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def no_grad_inside() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = m.l0(x).sin().exp()
        return (m.l1(x).cos() * scale).tanh() * scale.sin()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def detached_path() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x).sin()
        return (m.l1(y) * y.detach().exp()).tanh() * x.detach()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def frozen_inside() -> Hazard:
    parts = linears(3)
    parts["l1"].requires_grad_(False)
    return Hazard(Fn(lambda m, x: m.l2(m.l1(m.l0(x).sin()).exp()).tanh(), **parts), (x(),))


# --------------------------------------------------------------------------------------- kinds of operations


@hazard
def complex_numbers() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        z = torch.complex(m.l0(x).sin(), m.l1(x).cos())
        return (z.exp() * z.conj()).abs() + torch.view_as_real(z * 2j).sin().sum(-1)

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def conjugated_and_negated_views() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        z = torch.complex(m.l0(x).sin(), m.l1(x).cos())
        w = z.conj() @ z.t()
        return (w.conj().exp() * w).real + z.conj().imag.exp().sum()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def complex_input() -> Hazard:
    def run(m: Any, z: Tensor) -> Tensor:
        return (z.exp() * z.conj().sin() @ torch.complex(m.w, m.w)).tanh()

    return Hazard(Fn(run, w=nn.Parameter(torch.randn(8, 8))), (x(dtype=torch.complex64) * 0.3,))


@hazard
def fft() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.l1(torch.fft.irfft(torch.fft.rfft(m.l0(x).sin()) * 1.5, n=8).exp()).tanh()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def attention_with_masks() -> Hazard:
    def run(m: Any, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = m.qkv(x).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        b = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        bias = keep.float().masked_fill(~keep, -1e4)
        c = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return m.l0((a + b + c).transpose(1, 2).reshape(2, 6, 8)).tanh()

    return Hazard(Fn(run, qkv=nn.Linear(8, 24), **linears(1)), (x(2, 6, 8), torch.ones(6, 6).tril().bool()))


@hazard
def attention_with_dropout() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        return m.l0(y.transpose(1, 2).reshape(2, 6, 8)).tanh()

    return Hazard(Fn(run, qkv=nn.Linear(8, 24), **linears(1)), (x(2, 6, 8),))


@hazard
def attention_by_hand() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(2, 6, 2, 4).transpose(1, 2) for f in (m.l0, m.l1, m.l2))
        weights = (q @ k.transpose(-1, -2) / math.sqrt(4)).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(2, 6, 8).log_softmax(-1)

    return Hazard(Fn(run, **linears(3)), (x(2, 6, 8),))


@hazard
def multihead_attention() -> Hazard:
    return Hazard(
        Fn(
            lambda m, x: m.attend(x, x, x, need_weights=True),
            attend=nn.MultiheadAttention(8, 2, 0.2, batch_first=True),
        ),
        (x(2, 6, 8),),
    )


@hazard
def transformer_encoder_layer() -> Hazard:
    return Hazard(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), (x(2, 6, 8),))


@hazard
def einsum() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x).view(6, 2, 4).sin()
        return torch.einsum("ihd,jhd->hij", y, y.exp()).tanh().sum(0) @ torch.einsum("ij,j->i", x, m.l0.bias)

    return Hazard(Fn(run, **linears(1)), (x(),))


@hazard
def convolutions() -> Hazard:
    block = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GELU(), nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Tanh(),
        nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, groups=2), nn.SiLU(), nn.AvgPool2d(2),
        nn.Upsample(scale_factor=2), nn.Flatten(2), nn.Conv1d(4, 6, 3, dilation=2), nn.PReLU(),
    )  # fmt: skip
    return Hazard(block, (x(2, 3, 8, 8),))


@hazard
def channels_last() -> Hazard:
    block = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 1), nn.GELU()
    )
    return Hazard(
        block.to(memory_format=torch.channels_last), (x(2, 4, 6, 6).to(memory_format=torch.channels_last),)
    )


@hazard
def recurrent_layers() -> Hazard:
    def run(m: Any, x: Tensor) -> Any:
        a, _ = m.rnn(x.sin().exp())
        b, h = m.gru(a.tanh())
        c, (d, e) = m.lstm(b.sin())
        return c.exp(), h, d, e

    parts = {"rnn": nn.RNN(8, 8), "gru": nn.GRU(8, 8, num_layers=2, dropout=0.2), "lstm": nn.LSTM(8, 8)}
    return Hazard(Fn(run, **parts), (x(4, 3, 8),))


@hazard
def recurrent_cells() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        h, c = torch.zeros(3, 8), torch.zeros(3, 8)
        for row in x.unbind(0):
            h, c = m.lstm(m.gru(row, h), (h, c))
        return (h * c.sin()).exp()

    return Hazard(Fn(run, gru=nn.GRUCell(8, 8), lstm=nn.LSTMCell(8, 8)), (x(4, 3, 8),))


@hazard
def foreach() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        a, b = torch._foreach_exp([m.l0(x).sin(), m.l1(x).cos()])
        c, d = torch._foreach_mul([a, b], 2.0)
        return (c * d).tanh()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def foreach_in_place() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        parts = [m.l0(x).sin(), m.l1(x).cos()]
        torch._foreach_mul_(parts, 2.0)
        torch._foreach_add_(parts, 1.0)
        return (parts[0].exp() * parts[1]).tanh()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def embedding_bag() -> Hazard:
    def run(m: Any, tokens: Tensor) -> Tensor:
        return m.l0(m.bag(tokens).sin().exp()).tanh()

    return Hazard(Fn(run, bag=nn.EmbeddingBag(9, 8), **linears(1)), (torch.randint(9, (3, 4)),))


@hazard
def losses() -> Hazard:
    def run(m: Any, x: Tensor, target: Tensor) -> Tensor:
        y = m.l1(m.l0(x).sin())
        return (
            F.cross_entropy(y, target)
            + F.smooth_l1_loss(y, x)
            + F.kl_div(y.log_softmax(-1), x.softmax(-1), reduction="sum")
        )

    return Hazard(Fn(run, **linears()), (x(), torch.randint(8, (6,))))


@hazard
def not_a_number() -> Hazard:
    """NaN and infinity are values like any other."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x)
        y = torch.where(x > 0, y / 0, y).exp()
        return torch.nan_to_num(m.l1(y * 0).tanh()) + torch.where(x > 0, torch.zeros_like(y), y).sin()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def parts_by_name() -> Hazard:
    """unbind, stack, cat, tile, repeat_interleave, roll, flip, triu, pad."""

    def run(m: Any, x: Tensor) -> Tensor:
        a, *_, b = m.l0(x).sin().unbind(0)
        y = torch.stack([a, b]).exp().repeat_interleave(3, 0).roll(1, 0).flip(1).triu(-2).tile(1, 1)
        return m.l1(F.pad(y, (1, 1))[:, 1:-1].tanh()).cos()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def linear_algebra() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x).sin()
        gram = y @ y.t() + 3 * torch.eye(6)
        return (
            torch.linalg.solve(gram, y).tanh()
            + torch.linalg.cholesky(gram).exp().sum()
            + torch.linalg.inv(gram).sum()
        )

    return Hazard(Fn(run, **linears(1)), (x(),))


@hazard
def shared_submodule_called_twice() -> Hazard:
    parts = {**linears(), "act": nn.Softplus(), "drop": nn.Dropout(0.0)}
    return Hazard(Fn(lambda m, x: m.drop(m.act(m.l1(m.act(m.drop(m.l0(x)))))).exp(), **parts), (x(),))


@hazard
def deep_chain() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.l0(x)
        for i in range(350):
            y = (y * 1.001).sin() if i % 2 else y + 0.01
        return y.tanh()

    return Hazard(
        Fn(run, **linears(1)), (x(),), no_recipe="a chain of more than 300 operations", least_only=True
    )


@hazard
def autocast_inside() -> Hazard:
    def run(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = m.l1(m.l0(x).sin())
            with torch.autocast("cpu", enabled=False):
                z = m.l0(y.float()).exp()
            return m.l1(z).tanh().float()

    return Hazard(Fn(run, **linears()), (x(),))


@hazard
def sparse_input() -> Hazard:
    def run(m: Any, x: Tensor, s: Tensor) -> Tensor:
        return m.l0(torch.sparse.mm(s, x).sin().exp()).tanh()

    return Hazard(Fn(run, **linears(1)), (x(), torch.eye(6).to_sparse()), no_recipe="sparse")


@hazard
def inference_input() -> Hazard:
    """A tensor made in inference mode may be added, though not saved; it has no version to compare."""

    def run(m: Any, x: Tensor) -> Tensor:
        return (m.l0(x) + m.made[0]).sin().exp().tanh().cos()

    class Caller(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    block = Fn(run, **linears(1))
    with torch.inference_mode():
        block.made = [torch.randn(8)]
    return Hazard(Caller(block), (x(),))


@hazard
def module_list_with_a_loop() -> Hazard:
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def run(m: Any, x: Tensor) -> list[Tensor]:
        kept = []
        for layer in m.layers:
            x = layer(x).sin()
            kept.append(x)
            x = x + torch.stack(kept).mean(0).exp()
        return [*kept, x]

    return Hazard(Fn(run, layers=layers), (x(),))


# -------------------------------------------------------------------------------------------------- the test


@functools.lru_cache(maxsize=2)
def prepared(name: str) -> Any:
    made = HAZARDS[name]()
    host = Host(made.block).train()
    for part, before in zip(host.block.modules(), HAZARDS[name]().block.modules(), strict=True):
        part.training = before.training
    found = survey_of(host, functools.partial(made.run, host), [Block("block", host.block, "")])
    return made, host, found, train(copy.deepcopy(host), made.run)


@pytest.mark.parametrize("level", [0.5, LEAST])
@pytest.mark.parametrize("name", HAZARDS)
def test_hazard(name: str, level: float) -> None:
    made, host, found, expected = prepared(name)
    planned = regions_at(found, level)
    assert_planned_equals_plain(host, made.run, planned, expected)
    note = planned.notes.get("block", "")
    refused = made.no_recipe and (level == LEAST or not made.least_only)
    assert made.no_recipe in note if refused else not note, f"no recipe: {note}"
    why = fallbacks(planned).get("block", "")
    assert made.falls_back in why if made.falls_back else not why, f"fell back: {why}"
    modes = {variant.mode for variant in planned.regions[0].variants.values()}
    if level == LEAST and made.drops and not made.no_recipe:
        assert Mode.RECIPE in modes, "nothing is dropped: nothing is tested"
