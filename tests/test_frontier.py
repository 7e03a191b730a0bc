"""The benchmark that compares remat with its peers: its small edition runs here, so that it cannot rot."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import remat

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
    assert "BEHIND    selective 1.050x at 0.500: remat 0.5 1.060x at 0.500" in bench["verdict"].lines_of(
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
    assert not found.ahead
    assert (found.reach.peer, found.reach.rival, found.reach.ahead) == ("on the host", "remat", False)
    assert bench["verdict"].verdict([*rows[:2], row(bench, "remat", 0.04, 1.2, ours=True)]).reach.ahead


def test_peers_outside_of_the_judged_peaks_are_listed_as_such(bench):
    rows = [
        row(bench, "chunked", 0.95, 0.9),
        row(bench, "selective", 0.5, 1.1),
        row(bench, "on the host", 0.08, 6.0),
        row(bench, "remat", 0.5, 1.0, ours=True),
    ]
    found = bench["verdict"].verdict(rows)
    assert [each.peer for each in found.peers] == ["selective"]
    assert [(each.peer, each.ahead) for each in found.outside] == [("chunked", False), ("on the host", False)]
    assert found.as_json()["ahead_of_every_peer_from_0.1_to_0.9"] is True
    text = bench["verdict"].lines_of(found)
    assert "ahead of 1 of the 1 peers measured from 0.1 to 0.9 of the plain peak" in text
    outside = "outside of 0.1 to 0.9 of the plain peak, not counted"
    assert f"{outside}: chunked 0.900x at 0.950: remat 1.000x at 0.500" in text
    assert f"{outside}: on the host 6.000x at 0.080: nothing so low" in text


def test_without_a_peer_there_is_nothing_to_be_ahead_of(bench):
    rows = [row(bench, "plain", 1.0, 1.0, group="plain"), row(bench, "remat", 0.1, 1.1, ours=True)]
    found = bench["verdict"].verdict(rows)
    assert not found.ahead
    assert not found.reach.ahead
    assert found.as_json()["ahead_of_every_peer_from_0.1_to_0.9"] is False
    assert bench["verdict"].lines_of(found).splitlines() == [
        "no peer was measured from 0.1 to 0.9 of the plain peak: there is nothing to be ahead of",
        "no peer to compare the reach of remat 0.100 with",
    ]


@pytest.mark.parametrize(
    ("facts", "fault"),
    [
        ({"failed_in_the_race": "OutOfMemoryError: 7 GiB"}, "failed in the race: OutOfMemoryError: 7 GiB"),
        ({"gradients": "missing: 3 of 9"}, "gradients missing: 3 of 9"),
        ({"gradients": "different: 4.0e-01"}, "gradients different: 4.0e-01"),
        ({"fallbacks": 24}, "24 fallbacks"),
        ({"gradients": "within 2.1e-06", "fallbacks": 0}, ""),
        ({"gradients": "equal to the bit"}, ""),
        ({"gradients": "not compared: there is no plain step"}, ""),
    ],
)
def test_a_row_that_went_wrong_is_named_and_not_judged(bench, facts, fault):
    """On either side: its figures are those of something else."""
    verdict = bench["verdict"]
    peer, target = row(bench, "selective", 0.5, 1.2), verdict.Target("eager", 0.5, 1.1)
    ours = row(bench, "remat", 0.2, 1.0, ours=True, facts=facts)
    sound = not fault
    found = verdict.verdict([peer, ours], [target])
    assert found.ahead is sound
    assert found.reach.ahead is sound
    assert found.targets[0].met is sound
    assert (f"not judged: remat: {fault}" in verdict.lines_of(found)) is not sound
    assert ours.measured is sound
    assert fault in verdict.table([ours])
    worse = row(bench, "checkpointing", 0.5, 0.9, facts=facts)
    found = verdict.verdict([peer, worse, row(bench, "remat", 0.5, 1.0, ours=True)])
    assert found.ahead is not sound
    assert [each.label for each in found.unsound] == ([] if sound else ["checkpointing"])


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
        regions = each["facts"].get("regions", ())
        chunks = each["facts"].get("chunked") or any(way.startswith(("chunk", "pieces")) for way in regions)
        if each.get("ours") and chunks and found != "equal to the bit":
            assert float(found.removeprefix("within ")) < 1e-5
        elif each["label"] != "checkpointing + chunked loss":
            assert found == "equal to the bit", each["label"]
    assert len([each for each in measured if each["group"] == "exact"]) >= 4


def test_the_verdict_is_that_of_the_rows(small):
    """Worked out anew from the file; all rows are eager."""
    measured = [each for each in small["rows"] if "share" in each]
    ours = [each for each in measured if each.get("ours")]
    peers = [each for each in measured if not each.get("ours") and each["group"] != "plain"]
    told = {each["peer"]: each for each in (*small["verdict"]["peers"], *small["verdict"]["outside"])}
    assert told.keys() == {each["label"] for each in peers}
    for peer in peers:
        times = [each["time"] for each in ours if each["share"] <= 1.005 * peer["share"]]
        assert told[peer["label"]]["rival_time"] == min(times, default=None)
        assert told[peer["label"]]["ahead"] is (bool(times) and min(times) <= peer["time"])
    inside = {each["label"] for each in peers if 0.1 <= each["share"] <= 0.9}
    assert {each["peer"] for each in small["verdict"]["peers"]} == inside >= {"selective, attention"}
    ahead = all(told[label]["ahead"] for label in inside)
    assert small["verdict"]["ahead_of_every_peer_from_0.1_to_0.9"] is ahead
    assert small["verdict"]["unsound"] == []
    assert small["verdict"]["targets"] == []  # those are of the full shape


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("vit-b16", "llama-7b-lora", "video-dit")]


@pytest.mark.parametrize("name", ["gpt2-774m", "resnet-152", "moe", *SLOW])
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


def test_what_dies_in_the_race_is_not_judged_by_its_preparation(bench, monkeypatch):
    """It is prepared and runs in the first round; in the second it dies."""
    entered = []

    @contextmanager
    def dying(job: Any) -> Iterator[None]:
        entered.append(1)
        if len(entered) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 7 GiB")
        with bench["peers"].switch(job):
            yield

    def made(job: Any, group: str, backend: str, attention: bool) -> list[Any]:
        one, other = partial(dying, job), partial(bench["peers"].switch, job)
        return [bench["peers"].Method("dies", group, one), bench["peers"].Method("lives", group, other)]

    monkeypatch.setattr(bench["frontier"], "peers", made)
    content = bench["frontier"].main(["--methods", "plain,checkpoint", "--rounds", "2", "--steps", "1"])
    result = content["workloads"]["llama-1.3b"]
    (found,) = rows_of(result, label="dies")
    assert found["share"] > 0
    assert found["facts"]["failed_in_the_race"].startswith("OutOfMemoryError")
    assert [each["peer"] for each in result["verdict"]["peers"]] == ["lives"]
    fault = "failed in the race: OutOfMemoryError: CUDA out of memory. Tried to allocate 7 GiB"
    assert list(result["verdict"]["unsound"]) == [{"label": "dies", "fault": fault}]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([1.0, 1.0], "equal to the bit"),
        ([1.0, 1.0 + 1e-4], "within 7.1e-05"),
        ([1.0, 2.0], "different: 7.1e-01"),
        ([1.0, float("nan")], "different: inf"),
    ],
)
def test_gradients_are_equal_within_rounding_or_different(bench, found, said):
    assert bench["frontier"].difference([torch.ones(2)], [torch.tensor(found)]) == said


def test_without_a_plain_step_there_are_no_gradients_to_compare_with(bench):
    content = bench["frontier"].main(["--methods", "checkpoint"])
    for each in content["workloads"]["llama-1.3b"]["rows"]:
        assert each["facts"]["gradients"] == "not compared: there is no plain step"


def test_compiled_code_is_not_blamed_for_other_random_numbers(bench):
    options = bench["frontier"].parsed([])
    race = bench["frontier"].Race(
        "gpt2-774m", bench["workloads"].WORKLOADS["gpt2-774m"], options, lambda result: None
    )
    method, nothing = bench["peers"].Method, bench["frontier"].nullcontext
    for made in (method("plain", "plain", nothing), method("c", "regional", nothing, compiled=True)):
        race.prepare(made)
    said = {each.label: each.facts["gradients"] for each in race.rows()}
    assert said == {
        "plain": "equal to the bit",
        "c": "not compared: compiled code draws other random numbers",
    }


def test_fallbacks_of_any_round_are_remembered(bench, monkeypatch):
    """A later round without any does not take them back."""
    counts = iter([2, 0])

    @contextmanager
    def applied(model: Any, plan: Any) -> Iterator[Any]:
        region = SimpleNamespace(counts=SimpleNamespace(fallbacks=next(counts)))
        yield SimpleNamespace(regions=[region], engine=None)

    options = bench["frontier"].parsed([])
    race = bench["frontier"].Race(
        "llama-1.3b", bench["workloads"].WORKLOADS["llama-1.3b"], options, lambda result: None
    )
    planner = bench["frontier"].Planner.of(race, "exact")
    method = planner.method("remat", planner.plan(1 << 60), None)
    monkeypatch.setattr(bench["frontier"].remat, "apply", applied)
    for _ in range(2):
        with method.context():
            pass
    assert method.facts["fallbacks"] == 2


def test_what_fused_replay_gains_is_shown_by_the_same_plan_without(bench, monkeypatch):
    """The plan of the row, none of it fused: so it runs, and its gradients are those of the plain step. Where
    nothing is fused, as on the host, there is nothing to show."""
    frontier = bench["frontier"]
    options = frontier.parsed([])
    workload = bench["workloads"].WORKLOADS["llama-1.3b"]
    workload = frontier.replace(workload, shares=(0.8,))
    race = frontier.Race("llama-1.3b", workload, options, lambda result: None)
    monkeypatch.setattr(frontier, "UNFUSED_SHARE", 0.8)
    monkeypatch.setitem(frontier.OURS, "remat", frontier.EXACT)  # in chunks sums have another order
    race.prepare_group("plain")
    race.prepare_group("unfused")
    assert "there is no row remat 0.8" in race.lanes["remat unfused 0.8"].why
    race.prepare_group("remat")
    race.prepare_group("unfused")
    assert "nothing is fused" in race.lanes["remat unfused 0.8"].why

    def fused(entry: Any) -> Any:
        return frontier.replace(entry, recipe=entry.recipe and frontier.replace(entry.recipe, fused=True))

    plans = race.planners["remat"].plans
    found = plans["remat 0.8"]
    kinds = tuple(frontier.replace(kind, menu=tuple(map(fused, kind.menu))) for kind in found.profile.kinds)
    plans["remat 0.8"] = frontier.replace(found, profile=frontier.replace(found.profile, kinds=kinds))
    plan = frontier.one_by_one(plans["remat 0.8"])
    assert plan.choices == found.choices
    recipes = [entry.recipe for kind in plan.profile.kinds for entry in kind.menu if entry.recipe]
    assert recipes
    assert not any(recipe.fused for recipe in recipes)
    race.prepare_group("unfused")
    assert race.row(race.lanes["remat unfused 0.8"]).measured
    assert race.lanes["remat unfused 0.8"].facts["gradients"] == "equal to the bit"


def test_the_plain_step_runs_beside_all_parts_of_a_round(bench):
    made = bench["peers"].Method
    methods = [
        made(f"{i}", "plain" if i == 7 else "regional", bench["frontier"].nullcontext) for i in range(12)
    ]
    order = [method.label for method in bench["frontier"].with_plain(methods)]
    assert order == ["7", "0", "1", "2", "3", "4", "7", "5", "6", "8", "9", "10", "7", "11"]
    assert bench["frontier"].with_plain(methods[7:8]) == methods[7:8]
    assert bench["frontier"].with_plain(methods[:3]) == methods[:3]


def test_every_method_rests_before_it_is_timed(bench, monkeypatch):
    slept = []
    monkeypatch.setattr(bench["frontier"].time, "sleep", slept.append)
    content = bench["frontier"].main(
        ["--methods", "plain,checkpoint", "--rounds", "2", "--steps", "1", "--rest", "3"]
    )
    found = content["workloads"]["llama-1.3b"]
    assert found["rest_seconds"] == 3
    assert [seconds for seconds in slept if seconds == 3] == [3] * 2 * len(found["rows"])


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
    race.run(["plain", "compiled", "regional", "one-graph"])
    one_graph = race.planners["one-graph"]
    assert one_graph.profile.one_graph
    one_graph.add(0.5)
    rows = {each.label: each for each in race.rows() if each.measured}
    assert rows["regional 0.0"].share < rows["regional 0.5"].share < rows["regional 1.0"].share < 1
    assert rows["remat compiled 0.5"].share <= 0.5
    assert rows["remat compiled 0.5"].compiled
    row = rows["remat in one graph 0.5"]
    assert row.compiled
    assert row.share <= 0.5
    assert row.facts["fallbacks"] == 0


# ------------------------------------------------------------------------------------------ plans made ahead


@pytest.fixture(scope="module")
def profiled(bench: dict[str, Any]) -> Any:
    """A race of the small Llama with its plain step, and one profile: seconds of another would differ."""
    frontier = bench["frontier"]
    workload = frontier.replace(bench["workloads"].WORKLOADS["llama-1.3b"], shares=(0.8, 0.5, 0.01))
    race = frontier.Race("llama-1.3b", workload, frontier.parsed([]), lambda result: None)
    race.prepare_group("plain")
    return race, frontier.Planner.of(race, "exact").profile


def prepared(bench: dict[str, Any], profiled: Any, planners: int) -> tuple[Any, list[int]]:
    """Rows and plans of the group, made by so many processes; and the budgets that were planned for here."""
    (race, profile), frontier, here = profiled, bench["frontier"], []
    real = frontier.Planner.plan

    def counted(self: Any, budget_bytes: int) -> Any:
        here.append(budget_bytes)
        return real(self, budget_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(race.options, "planners", planners)
        patch.setattr(frontier.Planner, "of", lambda race, group: frontier.Planner(race, group, profile))
        patch.setattr(frontier.Planner, "plan", counted)
        for label in [label for label, lane in race.lanes.items() if lane.group == "exact"]:
            del race.lanes[label]
        race.prepare_ours("exact")
    rows = [row for row in race.rows() if row.group == "exact"]
    for row in rows:
        row.facts.pop("first_step_seconds", None)
    assert race.planners["exact"].workers is None
    return (rows, race.planners["exact"].plans), here


@pytest.fixture(scope="module")
def one_by_one(bench: dict[str, Any], profiled: Any) -> tuple[Any, list[int]]:
    return prepared(bench, profiled, planners=0)


def test_plans_made_ahead_are_those_made_one_by_one(bench, profiled, one_by_one, monkeypatch):
    started = []
    real = bench["frontier"].subprocess.Popen

    def noted(*args: Any, **options: Any) -> Any:
        started.append(real(*args, **options))
        return started[-1]

    monkeypatch.setattr(bench["frontier"].subprocess, "Popen", noted)
    (rows, plans), here = prepared(bench, profiled, planners=2)
    assert list(plans) == ["remat exact 0.8", "remat exact 0.5"]
    assert (rows, plans) == one_by_one[0]  # choices, predicted peaks and all
    (refused,) = [row for row in rows if row.label == "remat exact 0.01"]
    assert refused.why.startswith("out of reach: 0.")
    assert len(here) < len(one_by_one[1])
    assert len(started) == 2
    assert all(worker.returncode is not None for worker in started)  # none is left to disturb the race


def test_a_budget_out_of_reach_is_so_ahead_too(bench, profiled, monkeypatch):
    race, profile = profiled
    planner = bench["frontier"].Planner(race, "exact", profile)
    budget_bytes = planner.budget_bytes(int(0.01 * race.base.peak_bytes))
    with pytest.raises(remat.BudgetError) as expected:
        planner.plan(budget_bytes)
    monkeypatch.setattr(race.options, "planners", 2)
    with planner.ahead((0.02, 0.01)):
        monkeypatch.setattr(planner, "plan", None)  # not here
        with pytest.raises(remat.BudgetError) as found:
            planner.planned(budget_bytes, "remat")
    assert str(found.value) == str(expected.value)
    assert vars(found.value) == vars(expected.value)


@pytest.mark.parametrize("broken", ["raise SystemExit(3)", "print('not a plan')", ""])
def test_without_a_worker_plans_are_made_here(bench, profiled, one_by_one, monkeypatch, broken):
    """It dies, it says something else, or it does not start."""
    monkeypatch.setattr(bench["frontier"], "WORKER", broken)
    if not broken:
        monkeypatch.setattr(bench["frontier"].sys, "executable", "/no/such/python")
    assert prepared(bench, profiled, planners=2) == one_by_one


def test_workers_end_when_what_they_plan_for_fails(bench, profiled, monkeypatch):
    race, profile = profiled
    planner = bench["frontier"].Planner(race, "exact", profile)
    monkeypatch.setattr(race.options, "planners", 2)
    monkeypatch.setattr(bench["frontier"], "WORKER", "import time; time.sleep(600)")
    started: set[Any] = set()

    def interrupted() -> None:
        with planner.ahead((0.8, 0.5)):
            started.update(planner.workers.of_budget.values())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert planner.workers is None
    assert [worker.returncode for worker in started] == [-9, -9]


@pytest.mark.parametrize(
    ("budget_bytes", "serves"),
    [
        (1000, True),  # what it was made for
        (990, True),  # tighter, and its peak is within
        (949, False),
        (1005, True),  # looser, and little stays unused
        (1006, False),
    ],
)
def test_a_plan_made_ahead_serves_what_it_fits_and_nearly_fills(bench, budget_bytes, serves):
    plan = SimpleNamespace(predicted_peak_bytes=950)
    assert bench["frontier"].Made(1000, plan, 0.1).serves(budget_bytes, spare_bytes=5) is serves


@pytest.mark.parametrize(("budget_bytes", "serves"), [(1000, True), (900, True), (1199, True), (1200, False)])
def test_a_refusal_made_ahead_holds_below_what_is_needed(bench, budget_bytes, serves):
    refused = remat.BudgetError("out of reach", needed=1200)
    assert bench["frontier"].Made(1000, refused, 0.1).serves(budget_bytes, spare_bytes=5) is serves


@pytest.mark.parametrize(("seconds", "said"), [(8.43, ["remat 0.5: planned in 8.4 s"]), (0.9, [])])
def test_plans_that_take_long_are_told_of(bench, profiled, monkeypatch, seconds, said):
    race, profile = profiled
    planner, told = bench["frontier"].Planner(race, "exact", profile), []
    monkeypatch.setattr(race, "say", told.append)
    monkeypatch.setattr(planner, "made_now", lambda budget: bench["frontier"].Made(budget, "a plan", seconds))
    assert planner.planned(1 << 60, "remat 0.5") == "a plan"
    assert told == said


def test_one_process_plans_without_an_accelerator(bench):
    assert bench["frontier"].parsed([]).planners == 0
    assert bench["frontier"].parsed(["--planners", "3"]).planners == 3


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


def card_of(bench: dict[str, Any], job: Any, room_bytes: int = 4 << 20) -> Any:
    held = 2 * sum(p.numel() * p.element_size() for p in job.model.parameters())
    return bench["longest"].Card(held + room_bytes, 64, 16)


@pytest.fixture(scope="module")
def context_job(bench: dict[str, Any]) -> Any:
    job = bench["workloads"].WORKLOADS["long-context"].small()
    for parameter in job.trained:
        parameter.grad = torch.zeros_like(parameter)
    return job


@pytest.mark.parametrize(
    ("error", "too_long"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), True),
        (TypeError("lce_forward() got an unexpected keyword argument"), False),
        (RuntimeError("expected scalar type BFloat16 but found Float"), False),
        (remat.BudgetError("out of reach", needed=1), False),  # of a peer: it has no budget
    ],
)
def test_only_memory_makes_a_length_too_long(bench, context_job, error, too_long):
    @contextmanager
    def broken(job: Any) -> Iterator[None]:
        if job.batch["input_ids"].shape[1] > 64:
            raise error
        yield

    def trial(length: int) -> Any:
        return bench["longest"].peer_trial(context_job, card_of(bench, context_job), broken, length)

    found = bench["longest"].search(trial, 0, lambda: False, start=64, unit=16)
    if too_long:
        assert (found.length, found.below, found.why) == (64, 80, "")
    else:
        assert (found.length, found.below) == (None, None)
        assert found.why == f"failed at 128 tokens: {type(error).__name__}: {error}"
    shown = bench["longest"].line_of("peer", {"methods": {"peer": asdict(found)}})
    assert shown == ("peer: 64 tokens, 80 does not train (3 trials)" if too_long else f"peer: {found.why}")


def test_a_length_of_ours_counts_only_if_its_step_ran(bench, context_job, monkeypatch):
    longest, ran = bench["longest"], []
    real = longest.step_once

    def counted(*args: Any) -> Any:
        ran.append(args)
        return real(*args)

    monkeypatch.setattr(longest, "step_once", counted)
    found = longest.remat_trial(context_job, card_of(bench, context_job), False, 64)
    assert (found.fits, found.why, len(ran)) == (True, "", 1)
    assert found.seconds > 0
    refused = longest.remat_trial(context_job, card_of(bench, context_job, room_bytes=1), False, 64)
    assert (refused.fits, refused.broken, len(ran)) == (False, False, 1)
    assert refused.why.startswith("BudgetError")

    def wrong(*args: Any) -> Any:
        raise remat.RecomputeError("not what was dropped")

    monkeypatch.setattr(longest, "step_once", wrong)
    found = longest.remat_trial(context_job, card_of(bench, context_job), False, 64)
    assert (found.fits, found.broken, found.why) == (False, True, "RecomputeError: not what was dropped")


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


def recorded(folder: Path, **different: Any) -> Path:
    """A file of one workload and of one search for the longest context."""
    rows = [
        {"label": "plain", "group": "plain", "share": 1.0, "time": 1.0},
        {"label": "remat 0.5", "group": "remat", "ours": True, "share": 0.49, "time": 1.02},
        {"label": "remat 0.9", "group": "remat", "ours": True, "share": 0.89, "time": 1.03},
        {"label": "remat 0.01", "group": "remat", "ours": True, "share": 0.01, "time": 1.7},
        {
            "label": "remat 0.3",
            "group": "remat",
            "ours": True,
            "share": 0.3,
            "time": 0.9,
            "facts": {"fallbacks": 4},
        },
        {"label": "selective, attention", "group": "selective", "share": 0.6, "time": 1.2},
        {"label": "remat unfused 0.25", "group": "unfused", "ours": True, "share": 0.25, "time": 1.1},
        {"label": "save_on_cpu", "group": "offload-all", "share": 0.2, "time": 6.4},
        {"label": "Liger fused loss", "group": "chunked-loss", "why": "liger-kernel is not installed"},
    ]
    where = {"device": "NVIDIA H200", "torch": "2.11.0+cu130", "date": "2026-11-15T09:00:00+00:00",
             "commit": "abc", "run": "123"}  # fmt: skip
    result = {"about": "a model", "environment": where, "size": "full", "base": {"measured": True},
              "rows": rows, **different}  # fmt: skip
    found = {"methods": {
        "remat": {"length": 9, "below": 10, "why": ""}, "plain": {"why": "not run"},
        "Liger": {"length": None, "below": None, "why": "failed at 8 tokens: TypeError"},
    }}  # fmt: skip
    longest = {"environment": where, "capacity_bytes": 1 << 34, **found}
    path = folder / "frontier.json"
    path.write_text(json.dumps({"format": 1, "workloads": {"llama-1.3b": result}, "longest": longest}))
    return path


def test_the_table_holds_every_row_and_the_verdict(bench, tmp_path):
    text = bench["plot"].table_of([recorded(tmp_path)])
    assert "| **remat 0.5** | 0.490 | 1.020 |" in text
    assert "Liger fused loss (liger-kernel is not installed)" in text
    assert "ahead of  selective, attention 1.200x at 0.600: remat 0.5 1.020x at 0.490" in text
    assert "MISSED target eager 0.50 at <= 1.01x" in text
    assert "| remat | 9 | 10 |" in text
    assert "| Liger | failed at 8 tokens: TypeError | |" in text
    assert "remat 0.3 (4 fallbacks)" in text
    assert "- not judged: remat 0.3: 4 fallbacks" in text
    assert "prediction" not in text
    assert "NVIDIA H200, torch 2.11.0+cu130, 2026-11-15" in text


def test_the_table_of_small_shapes_has_no_targets(bench, tmp_path):
    text = bench["plot"].table_of([recorded(tmp_path, size="small")])
    assert "ahead of  selective" in text
    assert "target" not in text


def test_the_table_says_where_the_plain_step_is_predicted(bench, tmp_path):
    plain = {"label": "plain", "group": "plain", "why": "failed: OutOfMemoryError: 7 GiB"}
    ours = {"label": "remat", "group": "remat", "ours": True, "share": 0.3, "time": 1.1}
    path = recorded(tmp_path, base={"measured": False}, rows=[plain, ours])
    text = bench["plot"].table_of([path])
    said = (
        "The plain step was not measured (failed: OutOfMemoryError: 7 GiB): all ratios are to its prediction."
    )
    assert said in text
    assert text.index(said) < text.index("| method |")
    (panel,) = bench["plot"].panels_of([path])
    option = bench["plot"].option_of(panel, bench["plot"].SCHEMES["light"])
    assert "the plain step was not measured, and is predicted" in option["title"]["subtext"]


def test_the_panel_draws_our_frontier_and_names_what_is_too_slow(bench, tmp_path):
    (panel,) = bench["plot"].panels_of([recorded(tmp_path)])
    option = bench["plot"].option_of(panel, bench["plot"].SCHEMES["dark"])
    drawn = {each["name"]: [point["value"] for point in each["data"]] for each in option["series"]}
    assert drawn["remat"] == [[0.01, 1.7], [0.49, 1.02]]  # the other one is slower at a higher peak
    assert drawn["selective checkpointing"] == [[0.6, 1.2]]
    assert "offload" not in drawn
    assert option["title"]["subtext"].endswith("; not drawn: save_on_cpu 6.4x at 0.20")


def test_labels_of_neighbours_do_not_cover_each_other(bench):
    rows = [row(bench, f"a peer of some length {i}", 0.5 + 0.01 * i, 1.2) for i in range(3)]
    places = bench["plot"].Frame(0.9, 1.4).places(rows, [])
    assert len(set(places.values())) == 3


def test_a_label_without_room_is_left_out(bench):
    rows = [row(bench, f"a peer of some length {i}", 0.5, 1.2) for i in range(20)]
    assert 4 <= len(bench["plot"].Frame(0.9, 1.4).places(rows, [])) < 20


@pytest.mark.parametrize(
    ("times", "expected"), [((0.99, 1.13), (0.9, 1.2, 0.1)), ((0.66, 1.41), (0.6, 1.6, 0.2))]
)
def test_the_axis_of_times_ends_on_ticks(bench, times, expected):
    frame = bench["plot"].Frame.around(times)
    assert (frame.low, frame.high, frame.tick) == expected


def test_many_slow_methods_are_counted_instead_of_named(bench, tmp_path):
    slow = [{"label": f"slow {i}", "group": "selective", "share": 0.5, "time": 3.0} for i in range(4)]
    plain = {"label": "plain", "group": "plain", "share": 1.0, "time": 1.0}
    (panel,) = bench["plot"].panels_of([recorded(tmp_path, rows=[plain, *slow])])
    option = bench["plot"].option_of(panel, bench["plot"].SCHEMES["light"])
    assert option["title"]["subtext"].endswith("; not drawn: 4 methods beyond the axes")


def test_figures_below_our_lines_do_not_cover_each_other(bench, tmp_path):
    ours = [
        {"label": f"remat {share}", "group": "remat", "ours": True, "share": share, "time": 1.2 - share / 9}
        for share in (0.1, 0.11, 0.3)
    ]
    (panel,) = bench["plot"].panels_of([recorded(tmp_path, rows=ours)])
    option = bench["plot"].option_of(panel, bench["plot"].SCHEMES["light"])
    labels = [point["label"]["show"] for point in option["series"][0]["data"]]
    assert labels == [True, False, True]


def test_the_table_of_another_file_is_printed_and_not_recorded(bench, tmp_path, capsys):
    before = bench["plot"].TABLE.read_text()
    bench["plot"].main(["--table", str(recorded(tmp_path))])
    assert "| **remat 0.5** | 0.490 | 1.020 |" in capsys.readouterr().out
    assert bench["plot"].TABLE.read_text() == before


def test_the_documentation_shows_what_is_recorded(bench):
    plot = bench["plot"]
    assert plot.TABLE.read_text() == plot.table_of(plot.recorded()), "run benchmarks/plot.py"


# -------------------------------------------------------------------------------------- the rented machine


def test_the_rented_machine_runs_every_workload_once_in_parts_that_fit(bench):
    """As rented.sh says: parts of ten minutes, each race with what it may take beyond its limit."""
    text = (ROOT / "benchmarks" / "rented.sh").read_text()
    parts = re.findall(r"^    \d\)\n(.*?)\n        ;;", text, re.DOTALL | re.MULTILINE)
    races = [re.findall(r"^ +race (\S+) (\d+) \S+ (\d)", part, re.MULTILINE) for part in parts]
    names = [name for found in races for name, _, _ in found]
    assert sorted([*names, "long-context"]) == sorted(bench["workloads"].WORKLOADS)
    for part, found in zip(parts, races, strict=True):
        others = [int(seconds) for seconds in re.findall(r"timeout (\d+)", part)]
        assert sum(int(seconds) for _, seconds, _ in found) + sum(others) <= 590
    for groups in re.findall(r"^(?:EAGER|COMPILED)=(\S+)", text, re.MULTILINE):
        asked = set(groups.removeprefix("$EAGER,").split(","))
        assert asked <= set(bench["frontier"].GROUPS)
