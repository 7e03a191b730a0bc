"""The offload engine on a real link. Copies are slowed down by work on the copy streams, so that memory which
is let go too early, or read too early, holds other bytes by then."""

from __future__ import annotations

import gc
import time
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from remat.errors import HostMemoryError
from remat.run.link import calibrate
from remat.run.offload import Engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]
MB = 2**20


def make(limit=64 * MB, host=1024 * MB, **options):
    return Engine("cuda", in_flight_limit_bytes=limit, host_limit_bytes=host, **options)


class Sent:
    def __init__(self, group, tensor):
        self.layout = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        self.expected = tensor.cpu()
        self.ticket = group.send(tensor)

    def get(self):
        return self.ticket.get(*self.layout)


@contextmanager
def host_never_waits():
    """Whatever makes the host wait for the device raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def delay(stream, times=10):
    """Keep a stream busy for some milliseconds."""
    with torch.cuda.stream(stream):
        a = torch.ones(4096, 4096, device="cuda")
        for _ in range(times):
            a = a @ a
            a = a.clamp_(max=1.0)


def overwrite_free_memory(nbytes, pieces=8):
    """Take the blocks that were just freed, and write to them on the current stream."""
    return [torch.full((nbytes,), 0xA5, dtype=torch.uint8, device="cuda") for _ in range(pieces)]


def numbers(nbytes, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda", generator=generator)


@pytest.mark.parametrize("limit", [0, 8 * MB, 64 * MB])
@pytest.mark.parametrize("side_stream", [False, True])
def test_values_survive_slow_copies_and_reuse_of_memory(limit, side_stream):
    engine = make(limit)
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    size = 4 * MB
    with torch.cuda.stream(stream):
        expected = [numbers(size, seed).cpu() for seed in range(12)]
        tickets = []
        for order in range(6):
            group = engine.group(order)
            for place in range(2):
                tensor = numbers(size, 2 * order + place)
                delay(engine.link._out, 2)
                tickets.append(group.send(tensor))
                del tensor
                overwrite_free_memory(size)
        results = []
        for number in reversed(range(12)):
            delay(engine.link._back, 2)
            got = tickets[number].get((size,), (1,), 0, torch.uint8)
            results.append((number, (got.to(torch.int16) + 1)))  # used on the compute stream at once
            del got
            tickets[number] = None  # its memory is free for the next kernel
            overwrite_free_memory(size, 2)
    torch.cuda.synchronize()
    for number, result in results:
        assert (result - 1).to(torch.uint8).cpu().equal(expected[number])
    counts = engine.counts
    assert counts.peak_in_flight_bytes <= limit
    assert counts.peak_inbound_bytes <= limit
    assert counts.used_bytes == 0
    engine.close()


def test_prefetched_memory_that_nobody_asks_for_is_not_handed_out_under_the_copy():
    engine = make(16 * MB)
    size = 8 * MB
    ticket = engine.group(0).send(numbers(size, 0))
    engine.settle()
    torch.cuda.synchronize()
    delay(engine.link._back, 20)
    ticket.group.prefetch()
    del ticket
    engine.settle()  # reads the note that the ticket left
    after = overwrite_free_memory(size, 1)[0]
    torch.cuda.synchronize()
    assert int(after.min()) == int(after.max()) == 0xA5
    engine.close()


def test_strided_tensors_and_another_stream():
    engine = make(0)
    base = torch.randn(64, 33, device="cuda")
    group = engine.group(0)
    sent = [Sent(group, base.t()), Sent(group, base[3:, ::2]), Sent(group, base.new_empty(0, 3))]
    assert sent[0].ticket is sent[1].ticket
    del base
    other = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), other, torch.cuda.current_stream()):
        with torch.cuda.stream(stream):
            for each in sent:
                got = each.get()
                assert got.stride() == each.layout[1]
                assert got.cpu().equal(each.expected)


def test_the_host_never_waits():
    engine = make(8 * MB, host=256 * MB)
    engine.reserve(128 * MB)

    def step():
        tickets = []
        for order in range(8):
            group = engine.group(order)
            x = torch.ones(1024, 1024, device="cuda")
            tickets += [group.send(x), group.send(x @ x)]
        engine.settle()
        tickets[-1].group.prefetch()
        for ticket in reversed(tickets):
            ticket.get((1024, 1024), (1024, 1), 0, torch.float32).mul(2)

    step()
    with host_never_waits():
        step()
        step()
        assert engine.counts.used_bytes == 0
        engine.close()  # waits for the copies by asking, so this is no reason to raise either
    assert engine.counts.prefetch_hits > 0
    assert engine.counts.pinned_bytes == 0


def test_the_host_runs_ahead_of_slow_copies():
    engine = make(4 * MB)
    engine.reserve(64 * MB)
    tensors = [numbers(4 * MB, seed) for seed in range(8)]
    group = engine.group(0)
    delay(engine.link._out, 200)
    torch.cuda.current_stream().synchronize()
    begin = time.perf_counter()
    tickets = [group.send(tensor) for tensor in tensors]
    seconds = time.perf_counter() - begin
    assert not engine.link._out.query()  # the copies have not even begun
    assert seconds < 0.05
    torch.cuda.synchronize()
    assert tickets[0].get((4 * MB,), (1,), 0, torch.uint8).equal(tensors[0])


def test_pinned_bytes_are_what_the_counters_say_and_close_gives_them_back():
    engine = make(host=256 * MB)
    engine.reserve(100 * MB)
    slabs = [slab.memory for slab in engine._host.slabs]
    assert all(memory.is_pinned() for memory in slabs)
    assert sum(memory.nbytes for memory in slabs) == engine.counts.pinned_bytes == 128 * MB
    engine.close()
    assert engine.counts.pinned_bytes == 0
    assert not any(memory.is_pinned() for memory in slabs)


def test_refused_memory_leaves_no_error_behind():
    engine = make()
    memory = engine.link.pin(MB)
    with pytest.raises(RuntimeError):
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), MB, 0))
    engine.link._forget_error()
    assert float(torch.ones(4, device="cuda").sum()) == 4
    engine.link.unpin(memory)
    with pytest.raises(HostMemoryError, match="the limit is"):
        engine.reserve(2048 * MB)


def test_device_memory_goes_when_the_copies_are_out():
    engine = make(8 * MB)
    before = torch.cuda.memory_allocated()
    tickets = [engine.group(order).send(numbers(4 * MB, order)) for order in range(8)]
    assert torch.cuda.memory_allocated() - before == 8 * MB
    engine.settle()
    assert torch.cuda.memory_allocated() == before
    tickets[-1].get((4 * MB,), (1,), 0, torch.uint8)
    assert torch.cuda.memory_allocated() - before == 8 * MB  # itself, and its neighbour ahead
    tickets.clear()
    engine.settle()
    assert torch.cuda.memory_allocated() == before


def test_the_disk_tier(tmp_path):
    engine = make(0, host=0, disk_limit_bytes=64 * MB, disk_directory=str(tmp_path))
    sent = [Sent(engine.group(order), numbers(3 * MB, order)) for order in range(4)]
    assert engine.counts.disk_bytes > 0
    for each in reversed(sent):
        assert each.get().cpu().equal(each.expected)


def test_backward_of_a_real_model_many_times():
    """Autograd's own thread, retain_graph, forwards that are never backwarded; bits equal, nothing left."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)) for _ in range(6)]
    model = nn.Sequential(*layers).cuda()
    x = torch.randn(512, 256, device="cuda")
    model(x).square().sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    engine = make(MB)

    def hooks(group):
        def pack(tensor):
            if tensor.untyped_storage().data_ptr() in parameters:
                return tensor
            return group.send(tensor), (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)

        def unpack(packed):
            return packed if isinstance(packed, torch.Tensor) else packed[0].get(*packed[1])

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def forward():
        hidden = x
        for order, layer in enumerate(model):
            with hooks(engine.group(order)):
                hidden = layer(hidden)
        return hidden.square().sum()

    for step in range(60):
        loss = forward()
        if step % 5 == 4:
            continue
        for retain in (True, False) if step % 3 == 0 else (False,):
            model.zero_grad()
            loss.backward(retain_graph=retain)
            assert all(p.grad.equal(g) for p, g in zip(model.parameters(), plain, strict=True))
    del loss
    gc.collect()
    assert engine.counts.used_bytes == 0
    assert engine.counts.kept_bytes == 0


def test_calibration_takes_less_than_a_second():
    torch.cuda.synchronize()
    begin = time.perf_counter()
    rates = calibrate("cuda")
    assert time.perf_counter() - begin < 1.0
    assert min(rates.d2h_bytes_per_second, rates.h2d_bytes_per_second) > 1e9
    assert rates.d2h_both_bytes_per_second < 1.1 * rates.d2h_bytes_per_second
