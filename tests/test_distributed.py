"""DDP and FSDP2, two processes on the CPU: one plan for both, the budget met on each, all else unchanged."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

WORKER = Path(__file__).parent / "ranks_worker.py"
TIMEOUT_SECONDS = 600
TRAINED = ("ddp", "fsdp2", "accelerate_plain", "accelerate_fsdp2")
OTHERS = ("shapes_that_differ", "strangers", "trainer")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Scenario -> what each rank saw. All scenarios in one pair of processes: starting them takes longest."""
    out = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    command = [sys.executable, "-W", "ignore", str(WORKER), ",".join((*TRAINED, *OTHERS)), str(out)]
    logs = [(out / f"{rank}.log").open("w") for rank in range(2)]
    started = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=TIMEOUT_SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
        for log in logs:
            log.close()
    assert codes == [0, 0], "\n".join((out / f"{rank}.log").read_text()[-3000:] for rank in range(2))
    return {
        name: [torch.load(out / f"{name}.{rank}.pt") for rank in range(2)] for name in (*TRAINED, *OTHERS)
    }


@pytest.mark.parametrize("name", TRAINED)
def test_twenty_steps_are_the_same_to_the_bit(found: dict[str, Any], name: str) -> None:
    for seen in found[name]:
        assert seen["losses equal"]
        assert seen["losses differ from step to step"]
        assert seen["keys equal"]
        assert seen["weights equal"]


@pytest.mark.parametrize("name", TRAINED)
def test_one_plan_runs_on_all_ranks_within_the_budget(found: dict[str, Any], name: str) -> None:
    ours, theirs = found[name]
    assert ours["plan"] == theirs["plan"]
    for seen in (ours, theirs):
        assert seen["peak"] <= seen["budget"] < seen["plain peak"]
        assert seen["regions"]
        assert seen["recomputed"]
        assert not seen["fallbacks"]


@pytest.mark.parametrize("name", ["fsdp2", "accelerate_fsdp2"])
def test_parameters_stay_sharded(found: dict[str, Any], name: str) -> None:
    assert all(seen["still sharded"] for seen in found[name])


def test_ranks_with_batches_of_different_lengths_plan_for_the_longer(found: dict[str, Any]) -> None:
    short, long = found["shapes_that_differ"]
    assert short["plan"] == long["plan"]
    assert short["signature"] == long["signature"] == "{input_ids: int64[4, 48], labels: int64[4, 48]}"
    for seen in (short, long):
        assert seen["losses equal"]
        assert seen["weights equal"]
        assert seen["peak"] <= seen["budget"]
    assert not long["fallbacks"]
    assert all("not planned" in why for why in short["fallbacks"])


def test_ranks_with_different_models_are_refused_and_may_plan_alone(found: dict[str, Any]) -> None:
    for rank, seen in enumerate(found["strangers"]):
        assert "different models" in seen["message"]
        assert "remat.ranks.alone()" in seen["message"]
        assert seen["calls alone"] == 3 + rank


def test_the_trainer_under_ddp(found: dict[str, Any]) -> None:
    for seen in found["trainer"]:
        assert seen["steps"] == 20
        assert seen["losses equal"]
        assert seen["weights equal"]
        assert seen["regions"]
