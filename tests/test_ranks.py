"""Two processes: one runs out of memory, both run the step again, and stay the same model."""

import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import remat
from remat.run import recover
from remat.run.ranks import Ranks

WORLD = 2
# By step, and whether it is the micro-step that averages. In the forward after an averaged step ranks wait
# for each other's buffers: a rank that cannot begin it must not leave the others there.
PLACES = {
    (0, True): ("forward", 1),
    (1, True): ("backward", 2),
    (2, True): ("backward", 0),
    (3, False): ("remember", 0),
}
PATIENCE = timedelta(seconds=60)  # ranks that wait for each other for ever fail
remember_buffers = recover.remember_buffers


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(self.norm(x)))), 0.1)


class Net(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def batch_of(rank, step):
    return torch.randn(64, 8, generator=torch.Generator().manual_seed(100 * step + rank))


class Fault:
    """At one block, in forward or in backward, or where buffers are copied before; once."""

    def __init__(self, model):
        self.place = None
        recover.remember_buffers = self.remember
        for number, block in enumerate(model.blocks):
            block.register_forward_hook(self.around(number))

    def strike(self, *place):
        if place == self.place:
            self.place = None
            raise torch.OutOfMemoryError("injected")

    def remember(self, model):
        self.strike("remember", 0)
        return remember_buffers(model)

    def around(self, number):
        def after(module, args, output):
            self.strike("forward", number)
            output.register_hook(lambda gradient: self.strike("backward", number))

        return after


def train(rank, accumulate, faults):
    """The state after four steps, with or without faults in rank 1 (and in rank 0, later)."""
    torch.manual_seed(0)
    model = Net()
    handle = remat.fit(model, batch_of(rank, 0), activations=0.8)
    fault = Fault(model)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(rank)
    for step in range(4):
        for micro in range(accumulate):
            if faults and rank == (step + 1) % 2:
                fault.place = PLACES.get((step, micro == accumulate - 1))

            def run(step=step, micro=micro):
                return ddp(batch_of(rank, 10 * step + micro)) / accumulate

            if not faults:
                with ddp.no_sync() if micro < accumulate - 1 else torch.enable_grad():
                    run().backward()
            elif micro < accumulate - 1:
                with ddp.no_sync():
                    handle.step(run, ddp=ddp)
            else:
                handle.step(run, ddp=ddp)
        optimizer.step()
        optimizer.zero_grad()
    chance = torch.get_rng_state()
    return {name: t.clone() for name, t in model.state_dict().items()}, chance, handle.stats


def work(rank, port, accumulate):
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD, timeout=PATIENCE)
    try:
        expected, expected_chance, _ = train(rank, accumulate, faults=False)
        found, chance, stats = train(rank, accumulate, faults=True)
        assert stats.recovered == 4, stats
        assert torch.equal(chance, expected_chance)
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name
        for name, parameter in found.items():
            if "running" in name or "num_batches" in name:
                continue  # each rank has its own batches
            other = [torch.empty_like(parameter) for _ in range(WORLD)]
            dist.all_gather(other, parameter)
            assert torch.equal(other[0], other[1]), name
        _alone(rank)
    finally:
        dist.destroy_process_group()


def _alone(rank):
    """Without ddp= a rank does not try again by itself: the others would wait for it."""
    model = Net()
    handle = remat.apply(model, remat.plan(remat.profile(model, batch_of(0, 0)), activations=1.0))

    def step():
        raise torch.OutOfMemoryError("injected")

    with pytest.raises(remat.RecoveryError, match="ddp=model"):
        handle.step(step)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_both_ranks_run_again_and_stay_identical():
    mp.spawn(work, args=(free_port(), 2), nprocs=WORLD)


def test_ddp_must_be_what_it_says():
    with pytest.raises(remat.InputError, match="DistributedDataParallel"):
        Ranks(Net(), ddp=Net())
