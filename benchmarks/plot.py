"""The frontier from recorded results, drawn and tabulated: time against activation peak, by workload.

    python benchmarks/plot.py                 pictures and table of benchmarks/results/frontier*.json
    python benchmarks/plot.py --table         the table alone, which needs nothing but Python
    python benchmarks/plot.py out/mine.json   of another file

Pictures are drawn by scripts/pictures.py, in light and dark, to docs/pictures; the table goes to
benchmarks/results/frontier.md, which docs/benchmarks.md shows. No figure is typed in here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from verdict import TARGETS, Row, Target, lines_of, share_of, time_of, verdict

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"
TABLE = RESULTS / "frontier.md"
WIDTH, HEIGHT = 860, 520
MARGINS = (70, 60, 132, 60)  # left, right, top, bottom
HIGHEST = 1.05  # of the axis of peaks
SLOWEST = 1.6  # times the plain step: slower ones are named, not drawn
Option = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One workload of one run. `name` is that of its pictures."""

    name: str
    workload: str
    about: str
    environment: dict[str, Any]
    rows: tuple[Row, ...]
    measured_base: bool
    targets: tuple[Target, ...] = ()


def panels_of(files: Iterable[Path]) -> list[Panel]:
    """The workloads of all files. Two runs of a workload are two panels: their times say nothing about each
    other."""
    found: list[Panel] = []
    for path in files:
        for workload, result in json.loads(path.read_text(encoding="utf-8"))["workloads"].items():
            if not result["rows"]:
                continue
            name = path.stem if path.stem.endswith(workload) else f"{path.stem}-{workload}"
            rows = tuple(Row.from_json(row) for row in result["rows"])
            base = bool((result.get("base") or {}).get("measured", False))
            targets = TARGETS.get(workload, ()) if result.get("size") == "full" else ()
            found.append(Panel(name, workload, result["about"], result["environment"], rows, base, targets))
    return found


# --------------------------------------------------------------------------------------------- pictures


@dataclass(frozen=True)
class Colours:
    paper: str
    ink: str
    quiet: str
    line: str
    eager: str
    compiled: str
    peers: tuple[str, ...]


SCHEMES = {
    "light": Colours("#ffffff", "#10182b", "#5a6478", "#e2e6ec", "#2f5bea", "#0e8a6d",
                     ("#8b95a8", "#d98a1f", "#b0529e", "#7a6a55", "#c2514a", "#a08bd0")),
    "dark": Colours("#11151f", "#e8ecf4", "#a3adc0", "#2a3140", "#7f9cff", "#4fd1ac",
                    ("#8b95a8", "#f0b45c", "#d78cc8", "#b8a68c", "#ec8a83", "#c3b4ea")),
}  # fmt: skip
PEERS = {  # series by group of methods
    "torch.utils.checkpoint": ("checkpoint",),
    "selective checkpointing": ("selective",),
    "chunked loss": ("chunked-loss",),
    "offload": ("offload", "offload-all"),
    "torch.compile, block by block": ("regional",),
    "torch.compile, whole model": ("whole",),
}


def option_of(panel: Panel, colours: Colours) -> Option:
    """ECharts' option: remat as lines, peers as labelled points."""
    drawn = [row for row in panel.rows if row.measured and time_of(row) <= SLOWEST]
    left_out = [row for row in panel.rows if row.measured and time_of(row) > SLOWEST]
    times = [*(time_of(row) for row in drawn), 1.0]
    frame = Frame(_floor(min(times) - 0.03), _floor(max(times)) + 0.1)
    lines = {
        ("remat", colours.eager): _best(row for row in drawn if row.ours and not row.compiled),
        ("remat, compiled", colours.compiled): _best(row for row in drawn if row.ours and row.compiled),
    }
    series = [_ours(name, colour, rows, colours) for (name, colour), rows in lines.items()]
    peers = [row for row in drawn if not row.ours and row.group != "plain"]
    places = frame.places(peers, [row for rows in lines.values() for row in rows])
    for (name, groups), colour in zip(PEERS.items(), colours.peers, strict=True):
        rows = [row for row in peers if row.group in groups]
        series.append(_peers(name, colour, rows, places, colours))
    series = [each for each in series if each["data"]]
    plain = {"value": [1.0, 1.0], "label": _label("plain", "right", colours)}
    series.append(
        {"name": "plain", "type": "scatter", "color": colours.ink, "symbolSize": 9, "data": [plain]}
    )
    small = {"color": colours.quiet, "fontSize": 13}
    axis = {"type": "value", "axisLine": {"show": False}, "axisTick": {"show": False},
            "nameLocation": "middle", "nameTextStyle": small,
            "splitLine": {"lineStyle": {"color": colours.line}}, "axisLabel": small}  # fmt: skip
    where = panel.environment
    note = "".join(f"; {row.label} {time_of(row):.1f}x at {row.share:.2f} is not drawn" for row in left_out)
    base = "" if panel.measured_base else "; the plain step was not measured, and is predicted"
    return {
        "backgroundColor": colours.paper, "animation": False,
        "textStyle": {"fontFamily": "DejaVu Sans, Segoe UI, Helvetica, Arial, sans-serif"},
        "title": {"text": panel.about, "left": 20, "top": 12,
                  "textStyle": {"color": colours.ink, "fontSize": 17},
                  "subtext": f"{where['device']}, torch {where['torch'].split('+')[0]}, {where['date'][:10]}"
                             f"{base}{note}",
                  "subtextStyle": {**small, "width": WIDTH - 40, "overflow": "break"}},
        "legend": {"top": 76, "left": 16, "itemWidth": 14, "itemHeight": 10,
                   "textStyle": {"fontSize": 12, "color": colours.ink},
                   "data": [each["name"] for each in series[:-1]]},
        "grid": dict(zip(("left", "right", "top", "bottom"), MARGINS, strict=True)),
        "xAxis": {**axis, "min": 0, "max": HIGHEST, "interval": 0.2, "nameGap": 34,
                  "name": "activation peak, plain step = 1"},
        "yAxis": {**axis, "min": frame.low, "max": frame.high, "nameGap": 46,
                  "name": "time per step, plain = 1"},
        "series": series,
    }  # fmt: skip


@dataclass(frozen=True)
class Frame:
    """Where points and labels lie on the picture, in pixels: labels of different series do not know of each
    other in ECharts."""

    low: float
    high: float

    def at(self, row: Row) -> tuple[float, float]:
        left, right, top, bottom = MARGINS
        x = left + share_of(row) / HIGHEST * (WIDTH - left - right)
        return x, top + (self.high - time_of(row)) / (self.high - self.low) * (HEIGHT - top - bottom)

    def places(self, peers: Sequence[Row], ours: Sequence[Row]) -> dict[str, str]:
        """A side of its point for each label, where it covers nothing if there is one."""
        taken = [_box(*self.at(row), 12.0, 12.0) for row in (*peers, *ours)]
        found: dict[str, str] = {}
        for row in sorted(peers, key=share_of):
            x, y = self.at(row)
            wide = 6.4 * len(_short(row.label))
            sides = {
                "right": _box(x + 10 + wide / 2, y, wide, 12.0),
                "left": _box(x - 10 - wide / 2, y, wide, 12.0),
                "top": _box(x, y - 14, wide, 12.0),
                "bottom": _box(x, y + 14, wide, 12.0),
            }
            inside = {side: box for side, box in sides.items() if box[0] > MARGINS[0] and box[2] < WIDTH}
            free = [side for side, box in inside.items() if not any(_overlap(box, other) for other in taken)]
            found[row.label] = free[0] if free else "right"
            taken.append(sides[found[row.label]])
        return found


Box = tuple[float, float, float, float]


def _box(x: float, y: float, wide: float, high: float) -> Box:
    return x - wide / 2, y - high / 2, x + wide / 2, y + high / 2


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _best(rows: Iterable[Row]) -> list[Row]:
    """The frontier of ours: what is no faster at a higher peak than another of ours is not drawn."""
    best: list[Row] = []
    for row in sorted(rows, key=share_of):
        if not best or time_of(row) < time_of(best[-1]):
            best.append(row)
    return best


def _ours(name: str, colour: str, rows: Sequence[Row], colours: Colours) -> Option:
    data = [
        {"value": [row.share, row.time], "name": row.label,
         "label": _label(f"{row.time:.2f}", "bottom", colours)}
        for row in rows
    ]  # fmt: skip
    return {
        "name": name, "type": "line", "color": colour, "data": data, "symbol": "circle", "symbolSize": 11,
        "lineStyle": {"width": 3.5}, "itemStyle": {"opacity": 1}, "z": 5,
        "labelLayout": {"hideOverlap": True},
    }  # fmt: skip


def _peers(name: str, colour: str, rows: Sequence[Row], places: dict[str, str], colours: Colours) -> Option:
    data = [
        {"value": [row.share, row.time], "name": row.label,
         "label": _label(_short(row.label), places[row.label], colours)}
        for row in rows
    ]  # fmt: skip
    return {"name": name, "type": "scatter", "color": colour, "data": data, "symbolSize": 9}


def _short(label: str) -> str:
    """Beside its point the legend says the rest."""
    return label.removeprefix("selective, ").removeprefix("checkpoint, ").removeprefix("regional ")


def _label(text: str, position: str, colours: Colours) -> Option:
    return {"show": True, "formatter": text, "position": position, "color": colours.quiet, "fontSize": 11}


def _floor(value: float) -> float:
    return int(value * 10) / 10


def draw(panels: Sequence[Panel], browser: Any) -> list[Path]:
    """SVG files of all panels, in both schemes."""
    sys.path.insert(0, str(ROOT / "scripts"))
    svg_of = import_module("pictures").svg_of
    drawn = []
    for panel in panels:
        for scheme, colours in SCHEMES.items():
            path = PICTURES / f"{panel.name}-{scheme}.svg"
            path.write_text(svg_of(browser, option_of(panel, colours), WIDTH, HEIGHT), encoding="utf-8")
            drawn.append(path)
    return drawn


# ------------------------------------------------------------------------------------------------ table

NOTHING = "No run on an accelerator has been recorded yet.\n"


def markdown(panels: Sequence[Panel], longest: Sequence[dict[str, Any]] = ()) -> str:
    """What docs/benchmarks.md shows."""
    parts = [_section(panel) for panel in panels] + [_longest(found) for found in longest]
    return "<!-- made by benchmarks/plot.py -->\n\n" + ("\n".join(parts) if parts else NOTHING)


def _section(panel: Panel) -> str:
    where = panel.environment
    lines = [
        f"### {panel.workload}",
        "",
        f"{panel.about}. {where['device']}, torch {where['torch']}, {where['date'][:10]}, commit "
        f"{where['commit']}, run {where['run']}.",
        "",
    ]
    if (PICTURES / f"{panel.name}-light.svg").exists():
        for scheme in SCHEMES:
            lines.append(f"![{panel.about}](pictures/{panel.name}-{scheme}.svg#only-{scheme})")
        lines.append("")
    if not panel.measured_base:
        why = "".join(f" ({row.reason})" for row in panel.rows if row.group == "plain" and row.reason)
        lines += [f"**The plain step was not measured{why}: all ratios are to its prediction.**", ""]
    lines += ["| method | activation peak | time | spread |", "| --- | --- | --- | --- |"]
    for row in sorted((row for row in panel.rows if row.measured), key=share_of, reverse=True):
        spread = "" if row.spread is None else f"{row.spread:.3f}"
        name = f"**{row.label}**" if row.ours else row.label
        lines.append(f"| {name} | {row.share:.3f} | {row.time:.3f} | {spread} |")
    absent = [row for row in panel.rows if not row.measured]
    if absent:
        lines += ["", "Not measured: " + "; ".join(f"{row.label} ({row.reason})" for row in absent) + "."]
    found = lines_of(verdict(panel.rows, panel.targets))
    return "\n".join([*lines, "", *(f"- {line}" for line in found.splitlines()), ""])


def _longest(found: dict[str, Any]) -> str:
    where = found["environment"]
    lines = [
        "### Longest context",
        "",
        f"In {found['capacity_bytes'] / 2**30:.1f} GiB. {where['device']}, torch {where['torch']}, "
        f"{where['date'][:10]}, commit {where['commit']}, run {where['run']}.",
        "",
        "| method | trains | does not |",
        "| --- | --- | --- |",
    ]
    for name, each in found["methods"].items():
        shown = f"{each['why']} |" if each.get("why") else f"{each['length']} | {each['below'] or ''}"
        lines.append(f"| {name} | {shown} |")
    return "\n".join([*lines, ""])


def recorded() -> list[Path]:
    return sorted(RESULTS.glob("frontier*.json"))


def table_of(files: Sequence[Path]) -> str:
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    longest = [content["longest"] for content in contents if "longest" in content]
    return markdown(panels_of(files), longest)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--table", action="store_true", help="no pictures")
    options = parser.parse_args(arguments)
    files = options.files or recorded()
    if not options.table and files:
        sys.path.insert(0, str(ROOT / "scripts"))
        with import_module("pictures").chromium() as browser:
            for path in draw(panels_of(files), browser):
                print(path)
    TABLE.write_text(table_of(files), encoding="utf-8")
    print(TABLE)


if __name__ == "__main__":
    main()
