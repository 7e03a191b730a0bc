"""The offload engine's link: its rates, what a call costs the host, and how many bytes hide behind compute.

    PYTHONPATH=src python benchmarks/offload_link.py --out benchmarks/results/offload_link.json

A step is a row of blocks, forward then backward. In forward each block multiplies matrices for some
milliseconds and sends k bytes; in backward, which takes twice as long, it gets them back first. The ratio is
to the same step with nothing sent. On a machine without accelerator the same step runs on a simulated link in
virtual time, so that it cannot rot.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

import torch

from remat.run.link import LinkRates, calibrate
from remat.run.offload import Engine, Ticket
from remat.run.simulated import SimulatedLink

MB = 10**6
CUDA = torch.cuda.is_available()


@dataclass(frozen=True)
class Step:
    blocks: int
    block_seconds: float  # of one block's forward
    pieces: int  # storages per block
    in_flight_bytes: int


class Device:
    """Keeps the device busy and tells the time: CUDA, or the virtual clock of a simulated link."""

    def __init__(self) -> None:
        self.simulated = None if CUDA else SimulatedLink(d2h_bytes_per_second=55e9, h2d_bytes_per_second=55e9)
        if CUDA:
            self.matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
            self.product = torch.empty_like(self.matrix)
            self._multiply(50)
            self.each = statistics.median(self.seconds(lambda: self._multiply(50)) for _ in range(5)) / 50

    def engine(self, step: Step, host_bytes: int) -> Engine:
        device = "cuda" if CUDA else "cpu"
        slack = 64 * 2**20 if CUDA else 2**20
        engine = Engine(
            device,
            in_flight_limit_bytes=step.in_flight_bytes,
            host_limit_bytes=host_bytes + slack,
            slab_bytes=slack,
            link=self.simulated,
        )
        if host_bytes:
            engine.reserve(host_bytes)
        return engine

    def tensor(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda" if CUDA else "cpu")

    def compute(self, seconds: float) -> None:
        if self.simulated is not None:
            self.simulated.compute(seconds)
        else:
            self._multiply(max(1, round(seconds / self.each)))

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self.matrix, self.matrix, out=self.product)

    def seconds(self, run: Callable[[], None]) -> float:
        if self.simulated is not None:
            begin = self.simulated.now
            run()
            return self.simulated.now - begin
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3


def run_step(device: Device, engine: Engine, step: Step, nbytes: int) -> None:
    sent: list[list[Ticket]] = []
    piece = nbytes // step.pieces
    for order in range(step.blocks):
        device.compute(step.block_seconds)
        last = order == step.blocks - 1  # what the last block saves is needed at once
        if nbytes and not last:
            group = engine.group(order)
            sent.append([group.send(device.tensor(piece)) for _ in range(step.pieces)])
        else:
            sent.append([])
    for tickets in reversed(sent):
        while tickets:
            tickets.pop().get((piece,), (1,), 0, torch.uint8)
        device.compute(2 * step.block_seconds)


def hidden(device: Device, step: Step, nbytes: int, runs: int) -> dict[str, Any]:
    """Steps with and without offload in turn, so that clocks and temperature are the same for both."""
    begin = time.perf_counter()
    engine = device.engine(step, nbytes * (step.blocks - 1))
    reserve_seconds = time.perf_counter() - begin
    for _ in range(2):
        run_step(device, engine, step, nbytes)
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if CUDA else 0
    times: dict[int, list[float]] = {0: [], nbytes: []}
    for _ in range(runs):
        for size in times:
            times[size].append(device.seconds(lambda size=size: run_step(device, engine, step, size)))
    seconds, plain = statistics.median(times[nbytes]), statistics.median(times[0])
    row = {
        "bytes_per_block": nbytes,
        "seconds": seconds,
        "plain_seconds": plain,
        "time": seconds / plain,
        "link_bytes_per_second": 2 * nbytes * (step.blocks - 1) / seconds,
        "peak_device_bytes": torch.cuda.max_memory_allocated() - before if CUDA else None,
        "reserve_seconds": reserve_seconds,
        "counts": asdict(engine.counts),
    }
    engine.close()
    return row


def host_seconds(device: Device, calls: int = 400) -> dict[str, float]:
    """What one send and one get cost the host thread: small tensors, so that the link is never the limit."""
    engine = device.engine(Step(1, 0.0, 1, 64 * 1024), 0)
    engine.reserve(calls * 1024)
    times: dict[str, list[float]] = {"send": [], "get": []}
    for _ in range(5):
        tensors = [device.tensor(1024) for _ in range(calls)]
        begin = time.perf_counter()
        tickets = [engine.group(number // 8).send(tensor) for number, tensor in enumerate(tensors)]
        times["send"].append((time.perf_counter() - begin) / calls)
        begin = time.perf_counter()
        while tickets:
            tickets.pop().get((1024,), (1,), 0, torch.uint8)
        times["get"].append((time.perf_counter() - begin) / calls)
    engine.close()
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--runs", type=int, default=5 if CUDA else 1)
    options = parser.parse_args()

    device = Device()
    rates: LinkRates = calibrate("cuda") if device.simulated is None else device.simulated.calibrate(MB)
    for name, rate in asdict(rates).items():
        print(f"{name:<30}{rate / 1e9:8.1f} GB/s")
    calls = host_seconds(device)
    print("host: " + ", ".join(f"{name} {seconds * 1e6:.0f} us" for name, seconds in calls.items()))

    step = Step(24, 5e-3, 4, 512 * MB) if CUDA else Step(6, 5e-5, 4, 4 * MB)
    sizes = [64, 128, 192, 256, 320, 512] if CUDA else [1, 2, 4]
    rows = []
    for size in sizes:
        rows.append(hidden(device, step, size * MB, options.runs))
        window = rates.d2h_both_bytes_per_second * step.block_seconds
        print(
            f"{size:>5} MB per block ({size * MB / window:4.0%} of the window): "
            f"{rows[-1]['time']:.3f}x, link {rows[-1]['link_bytes_per_second'] / 1e9:.1f} GB/s, "
            f"reserved in {rows[-1]['reserve_seconds']:.2f} s",
            flush=True,
        )
    result = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if CUDA else "cpu, simulated link",
        "rates": asdict(rates),
        "host_seconds_per_call": calls,
        "step": asdict(step),
        "rows": rows,
    }
    if options.out:
        with open(options.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
