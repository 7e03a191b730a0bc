"""The host's time that a plan of recipes adds to a training step, where the host sets the pace.

    PYTHONPATH=src python benchmarks/host_time.py

On CUDA the launch-bound shape of recipes.py; elsewhere a tiny one of as many layers, whose operations take no
longer than dispatching them. Whole steps, in turn: plain, planned, planned without the spot check; added are
differences of medians. Then what is remat's own, timed by itself, so that a busy machine disturbs it less:
what each region does around its forward, what autograd calls in backward (the operations that rebuild
included), and the reading of the spot check when backward ends; each the tenth percentile over all steps,
summed over a step.
"""

from __future__ import annotations

import argparse
import collections
import random
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from gauge import synchronize
from recipes import ALONE, SHAPES, Shape, build
from workloads import CUDA

import remat
from remat.handle import Handle
from remat.run import spotcheck
from remat.run.wrap import bypass

SHAPE = SHAPES["launch-bound"] if CUDA else Shape(12, 64, 176, 4, 128, 4, 16)
now = time.perf_counter if CUDA else time.thread_time  # other threads of a busy machine count for nothing
Times = dict[Any, list[float]]


def whole_steps(step: Callable[[], None], handle: Handle, rounds: int) -> dict[str, float]:
    """Median milliseconds of each kind, until the device is done."""
    times: dict[str, list[float]] = {"plain": [], "checked": [], "unchecked": []}
    order = random.Random(0)
    for _ in range(rounds):
        for kind in order.sample(list(times), len(times)):
            for region in handle.regions:
                region.check = kind == "checked"
            with bypass() if kind == "plain" else nullcontext():
                step()
                synchronize()
                begin = now()
                step()
                synchronize()
                times[kind].append((now() - begin) * 1e3)
    return {kind: statistics.median(found) for kind, found in times.items()}


def own_parts(
    step: Callable[[], None], model: torch.nn.Module, handle: Handle, rounds: int
) -> dict[str, float]:
    """Milliseconds per step of what remat itself runs, by part."""
    times: Times = collections.defaultdict(list)
    for region in handle.regions:
        wrapper = model.get_submodule(region.name).__dict__["forward"]
        wrapper.around = _around(wrapper.around, times["around forward", region.name])
        for variant in region.variants.values():
            if variant.program is None or variant.program.hook.__globals__.get("timed"):
                continue
            names = variant.program.hook.__globals__
            names["timed"] = True
            for place in range(len(variant.program.slots)):
                key = ("in backward", (id(variant.program), place))
                names[f"u{place}"] = _timed(names[f"u{place}"], times[key])
    read = spotcheck._read
    spotcheck._read = _timed(read, times["read", 0])
    try:
        for _ in range(5):
            step()
        for found in times.values():
            found.clear()
        for _ in range(rounds):
            step()
    finally:
        spotcheck._read = read
    parts: dict[str, float] = collections.defaultdict(float)
    for (part, _), found in times.items():
        if found:
            parts[part] += sorted(found)[len(found) // 10] * len(found) / rounds * 1e3
    return dict(parts)


def _timed(function: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        begin = time.perf_counter()
        result = function(*args)
        into.append(time.perf_counter() - begin)
        return result

    return timed


def _around(around: Any, into: list[float]) -> Any:
    """The same region; its time without that of the module's own forward."""

    def timed(module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        inner: list[float] = []
        begin = time.perf_counter()

        def own(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = forward(*args, **kwargs)
            inner.append(time.perf_counter() - start)
            return result

        result = around(module, own, args, kwargs)
        into.append(time.perf_counter() - begin - sum(inner))
        return result

    timed.owner, timed.status = around.owner, around.status  # type: ignore[attr-defined]
    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--share", type=float, default=0.6, help="of the activation peak")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    model, batch = build(SHAPE)
    model.to(torch.bfloat16)
    profile = remat.profile(model, batch, accumulate=True, allow=ALONE)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plan = remat.plan(profile, activations=options.share, allow=ALONE)

    def step() -> None:
        model(**batch).loss.backward()

    with remat.apply(model, plan) as handle:
        programs = [v.program for r in handle.regions for v in r.variants.values() if v.program]
        slots = sum(len(program.slots) for program in programs)
        print(f"{len(handle.regions)} regions, {slots} dropped tensors", flush=True)
        for _ in range(3):
            step()
        found = whole_steps(step, handle, options.rounds)
        for kind in ("checked", "unchecked"):
            added, ratio = found[kind] - found["plain"], found[kind] / found["plain"]
            print(f"{kind}: {found[kind]:.2f} ms, added {added:.2f} ms, {ratio:.3f} of plain", flush=True)
        assert not any(region.counts.fallbacks for region in handle.regions)
    for check in (True, False):
        with remat.apply(model, plan, check=check) as handle:
            parts = own_parts(step, model, handle, options.rounds)
            text = ", ".join(f"{part} {ms:.2f}" for part, ms in parts.items())
            kind = "checked" if check else "unchecked"
            print(f"{kind}: {text}; in all {sum(parts.values()):.2f} ms per step")


if __name__ == "__main__":
    main()
