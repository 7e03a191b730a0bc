"""The frontier from recorded results, drawn and tabulated: time against activation peak, by workload.

    python benchmarks/plot.py                 pictures and table of benchmarks/results/frontier*.json
    python benchmarks/plot.py --table         the table alone, which needs nothing but Python
    python benchmarks/plot.py out/mine.json   of another file: its table is printed

Pictures are drawn by scripts/pictures.py, in light and dark, to docs/pictures; the table goes to
benchmarks/results/frontier.md, which docs/benchmarks.md shows. No figure is typed in here.
"""

from __future__ import annotations

import argparse
import json
import math
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
SLOWEST = 1.6  # times the plain step: what is slower is named, not drawn, unless remat is so itself
NAMED = 2  # where there are more of those, they are counted
APART = 34.0  # pixels between two figures below our lines
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
    measured = [row for row in panel.rows if row.measured]
    slowest = max((time_of(row) for row in measured if row.ours), default=0.0)
    drawn = [row for row in measured if time_of(row) <= max(slowest, SLOWEST) and share_of(row) <= HIGHEST]
    left_out = [row for row in measured if row not in drawn]
    ours = [row for row in drawn if row.ours and row.group != "unfused"]  # a comparison, no way to run
    frame = Frame.around([*(time_of(row) for row in drawn), 1.0])
    lines = {
        ("remat", colours.eager): _best(row for row in ours if not row.compiled),
        ("remat, compiled", colours.compiled): _best(row for row in ours if row.compiled),
    }
    series = [_ours(name, colour, rows, frame, colours) for (name, colour), rows in lines.items()]
    peers = [row for row in drawn if not row.ours and row.group != "plain"]
    plain_row = Row("plain", "plain", share=1.0, time=1.0)
    places = frame.places(peers, [plain_row, *(row for rows in lines.values() for row in rows)])
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
            "splitLine": {"lineStyle": {"color": colours.line}},
            "axisLabel": {**small, "showMaxLabel": False}}  # fmt: skip
    where = panel.environment
    named = ", ".join(f"{row.label} {time_of(row):.1f}x at {row.share:.2f}" for row in left_out)
    few = named if len(left_out) <= NAMED else f"{len(left_out)} methods beyond the axes"
    note = f"; not drawn: {few}" if left_out else ""
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
        "yAxis": {**axis, "min": frame.low, "max": frame.high, "interval": frame.tick, "nameGap": 46,
                  "name": "time per step, plain = 1"},
        "series": series,
    }  # fmt: skip


@dataclass(frozen=True)
class Frame:
    """Where points and labels lie on the picture, in pixels: labels of different series do not know of each
    other in ECharts."""

    low: float
    high: float
    tick: float = 0.1

    @classmethod
    def around(cls, times: Sequence[float]) -> Frame:
        """Room for all of these, and for a label below the lowest, between whole ticks."""
        low, high = min(times) - 0.04, max(times) + 0.02
        tick = 0.1 if high - low < 0.8 else 0.2
        return cls(round(math.floor(low / tick) * tick, 1), round(math.ceil(high / tick) * tick, 1), tick)

    def at(self, row: Row) -> tuple[float, float]:
        left, right, top, bottom = MARGINS
        x = left + share_of(row) / HIGHEST * (WIDTH - left - right)
        return x, top + (self.high - time_of(row)) / (self.high - self.low) * (HEIGHT - top - bottom)

    def places(self, peers: Sequence[Row], ours: Sequence[Row]) -> dict[str, Place]:
        """A side of its point for each label, where it covers nothing if there is one; then no label."""
        taken = [_box(*self.at(row), 12.0, 12.0) for row in (*peers, *ours)]
        taken += [_box(x, y + 14, 26.0, 12.0) for x, y in map(self.at, ours)]  # the figures of our lines
        found: dict[str, Place] = {}
        for row in sorted(peers, key=share_of):
            x, y = self.at(row)
            wide = 6.4 * len(_short(row.label))
            for place in PLACES:
                box = _box(x + place.across * (10 + wide / 2), y + place.down, wide, 12.0)
                if MARGINS[0] < box[0] and box[2] < WIDTH and not any(_overlap(box, one) for one in taken):
                    found[row.label] = place
                    taken.append(box)
                    break
        return found


@dataclass(frozen=True)
class Place:
    """A label's, beside its point: `across` is the side, -1 left of it; pixels `down` from its height."""

    position: str
    across: int
    down: float

    @property
    def offset(self) -> list[float]:
        """From where ECharts puts it by itself."""
        return [0.0, self.down if self.across else 0.0]


PLACES = (
    Place("right", 1, 0.0), Place("left", -1, 0.0), Place("top", 0, -14.0), Place("bottom", 0, 14.0),
    *(
        Place(side, across, down)
        for down in (-13.0, 13.0, -26.0, 26.0)
        for side, across in (("right", 1), ("left", -1))
    ),
)  # fmt: skip


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


def _ours(name: str, colour: str, rows: Sequence[Row], frame: Frame, colours: Colours) -> Option:
    data, last = [], -APART
    for row in rows:
        x, _ = frame.at(row)
        apart = x - last >= APART
        last = x if apart else last
        label = _label(f"{row.time:.2f}", "bottom", colours) if apart else {"show": False}
        data.append({"value": [row.share, row.time], "name": row.label, "label": label})
    return {
        "name": name, "type": "line", "color": colour, "data": data, "symbol": "circle", "symbolSize": 11,
        "lineStyle": {"width": 3.5}, "itemStyle": {"opacity": 1}, "z": 5,
    }  # fmt: skip


def _peers(
    name: str, colour: str, rows: Sequence[Row], places: dict[str, Place], colours: Colours
) -> Option:
    data = []
    for row in rows:
        place, label = places.get(row.label), {"show": False}
        if place is not None:
            label = {**_label(_short(row.label), place.position, colours), "offset": place.offset}
        data.append({"value": [row.share, row.time], "name": row.label, "label": label})
    return {"name": name, "type": "scatter", "color": colour, "data": data, "symbolSize": 9}


def _short(label: str) -> str:
    """Beside its point the legend says the rest."""
    return label.removeprefix("selective, ").removeprefix("checkpoint, ").removeprefix("regional ")


def _label(text: str, position: str, colours: Colours) -> Option:
    return {"show": True, "formatter": text, "position": position, "color": colours.quiet, "fontSize": 11}


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
        f"### {panel.name.removeprefix('frontier-')}",  # two runs of a workload differ in their files
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
    if options.files:
        print(table_of(files))
        return
    TABLE.write_text(table_of(files), encoding="utf-8")
    print(TABLE)


if __name__ == "__main__":
    main()
