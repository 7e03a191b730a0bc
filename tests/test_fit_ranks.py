"""Two ranks on the CPU, one of which fares otherwise in the middle of `fit`: both come to the same plan."""

from __future__ import annotations

import datetime
import socket
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import remat
from models import InARow
from remat import fitting, profiling, wholestep
from remat.records import Mode
from remat.run import offload
from remat.run.ranks import Ranks

needs_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
WAIT = datetime.timedelta(seconds=20)  # a rank that is left alone fails, and does not wait for ever


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(torch.sin(self.up(x))))


class Net(InARow):
    def __init__(self) -> None:
        super().__init__(Block() for _ in range(6))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(rows: int = 256) -> torch.Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(dist.get_rank()))


def same_everywhere(value: Any) -> bool:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, repr(value))
    return found[0] == found[1]


# ------------------------------------------------------------------------------------ verification fails


def failing(modes: set[Mode]) -> Any:
    """verify_regions, to which replays of these modes are always wrong."""
    real = fitting.verify_regions

    def verify(model: Any, run: Any, regions: Any, *more: Any) -> Any:
        found = real(model, run, regions, *more)
        for region in regions:
            if any(variant.mode in modes for variant in region.variants.values()):
                region.counts.fallbacks += 1
                found = replace(found, ok=False, worst=f"{region.name}: made up")
        return found

    return verify


def test_regions_that_fail_without_a_recipe_are_an_error_and_no_endless_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fitting, "verify_regions", failing(set(Mode)))
    model = net()
    with pytest.raises(remat.VerificationError, match=r"blocks\.\d: made up.* remat\.region"):
        remat.fit(model, torch.randn(256, 16), activations=0.7)
    assert "forward" not in vars(model.blocks[0])


def wrong_on_one_rank(patch: pytest.MonkeyPatch) -> None:
    if dist.get_rank() == 1:
        patch.setattr(fitting, "verify_regions", failing({Mode.RECIPE}))
    handle = remat.fit(net(), batch(), activations=0.7)
    assert all(v.mode is Mode.FULL for region in handle.regions for v in region.variants.values())
    assert same_everywhere(handle.plan)


# ---------------------------------------------------------------------------------- one rank lacks something


def no_link_on_one_rank(patch: pytest.MonkeyPatch) -> None:
    if dist.get_rank() == 1:

        def hosting(device: torch.device, like: Any = None) -> Any:
            raise remat.HostMemoryError("made up")

        patch.setattr(profiling, "hosting", hosting)
    handle = remat.fit(net(), batch(), activations=0.7, allow=["keep", "recompute", "offload"])
    assert handle.plan.profile.link is None
    assert any("nothing is offloaded: the host of another rank" in n for n in handle.plan.profile.notes)
    assert same_everywhere(handle.plan)


def host_refuses_on_one_rank(patch: pytest.MonkeyPatch) -> None:
    if dist.get_rank() == 1:
        patch.setattr(offload, "available_host_bytes", lambda: 1000)
    handle = remat.fit(net(), batch(4096), activations=0.7, allow=["keep", "offload", "recompute"])
    assert handle.plan.profile.link is not None
    assert remat.Action.OFFLOAD not in handle.plan.allow
    assert same_everywhere(handle.plan.choices)


def not_compiled_on_one_rank(patch: pytest.MonkeyPatch) -> None:
    def compiled_kind(*args: Any) -> Any:
        if dist.get_rank() == 1:
            raise remat.CaptureError("made up")
        return "compiled"

    patch.setattr(profiling, "compiled_kind", compiled_kind)
    found = remat.profile(net(), batch(), compile="aot_eager")
    assert "not compiled, on another rank it cannot be" in found.kinds[0].note


def slower_on_one_rank(patch: pytest.MonkeyPatch) -> None:
    """The step communicates, as under FSDP2: all ranks have to run it as often."""
    real = wholestep._frugal_step
    patch.setattr(wholestep, "_frugal_step", lambda *args: real(*args) + dist.get_rank())
    model, steps = net(), []

    def step(x: torch.Tensor) -> torch.Tensor:
        steps.append(x)
        return model(x)

    remat.profile(model, batch(), step=step)
    assert same_everywhere(len(steps))


# --------------------------------------------------------------------------------------------- adaptive


def adaptive_under_ddp(patch: pytest.MonkeyPatch) -> None:
    model = DistributedDataParallel(net())
    handle = remat.fit(model, batch(), activations=0.6, step=model, adaptive=True)
    assert len(handle.sizes) == 3
    assert same_everywhere(handle._family)
    model(batch(32)).backward()


def adaptive_with_a_size_that_one_rank_cannot_run(patch: pytest.MonkeyPatch) -> None:
    model = DistributedDataParallel(net())

    def step(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 16 and dist.get_rank() == 1:
            raise ValueError("made up")
        return model(x)

    handle = remat.fit(model, batch(), activations=0.6, step=step, adaptive=[batch(16), batch(32)])
    assert len(handle.sizes) == 2
    assert same_everywhere(handle._family)
    assert any("ValueError: made up" in event.text for event in handle.stats.events)


# ---------------------------------------------------------------------------------------- a part of the ranks


def ddp_over_a_part_of_the_ranks(patch: pytest.MonkeyPatch) -> None:
    part = dist.new_group([1])
    if dist.get_rank() == 1:
        patch.setattr(dist, "get_backend", lambda group=None: "nccl")
        assert Ranks(net(), DistributedDataParallel(net(), process_group=part)).agree(True)


ON_TWO_RANKS = [
    wrong_on_one_rank,
    no_link_on_one_rank,
    host_refuses_on_one_rank,
    not_compiled_on_one_rank,
    slower_on_one_rank,
    adaptive_under_ddp,
    adaptive_with_a_size_that_one_rank_cannot_run,
    ddp_over_a_part_of_the_ranks,
]


def work(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=WAIT
    )
    try:
        for run in ON_TWO_RANKS:
            with pytest.MonkeyPatch.context() as patch:
                run(patch)
            dist.barrier(dist.new_group([0, 1]))  # stands still if one rank alone has made a group meanwhile
    finally:
        dist.destroy_process_group()


@needs_gloo
def test_two_ranks_agree() -> None:
    """All in one pair of processes: starting them takes longest."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, args=(port,), nprocs=2)
