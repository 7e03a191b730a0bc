"""The HTML report in a real browser: it draws, answers, sorts and searches, offline; no name is markup."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat
from remat.records import Entry, Kind
from remat.show.html import page as html_page
from remat.show.text import Report

LAYERS = 48
EVIL = "<script>hacked=1<script>"
ECHARTS_SHA256 = "61f13280aba3161f77fc801bf5f9c786f55f10432153a0683fc5cc0700b013d5"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Evil(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({EVIL if i == 3 else f"block{i}": Block() for i in range(LAYERS)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def report() -> Report:
    torch.manual_seed(0)
    model, batch = Evil(), torch.randn(4, 32, 16)
    with remat.fit(model, batch, activations=0.6) as handle:
        model(batch).backward()
        found = handle.report()
    profile = replace(found.plan.profile, model=f"{EVIL}</script>", notes=("<b>a note</b>",))
    events = [{"step": 3, "what": "<i>tighter plan</i>"}, {"step": 9, "what": "recovered", "bytes": 7}]
    return replace(found, plan=replace(found.plan, profile=profile), events=events)


@pytest.fixture(scope="module")
def saved(report: Report, tmp_path_factory: Any) -> Path:
    return report.save(tmp_path_factory.mktemp("html") / "fit.html")


# --------------------------------------------------------------------------------------- without a browser


def test_it_is_small_and_quick(report, saved):
    assert saved.stat().st_size < 6_000_000
    start = time.process_time()  # of this process: other tests run at the same time
    html_page(report)
    assert time.process_time() - start < 2.0


def test_nothing_in_it_is_a_link_to_elsewhere(saved):
    text = saved.read_text()
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    places = re.findall(r"(?:src|href)=['\"]?([^'\"\s>]+)", markup)
    assert places
    assert all(place.startswith(("data:", "#")) for place in places)
    assert text.count("</script>") == 3  # facts, library, script: no name made another


def test_the_library_is_the_published_file():
    path = Path(remat.__file__).parent / "show" / "assets" / "echarts.common.min.js"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == ECHARTS_SHA256


# ----------------------------------------------------------------------------------------- with a browser


def chromium() -> str:
    names = [os.environ.get("REMAT_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium here: `make browser` installs it as root on Debian, or set REMAT_CHROMIUM")
    return found


@pytest.fixture(scope="module")
def browser():
    path = chromium()
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


class Opened:
    """A page, with what it said and asked for."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_function("document.querySelectorAll('#memory svg path').length > 10")

    def names(self) -> list[str]:
        return self.page.locator("#region-table td.name button").all_inner_texts()


@pytest.fixture
def opened(browser, saved):
    found = Opened(browser, saved)
    yield found
    found.page.close()


def test_it_opens_without_a_word_and_without_a_request(opened, saved):
    opened.page.wait_for_timeout(200)
    assert opened.said == []
    assert [url for url in opened.asked if not url.startswith(("file:", "data:"))] == []
    assert opened.page.locator("#trade svg path").count() > 10
    assert "budget" in opened.page.locator("#memory svg").text_content()
    assert "Bit-equal" in opened.page.locator("#cards").inner_text()


def test_no_name_becomes_markup(opened):
    assert opened.page.evaluate("typeof window.hacked") == "undefined"
    assert opened.page.locator("h1").inner_text() == f"{EVIL}</script>"
    assert f"layers.{EVIL}" in opened.names()
    assert opened.page.locator("#notes").inner_text() == "<b>a note</b>"
    assert "<i>tighter plan</i>" in opened.page.locator("#events").inner_text()
    assert opened.page.locator("script").count() == 3


def test_the_policy_lets_no_other_script_run(opened):
    opened.page.evaluate(
        "() => { const made = document.createElement('script'); made.textContent = 'hacked=1';"
        "document.body.append(made); }"
    )
    assert opened.page.evaluate("typeof window.hacked") == "undefined"


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_hover_shows_what_lives_there(opened, share):
    box = opened.page.locator("#memory").bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] * 0.5)
    tip = opened.page.locator("#memory .tip")
    tip.wait_for(state="visible")
    text = tip.inner_text()
    assert "activations kept" in text
    assert "plain step" in text
    assert re.search(r"\d+ regions? holds? [\d.]+ [KM]iB: layers\.block0", text)


def test_the_keyboard_moves_along_the_step(opened):
    opened.page.locator("#memory").focus()
    opened.page.keyboard.press("ArrowRight")
    opened.page.keyboard.press("End")
    opened.page.keyboard.press("ArrowLeft")
    live = opened.page.locator("#memory-live").inner_text()
    assert "at its peak" in live
    assert opened.page.locator("#memory .tip").is_visible()


def test_hover_on_the_trade_off(opened, report):
    opened.page.locator("#trade").scroll_into_view_if_needed()
    box = opened.page.locator("#trade").bounding_box()
    plan = opened.page.evaluate(
        "() => { const c = echarts.getInstanceByDom(document.getElementById('trade'));"
        "return c.convertToPixel({seriesIndex: 3}, c.getOption().series[3].data[0].value); }"
    )
    opened.page.mouse.move(box["x"] + plan[0], box["y"] + plan[1])
    tip = opened.page.locator("#trade .tip")
    tip.wait_for(state="visible")
    assert "this plan" in tip.inner_text()
    assert "slowdown" in tip.inner_text()


def test_regions_are_sorted_by_any_column(opened, report):
    seconds = {row["label"]: row["extra_seconds"] for row in report.as_dict()["regions"]}
    before = opened.names()
    assert len(before) == LAYERS
    header = opened.page.get_by_role("button", name="Extra time")
    header.click()
    dearest = [seconds[name] for name in opened.names()]
    assert dearest == sorted(dearest, reverse=True)
    header.click()
    cheapest = [seconds[name] for name in opened.names()]
    assert cheapest == sorted(cheapest)
    assert opened.page.locator("#region-table th[aria-sort='ascending']").count() == 1
    opened.page.get_by_role("button", name="Region", exact=True).click()
    by_name = opened.names()
    numbered = [name for name in by_name if "block" in name]
    assert numbered == [f"layers.block{i}" for i in range(LAYERS) if i != 3]  # 2 before 10


def test_regions_are_searched(opened):
    opened.page.locator("#search").fill("block1")
    names = opened.names()
    assert names == ["layers.block1", *(f"layers.block{i}" for i in range(10, 20))]
    assert f"11 of {LAYERS} shown" in opened.page.locator("#found").inner_text()
    opened.page.locator("#search").fill("no such region")
    assert opened.names() == []
    opened.page.locator("#search").fill("")
    assert len(opened.names()) == LAYERS


def test_a_region_opens_its_tensors_by_keyboard(opened):
    opened.page.locator("#region-table td.name button").first.focus()
    opened.page.keyboard.press("Enter")
    detail = opened.page.locator("#region-table tr.detail")
    assert "gelu" in detail.inner_text()
    assert "test_html.py:" in detail.inner_text()
    opened.page.keyboard.press("Enter")  # the focus stayed where it was
    assert detail.count() == 0


def test_predicted_and_measured_are_side_by_side(opened):
    text = opened.page.locator("#compared").inner_text()
    assert "peak of forward and backward" in text
    assert opened.page.locator("#link-panel").is_hidden()  # this plan moves nothing


def test_the_link_is_drawn_when_a_plan_uses_it(browser, report, tmp_path):
    path = moving(report).save(tmp_path / "moving.html")
    found = Opened(browser, path)
    page = found.page
    assert "wait on the host" in page.locator("#link-note").inner_text()
    page.wait_for_function("document.querySelectorAll('#link svg path').length > 10")
    page.locator("#link").focus()
    page.keyboard.press("ArrowRight")
    assert "to the host" in page.locator("#link-live").inner_text()
    assert "On the host" in page.locator("#region-table thead").inner_text()
    assert found.said == []
    page.close()


def moving(report: Report) -> Report:
    """The same plan, with the first kept tensor of each recipe sent to the host instead."""
    profile = report.plan.profile

    def sent(kind: Kind, entry: Entry) -> Entry:
        recipe, graph = entry.recipe, kind.graph
        first = next((s for s in recipe.kept if graph.storages[s].charge_bytes), None) if recipe else None
        if first is None:
            return entry
        nbytes = graph.storages[first].charge_bytes
        recipe = replace(recipe, offloaded=(first,), host_bytes=nbytes)
        resident = max(entry.resident_bytes - nbytes, 0)
        return replace(entry, recipe=recipe, host_bytes=nbytes, resident_bytes=resident)

    kinds = tuple(replace(k, menu=tuple(sent(k, entry) for entry in k.menu)) for k in profile.kinds)
    return replace(report, plan=replace(report.plan, profile=replace(profile, kinds=kinds)))


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_reads_well_at_this_size(browser, saved, tmp_path, width, scheme):
    found = Opened(browser, saved, viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = found.page
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
    shades = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (max(shades) < 60) == (scheme == "dark")
    picture = page.screenshot(path=str(tmp_path / f"{width}-{scheme}.png"), full_page=True)
    assert len(picture) > 50_000
    page.locator("#theme").click()
    turned = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (max(turned) < 60) == (scheme == "light")
    assert found.said == []
    page.close()


def test_without_scripts_the_text_is_there(browser, saved):
    page = browser.new_page(java_script_enabled=False)
    page.goto(saved.as_uri())
    assert "memory over the step" in page.locator("noscript").inner_text()
    page.close()
