"""The offload engine on hand-made schedules: what moves when, exactly, and that nothing is lost.

The link is simulated: copies take virtual time; memory that is let go too early, or read too early, shows.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from remat.errors import HostMemoryError, InputError, OffloadError, RematError
from remat.run.link import CudaLink, Direction, LinkRates, Outbound, calibrate
from remat.run.offload import Engine
from remat.run.simulated import SimulatedLink

KB = 1024


def make(limit=8 * KB, host=256 * KB, **options):
    """An engine whose link moves 1 KiB per virtual second in each direction."""
    settings = {"spoil": True, "d2h_bytes_per_second": KB, "h2d_bytes_per_second": KB, "latency_seconds": 0.0}
    link = SimulatedLink(**{**settings, **options.pop("link", {})})
    return Engine(
        "cpu", in_flight_limit_bytes=limit, host_limit_bytes=host, slab_bytes=16 * KB, link=link, **options
    )


def block(kib=1, seed=0):
    return torch.randint(0, 2**31, (kib * KB // 8,), generator=torch.Generator().manual_seed(seed))


class Sent:
    """A tensor that was sent: its ticket, and what it has to be when it comes back."""

    def __init__(self, group, tensor):
        self.layout = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        self.expected = tensor.clone()
        self.ticket = group.send(tensor)

    def get(self):
        return self.ticket.get(*self.layout)

    def check(self):
        got = self.get()
        assert got.dtype == self.expected.dtype
        assert got.stride() == self.layout[1]
        assert got.equal(self.expected)


def send(engine, order, kibs):
    """A group with blocks of these sizes."""
    group = engine.group(order)
    return [Sent(group, block(kib, seed=100 * order + n)) for n, kib in enumerate(kibs)]


@pytest.fixture(params=["host", "disk"])
def tier(request, tmp_path):
    """Where the bytes go: pinned host memory, or files because there is none."""
    if request.param == "host":
        return {}
    return {"host": 0, "disk_limit_bytes": 256 * KB, "disk_directory": str(tmp_path)}


# ------------------------------------------------------------------------------------------------- values


def strided():
    base = torch.randn(6, 8)
    return {
        "contiguous": base.clone(),
        "transposed": base.clone().t(),
        "a slice": base.clone()[1:4, ::2],
        "expanded": torch.randn(3, 1).expand(3, 5),
        "overlapping": torch.randn(9).as_strided((3, 4), (2, 1), 1),
        "scalar": torch.randn(()),
        "bfloat16": torch.randn(5).bfloat16(),
        "bool": torch.randn(7) > 0,
        "complex": torch.randn(3, dtype=torch.complex64),
        "float8": torch.randn(8).to(torch.float8_e4m3fn).view(torch.float8_e4m3fn),
        "int8 of odd length": torch.arange(13, dtype=torch.int8),
        "empty": torch.empty(0, 4),
        "of a graph": (torch.randn(4, requires_grad=True) * 2),
    }


@pytest.mark.parametrize("name", strided())
def test_any_layout_and_dtype_comes_back(name, tier):
    tensor = strided()[name]
    engine = make(limit=0, **tier)
    expected = tensor.detach().clone(memory_format=torch.preserve_format)
    layout = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
    ticket = engine.group(0).send(tensor)
    del tensor
    got = ticket.get(*layout)
    assert (got.shape, got.stride(), got.dtype) == (layout[0], layout[1], layout[3])
    assert (
        got.view(torch.uint8).equal(expected.view(torch.uint8)) if "float8" in name else got.equal(expected)
    )
    assert not got.requires_grad
    assert not engine.link.violations


def test_tensors_of_one_storage_share_one_copy(tier):
    engine = make(limit=0, **tier)
    group = engine.group(0)
    base = torch.randn(4, 8)
    expected = base.clone()
    tickets = [group.send(base), group.send(base.t()), group.send(base[1:])]
    del base
    assert tickets[0] is tickets[1] is tickets[2]
    assert engine.counts.sent_bytes == 128
    one = tickets[0].get((4, 8), (8, 1), 0, torch.float32)
    other = tickets[0].get((3, 8), (8, 1), 8, torch.float32)
    assert one.equal(expected)
    assert other.data_ptr() == one[1:].data_ptr()
    assert engine.counts.fetched_bytes == 128


def test_tensors_sent_together_are_copies_of_their_own_in_order():
    """One of them twice, one that was sent before, and one whose copy fails: that one stays."""
    engine = make(link={"fails": lambda direction, number: number == 3})
    group = engine.group(0)
    before, *tensors = [block(kib, seed) for seed, kib in enumerate([1, 2, 4, 8])]
    expected = [tensor.clone() for tensor in (*tensors, before)]
    known = group.send(before)
    tickets = group.send_all([*tensors, tensors[0].view(2, -1), before])
    assert tickets[3] is tickets[0]
    assert tickets[4] is known
    assert [copy.nbytes for copy in engine.link.history] == [1 * KB, 2 * KB, 8 * KB]
    assert [ticket.is_on_host for ticket in tickets] == [True, False, True, True, True]
    counts = engine.counts
    assert (counts.failures, counts.kept_bytes, counts.used_bytes) == (1, 4 * KB, 11 * KB)
    stays = tensors[1]
    del before, tensors
    engine.settle()
    for ticket, value in zip([*tickets[:3], known], expected, strict=True):
        assert ticket.get(value.shape, value.stride(), 0, value.dtype).equal(value)
    assert tickets[1].get(stays.shape, stays.stride(), 0, stays.dtype).data_ptr() == stays.data_ptr()


def test_another_group_makes_its_own_copy():
    engine = make(link={"spoil": False})
    tensor = block()
    one, other = engine.group(0).send(tensor), engine.group(1).send(tensor)
    assert one is not other
    assert engine.counts.sent_bytes == 2 * KB


def test_a_tensor_that_was_written_between_two_sends_is_two_copies():
    engine = make(limit=0, link={"spoil": False})
    group, tensor = engine.group(0), block()
    first = Sent(group, tensor)
    tensor += 1
    second = Sent(group, tensor)
    first.check()
    second.check()


def test_what_cannot_be_offloaded_is_refused():
    engine = make()
    weight = nn.Parameter(torch.randn(3, 3))
    for tensor in (weight, weight.t(), torch.randn(2, device="meta"), torch.eye(2).to_sparse()):
        with pytest.raises(InputError, match="plain strided tensors of that device, and no parameters"):
            engine.group(0).send(tensor)
    with pytest.raises(InputError, match="not supported"):
        Engine("meta")
    with pytest.raises(InputError, match="0 bytes or more"):
        Engine("cpu", in_flight_limit_bytes=-1)


def test_the_default_host_limit_comes_from_the_machine():
    engine = Engine("cpu")
    assert engine._host.limit_bytes > 0
    assert engine.counts.pinned_bytes == 0


# -------------------------------------------------------------------------- out: ordering and back-pressure


def test_sends_stay_in_flight_up_to_the_limit_and_then_the_oldest_lands():
    engine = make(limit=3 * KB)
    sent = send(engine, 0, [1, 1, 1])
    assert (engine.counts.in_flight_bytes, engine.counts.waits, engine.link.waits) == (3 * KB, 0, 0)
    sent += send(engine, 1, [1])
    assert (engine.counts.in_flight_bytes, engine.counts.waits, engine.link.waits) == (3 * KB, 1, 1)
    assert engine.link.now == 1.0  # one copy of one KiB
    sent += send(engine, 2, [3])
    assert (engine.counts.in_flight_bytes, engine.counts.waits) == (3 * KB, 4)
    assert engine.link.now == 4.0
    assert engine.counts.peak_in_flight_bytes == 3 * KB
    for each in reversed(sent):
        each.check()


def test_a_tensor_above_the_limit_is_copied_before_send_returns():
    engine = make(limit=KB)
    sent = send(engine, 0, [4])
    assert (engine.counts.in_flight_bytes, engine.link.now) == (0, 4.0)
    sent[0].check()


def test_compute_hides_copies():
    engine = make(limit=2 * KB)
    sent = []
    for order in range(6):
        sent += send(engine, order, [1])
        engine.link.compute(1.0)
    assert engine.link.waits == 0
    engine.settle()
    assert (engine.counts.in_flight_bytes, engine.link.waits) == (0, 0)


def test_copies_go_out_in_order_one_at_a_time():
    engine = make(limit=100 * KB)
    keep = send(engine, 0, [2, 1, 3])
    spans = [(copy.start, copy.end) for copy in engine.link.history]
    assert spans == [(0, 2), (2, 3), (3, 6)]
    assert keep


def test_settle_lets_all_device_memory_go():
    engine = make()
    group, tensor = engine.group(0), block()
    storage = weakref.ref(tensor.untyped_storage())
    ticket = group.send(tensor)
    del tensor
    assert storage() is not None
    engine.settle()
    assert storage() is None
    assert ticket.is_on_host


# ------------------------------------------------------------------------------- back: direct and prefetch


def test_memory_that_has_not_left_is_used_again():
    engine = make()
    (sent,) = send(engine, 0, [2])
    sent.check()
    assert (engine.counts.direct_hits, engine.counts.fetched_bytes, engine.link.waits) == (1, 0, 0)
    engine.settle()
    sent.check()  # it was asked for, so it stays until its ticket dies
    assert engine.counts.fetched_bytes == 0


def test_memory_that_was_used_again_goes_with_its_ticket():
    """Not with the next call of the engine, which may come late: regions in between may send nothing."""
    engine = make()
    tensor = block(4)
    storage = weakref.ref(tensor.untyped_storage())
    ticket = engine.group(0).send(tensor)
    del tensor
    ticket.get((4 * KB // 4,), (1,), 0, torch.float32)
    assert engine._in_flight_bytes == 4 * KB
    del ticket
    assert engine._in_flight_bytes == 0
    assert storage() is None


def test_a_get_without_prefetch_starts_the_copy_and_waits():
    engine = make(limit=0)
    (sent,) = send(engine, 0, [2])
    sent.check()
    assert (engine.counts.late_fetches, engine.counts.fetched_bytes, engine.link.now) == (1, 2 * KB, 4.0)
    sent.check()
    assert engine.counts.fetched_bytes == 2 * KB


def test_reaching_a_group_prefetches_its_neighbour_while_it_computes():
    engine = make(limit=4 * KB)
    sent = [send(engine, order, [1]) for order in range(4)]
    engine.settle()
    engine.link.compute(10.0)
    for (each,) in reversed(sent):
        each.check()
        engine.link.compute(2.0)
    counts = engine.counts
    assert (counts.late_fetches, counts.prefetch_hits, counts.direct_hits) == (1, 3, 0)
    assert engine.link.waited_seconds == 4.0 + 1.0  # settling, and the first fetch; the others were hidden
    fetches = [copy for copy in engine.link.history if copy.direction is Direction.BACK]
    assert [copy.start for copy in fetches] == [14.0, 15.0, 17.0, 19.0]


def test_prefetch_brings_the_last_sent_first_and_keeps_to_the_limit():
    engine = make(limit=2 * KB)
    group = engine.group(0)
    sent = [Sent(group, block(1, seed)) for seed in range(5)]
    engine.settle()
    group.prefetch()
    assert engine.counts.inbound_bytes == 2 * KB
    for each in reversed(sent):
        each.check()
        assert engine.counts.inbound_bytes <= 2 * KB
    assert (engine.counts.prefetch_hits, engine.counts.late_fetches) == (5, 0)
    assert engine.counts.peak_inbound_bytes == 2 * KB
    group.prefetch()
    assert engine.counts.fetched_bytes == 5 * KB  # everything is on the device


def test_what_is_larger_than_the_limit_is_not_fetched_ahead():
    engine = make(limit=KB)
    sent = send(engine, 0, [2, 1])
    engine.settle()
    sent[0].ticket.group.prefetch()
    assert engine.counts.inbound_bytes == KB
    sent[1].check()
    sent[0].check()
    assert (engine.counts.prefetch_hits, engine.counts.late_fetches) == (1, 1)


def test_neighbours_are_those_of_the_same_forward():
    engine = make(limit=64 * KB)
    first = [send(engine, order, [1]) for order in range(3)]
    second = [send(engine, order, [1]) for order in range(3)]
    engine.settle()
    first[2][0].check()
    assert engine.counts.fetched_bytes == 2 * KB  # itself and first[1]
    first[1][0].check()
    assert (engine.counts.prefetch_hits, engine.counts.late_fetches) == (1, 1)
    second[0][0].check()  # the group sent before it belongs to the other forward
    assert engine.counts.fetched_bytes == 4 * KB


def test_a_neighbour_still_on_the_device_stays_there():
    engine = make(limit=4 * KB)
    sent = [send(engine, order, [2]) for order in range(3)]
    for (each,) in reversed(sent):
        each.check()
    assert (engine.counts.direct_hits, engine.counts.late_fetches, engine.counts.prefetch_hits) == (2, 0, 1)
    assert engine.counts.in_flight_bytes == 0  # backward took them out of flight on its way


def test_prefetched_copies_that_nobody_asks_for_give_way():
    engine = make(limit=2 * KB)
    forgotten = send(engine, 0, [1, 1])
    wanted = [send(engine, order, [1, 1]) for order in (0, 1)]
    engine.settle()
    forgotten[0].ticket.group.prefetch()
    for each in (*reversed(wanted[1]), *reversed(wanted[0])):
        each.check()
        assert engine.counts.inbound_bytes <= 2 * KB
    assert engine.counts.late_fetches == 1
    for each in forgotten:
        each.check()
    assert not engine.link.violations


# -------------------------------------------------------------------------------- graphs, threads, streams


def test_retain_graph_fetches_again(tier):
    engine = make(limit=4 * KB, **tier)
    sent = [send(engine, order, [1]) for order in range(6)]
    engine.settle()
    for _ in range(2):
        for (each,) in reversed(sent):
            each.check()
    assert engine.counts.fetched_bytes > 6 * KB  # backward lets device memory go behind it
    on_device = sum(each.ticket._stored.device is not None for (each,) in sent)
    assert on_device <= 3


def test_a_ticket_that_dies_gives_its_host_bytes_back(tier):
    engine = make(limit=2 * KB, **tier)
    sent = [send(engine, order, [1, 1]) for order in range(3)]
    assert engine.counts.used_bytes == 6 * KB
    sent[2].clear()  # never asked for, one copy still in flight
    assert engine.counts.used_bytes == 4 * KB
    sent[1][0].ticket.group.prefetch()
    sent[1].clear()  # fetched, never asked for
    assert engine.counts.inbound_bytes == 0
    for each in sent[0]:
        each.check()
    sent.clear()
    del each
    assert engine.counts.used_bytes == 0
    engine.close()
    assert not engine.link.violations


def test_a_second_stream_gets_its_own_copy():
    engine = make()
    (sent,) = send(engine, 0, [1])
    with engine.link.on("other"):
        sent.check()  # the memory in flight belongs to the first stream
        assert (engine.counts.direct_hits, engine.counts.late_fetches) == (0, 1)
    first = sent.get()
    assert engine.counts.fetched_bytes == 2 * KB
    with engine.link.on("other"):
        assert sent.get().data_ptr() != first.data_ptr()
    assert not engine.link.violations


def test_host_bytes_are_overwritten_only_after_they_were_read():
    """Two streams that never wait for each other: only the link knows that the slow read comes first."""
    engine = make(limit=0, link={"h2d_bytes_per_second": 1.0})
    (sent,) = send(engine, 0, [1])
    with engine.link.on("other"):
        sent.check()
    read = engine.link.history[-1]
    del sent
    again = send(engine, 1, [1])
    written = engine.link.history[-1]
    assert written.host.data_ptr() == read.host.data_ptr()
    assert written.start >= read.end
    again[0].check()


def test_backward_in_another_thread_while_the_next_forward_sends():
    engine = make(limit=2 * KB, link={"spoil": False})
    problems = []

    def backward(graph):
        try:
            for (each,) in reversed(graph):
                each.check()
        except AssertionError as error:  # pragma: no cover - only if the engine is broken
            problems.append(error)

    for _ in range(30):
        graph = [send(engine, order, [1]) for order in range(5)]
        thread = threading.Thread(target=backward, args=(graph,))
        thread.start()
        other = [send(engine, order, [1]) for order in range(5)]
        thread.join(timeout=60)
        assert not thread.is_alive()
        backward(other)
    assert not problems
    assert not engine.link.violations
    del graph, other, thread
    assert engine.counts.used_bytes == 0


def test_a_real_graph_with_saved_tensors_hooks():
    """Gradients with everything offloaded equal plain ones, in two backwards, and nothing is left behind."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(4)])
    x = torch.randn(8, 16)
    model(x).square().sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    engine = make(limit=2 * KB, link={"spoil": False})
    parameters = {parameter.data_ptr() for parameter in model.parameters()}

    def run(order, layer, x):
        group = engine.group(order)

        def pack(tensor):
            if tensor.untyped_storage().data_ptr() in parameters:
                return tensor
            layout = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
            return group.send(tensor), layout

        def unpack(packed):
            return packed if isinstance(packed, torch.Tensor) else packed[0].get(*packed[1])

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return layer(x)

    hidden = x
    for order, layer in enumerate(model):
        hidden = run(order, layer, hidden)
    loss = hidden.square().sum()
    for retain in (True, False):
        model.zero_grad()
        loss.backward(retain_graph=retain)
        assert all(p.grad.equal(g) for p, g in zip(model.parameters(), plain, strict=True))
    del loss, hidden
    gc.collect()
    assert engine.counts.used_bytes == 0
    assert not engine.link.violations


# --------------------------------------------------------------------------------- limits, failures, close


def test_reserve_takes_memory_once_and_says_when_there_is_none():
    engine = make(host=64 * KB, link={"capacity_bytes": 48 * KB})
    engine.reserve(20 * KB)
    assert engine.counts.pinned_bytes == 32 * KB  # whole slabs
    engine.reserve(10 * KB)
    assert engine.counts.pinned_bytes == 32 * KB
    with pytest.raises(HostMemoryError, match=r"wants 65.0 KiB .* limit is 64.0 KiB; offload 1.0 KiB less"):
        engine.reserve(65 * KB)
    with pytest.raises(HostMemoryError, match=r"32.0 KiB more of pinned host memory were refused") as caught:
        engine.reserve(64 * KB)
    assert isinstance(caught.value, RematError)
    assert engine.counts.pinned_bytes == 32 * KB


def test_reserve_goes_on_to_disk(tmp_path):
    engine = make(host=16 * KB, disk_limit_bytes=32 * KB, disk_directory=str(tmp_path))
    engine.reserve(40 * KB)
    assert (engine.counts.pinned_bytes, engine.counts.disk_bytes) == (16 * KB, 32 * KB)
    assert list(tmp_path.iterdir()) == []  # the file has no name any more
    sent = send(engine, 0, [10, 10, 10])
    assert engine.counts.used_bytes == 30 * KB
    for each in reversed(sent):
        each.check()


def test_without_host_memory_a_tensor_stays_on_the_device():
    engine = make(limit=0, host=16 * KB)
    sent = send(engine, 0, [12, 8])
    assert [each.ticket.is_on_host for each in sent] == [True, False]
    assert engine.counts.kept_bytes == 8 * KB
    for each in reversed(sent):
        each.check()


def test_refused_pinned_memory_keeps_tensors_on_the_device():
    engine = make(limit=0, link={"capacity_bytes": 0})
    sent = send(engine, 0, [1])
    assert (engine.counts.kept_bytes, engine.counts.pinned_bytes) == (KB, 0)
    sent[0].check()


def test_a_copy_out_that_fails_keeps_the_tensor_on_the_device():
    engine = make(limit=0, link={"fails": lambda direction, number: number == 1})
    sent = send(engine, 0, [1, 1])
    assert (engine.counts.failures, engine.counts.kept_bytes, engine.counts.used_bytes) == (1, KB, KB)
    for each in reversed(sent):
        each.check()


def test_a_copy_back_that_fails_is_one_clear_error_and_can_be_repeated():
    broken = [True]
    engine = make(
        limit=0, link={"fails": lambda direction, number: broken[0] and direction is Direction.BACK}
    )
    (sent,) = send(engine, 0, [2])
    sent.ticket.group.prefetch()
    with pytest.raises(OffloadError, match=r"2.0 KiB of an offloaded .*simulated failure.* plan without"):
        sent.get()
    broken[0] = False
    sent.check()


def test_a_prefetch_that_fails_is_made_good_by_get():
    failing = [2]  # the first copy back
    engine = make(limit=4 * KB, link={"fails": lambda direction, number: number in failing})
    (sent,) = send(engine, 0, [1])
    engine.settle()
    sent.ticket.group.prefetch()
    assert engine.counts.failures == 1
    sent.check()
    assert engine.counts.inbound_bytes == 0


def test_a_full_device_drops_what_was_fetched_ahead():
    class Full(SimulatedLink):
        full = False

        def fetch(self, source, stream, after):
            if self.full and engine.counts_unlocked_inbound():
                raise torch.OutOfMemoryError("simulated")
            return super().fetch(source, stream, after)

    engine = Engine("cpu", in_flight_limit_bytes=4 * KB, host_limit_bytes=64 * KB, slab_bytes=KB, link=Full())
    engine.counts_unlocked_inbound = lambda: engine._inbound_bytes
    ahead, (asked,) = send(engine, 0, [1, 1]), send(engine, 0, [1])
    engine.settle()
    ahead[0].ticket.group.prefetch()
    assert engine.counts.inbound_bytes == 2 * KB
    engine.link.full = True
    asked.check()
    assert engine.counts.inbound_bytes == 0
    for each in ahead:
        each.check()


@pytest.mark.parametrize("settled", [False, True])
def test_writing_to_a_tensor_after_it_was_sent(settled):
    """While it is being copied: an error. Afterwards: the value that was sent."""
    engine = make(link={"spoil": False})
    tensor = block()
    sent = Sent(engine.group(0), tensor)
    if settled:
        engine.settle()
    tensor += 1
    if settled:
        sent.check()
        return
    with pytest.raises(OffloadError, match=r"1.0 KiB was modified in place .* clone it before"):
        sent.get()
    engine.settle()
    with pytest.raises(OffloadError, match="modified in place"):
        sent.get()


def test_writing_to_memory_that_is_used_again_fetches_what_was_sent():
    engine = make(link={"spoil": False})
    tensor = block()
    sent = Sent(engine.group(0), tensor)
    sent.check()
    engine.settle()
    tensor += 1
    sent.check()
    assert engine.counts.fetched_bytes == KB


def test_close_releases_everything(tier):
    engine = make(limit=4 * KB, **tier)
    sent = [send(engine, order, [1, 2]) for order in range(4)]
    for each in reversed(sent):
        each[0].check()
    del each
    sent.clear()
    engine.close()
    counts = engine.counts
    assert (counts.pinned_bytes, counts.disk_bytes, counts.used_bytes, counts.in_flight_bytes) == (0, 0, 0, 0)
    assert (engine.link.pinned_bytes, engine.link.pending, engine.link.violations) == (0, 0, [])
    assert send(engine, 0, [1])[0].ticket.is_on_host is False
    with pytest.raises(HostMemoryError, match="closed"):
        engine.reserve(KB)


def test_close_under_a_live_graph_loses_nothing_and_releases_when_it_dies():
    engine = make(limit=0)
    sent = [send(engine, order, [1]) for order in range(3)]
    engine.close()
    for (each,) in reversed(sent):
        each.check()
    assert engine.link.pinned_bytes > 0
    sent.clear()
    del each
    assert engine.link.pinned_bytes == 0


def test_an_engine_that_is_dropped_gives_its_memory_back():
    engine = make(limit=0)
    link = engine.link
    sent = send(engine, 0, [1])
    del engine
    sent[0].check()  # tickets hold the engine
    assert link.pinned_bytes > 0
    sent.clear()
    assert link.pinned_bytes == 0


def test_calibrate_is_not_slowed_down_by_what_others_do_for_a_while(monkeypatch):
    link = SimulatedLink(d2h_bytes_per_second=50e9, h2d_bytes_per_second=25e9, latency_seconds=0.0)
    seconds, busy = link.seconds, iter([1.4, 1.0, 1.2] * 3)

    def contended(directions, buffers, repeats):
        slower = next(busy)
        return {d: slower * found for d, found in seconds(directions, buffers, repeats).items()}

    monkeypatch.setattr(link, "seconds", contended)
    rates = calibrate(link)
    assert (rates.d2h_bytes_per_second, rates.h2d_bytes_per_second) == pytest.approx((50e9, 25e9))


def test_calibrate_reads_the_rates_of_the_link():
    link = SimulatedLink(d2h_bytes_per_second=2e9, h2d_bytes_per_second=4e9, latency_seconds=0.0)
    assert calibrate(link) == LinkRates(
        pytest.approx(2e9), pytest.approx(4e9), pytest.approx(2e9), pytest.approx(4e9)
    )
    assert link.pinned_bytes == 0


@pytest.mark.slow
def test_the_benchmark_runs_without_an_accelerator(tmp_path):
    script = Path(__file__).parents[1] / "benchmarks" / "offload_link.py"
    out = tmp_path / "result.json"
    done = subprocess.run([sys.executable, script, "--out", out], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert rows[0]["time"] == pytest.approx(1.0, abs=0.01)  # what fits the window is hidden
    assert rows[-1]["time"] > 1.2


# ---------------------------------------------------------------------------------------------------- lenders


class Borrowed:
    def __init__(self):
        self.tickets = []

    def sent_by(self, ticket, version):
        self.tickets.append((ticket, version))


def test_a_lender_is_told_who_sent_its_storage_once():
    engine = Engine("cpu", in_flight_limit_bytes=0, link=SimulatedLink())
    tensor, other = torch.arange(64.0), torch.arange(64.0)
    lender, second, gone = Borrowed(), Borrowed(), Borrowed()
    for each in (lender, second, gone):
        engine.lend(each, tensor[8:])
    del each, gone
    engine.group(0).send(other)
    assert not lender.tickets
    expected, group = tensor.clone(), engine.group(1)
    ticket = group.send(tensor)
    assert [found for found, _ in lender.tickets] == [found for found, _ in second.tickets] == [ticket]
    assert lender.tickets[0][1] == tensor._version
    del ticket, tensor
    second.tickets.clear()
    assert torch.equal(lender.tickets[0][0].get((64,), (1,), 0, torch.float32), expected)
    engine.lend(lender, other)
    assert len(engine._lenders) == 1
    del lender
    engine.lend(second, torch.zeros(1))
    assert len(engine._lenders) == 1, "one that is gone is forgotten"
    group.reach()
    engine.close()


class Recorded:
    """A stream that only notes what it is told."""

    def __init__(self, told, name):
        self.told, self.name = told, name

    def wait_stream(self, other):
        self.told.append((self.name, "waits for all of", other.name))

    def wait_event(self, event):
        self.told.append((self.name, "waits for", event))

    def record_event(self):
        self.told.append((self.name, "marks"))
        return f"event {len(self.told)}"


def test_on_cuda_copies_that_start_together_are_ordered_once(monkeypatch):
    """And a stream is not told again what it waits for already, be it through another."""
    told = []
    streams = [Recorded(told, name) for name in ("compute", "another", "out", "back")]
    compute, another, out, back = streams
    link = object.__new__(CudaLink)
    link.device, link._number, link._told = torch.device("cpu"), 0, {}
    link._out, link._back = out, back
    monkeypatch.setattr(CudaLink, "current", lambda self: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", Recorded)
    host = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
    sources = [torch.full((8,), value, dtype=torch.uint8) for value in (3, 7)]

    first, second = link.send([Outbound(sources[0], host[0], None), Outbound(sources[1], host[1], None)])
    assert told == [("out", "waits for all of", "compute"), ("out", "marks"), ("out", "marks")]
    assert [int(memory[0]) for memory in host] == [3, 7]
    told.clear()

    link.wait(compute, second)
    link.wait(compute, first)  # an earlier one of the same direction
    link.wait(another, first)
    assert told == [("compute", "waits for", second.event), ("another", "waits for", first.event)]
    told.clear()

    _, fetched = link.fetch(host[0], compute, first)  # compute waits for that copy, and back for compute
    assert told == [("back", "waits for all of", "compute"), ("back", "marks")]
    told.clear()
    link.fetch(host[1], another, second)
    assert told[:2] == [("back", "waits for all of", "another"), ("back", "waits for", second.event)]
    told.clear()

    link.send([Outbound(sources[0], host[0], fetched)])  # nobody has waited for that copy yet
    assert told[:2] == [("out", "waits for all of", "compute"), ("out", "waits for", fetched.event)]
    told.clear()
    link.wait(compute, fetched)
    link.send([Outbound(sources[0], host[0], fetched)])
    assert told[1:] == [("out", "waits for all of", "compute"), ("out", "marks")]
