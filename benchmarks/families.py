"""Fit every family of benchmarks/zoo.py at half of its activation peak; write docs/families.md.

    PYTHONPATH=src python benchmarks/families.py                     # all of them, 2 at a time
    PYTHONPATH=src python benchmarks/families.py llama t5 --share 0.4
    PYTHONPATH=src python benchmarks/families.py --docs docs/families.md

For each family the untouched model and the fitted one train three steps from equal weights, batches and
seeds: losses, every gradient, buffers and random state must be equal to the bit, and the first step's counted
peak must be within the budget. Where half is out of reach `fit` must say what is needed, and that must do.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # virtual machines may report AMX in vain

import torch
from torch import Tensor
from zoo import FAMILIES, Built, Family, loss_of

import remat
from remat.check.live import LiveBytes
from remat.check.step import tensors_of

SHARE = 0.5
SEED, STEPS = 7, 3
TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Row:
    """What one family did. `verdict`: "fits", "out of reach" (then `needed_share` was met), or "FAILED"."""

    family: str
    library: str
    group: str
    verdict: str
    share: float = SHARE  # of the plain activation peak that was asked for
    needed_share: float = 0.0  # where that is out of reach: the least share, which was met
    budget_bytes: int = 0
    peak_bytes: int = 0
    regions: int = 0
    planned: int = 0
    recomputed_whole: int = 0
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    problem: str = ""


@dataclass
class Record:
    """Three training steps: what came out, and the first step's peak."""

    values: dict[str, Tensor] = field(default_factory=dict)
    peak_bytes: int = 0


def train(built: Built) -> Record:
    record = Record()
    model = built.model
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    torch.manual_seed(SEED)
    for number in range(STEPS):
        optimizer.zero_grad()
        if number == 0:
            with LiveBytes() as live:
                live.watch([*model.parameters(), *model.buffers(), *tensors_of(built.batch)])
                live.reset_peak()
                loss = built.loss()
                loss.backward()
                record.peak_bytes = live.peak_bytes
        else:
            loss = built.loss()
            loss.backward()
        record.values[f"loss of step {number}"] = loss.detach()
        del loss
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                record.values[f"gradient of {name} in step {number}"] = parameter.grad.clone()
        for name, buffer in model.named_buffers():
            record.values[f"buffer {name} after step {number}"] = buffer.clone()
        record.values[f"random numbers after step {number}"] = torch.rand(3)
        optimizer.step()
    return record


def difference(expected: dict[str, Tensor], found: dict[str, Tensor]) -> str:
    """The first difference, or nothing."""
    if expected.keys() != found.keys():
        return f"only on one side: {sorted(expected.keys() ^ found.keys())[:3]}"
    for name, value in expected.items():
        if not torch.equal(value.nan_to_num(123.0), found[name].nan_to_num(123.0)):
            return f"{name} differs"
    return ""


def examine(family: Family, share: float = SHARE) -> Row:
    """Fit one family and judge it."""
    start = time.perf_counter()
    row: dict[str, Any] = {
        "family": family.name,
        "library": family.library,
        "group": family.group,
        "share": share,
    }
    plain = family.build()
    resident = _bytes(plain)
    expected = train(plain)
    built = family.build()
    needed = 0.0
    try:
        handle = remat.fit(built.model, built.batch, activations=share, loss=loss_of)
    except remat.BudgetError as error:
        needed = (error.needed - resident) / (expected.peak_bytes - resident)
        handle = remat.fit(built.model, built.batch, error.needed, loss=loss_of)
    if handle.verification is None or not handle.verification.ok:
        raise AssertionError(f"fit returned an unverified plan: {handle.verification}")
    found = train(built)
    problem = difference(expected.values, found.values)
    budget = handle.plan.budget_bytes
    if found.peak_bytes > budget:
        problem = problem or f"peak {found.peak_bytes} is over the budget {budget}"
    rows = handle.status().rows
    fell = sorted({f"{r.name}: {r.why}" for r in rows if r.fallbacks})
    known = [note for note in handle.plan.profile.notes if not note.startswith("compile=")]
    notes = tuple(dict.fromkeys((*known, *fell)))
    handle.remove()
    left = [name for name, module in built.model.named_modules() if "forward" in module.__dict__]
    if left:
        problem = problem or f"remove() left something on {left[0]}"
    return Row(
        **row,
        verdict="FAILED" if problem else "out of reach" if needed else "fits",
        needed_share=needed,
        budget_bytes=budget,
        peak_bytes=found.peak_bytes,
        regions=len(handle.plan.profile.calls),
        planned=len(rows),
        recomputed_whole=sum(r.mode == "full" for r in rows),
        notes=notes,
        seconds=time.perf_counter() - start,
        problem=problem,
    )


def _bytes(built: Built) -> int:
    found = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in (*built.model.parameters(), *built.model.buffers(), *tensors_of(built.batch))
    }
    return sum(found.values())


# --------------------------------------------------------------------------------------------- many of them


def _child(name: str, share: float, send: Any) -> None:
    family = FAMILIES[name]
    try:
        row = examine(family, share)
    except BaseException as error:
        where = "".join(traceback.format_exception(error))
        row = Row(name, family.library, family.group, "FAILED", share, problem=f"{error!r}\n{where}")
    send.send(asdict(row))


def sweep(names: Iterable[str], share: float, workers: int) -> Iterator[Row]:
    """One process per family, forked from this one: a crash or a hang is that family's failure."""
    fork = multiprocessing.get_context("fork")

    def one(name: str) -> Row:
        receive, send = fork.Pipe(duplex=False)
        process = fork.Process(target=_child, args=(name, share, send))
        process.start()
        send.close()
        try:
            if receive.poll(TIMEOUT_SECONDS):
                given = receive.recv()
                return read(given)
            problem = f"no answer within {TIMEOUT_SECONDS} s"
        except EOFError:
            problem = "the process died"
        finally:
            if process.is_alive():
                process.join(5)
                process.kill()
        family = FAMILIES[name]
        return Row(name, family.library, family.group, "FAILED", share, problem=problem)

    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(one, names)


def page(rows: list[Row]) -> str:
    """docs/families.md."""
    fits = [row for row in rows if row.verdict == "fits"]
    reach = [row for row in rows if row.verdict == "out of reach"]
    count = {
        library: sum(row.library == library for row in rows) for library in ("transformers", "diffusers")
    }
    text = f"""# Model families

{count["transformers"]} model families of transformers and {count["diffusers"]} of diffusers, tiny and with
random weights, each fitted with `remat.fit(model, batch, activations={rows[0].share})` on a CPU
(torch {torch.__version__.split("+")[0]}, {versions()}).
For each, three training steps of the fitted model were compared with three of the untouched one: losses,
every gradient, buffers and random state are equal to the bit, and the counted peak of a step is within the
budget.

- {len(fits)} run within half of their activation peak.
- {len(reach)} cannot: `fit` raises `BudgetError` and names what is needed. Given that much, they run, with
  the same comparison. These are small stacks whose gradients, inputs or largest block alone take more than
  half.
- {len(rows) - len(fits) - len(reach)} failed.

A family is a `model_type` of transformers or a model class of diffusers. `share` is what was met, of the
plain step's activation peak; `peak/budget` the counted peak over the budget; `regions` those planned (not
simply kept) of all calls of repeated blocks. Caches are off, as in every trainer. Notes say where a region
has no recipe, or fell back, and why.

Generated by `make families` (`benchmarks/families.py`), {len(rows)} of the {len(FAMILIES)} models in
`benchmarks/zoo.py`.
"""
    lines = text.splitlines()
    groups = dict.fromkeys((row.library, row.group) for row in rows)
    for library, group in groups:
        lines += ["", f"## {library}: {group}", "", "| family | share | peak/budget | regions | notes |"]
        lines += ["| --- | ---: | ---: | ---: | --- |"]
        lines += [_line(row) for row in rows if (row.library, row.group) == (library, group)]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    figures = "- | - | -"
    if row.budget_bytes:
        share, used = row.needed_share or row.share, row.peak_bytes / row.budget_bytes
        figures = f"{share:.2f} | {used:.3f} | {row.planned}/{row.regions}"
    return f"| {row.family} | {figures} | {remarks(row)} |"


def remarks(row: Row) -> str:
    found = [row.problem.splitlines()[0]] if row.problem else []
    if row.recomputed_whole:
        found.append(f"{row.recomputed_whole} recompute as a whole")
    return "; ".join([*found, *row.notes]).replace("|", "/")


def versions() -> str:
    import diffusers
    import transformers

    return f"transformers {transformers.__version__}, diffusers {diffusers.__version__}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="families (all by default)")
    parser.add_argument("--share", type=float, default=SHARE)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--out", type=Path, help="write the rows as JSON here; those already there are not run again"
    )
    parser.add_argument("--docs", type=Path, help="write the rows as a page here")
    arguments = parser.parse_args()
    _quiet()
    rows: dict[str, Row] = {}
    if arguments.out and arguments.out.exists():
        rows = {row["family"]: read(row) for row in json.loads(arguments.out.read_text())}
    names = [name for name in arguments.names or FAMILIES if name not in rows]
    for number, row in enumerate(sweep(names, arguments.share, arguments.workers), 1):
        rows[row.family] = row
        used = f"{row.peak_bytes / row.budget_bytes:.3f}" if row.budget_bytes else "-"
        print(
            f"{number:3}/{len(names)} {row.family:28} {row.verdict:12} needs {row.needed_share:.2f} "
            f"peak/budget {used} {row.planned}/{row.regions} {row.seconds:.1f} s {row.problem} "
            f"{'; '.join(row.notes)}",
            flush=True,
        )
        if arguments.out:
            arguments.out.write_text(json.dumps([asdict(row) for row in rows.values()], indent=1) + "\n")
    if arguments.docs:
        arguments.docs.write_text(page([rows[name] for name in FAMILIES if name in rows]))
    return 1 if any(row.verdict == "FAILED" for row in rows.values()) else 0


def read(row: dict[str, Any]) -> Row:
    return Row(**{**row, "notes": tuple(row["notes"])})


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    import transformers

    transformers.logging.set_verbosity_error()


if __name__ == "__main__":
    sys.exit(main())
