"""What the commands print: tables for a terminal, wide enough to be read in a file, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from remat.devices import DEVICES, Device
from remat.planner.strategies import Row
from remat.records import Plan
from remat.show.decisions import RegionRow, TensorRow, grouped, region_rows, tensor_rows
from remat.units import format_bytes, format_seconds

__all__ = ["compare_table", "devices_table", "diagnosis_text", "explain_tables", "out", "race_table"]

_WIDE = 150  # columns, where the output is not a terminal
_COLOURS = {"keep": "green", "recompute": "yellow", "offload": "cyan", "full": "red"}


def out() -> Console:
    """Standard output. Colours only on a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDE)
    return console


def explain_tables(plan: Plan, every: bool = False) -> RenderableType:
    """Each distinct region and its tensors; with `every`, each call of each region has a row of its own."""
    rows = region_rows(plan)
    groups = [(row, 1) for row in rows] if every else grouped(rows)
    parts: list[RenderableType] = [_regions(groups, hosted=any(row.offloaded_bytes for row in rows))]
    for row, count in grouped(rows):
        kind = plan.profile.kinds[row.kind]
        tensors = tensor_rows(kind, plan.entry(row.index))
        more = f" and {count - 1} more like it" if count > 1 else ""
        title = f"{row.label}{more} · {row.way}"
        if tensors:
            parts.append(_tensors(title, tensors))
        else:
            parts.append(Text(f"\n{title}: its tensors are not known ({kind.note or 'not captured'})"))
    return Group(*parts)


def _regions(groups: Iterable[tuple[RegionRow, int]], hosted: bool) -> Table:
    titles = ["held", "recomputed", *(["on the host"] if hosted else []), "of", "extra time"]
    table = _table("Regions", ["region", "way"], titles, ["reason"])
    for row, count in groups:
        name = row.label if count == 1 else f"{row.label}  (x {count})"
        sizes = [row.kept_bytes, row.recomputed_bytes, *([row.offloaded_bytes] if hosted else [])]
        cells = [format_bytes(size) for size in (*sizes, row.saved_bytes)]
        table.add_row(
            escape(name), _coloured(row.way), *cells, format_seconds(row.extra_seconds), escape(row.reason)
        )
    return table


def _tensors(title: str, rows: Sequence[TensorRow]) -> Table:
    table = _table(title, ["tensor", "shape", "action"], ["bytes", "time"], ["source", "reason"])
    for row in rows:
        shape = f"{row.dtype}{list(row.shape)}"
        table.add_row(
            escape(row.operation),
            escape(shape),
            _coloured(row.action),
            format_bytes(row.nbytes),
            format_seconds(row.seconds) if row.seconds else "",
            escape(row.source),
            escape(row.reason),
        )
    return table


def compare_table(title: str, plan: Plan, rows: Sequence[Row]) -> Table:
    """The optimum beside what people do by hand."""
    budget = format_bytes(plan.budget_bytes)
    table = _table(
        f"{title}, budget {budget}", ["strategy"], ["peak", "time", "slowdown", "recomputed"], ["fits"]
    )
    for row in rows:
        slowdown = row.seconds / plan.plain_seconds if plan.plain_seconds else 1.0
        table.add_row(
            escape(row.strategy),
            format_bytes(row.peak_bytes),
            format_seconds(row.seconds),
            f"{slowdown:.3f}x",
            f"{row.recomputed} of {len(plan.choices)}",
            Text("yes", "green") if row.feasible else Text("no", "red"),
            style="bold" if row.strategy == "optimal" else "",
        )
    return table


def devices_table(devices: Sequence[Device] = tuple(DEVICES.values())) -> Table:
    titles = ["memory", "bandwidth", "half", "single", "link"]
    table = _table("Devices to plan for", ["name"], titles, ["where the numbers come from"])
    for found in devices:
        table.add_row(
            found.name,
            format_bytes(found.total_bytes),
            f"{found.bytes_per_second / 1e12:.2f} TB/s",
            f"{found.half_flops_per_second / 1e12:.0f} TFLOP/s",
            f"{found.single_flops_per_second / 1e12:.0f} TFLOP/s",
            f"{found.link_bytes_per_second / 1e9:.0f} GB/s",
            escape(found.note),
        )
    return table


def race_table(laps: Sequence[Any]) -> Table:
    """Of remat.race.Lap: every way beside the plain step."""
    titles = ["peak", "predicted", "activations", "time per step", "prepared in"]
    table = _table("One training step", ["way"], titles, ["gradients bit-equal"])
    plain = laps[0]
    for lap in laps:
        if lap.failed:
            table.add_row(escape(lap.way), Text(lap.failed, "red"), "", "", "", "", "")
            continue
        share = f" ({lap.activation_bytes / plain.activation_bytes:.2f})" if plain.activation_bytes else ""
        ratio = f" ({lap.seconds / plain.seconds:.2f})" if plain.seconds else ""
        predicted = lap.predicted_peak_bytes
        table.add_row(
            escape(lap.way),
            format_bytes(lap.peak_bytes),
            "-" if predicted is None else format_bytes(predicted),
            format_bytes(lap.activation_bytes) + share,
            format_seconds(lap.seconds) + ratio,
            format_seconds(lap.prepare_seconds) if lap.prepare_seconds else "-",
            {None: "-", True: "yes", False: "no"}[lap.bitwise],
        )
    return table


def diagnosis_text(found: Any) -> RenderableType:
    """Of remat.doctor.Diagnosis."""
    colours = {"problem": "red", "warning": "yellow", "note": "blue"}
    lines = [Text.assemble(("gradients  ", "bold"), str(found.verification or "not verified")), Text()]
    for finding in found.findings:
        lines.append(
            Text.assemble((finding.level, f"bold {colours[finding.level]}"), "  ", (finding.title, "bold"))
        )
        lines.append(Text(f"  {finding.what}"))
        if finding.remedy:
            lines.append(Text.assemble(("  -> ", "dim"), finding.remedy))
    lines += [Text(), Text(f"nothing found: {', '.join(found.passed)}", "dim")]
    lines += [Text(f"not checked: {line}", "dim") for line in found.skipped]
    return Group(*lines)


def _table(title: str, left: Iterable[str], right: Iterable[str], text: Iterable[str]) -> Table:
    table = Table(
        title=escape(title),
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=box.SIMPLE_HEAD,
    )
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    for name in text:
        table.add_column(name, overflow="fold")
    return table


def _coloured(action: str) -> Text:
    return Text(action, _COLOURS.get(action, "yellow"))
