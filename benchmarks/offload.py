"""Plans with everything allowed (keep, recompute, offload, chunk) at small shares of the activation peak.

    PYTHONPATH=src python benchmarks/offload.py --out benchmarks/results/offload.json
    PYTHONPATH=src CUBLAS_WORKSPACE_CONFIG=:4096:8 python benchmarks/offload.py --only gradients

One process, one run. The Llama shape of recipes.py; every method in every round, in shuffled order, timed by
CUDA events and compared within rounds. For each share: predicted and measured peak and time, the same plan
with a link that takes no time (nothing is copied; only for timing), pinned bytes against the plan's. Then a
plan that offloads in every region what fits the window, with and without a free link. Peer: torch's
save_on_cpu. Then many steps of random shapes on a small model: neither device nor pinned memory may grow.
By itself, `--only gradients`: every plan's gradients, first with the kernels and the chunked head of the
race, the distance from fp32 gradients beside the plain step's own, and the plain step against itself; then
with deterministic kernels and the head as it is, where bits must be equal. The result is written after each
part. Without accelerator it runs small shapes against the simulated link, so that it cannot rot.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gauge import peak_of
from recipes import SHAPES, Shape, build, race
from torch.autograd.graph import save_on_cpu
from workloads import CUDA, DEVICE

import remat
from remat.planner.link import host_bytes, window_bytes
from remat.planner.schedule import make_plan, with_chunks
from remat.planner.simulate import simulate
from remat.records import Action, Plan, Profile
from remat.run.link import FreeLink
from remat.run.offload import Engine

ALL = [Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD, Action.CHUNK]
EXACT = ALL[:3]
SHARES = (0.50, 0.25, 0.10, 0.07)
PIECES = 0.0005  # of the plain peak
SMALL = Shape(4, 256, 688, 4, 512, 4, 256) if CUDA else Shape(3, 32, 88, 4, 64, 2, 16)
Result = dict[str, Any]


class Out:
    """The result so far, on disk after each part."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.result: Result = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if CUDA else "cpu (simulated link)",
        }
        self.begin = time.perf_counter()

    def put(self, name: str, content: Any) -> None:
        self.result[name] = content
        self.result["seconds"] = time.perf_counter() - self.begin
        if self.path:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            Path(self.path).write_text(json.dumps(self.result, indent=1))


# ------------------------------------------------------------------------------------------------- plans


def plans_of(profile: Profile, plain_peak: int, peak: Callable[[Plan], int]) -> dict[str, Plan]:
    """One plan per share of the measured activation peak (above parameters and gradients), confirmed as `fit`
    does it: run once, and planned again by what its peak was off. As there, a little is left to the
    allocator's pieces, which do not lie alike in every step."""
    resident = profile.step.resident + profile.step.gradients
    found: dict[str, Plan] = {}
    for share in SHARES:
        budget = resident + int((share - PIECES) * plain_peak)
        begin, plan, limit = time.perf_counter(), None, budget
        for _ in range(4):
            try:
                made = remat.plan(profile, limit, allow=ALL)
            except remat.BudgetError as error:
                print(f"{share}: {error}", flush=True)
                if plan is None:
                    plan = remat.plan(profile, error.needed, allow=ALL)
                break
            room = budget - resident - peak(made)
            print(f"remat {share}: {room / plain_peak:+.4f} of the plain peak left", flush=True)
            if room >= 0 and (plan is None or made.predicted_seconds < plan.predicted_seconds):
                plan = made
            if 0 <= room < 0.002 * plain_peak:
                break
            limit = made.predicted_peak_bytes + room if room < 0 else limit + int(0.9 * room)
        found[f"remat {share}"] = plan or made
        seconds = time.perf_counter() - begin
        print(f"remat {share}: planned in {seconds:.1f} s, {_shape_of(found[f'remat {share}'])}", flush=True)
    return found


def window_plan(profile: Profile) -> Plan:
    """Every region sends as much as its own forward hides, and recomputes as little as that takes."""
    chunks = with_chunks(profile)
    profile = profile if chunks is None else chunks
    choices = []
    for call in profile.calls:
        kind = profile.kinds[call.kind]
        menu, hidden = kind.menu, profile.link.d2h_bytes_per_second * kind.forward_seconds
        most = max(entry.host_bytes for entry in menu if entry.host_bytes <= hidden)
        fastest = [i for i, e in enumerate(menu) if 0.9 * most <= e.host_bytes <= hidden]
        choices.append(min(fastest, key=lambda i: menu[i].extra_seconds, default=0) if most else 0)
    return make_plan(profile, choices, 1 << 62, strategy="window", allow=ALL)


def _shape_of(plan: Plan) -> str:
    use = simulate(plan.profile, plan.choices).link
    ways: dict[str, int] = {}
    for call in range(len(plan.choices)):
        entry = plan.entry(call)
        name = f"{entry.mode.value}{'+host' if entry.host_bytes else ''}"
        ways[name] = ways.get(name, 0) + 1
    waited = 0.0 if use is None else use.waited_seconds
    sent = host_bytes(plan.profile, plan.choices)
    return f"{ways}, head in chunks: {plan.profile.chunked}, host {sent / 1e9:.2f} GB, waits {waited:.4f} s"


class Planned:
    """Puts plans on the model, and remembers what their engines counted."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.seen: dict[str, Result] = {}

    @contextmanager
    def with_link(self, label: str, plan: Plan) -> Iterator[None]:
        with remat.apply(self.model, plan) as handle:
            yield
            row = {"fallbacks": sum(region.counts.fallbacks for region in handle.regions)}
            if handle.engine is not None:
                counts = handle.engine.counts
                row |= {
                    "planned_host_bytes": host_bytes(plan.profile, plan.choices),
                    "peak_host_bytes": counts.peak_used_bytes,
                    "pinned_bytes": counts.pinned_bytes,
                    "peak_in_flight_bytes": counts.peak_in_flight_bytes,
                    "peak_ahead_bytes": counts.peak_inbound_bytes,
                    "window_bytes": window_bytes(plan.profile, plan.choices),
                    "late_fetches": counts.late_fetches,
                    "prefetch_hits": counts.prefetch_hits,
                    "direct_hits": counts.direct_hits,
                    "kept_bytes": counts.kept_bytes,
                }
            self.seen[label] = row
        if handle.engine is not None:
            self.seen[label]["pinned_bytes_after_remove"] = handle.engine.counts.pinned_bytes

    @contextmanager
    def with_free_link(self, plan: Plan) -> Iterator[None]:
        with remat.apply(self.model, plan) as handle:
            limit = window_bytes(plan.profile, plan.choices)
            engine = Engine(DEVICE, in_flight_limit_bytes=limit, link=FreeLink(DEVICE))
            for region in handle.regions:
                region.engine = engine
            yield
            engine.close()


# ------------------------------------------------------------------------------------------------- gradients


def gradients(model: torch.nn.Module, batch: Any, context: Callable[[], Any]) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    with context():
        model(**batch).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def reference(model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """The gradients in fp32, blocks recomputed so that they fit."""
    exact = copy.deepcopy(model).float()
    exact.gradient_checkpointing_enable()
    return gradients(exact, batch, nullcontext)


def distances(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far b's gradient is from a's, relative to that, by parameter."""
    assert a.keys() == b.keys()
    return {n: float((a[n].float() - b[n].float()).norm() / a[n].float().norm().clamp_min(1e-30)) for n in a}


def compare_gradients(
    model: torch.nn.Module, batch: Any, plans: dict[str, Plan], exact: dict[str, torch.Tensor]
) -> Result:
    """Each plan and the plain step once more: against the plain step, and all against fp32, where a parameter
    whose gradient came out worse than the plain step's would show."""
    planned = Planned(model)
    plain = gradients(model, batch, nullcontext)
    error = distances(exact, plain)
    rows: Result = {"plain": {"worst_from_fp32": max(error.values())}}
    ways: dict[str, Callable[[], Any]] = {"plain, again": nullcontext}
    ways |= {label: partial(planned.with_link, label, plan) for label, plan in plans.items()}
    for label, way in ways.items():
        found = gradients(model, batch, way)
        changed, far = distances(plain, found), distances(exact, found)
        over = {n: far[n] / error[n] if error[n] else 1.0 + far[n] for n in far}
        worst, farthest = max(changed, key=changed.__getitem__), max(over, key=over.__getitem__)
        rows[label] = {
            "bit_equal": all(torch.equal(plain[n], found[n]) for n in plain),
            "worst_from_plain": (worst, changed[worst]),
            "worst_from_fp32": max(far.values()),
            "worst_error_over_plain_error": (farthest, over[farthest]),
            **({"of_plan": _shape_of(plans[label])} if label in plans else {}),
            **planned.seen.get(label, {}),
        }
        print(f"gradients, {label}: {rows[label]}", flush=True)
    return rows


# ---------------------------------------------------------------------------------------------------- race


def llama(name: str, rounds: int, out: Out) -> None:
    model, batch = build(SHAPES[name])
    with torch.no_grad():
        model(**batch)
    begin = time.perf_counter()
    profile = remat.profile(model, batch, accumulate=True, allow=ALL)
    seconds = time.perf_counter() - begin
    out.put("profile", {
        "seconds": seconds,
        "link": vars(profile.link) if profile.link else None,
        "menu": [len(kind.menu) for kind in profile.kinds],
        "window_bytes": max(e.host_bytes for kind in profile.kinds for e in kind.menu),
        "notes": profile.notes,
    })  # fmt: skip
    print(f"{name}: profile {seconds:.1f} s, {out.result['profile']}", flush=True)
    if out.path:
        profile.save(Path(out.path).with_name(f"profile-offload-{name}.json"))

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        model(**batch).loss.backward()

    step()
    plain_peak = peak_of(step)

    def peak(plan: Plan) -> int:
        with remat.apply(model, plan):
            step()
            return peak_of(step)

    plans = plans_of(profile, plain_peak, peak)
    window = window_plan(profile)
    planned = Planned(model)
    methods: dict[str, Callable[[], Any]] = {"plain": nullcontext}
    for label, plan in plans.items():
        methods[label] = partial(planned.with_link, label, plan)
        if host_bytes(plan.profile, plan.choices):
            methods[f"{label}, free link"] = partial(planned.with_free_link, plan)
    methods["window"] = partial(planned.with_link, "window", window)
    methods["window, free link"] = partial(planned.with_free_link, window)
    rows = race(methods, step, rounds, 2)
    rows |= peer(step, rows["plain"])
    resident = profile.step.resident + profile.step.gradients
    for label, row in rows.items():
        plan = plans.get(label) or (window if label == "window" else None)
        if plan is not None:
            row |= {
                "predicted_time": plan.predicted_seconds / plan.plain_seconds,
                "predicted_peak_ratio": (plan.predicted_peak_bytes - resident) / row["peak"],
                "of_plan": _shape_of(plan),
                **planned.seen.get(label, {}),
            }
            free = rows.get(f"{label}, free link")
            if free is not None:
                pairs = zip(row["time_by_round"], free["time_by_round"], strict=True)
                row["over_free_link"] = statistics.median(with_link / without for with_link, without in pairs)
        print(f"{label:<24}{row['time']:.3f}x  peak {row['share']:.3f}  {_details(row)}", flush=True)
    out.put("rows", rows)


def exactness(name: str, out: Out) -> None:
    """As raced; then with kernels that add up in the same order every time, and the head as it is, where bits
    must be equal."""
    model, batch = build(SHAPES[name])
    exact = reference(model, batch)
    profile = remat.profile(model, batch, accumulate=True, allow=ALL)
    plans = {f"remat {share}": _at_least(profile, _bytes_of(profile, share), ALL) for share in SHARES}
    out.put("gradients", compare_gradients(model, batch, plans, exact))
    torch.use_deterministic_algorithms(True)
    try:
        profile = remat.profile(model, batch, accumulate=True, allow=ALL)  # other kernels save other tensors
        small_head = with_chunks(profile) or profile  # room that the head takes is not what is compared here
        whole = replace(profile, head=None)
        plans = {}
        for share in SHARES:
            chosen = _at_least(small_head, _bytes_of(profile, share), EXACT).choices
            plans[f"remat {share}"] = make_plan(whole, chosen, 1 << 62, strategy="optimal", allow=EXACT)
        out.put("deterministic_gradients", compare_gradients(model, batch, plans, exact))
    finally:
        torch.use_deterministic_algorithms(False)


def _bytes_of(profile: Profile, share: float) -> int:
    resident = profile.step.resident + profile.step.gradients
    return resident + int(share * (remat.plan(profile, activations=1.0).plain_peak_bytes - resident))


def _at_least(profile: Profile, budget_bytes: int, allow: list[Action]) -> Plan:
    """The plan at this budget, or at the least there is."""
    try:
        return remat.plan(profile, budget_bytes, allow=allow)
    except remat.BudgetError as error:
        return remat.plan(profile, error.needed, allow=allow)


def peer(step: Callable[[], None], plain: Result) -> Result:
    """It takes six times as long: once is enough."""
    with save_on_cpu(pin_memory=CUDA):
        step()
        peak = peak_of(step)
        begin = time.perf_counter()
        step()
        if CUDA:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    share = peak / plain["peak"]
    row = {"seconds": seconds, "time": seconds / plain["seconds"], "peak": peak, "share": share}
    return {"save_on_cpu": row}


def _details(row: Result) -> str:
    if "predicted_time" not in row:
        return ""
    over = f", {row['over_free_link']:.4f} of free link" if "over_free_link" in row else ""
    host = ""
    if "pinned_bytes" in row:
        host = (
            f", host {row['peak_host_bytes'] / 1e9:.3f} GB of {row['planned_host_bytes'] / 1e9:.3f} planned, "
            f"pinned {row['pinned_bytes'] / 1e9:.3f}, late {row['late_fetches']}"
        )
    return (
        f"predicted {row['predicted_time']:.3f}x, predicted/measured peak {row['predicted_peak_ratio']:.4f}"
        f"{over}{host}, fallbacks {row['fallbacks']}"
    )


# --------------------------------------------------------------------------------------------------- leaks


def leaks(steps: int, out: Out) -> None:
    """Steps of random shapes, one plan per shape, all on one model in turn: nothing may pile up."""
    model, _ = build(SMALL)
    order = random.Random(0)
    shapes = [(batch, SMALL.sequence // part) for batch in (1, SMALL.batch) for part in (1, 2, 4)]
    plans, batches = [], []
    for rows, length in shapes:
        ids = torch.randint(0, SMALL.vocab, (rows, length), device=DEVICE)
        batches.append({"input_ids": ids, "labels": ids})
    for index in (0, len(batches) - 1):  # the others recompute
        plans.append((index, window_plan(remat.profile(model, batches[index], allow=EXACT))))
    levels, done = [], 0
    while done < steps:
        planned_for, plan = order.choice(plans)
        with remat.apply(model, plan) as handle:
            for _ in range(min(50, steps - done)):
                index = planned_for if order.random() < 0.6 else order.randrange(len(batches))
                loss = model(**batches[index]).loss
                if order.random() < 0.9:  # some forwards are never backwarded
                    loss.backward()
                del loss
                model.zero_grad(set_to_none=True)
                done += 1
            used = 0 if handle.engine is None else handle.engine.counts.used_bytes
        pinned = 0 if handle.engine is None else handle.engine.counts.pinned_bytes
        if done % 200 == 0 or done >= steps:
            gc.collect()
            levels.append((done, torch.cuda.memory_allocated() if CUDA else 0, used, pinned))
    out.put("leaks", {
        "steps": done,
        "columns": ["step", "allocated_bytes", "host_bytes_in_use", "pinned_bytes_after_remove"],
        "levels": levels,
        "grew_bytes": levels[-1][1] - levels[min(1, len(levels) - 1)][1],
    })  # fmt: skip
    print(f"leaks: {done} steps, {levels}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2000 if CUDA else 60)
    parser.add_argument("--shape", default="llama-1.3b" if CUDA else "tiny", choices=list(SHAPES))
    parser.add_argument("--only", default="llama,leaks", help="of llama, leaks, gradients")
    options = parser.parse_args()
    out = Out(options.out)
    if "llama" in options.only:
        llama(options.shape, options.rounds, out)
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
    if "gradients" in options.only:
        exactness(options.shape, out)
    if "leaks" in options.only:
        leaks(options.steps, out)
    print(f"done in {out.result['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
