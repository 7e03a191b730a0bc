"""The benchmark that compares remat with its peers: its small edition runs here, so that it cannot rot."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
NAMES = ("frontier", "gauge", "peers", "verdict", "video_dit", "workloads", "longest", "plot")


@pytest.fixture(scope="module")
def bench() -> Iterator[dict[str, Any]]:
    """The modules of the benchmark, which lie beside each other and are no package."""
    pytest.importorskip("transformers")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        for name in NAMES:
            sys.modules.pop(name, None)


# ------------------------------------------------------------------------------------------------ verdict


def row(bench: dict[str, Any], label: str, share: float, time: float, **more: Any) -> Any:
    return bench["verdict"].Row(label, more.pop("group", "peers"), share=share, time=time, **more)


def test_a_peer_is_compared_with_the_fastest_of_ours_at_its_peak_or_below(bench):
    rows = [
        row(bench, "plain", 1.0, 1.0, group="plain"),
        row(bench, "checkpointing", 0.2, 1.28),
        row(bench, "remat 0.5", 0.5, 1.02, ours=True),
        row(bench, "remat 0.2", 0.2, 1.10, ours=True),
        row(bench, "remat 0.1", 0.1, 1.12, ours=True),
    ]
    (judged,) = bench["verdict"].verdict(rows).peers
    assert (judged.peer, judged.rival, judged.rival_time, judged.ahead) == (
        "checkpointing", "remat 0.2", 1.10, True,
    )  # fmt: skip


def test_a_slower_step_at_the_peers_peak_is_behind(bench):
    rows = [row(bench, "selective", 0.5, 1.05), row(bench, "remat 0.5", 0.5, 1.06, ours=True)]
    found = bench["verdict"].verdict(rows)
    assert not found.ahead
    assert "BEHIND of selective 1.050x at 0.500: remat 0.5 1.060x at 0.500" in bench["verdict"].lines_of(
        found
    )


def test_times_within_the_spread_are_called_so(bench):
    peer = row(bench, "selective", 0.5, 1.05, spread=0.02)
    near, far = (row(bench, "remat", 0.5, time, ours=True, spread=0.001) for time in (1.06, 1.08))
    assert bench["verdict"].verdict([peer, near]).peers[0].tied
    assert "within the spread" in bench["verdict"].lines_of(bench["verdict"].verdict([peer, near]))
    assert not bench["verdict"].verdict([peer, far]).peers[0].tied


def test_a_peer_that_none_of_ours_reaches_is_unmatched(bench):
    rows = [row(bench, "offload", 0.15, 3.0), row(bench, "remat 0.5", 0.5, 1.0, ours=True)]
    found = bench["verdict"].verdict(rows)
    (judged,) = found.peers
    assert (judged.rival, judged.rival_time, judged.ahead) == ("", None, False)
    assert "nothing so low" in bench["verdict"].lines_of(found)


@pytest.mark.parametrize(("share", "ahead"), [(0.502, True), (0.503, False)])
def test_peaks_half_a_percent_apart_are_the_same(bench, share, ahead):
    rows = [row(bench, "peer", 0.5, 1.2), row(bench, "remat", share, 1.1, ours=True)]
    assert bench["verdict"].verdict(rows).ahead is ahead


def test_eager_peers_are_not_compared_with_compiled_plans_but_compiled_ones_with_all(bench):
    ours = [
        row(bench, "remat", 0.5, 1.02, ours=True),
        row(bench, "remat compiled", 0.5, 0.8, ours=True, compiled=True),
    ]
    eager, compiled = row(bench, "eager peer", 0.5, 1.01), row(bench, "regional", 0.5, 0.9, compiled=True)
    first, second = bench["verdict"].verdict([*ours, eager, compiled]).peers
    assert (first.rival, first.ahead) == ("remat", False)
    assert (second.rival, second.ahead) == ("remat compiled", True)
    slow = row(bench, "regional", 0.5, 1.03, compiled=True)
    assert bench["verdict"].verdict([ours[0], slow]).ahead


def test_peers_outside_of_the_judged_peaks_count_for_the_reach_alone(bench):
    rows = [
        row(bench, "chunked", 0.95, 0.9),
        row(bench, "on the host", 0.08, 6.0),
        row(bench, "remat", 0.05, 1.2, ours=True),
    ]
    found = bench["verdict"].verdict(rows)
    assert found.peers == ()
    assert (found.reach.peer, found.reach.rival, found.reach.ahead) == ("on the host", "remat", False)
    assert bench["verdict"].verdict([*rows[:2], row(bench, "remat", 0.04, 1.2, ours=True)]).reach.ahead


def test_targets_are_met_by_rows_of_their_kind(bench):
    target = bench["verdict"].Target
    rows = [
        row(bench, "remat", 0.45, 1.02, ours=True),
        row(bench, "remat compiled", 0.25, 0.75, ours=True, compiled=True),
    ]
    asked = [target("eager", 0.50, 1.01), target("compiled", 0.25, 0.76), target("any", 0.40, 1.06),
             target("eager", 0.40, 1.06)]  # fmt: skip
    found = bench["verdict"].verdict(rows, asked).targets
    assert [(met.met, met.rival) for met in found] == [
        (False, "remat"), (True, "remat compiled"), (True, "remat compiled"), (False, ""),
    ]  # fmt: skip


def test_rows_that_were_not_measured_are_shown_and_not_judged(bench):
    rows = [bench["verdict"].Row("Liger", "chunked-loss", why="liger-kernel is not installed")]
    assert bench["verdict"].verdict(rows).peers == ()
    assert "Liger" in bench["verdict"].table(rows)
    assert bench["verdict"].Row.from_json(rows[0].as_json()) == rows[0]


# ----------------------------------------------------------------------------------------- the small edition


@pytest.fixture(scope="module")
def small(bench: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of every eager group on the small Llama, and what it left on disk."""
    path = tmp_path_factory.mktemp("frontier") / "frontier.json"
    groups = "plain,remat,exact,checkpoint,selective,chunked-loss,offload,offload-all"
    bench["frontier"].main(["--workloads", "llama-1.3b", "--methods", groups, "--out", str(path)])
    return json.loads(path.read_text())["workloads"]["llama-1.3b"]


def rows_of(result: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [each for each in result["rows"] if all(each.get(key) == value for key, value in wanted.items())]


def test_the_file_says_what_was_measured_where(small):
    assert {"run", "date", "torch", "device", "versions", "commit", "command"} <= small["environment"].keys()
    assert small["size"] == "small"
    assert small["base"]["measured"]
    labels = [each["label"] for each in small["rows"]]
    assert len(labels) == len(set(labels))
    for peer in ("plain", "transformers checkpointing", "checkpoint, every 2nd block",
                 "checkpoint, reentrant", "selective, attention", "selective, every 2nd matmul",
                 "selective, all matmuls", "checkpointing + chunked loss"):  # fmt: skip
        (found,) = rows_of(small, label=peer)
        assert found["share"] > 0
        assert found["time"] > 0
    assert "not installed" in rows_of(small, label="Liger fused loss")[0]["why"]
    assert "accelerator" in rows_of(small, label="save_on_cpu")[0]["why"]


def test_every_plan_stays_within_its_budget(small):
    ours = [each for each in rows_of(small, ours=True) if "share" in each]
    assert len(ours) >= 8
    for each in ours:
        asked = each["facts"]["budget_share"]
        assert asked is None or each["share"] <= asked
        assert each["facts"]["fallbacks"] == 0
    refused = [each for each in rows_of(small, ours=True) if "share" not in each]
    assert all("out of reach" in each["why"] or "the same plan" in each["why"] for each in refused)


def test_gradients_are_those_of_the_plain_step(small):
    """To the bit, but for plans that chunk: those add up in another order."""
    measured = [each for each in small["rows"] if "share" in each]
    for each in measured:
        found = each["facts"]["gradients"]
        chunks = each["facts"].get("chunked") or "chunk" in each["facts"].get("regions", ())
        if each.get("ours") and chunks and found != "equal to the bit":
            assert float(found.removeprefix("within ")) < 1e-5
        elif each["label"] != "checkpointing + chunked loss":
            assert found == "equal to the bit", each["label"]
    assert len([each for each in measured if each["group"] == "exact"]) >= 4


def test_the_verdict_is_that_of_the_rows(bench, small):
    rows = [bench["verdict"].Row.from_json(each) for each in small["rows"]]
    assert json.loads(json.dumps(bench["verdict"].verdict(rows).as_json())) == small["verdict"]
    assert {each["peer"] for each in small["verdict"]["peers"]} >= {"selective, attention"}


@pytest.mark.parametrize("name", ["gpt2-774m", "vit-b16", "resnet-152", "llama-7b-lora", "video-dit", "moe"])
def test_every_kind_of_workload_runs(bench, name):
    """The plain step, checkpointing, and one plan, with equal gradients."""
    options = bench["frontier"].parsed([])
    race = bench["frontier"].Race(name, bench["workloads"].WORKLOADS[name], options, lambda result: None)
    race.workload = bench["workloads"].Workload("", race.workload.full, race.workload.small, shares=(0.8,))
    race.run(["plain", "exact", "checkpoint"])
    rows = {each.label: each for each in race.rows()}
    assert rows["remat exact 0.8"].share <= 0.8
    for each in rows.values():
        assert each.facts["gradients"] == "equal to the bit" if each.measured else each.why


def test_a_run_without_time_records_what_it_left_out(bench, tmp_path):
    path = tmp_path / "frontier.json"
    bench["frontier"].main(["--limit", "0", "--methods", "plain,remat,checkpoint", "--out", str(path)])
    rows = json.loads(path.read_text())["workloads"]["llama-1.3b"]["rows"]
    assert {each["why"] for each in rows} == {"not run: the limit of 0 s"}
    assert {"plain", "remat profile", "transformers checkpointing"} <= {each["label"] for each in rows}


def test_what_fails_is_recorded_and_the_rest_goes_on(bench, monkeypatch, tmp_path):
    def broken(job: Any, group: str, backend: str, attention: bool) -> list[Any]:
        def context() -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 7 GiB")

        made = bench["peers"].Method
        return [made("broken", group, context), made("works", group, bench["frontier"].nullcontext)]

    monkeypatch.setattr(bench["frontier"], "peers", broken)
    path = tmp_path / "frontier.json"
    arguments = ["--methods", "plain,checkpoint", "--rounds", "2", "--steps", "2", "--out", str(path)]
    bench["frontier"].main(arguments)
    rows = {each["label"]: each for each in json.loads(path.read_text())["workloads"]["llama-1.3b"]["rows"]}
    assert rows["broken"]["why"] == "failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 7 GiB"
    assert rows["works"]["time"] == 1.0
    assert rows["works"]["runs"] == 4
    assert rows["works"]["spread"] >= 0


def test_a_group_that_cannot_be_made_is_recorded_and_the_race_goes_on(bench, monkeypatch):
    def broken(*args: Any) -> list[Any]:
        raise AttributeError("no such block")

    monkeypatch.setattr(bench["frontier"], "peers", broken)
    content = bench["frontier"].main(["--methods", "plain,selective", "--rounds", "1", "--steps", "2"])
    rows = {each["label"]: each for each in content["workloads"]["llama-1.3b"]["rows"]}
    assert rows["group selective"]["why"] == "failed: AttributeError: no such block"
    assert rows["plain"]["runs"] == 2


def test_a_workload_that_cannot_be_built_is_recorded(bench, monkeypatch, tmp_path):
    def missing() -> Any:
        raise ImportError("No module named 'torchvision'")

    workload = bench["workloads"].Workload("a network", missing, missing)
    monkeypatch.setitem(bench["workloads"].WORKLOADS, "network", workload)
    path = tmp_path / "frontier.json"
    bench["frontier"].main(["--workloads", "network", "--out", str(path)])
    assert "torchvision" in json.loads(path.read_text())["workloads"]["network"]["failed"]


def test_rows_of_two_runs_are_never_mixed(bench, tmp_path):
    out = bench["frontier"].Out
    path = str(tmp_path / "frontier.json")
    first = out(path)
    first.put("a", {"rows": [1]})
    first.put("b", {"rows": [2]})
    second = out(path)
    second.put("a", {"rows": [3]})
    second.put("a", {"rows": [3, 4]})
    content = json.loads(Path(path).read_text())
    assert content["workloads"]["a"]["rows"] == [3, 4]
    assert content["workloads"]["a"]["environment"]["run"] == second.environment["run"]
    assert content["workloads"]["b"]["environment"]["run"] == first.environment["run"]
    assert [(each["workload"], each["rows"]) for each in content["superseded"]] == [("a", [1])]
    Path(path).write_text('{"format": 0}')
    with pytest.raises(SystemExit, match="format 0"):
        out(path)


def test_peers_leave_the_model_as_it_was(bench):
    job = bench["workloads"].WORKLOADS["llama-7b-lora"].small()

    def state() -> Any:
        hooks = [list(m._forward_hooks) + list(m._forward_pre_hooks) for m in job.model.modules()]
        return hooks, [sorted(vars(m)) for m in job.blocks], job.model.is_gradient_checkpointing

    before = state()
    for group in ("checkpoint", "selective", "chunked-loss"):
        for method in bench["peers"].peers(job, group, "eager", True):
            if isinstance(method, bench["peers"].Method):
                with method.context():
                    job.step()
                assert state()[0] == before[0], method.label
                assert state()[2] == before[2], method.label
                assert not any("forward" in vars(block) for block in job.blocks), method.label


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own, which are errors inside of it
def test_compiled_peers_and_plans_run(bench):
    options = bench["frontier"].parsed(["--backend", "aot_eager"])
    race = bench["frontier"].Race(
        "llama-1.3b", bench["workloads"].WORKLOADS["llama-1.3b"], options, lambda result: None
    )
    race.run(["plain", "compiled", "regional"])
    rows = {each.label: each for each in race.rows() if each.measured}
    assert rows["regional 0.0"].share < rows["regional 0.5"].share < rows["regional 1.0"].share < 1
    assert rows["remat compiled 0.5"].share <= 0.5
    assert rows["remat compiled 0.5"].compiled


# ------------------------------------------------------------------------------------------ longest context


@pytest.mark.parametrize(("capacity", "most"), [(10_000, 3_300), (1_000, 300), (130, 10), (90, 0)])
def test_the_longest_length_is_bracketed_to_a_tenth_in_few_trials(bench, capacity, most):
    """A step that takes 100 bytes, and 3 for each token."""
    made = bench["longest"].Trial

    def trial(length: int) -> Any:
        needed = 100 + 3 * length
        return made(length, needed <= capacity, needed if needed <= capacity else None)

    found = bench["longest"].search(trial, capacity, lambda: False, start=64, unit=2)
    assert found.length <= most
    assert found.length * 1.1 + 4 >= most
    assert found.below is not None
    assert found.below > most
    assert len(found.trials) <= 8


def test_lengths_are_bisected_where_bytes_are_not_known(bench):
    made = bench["longest"].Trial
    found = bench["longest"].search(lambda n: made(n, n <= 5000), 0, lambda: False, start=64, unit=2)
    assert 5000 / 1.1 <= found.length <= 5000 < found.below


def test_a_search_without_time_says_that_nothing_failed(bench):
    made, tries = bench["longest"].Trial, iter([False, False, True])
    found = bench["longest"].search(lambda n: made(n, True), 0, lambda: next(tries), start=64, unit=2)
    assert (found.length, found.below, len(found.trials)) == (128, None, 2)


def test_checkpointing_trains_longer_than_the_plain_step(bench, tmp_path):
    path = tmp_path / "longest.json"
    bench["frontier"].main(["--longest", "--methods", "plain,checkpointing", "--out", str(path)])
    found = json.loads(path.read_text())["longest"]["methods"]
    assert found["checkpointing"]["length"] > 2 * found["plain"]["length"] > 0


@pytest.mark.slow
def test_remat_trains_longer_than_checkpointing(bench, tmp_path):
    path = tmp_path / "longest.json"
    bench["frontier"].main(["--longest", "--methods", "remat,checkpointing", "--out", str(path)])
    found = json.loads(path.read_text())["longest"]["methods"]
    assert found["remat"]["length"] > found["checkpointing"]["length"]


# ----------------------------------------------------------------------------------------- pictures, table


def recorded(folder: Path) -> Path:
    rows = [
        {"label": "plain", "group": "plain", "share": 1.0, "time": 1.0},
        {"label": "remat 0.5", "group": "remat", "ours": True, "share": 0.49, "time": 1.02},
        {"label": "remat 0.9", "group": "remat", "ours": True, "share": 0.89, "time": 1.03},
        {"label": "selective, attention", "group": "selective", "share": 0.6, "time": 1.2},
        {"label": "save_on_cpu", "group": "offload-all", "share": 0.2, "time": 6.4},
        {"label": "Liger fused loss", "group": "chunked-loss", "why": "liger-kernel is not installed"},
    ]
    where = {"device": "NVIDIA H200", "torch": "2.11.0+cu130", "date": "2026-11-15T09:00:00+00:00",
             "commit": "abc", "run": "123"}  # fmt: skip
    result = {"about": "a model", "environment": where, "base": {"measured": True}, "rows": rows}
    found = {"methods": {"remat": {"length": 9, "below": 10}, "plain": {"why": "not run"}}}
    longest = {"environment": where, "capacity_bytes": 1 << 34, **found}
    path = folder / "frontier.json"
    path.write_text(json.dumps({"format": 1, "workloads": {"llama-1.3b": result}, "longest": longest}))
    return path


def test_the_table_holds_every_row_and_the_verdict(bench, tmp_path):
    text = bench["plot"].table_of([recorded(tmp_path)])
    assert "| **remat 0.5** | 0.490 | 1.020 |" in text
    assert "Liger fused loss (liger-kernel is not installed)" in text
    assert "ahead  of selective, attention 1.200x at 0.600: remat 0.5 1.020x at 0.490" in text
    assert "MISSED target eager 0.50 at <= 1.01x" in text
    assert "| remat | 9 | 10 |" in text
    assert "NVIDIA H200, torch 2.11.0+cu130, 2026-11-15" in text


def test_the_panel_draws_our_frontier_and_names_what_is_too_slow(bench, tmp_path):
    (panel,) = bench["plot"].panels_of([recorded(tmp_path)])
    option = bench["plot"].option_of(panel, bench["plot"].SCHEMES["dark"])
    drawn = {each["name"]: [point["value"] for point in each["data"]] for each in option["series"]}
    assert drawn["remat"] == [[0.49, 1.02]]  # the other one is slower at a higher peak
    assert drawn["selective checkpointing"] == [[0.6, 1.2]]
    assert "offload" not in drawn
    assert "save_on_cpu 6.4x at 0.20 is not drawn" in option["title"]["subtext"]


def test_labels_of_neighbours_do_not_cover_each_other(bench):
    rows = [row(bench, f"a peer of some length {i}", 0.5 + 0.01 * i, 1.2) for i in range(3)]
    places = bench["plot"].Frame(0.9, 1.4).places(rows, [])
    assert len(set(places.values())) == 3


def test_the_documentation_shows_what_is_recorded(bench):
    plot = bench["plot"]
    assert plot.TABLE.read_text() == plot.table_of(plot.recorded()), "run benchmarks/plot.py"
