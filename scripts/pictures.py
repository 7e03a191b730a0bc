"""The pictures of the report in README and documentation, drawn by its own code in Chromium.

    python scripts/pictures.py

`benchmarks/plot.py` draws the measured trade-off, frontier*.json, with what is here. Needs what `make test`
installs.
"""

from __future__ import annotations

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
    with chromium() as browser:
        draw_report(browser)


if __name__ == "__main__":
    main()
