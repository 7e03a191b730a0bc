"""Counted bytes against bytes computed by hand, and against an independent model of random programs."""

import gc
from dataclasses import dataclass, field

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from remat.check.live import LiveBytes, Meter


class Passing(TorchDispatchMode):
    """Another mode, which counts the operations it sees."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_a_storage_counts_once_until_its_last_view_goes():
    with LiveBytes() as live:
        base = torch.zeros(10)
        rows, same = base.view(2, 5), base.detach()
        assert live.current_bytes == 40
        del base, same
        assert live.current_bytes == 40
        del rows
        assert live.current_bytes == 0
        assert live.peak_bytes == 40


def test_peak_holds_inputs_and_outputs_of_an_operation_together():
    with LiveBytes() as live:
        a = torch.zeros(100)
        a = a + 1  # the old one is alive until the sum exists
        assert live.peak_bytes == 800
        assert live.current_bytes == 400
        live.reset_peak()
        assert live.peak_bytes == 400
        del a


def test_tensors_of_before_count_only_when_watched():
    weight = torch.zeros(8, 8)
    with LiveBytes() as live:
        view = weight.t()
        weight.add_(1)
        assert live.current_bytes == 0
        live.watch([weight, view, weight])
        assert live.current_bytes == 256
        del view, weight
        assert live.current_bytes == 0


def test_frees_are_counted_after_the_exit():
    with LiveBytes() as live:
        a = torch.zeros(10)
    b = torch.zeros(10)
    assert live.current_bytes == 40
    del a, b
    assert live.current_bytes == 0


@pytest.mark.parametrize(
    ("make", "nbytes"),
    [
        (lambda: torch.tensor([1.0, 2.0]), 8),
        (lambda: torch.empty(3, dtype=torch.bfloat16), 6),
        (lambda: torch.zeros(4, 4)[1:], 64),
        (lambda: torch.zeros(1).expand(1000), 4),
        (lambda: torch.ones(2, 3, dtype=torch.bool), 6),
        (lambda: nn.Parameter(torch.zeros(5)), 20),
        (lambda: torch.zeros(6).split(2), 24),
        (lambda: torch.zeros(6).unbind(), 24),
        (lambda: torch.zeros(6).sort(), 24 + 48),
        (lambda: torch.zeros(0), 0),
        (lambda: torch.from_numpy(numpy.zeros(3)), 24),
        (lambda: torch.eye(3).to_sparse(), 2 * 3 * 8 + 3 * 4),
        (lambda: torch.eye(3).to_sparse_csr(), 4 * 8 + 2 * 3 * 8 + 3 * 4),  # col_indices is one row of two
        (lambda: TwoTensor(torch.zeros(4), torch.zeros(4)) + 1, 32),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_remains_of_one_expression(make, nbytes):
    with LiveBytes() as live:
        made = make()
        assert live.current_bytes == nbytes
        del made
        assert live.current_bytes == 0


def test_resized_storages():
    with LiveBytes() as live:
        a = torch.zeros(4)
        a.resize_(100)
        assert live.current_bytes == 400
        a.untyped_storage().resize_(0)  # no operation, seen when read
        assert live.current_bytes == 0
        a.untyped_storage().resize_(400)
        live.reset_peak()
        b = torch.zeros(1)  # has changed before: looked at by every operation
        assert live.peak_bytes == 404
        a.untyped_storage().resize_(0)
        c = torch.zeros(50)
        assert live.peak_bytes == 404
        assert live.current_bytes == 204
        del a, b, c
        assert live.current_bytes == 0


def test_growth_by_hand_is_seen_at_the_first_write():
    with LiveBytes() as live:
        a = torch.zeros(4)
        a.untyped_storage().resize_(0)
        a.untyped_storage().resize_(16)
        a.zero_()
        assert live.current_bytes == 16


def test_linear_step_by_hand():
    """Linear(8 -> 8, no bias), relu, sum: every storage of the step is accounted for."""
    layer, x = nn.Linear(8, 8, bias=False), torch.zeros(4, 8)
    with LiveBytes() as live:
        hidden = layer(x)  # 128
        out = hidden.relu()  # 128, saved
        del hidden  # linear saves its input and weight, relu its result
        assert live.current_bytes == 128
        loss = out.sum()  # 4
        assert live.current_bytes == 132
        del out
        assert live.current_bytes == 132  # the graph holds it
        loss.backward()
        assert live.current_bytes == 4 + 256  # the graph's tensors are gone, the weight's gradient is there
        layer.zero_grad()
        assert live.current_bytes == 4


def test_checkpointed_backward_recomputes_under_the_counter():
    layer, x = nn.Linear(16, 16, bias=False), torch.zeros(4, 16)

    def block(h):
        return layer(layer(h).tanh()).tanh()

    with LiveBytes() as plain:
        loss = block(x).sum()
        held_plain = plain.current_bytes
        loss.backward()
    layer.zero_grad()
    with LiveBytes() as live:
        loss = checkpoint(block, x, use_reentrant=False).sum()
        assert live.current_bytes == 4
        loss.backward()
        assert live.current_bytes == 4 + 16 * 16 * 4
        assert live.peak_bytes >= held_plain
    assert held_plain == 4 + 2 * 4 * 16 * 4  # both tanh outputs


@pytest.mark.parametrize("outside", [True, False])
def test_beside_another_mode(outside):
    other, live = Passing(), LiveBytes()
    first, second = (other, live) if outside else (live, other)
    weight = torch.zeros(8, 8, requires_grad=True)
    with first, second:
        loss = (weight * 2).exp().sum()
        assert live.current_bytes == 256 + 4
        loss.backward()
        assert live.current_bytes == 256 + 4
    assert other.seen > 4


def test_nested_counters_agree():
    with LiveBytes() as outer:
        a = torch.zeros(10)
        with LiveBytes() as inner:
            b = a + 1
        assert (outer.current_bytes, inner.current_bytes) == (80, 40)
        del b
        assert (outer.current_bytes, inner.current_bytes) == (40, 0)


def test_fake_tensors_count_on_their_fake_device():
    with FakeTensorMode(), LiveBytes("cuda") as live:
        a = torch.zeros(10, device="cuda")
        b = a @ torch.zeros(10, 5, device="cuda")
        host = torch.zeros(1000)
        assert live.current_bytes == 40 + 20
        assert live.peak_bytes == 40 + 200 + 20
        del a, b, host
        assert live.current_bytes == 0


def test_meta_tensors():
    with LiveBytes("meta") as live:
        a = torch.zeros(10, device="meta")
        assert live.current_bytes == a.nbytes


def test_limit_raises_with_the_numbers_and_holds_nothing():
    with LiveBytes(limit_bytes=1000) as live:
        a = torch.zeros(200)
        with pytest.raises(
            torch.OutOfMemoryError, match=r"allocate 400 bytes .* 800 bytes .* 1000 bytes"
        ) as caught:
            torch.zeros(100)
        assert live.current_bytes == 800
        assert live.peak_bytes == 800
        b = torch.zeros(50)  # exactly up to the limit
        assert live.current_bytes == 1000
        del a, b, caught
    assert live.current_bytes == 0


def test_limit_stops_a_backward_and_the_memory_comes_back():
    weight = torch.zeros(32, 32, requires_grad=True)
    with LiveBytes(limit_bytes=3 * 4096 + 8) as live:
        loss = weight.exp().exp().sum()
        with pytest.raises(torch.OutOfMemoryError):
            (loss * 1).backward()
        del loss
        gc.collect()
        assert live.current_bytes == 0
    assert weight.grad is None


def test_limit_trusts_what_was_shrunk_by_hand():
    with LiveBytes(limit_bytes=400) as live:
        a = torch.zeros(100)
        a.untyped_storage().resize_(0)
        b = torch.zeros(100)
        assert live.current_bytes == 400
        del a, b


def test_meter_without_an_accelerator():
    weight = torch.zeros(10)
    with Meter("cpu") as meter:
        meter.watch([weight])
        doubled = weight * 2
        assert meter.current_bytes() == 80
        del doubled
        meter.synchronize()
        assert (meter.current_bytes(), meter.peak_bytes()) == (40, 80)
        meter.reset_peak()
        assert meter.peak_bytes() == 40


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_meter_on_cuda_reads_the_allocator():
    with Meter("cuda") as meter:
        start = meter.current_bytes()
        a = torch.zeros(2**20, device="cuda")
        assert meter.current_bytes() - start == 2**22
        del a
        assert meter.current_bytes() == start
        assert meter.peak_bytes() >= start + 2**22


# ------------------------------------------------------------------- random programs, independent model


@dataclass
class Model:
    """The same program over plain Python objects: a storage is a list of the variables that look into it."""

    sizes: dict[int, int] = field(default_factory=dict)
    owner: dict[int, int] = field(default_factory=dict)
    fresh: int = 0
    peak: int = 0

    def level(self):
        return sum(self.sizes[s] for s in set(self.owner.values()))

    def new(self, variable, nbytes, extra=0):
        self.fresh += 1
        self.sizes[self.fresh] = nbytes
        before = self.level()  # the variable's old storage is alive while the new one is made
        self.peak = max(self.peak, before + nbytes + extra)
        self.owner[variable] = self.fresh


VARIABLES = st.integers(0, 3)
STEPS = st.one_of(
    st.tuples(st.just("new"), VARIABLES, st.integers(0, 50)),
    st.tuples(st.just("view"), VARIABLES, VARIABLES),
    st.tuples(st.just("add"), VARIABLES, VARIABLES),
    st.tuples(st.just("inplace"), VARIABLES, VARIABLES),
    st.tuples(st.just("resize"), VARIABLES, st.integers(51, 90)),
    st.tuples(st.just("free"), VARIABLES, VARIABLES),
    st.tuples(st.just("chunk"), VARIABLES, VARIABLES),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_random_programs(program):
    tensors, model = {}, Model()
    with LiveBytes() as live:
        for name, target, other in program:
            if name == "new":
                tensors[target] = torch.zeros(other)
                model.new(target, 4 * other)
            elif name == "free":
                tensors.pop(target, None)
                model.owner.pop(target, None)
            elif name == "resize":
                if target in tensors:
                    tensors[target].resize_(other)
                    storage = model.owner[target]
                    model.sizes[storage] = max(model.sizes[storage], 4 * other)
                    model.peak = max(model.peak, model.level())
            elif other in tensors:
                source = tensors[other]
                nbytes = 4 * source.numel()
                if name == "view":
                    tensors[target] = source.view(-1)[:7]
                    model.owner[target] = model.owner[other]
                elif name == "add":
                    tensors[target] = source + 1
                    model.new(target, nbytes)
                elif name == "inplace":
                    source.add_(1)
                elif name == "chunk":
                    tensors[target] = source.clone().chunk(2)[0]
                    model.new(target, nbytes)
                del source
            assert live.current_bytes == model.level()
        assert live.peak_bytes == model.peak
        tensors.clear()
        assert live.current_bytes == 0


def test_a_training_loop_leaks_nothing():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)), torch.randn(2, 4)
    with LiveBytes() as live:
        levels = set()
        for _ in range(50):
            model(x).sum().backward()
            model.zero_grad()
            levels.add(live.current_bytes)
        assert levels == {0}
        assert not live._entries
    del model, x
    assert not live._foreign
