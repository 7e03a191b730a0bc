"""The pictures of the README and the documentation, drawn by the report's own code in Chromium.

    python scripts/pictures.py            all of them
    python scripts/pictures.py frontier   the measured trade-off alone, from benchmarks/results/recipes.json

`benchmarks/plot.py` draws the panels of frontier*.json with what is here.

Needs what `make test` installs. Figures come from recorded results and from plans; none is typed in here.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).parent.parent
OUT = ROOT / "docs" / "pictures"
LIBRARY = ROOT / "src" / "remat" / "show" / "assets" / "echarts.common.min.js"
WORKLOAD = "llama-1.3b"
BLUE, AMBER, GREY = "#2f5bea", "#d98a1f", "#8b95a8"
INK, QUIET, LINE = "#10182b", "#5a6478", "#e2e6ec"


def frontier_option(results: dict[str, Any]) -> dict[str, Any]:
    """Time against activation peak, as measured: remat's budgets, and what else there is."""
    rows = results["workloads"][WORKLOAD]["rows"]

    def points(prefix: str) -> list[dict[str, Any]]:
        named = {name: row for name, row in rows.items() if name.startswith(prefix) and "without" not in name}
        found = [(row["share"], row["time"], name) for name, row in named.items()]
        return [{"value": [share, time], "name": name} for share, time, name in sorted(found)]

    def label(position: str, text: str | None = None) -> dict[str, Any]:
        shown = {"show": True, "position": position, "color": INK, "fontSize": 13, "distance": 8}
        return shown if text is None else {**shown, "formatter": text}

    def series(name: str, colour: str, data: list[dict[str, Any]], kind: str = "line") -> dict[str, Any]:
        style = {"symbol": "circle", "symbolSize": 11, "lineStyle": {"width": 3}, "itemStyle": {"opacity": 1}}
        return {"name": name, "type": kind, "color": colour, "data": data, **style}

    remat = [{**p, "label": label("bottom", f"{p['value'][1]:.3f}x")} for p in points("remat")]
    selective = [
        {**p, "label": label("right" if place == 0 else "top", f"{p['value'][1]:.3f}x")}
        for place, p in enumerate(points("selective"))
    ]
    whole = [{**p, "label": label("left", f"{p['value'][1]:.3f}x")} for p in points("transformers")]
    plain = {"value": [1.0, 1.0], "label": label("top", "untouched")}
    small = {"color": QUIET, "fontSize": 13}
    axis = {"type": "value", "axisLine": {"show": False}, "axisTick": {"show": False},
            "nameLocation": "middle", "nameTextStyle": small, "splitLine": {"lineStyle": {"color": LINE}},
            "axisLabel": {**small, "showMaxLabel": False}}  # fmt: skip
    return {
        "backgroundColor": "#ffffff", "animation": False,
        "textStyle": {"fontFamily": "DejaVu Sans, Segoe UI, Helvetica, Arial, sans-serif"},
        "title": {"text": "Less memory, less time lost", "left": 20, "top": 14,
                  "textStyle": {"color": INK, "fontSize": 19},
                  "subtext": f"Llama 1.3B, batch 4 x 4096, bfloat16, {results['device']}, torch "
                             f"{results['torch'].split('+')[0]}, {results['date']}",
                  "subtextStyle": small},
        "legend": {"top": 66, "left": 16, "itemWidth": 14, "itemHeight": 14,
                   "textStyle": {"fontSize": 13, "color": INK}},
        "grid": {"left": 70, "right": 40, "top": 112, "bottom": 60},
        "xAxis": {**axis, "min": 0, "max": 1.05, "interval": 0.2, "nameGap": 36,
                  "name": "activation peak, untouched step = 1"},
        "yAxis": {**axis, "min": 0.9, "max": 1.35, "interval": 0.1, "nameGap": 46,
                  "name": "time per step, untouched = 1"},
        "series": [
            series("remat at three budgets", BLUE, [*remat, plain]),
            series("selective checkpointing, three policies", AMBER, selective),
            series("transformers' gradient checkpointing", GREY, whole, "scatter"),
        ],
    }  # fmt: skip


def draw_frontier(browser: Browser) -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "recipes.json").read_text())
    (OUT / "frontier.svg").write_text(svg_of(browser, frontier_option(results), 860, 480))


def svg_of(browser: Browser, option: dict[str, Any], width: int, height: int) -> str:
    """A chart of ECharts as SVG text."""
    page = browser.new_page(viewport={"width": width, "height": height})
    page.set_content(f"<div id='chart' style='width:{width}px;height:{height}px'></div>")
    page.add_script_tag(path=str(LIBRARY))
    svg: str = page.evaluate(
        "(option) => { const chart = echarts.init(document.getElementById('chart'), null, {renderer: 'svg'});"
        "chart.setOption(option); return chart.renderToSVGString(); }",
        option,
    )
    page.close()
    return svg


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


def draw_report(browser: Browser) -> None:
    """The report of the example's plan, as a person sees it, and its two charts."""
    import remat

    sys.path.insert(0, str(ROOT / "examples"))
    import long_context
    import torch

    job = long_context.build()
    profile = remat.profile(job["model"], job["batch"], device="rtx4090", dtype=torch.bfloat16)  # type: ignore[arg-type]
    report = remat.plan(profile, long_context.BUDGET).report()
    with tempfile.TemporaryDirectory() as folder:
        path = report.save(Path(folder) / "plan.html")
        for width, scheme in ((1280, "light"), (390, "dark")):
            page = browser.new_page(
                viewport={"width": width, "height": 1180 if width > 600 else 1400}, color_scheme=scheme
            )
            page.goto(path.as_uri())
            page.wait_for_timeout(300)
            page.screenshot(path=str(OUT / f"report-{width}-{scheme}.png"))
            if scheme == "light":
                for name in ("memory", "trade"):
                    page.locator(f"#{name}").screenshot(path=str(OUT / f"{name}.png"))
            page.close()


def main() -> None:
    OUT.mkdir(exist_ok=True)
    wanted = sys.argv[1:] or ["frontier", "report"]
    with chromium() as browser:
        if "frontier" in wanted:
            draw_frontier(browser)
        if "report" in wanted:
            draw_report(browser)


if __name__ == "__main__":
    main()
