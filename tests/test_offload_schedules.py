"""The offload engine on random schedules: every value comes back, every bound holds, nothing leaks."""

from __future__ import annotations

import random
import weakref
from collections import Counter
from dataclasses import asdict, dataclass, field, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remat.errors import OffloadError
from remat.run.offload import Engine
from remat.run.simulated import SimulatedLink
from remat.run.slabs import Slab

KB = 1024


@dataclass(frozen=True)
class Setting:
    """Limits of all kinds, most of them too small."""

    in_flight: int
    host: int
    disk: int
    slab: int
    capacity: int | None
    d2h: float
    h2d: float
    failing: frozenset[int]


@dataclass(eq=False)
class Saved:
    """One saved tensor of a graph, and what it has to be when it comes back."""

    ticket: object
    layout: tuple
    expected: torch.Tensor
    stream: str


@dataclass(eq=False)
class Graph:
    group: object = None
    order: int = 0
    saved: list[Saved] = field(default_factory=list)


class Driver:
    """Carries out a schedule and checks the engine after every step. Three graphs are alive at a time."""

    def __init__(self, setting):
        self.setting = setting
        self.link = SimulatedLink(
            d2h_bytes_per_second=setting.d2h,
            h2d_bytes_per_second=setting.h2d,
            capacity_bytes=setting.capacity,
            fails=lambda direction, number: number in setting.failing,
            spoil=True,
        )
        self.engine = Engine(
            "cpu",
            in_flight_limit_bytes=setting.in_flight,
            host_limit_bytes=setting.host,
            disk_limit_bytes=setting.disk,
            slab_bytes=setting.slab,
            link=self.link,
        )
        self.graphs = [Graph(), Graph(), Graph()]
        self.seed = 0

    # -- what a schedule is made of: (name, graph, number)

    def region(self, graph, number):
        """Another region call: what is sent from here on belongs to a new group."""
        graph.order += 1
        graph.group = self.engine.group(graph.order)

    def send(self, graph, number):
        if graph.group is None:
            self.region(graph, 0)
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        tensor = torch.randint(0, 256, (number * 97 % 3000,), generator=generator, dtype=torch.uint8)
        views = [tensor, tensor[number % 5 :], tensor[::2]][: 1 + number % 3]
        expected = [
            view.clone() for view in views
        ]  # before the first send: the engine may spoil what it lets go
        for view, value in zip(views, expected, strict=True):
            layout = (view.shape, view.stride(), view.storage_offset(), view.dtype)
            graph.saved.append(Saved(graph.group.send(view), layout, value, self.link.current()))
        assert len({id(saved.ticket) for saved in graph.saved[-len(views) :]}) == 1

    def forward(self, graph, number):
        """Some regions in a row, as in a training step."""
        for region in range(2 + number % 3):
            self.region(graph, 0)
            self.send(graph, number + region)
            self.send(graph, number + 31 * region)

    def get(self, graph, number):
        if graph.saved:
            self.check(graph.saved[number % len(graph.saved)])

    def check(self, saved):
        with self.link.on(saved.stream):
            got = self.ask(saved)
        assert got.equal(saved.expected)
        assert got.stride() == saved.layout[1]

    def ask(self, saved):
        """What fails may be repeated: nothing is lost."""
        while True:
            try:
                return saved.ticket.get(*saved.layout)
            except OffloadError:
                assert any(c.number not in self.setting.failing for c in self.link.history)

    def get_on_another_stream(self, graph, number):
        if graph.saved:
            saved = graph.saved[number % len(graph.saved)]
            with self.link.on("other" if saved.stream == "default" else "default"):
                assert self.ask(saved).equal(saved.expected)

    def prefetch(self, graph, number):
        if graph.saved:
            graph.saved[number % len(graph.saved)].ticket.group.prefetch()

    def backward(self, graph, number):
        """In reverse, letting go on the way."""
        while graph.saved:
            self.check(graph.saved.pop())
            self.link.compute(number * 1e-9)
        self.forget(graph, 0)

    def backward_and_retain(self, graph, number):
        for saved in reversed(graph.saved):
            self.check(saved)

    def stop_in_the_middle(self, graph, number):
        """An exception in backward: some were asked for, then all go."""
        for saved in graph.saved[number % 7 :]:
            self.check(saved)
        self.forget(graph, 0)

    def forget(self, graph, number):
        graph.saved.clear()
        graph.group, graph.order = None, 0

    def drop(self, graph, number):
        if graph.saved:
            graph.saved.pop(number % len(graph.saved))

    def settle(self, graph, number):
        self.engine.settle()
        assert self.engine.counts.in_flight_bytes == 0

    def compute(self, graph, number):
        self.link.compute(number * 1e-8)

    def switch_stream(self, graph, number):
        self.link._stream = ("default", "other")[number % 2]

    # -- what holds at all times

    def check_bounds(self):
        counts, setting = self.engine.counts, self.setting
        assert counts.in_flight_bytes <= counts.peak_in_flight_bytes <= setting.in_flight
        assert counts.inbound_bytes <= counts.peak_inbound_bytes <= setting.in_flight
        assert counts.pinned_bytes == self.link.pinned_bytes <= setting.host
        assert counts.disk_bytes <= setting.disk
        tickets = {saved.ticket for graph in self.graphs for saved in graph.saved}
        assert counts.used_bytes == sum(ticket.nbytes for ticket in tickets if ticket.is_on_host)
        assert not self.link.violations

    def run(self, schedule):
        for name, graph, number in schedule:
            getattr(self, name)(self.graphs[graph], number)
            self.check_bounds()
        for graph in self.graphs:
            self.backward(graph, 1)
        self.engine.close()
        counts = self.engine.counts
        assert (counts.used_bytes, counts.inbound_bytes, counts.in_flight_bytes) == (0, 0, 0)
        assert (counts.pinned_bytes, counts.disk_bytes, self.link.pinned_bytes) == (0, 0, 0)
        assert not self.link.violations
        return self


def one_of(*values):
    return st.sampled_from(values)


SETTINGS = st.builds(
    Setting,
    in_flight=one_of(0, 500, 2 * KB, 5 * KB, 64 * KB),
    host=one_of(0, 5 * KB, 20 * KB, 200 * KB, 200 * KB),
    disk=one_of(0, 0, 0, 8 * KB, 64 * KB),
    slab=one_of(512, 3 * KB, 16 * KB),
    capacity=one_of(None, None, None, 4 * KB),
    d2h=one_of(1e3, 1e9, 1e12),
    h2d=one_of(1e3, 1e9, 1e12),
    failing=one_of(frozenset(), frozenset(), frozenset({1, 4, 5, 9}), frozenset(range(6, 40, 2))),
)
STEPS = (
    ["send", "forward"] * 4
    + ["region", "get", "backward"] * 3
    + ["prefetch"] * 2
    + ["get_on_another_stream", "backward_and_retain", "stop_in_the_middle", "forget", "drop", "settle"]
    + ["compute", "switch_stream"]
)
SCHEDULES = st.lists(
    st.tuples(st.sampled_from(STEPS), st.integers(0, 2), st.integers(0, 10_000)), min_size=8, max_size=40
)
THOROUGH = settings(
    max_examples=1000, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)


def test_random_schedules_keep_every_value_and_every_bound():
    seen: Counter[str] = Counter()

    @THOROUGH
    @given(SETTINGS, SCHEDULES)
    def run(setting, schedule):
        counts = asdict(Driver(setting).run(schedule).engine.counts)
        seen.update(name for name, count in counts.items() if count > 0)
        seen["schedules"] += 1

    run()
    assert seen["schedules"] >= 1000
    rarely = [name for name, times in seen.items() if times < 100]
    assert not rarely, f"the schedules hardly ever come to {rarely}"


# ------------------------------------------------------------------ the same schedules see a broken engine


def settle_without_waiting(patch):
    patch.setattr(SimulatedLink, "wait", lambda self, stream, mark: None)


def two_tickets_in_the_same_host_bytes(patch):
    take = Slab.take

    def overlapping(slab, nbytes):
        extent = take(slab, nbytes)
        return None if extent is None else replace(extent, offset=0)

    patch.setattr(Slab, "take", overlapping)


def use_of_memory_that_was_let_go(patch):
    land = Engine._land

    def keep_using(engine, flight):
        land(engine, flight)
        flight.stored.device = flight.copy

    patch.setattr(Engine, "_land", keep_using)


def no_back_pressure(patch):
    patch.setattr(Engine, "_settle", lambda self, limit: None)


def dead_tickets_are_not_noted(patch):
    patch.setattr(Engine, "_note_death", lambda self, stored: None)


@pytest.mark.parametrize(
    "breakage",
    [
        settle_without_waiting,
        two_tickets_in_the_same_host_bytes,
        use_of_memory_that_was_let_go,
        no_back_pressure,
        dead_tickets_are_not_noted,
    ],
)
def test_a_broken_engine_is_caught(breakage, monkeypatch):
    breakage(monkeypatch)
    setting = Setting(2 * KB, 64 * KB, 0, 16 * KB, None, 1e3, 1e3, frozenset())
    forward = [
        step for n in range(1, 8) for step in (("region", 0, 0), ("send", 0, 3 * n), ("send", 0, 5 * n))
    ]
    with pytest.raises(AssertionError):
        Driver(setting).run([*forward, ("backward", 0, 1)])


# -------------------------------------------------------------------------------------------------- leaks


def test_two_thousand_steps_of_random_sizes_leak_nothing():
    chance = random.Random(0)
    engine = Engine(
        "cpu",
        in_flight_limit_bytes=8 * KB,
        host_limit_bytes=256 * KB,
        slab_bytes=32 * KB,
        link=SimulatedLink(d2h_bytes_per_second=1e9, h2d_bytes_per_second=1e9),
    )
    sent: list[weakref.ref] = []

    def forward():
        graph = []
        for order in range(chance.randrange(1, 5)):
            group = engine.group(order)
            for _ in range(chance.randrange(3)):
                value = len(sent) % 251
                tensor = torch.full((chance.randrange(1, 2000),), value, dtype=torch.uint8)
                sent.append(weakref.ref(tensor.untyped_storage()))
                graph.append((group.send(tensor), tensor.shape, value))
        return graph

    def step():
        graphs = [forward() for _ in range(chance.choice([1, 1, 2]))]
        if chance.random() < 0.2:
            return  # never backwarded
        for graph in graphs:
            while graph:
                ticket, shape, value = graph.pop()
                assert ticket.get(shape, (1,), 0, torch.uint8).unique().tolist() == [value]

    for _ in range(1000):
        step()
    pinned_halfway = engine.counts.pinned_bytes
    for _ in range(1000):
        step()
    engine.settle()
    counts = engine.counts
    assert counts.sent_bytes > 1_000_000
    assert counts.kept_bytes == 0
    assert counts.pinned_bytes == pinned_halfway
    assert (counts.used_bytes, counts.inbound_bytes, counts.in_flight_bytes) == (0, 0, 0)
    assert not any(storage() is not None for storage in sent)
    assert all(slab.is_empty for slab in engine._host.slabs)
    assert not engine._flights
    assert not engine._dead
    assert all(stored.dead for stored in engine._wanted)
    assert len(engine._wanted) < 20  # what the last backward still wanted
    assert not engine.link.violations
