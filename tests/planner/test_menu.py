"""Recipes: exact small cases, brute force over every keep set, a checker that must catch bad recipes."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.errors import InputError
from remat.planner.menu import (
    check_recipe,
    finish,
    least_resident_bytes,
    most_useful,
    recipes,
    solve,
    working_set_bytes,
)
from remat.records import RegionGraph, Role

from .build import GraphBuilder, llama_block


def chain() -> RegionGraph:
    """x -> a (cheap) -> b (dear) -> c -> output; a, b, c saved."""
    g = GraphBuilder()
    x = g.input(10)
    a = g.op(x, nbytes=100, seconds=1.0)
    b = g.op(a, nbytes=50, seconds=5.0)
    c = g.op(b, nbytes=60, seconds=2.0)
    g.save(a, b, c)
    g.output(g.op(c, nbytes=10, seconds=1.0))
    return g.graph()


# ------------------------------------------------------------------------------------------ exact cases


def test_the_cheapest_tensor_per_byte_goes_first() -> None:
    graph = chain()
    assert graph.saved_bytes == 210
    recipe = solve(graph, 120)
    assert recipe is not None
    # Dropping `a` frees 100 bytes but needs the input (10): 50 + 60 + 10 = 120 stay.
    assert (recipe.resident_bytes, recipe.replay_seconds, recipe.replayed) == (120, 1.0, (0,))
    assert recipe.dropped == (0,)


def test_the_least_is_the_input_and_a_byte_below_it_there_is_no_recipe() -> None:
    graph = chain()
    assert least_resident_bytes(graph) == 10
    recipe = solve(graph, 10)
    assert recipe is not None
    assert recipe.replay_seconds == 8.0
    assert solve(graph, 9) is None


def test_with_room_for_everything_nothing_is_dropped() -> None:
    graph = chain()
    recipe = solve(graph, graph.saved_bytes)
    assert recipe is not None
    assert (recipe.dropped, recipe.replayed, recipe.replay_seconds) == ((), (), 0.0)
    assert recipe.resident_bytes == graph.saved_bytes


def test_offloading_spares_replays() -> None:
    graph = chain()
    recipe = solve(graph, 10, 100)
    assert recipe is not None
    check_recipe(graph, recipe)
    # 100 bytes may cross the link: b (dearest to rebuild), then a or c cannot both go along.
    assert recipe.host_bytes <= 100
    assert recipe.replay_seconds < 8.0
    assert least_resident_bytes(graph, 10) == 0


def test_small_storages_are_not_sent() -> None:
    """However low the limit: a copy of a row's mean costs the host as much as one of the row."""
    g = GraphBuilder()
    x = g.input(1000)
    large = g.op(x, nbytes=4000, seconds=1.0, replayable=False)
    small = g.op(x, nbytes=20, seconds=1.0, replayable=False)
    g.save(x, large, small)
    menu = recipes(g.graph(), link_bytes=10_000)
    assert {s for recipe in menu for s in recipe.offloaded} == {g.values[v].storage for v in (x, large)}
    assert menu[-1].resident_bytes == 20  # asked for less, it gives what it can
    assert least_resident_bytes(g.graph(), 10_000) == 0


def test_where_moving_costs_the_host_fewer_and_larger_storages_move() -> None:
    g = GraphBuilder()
    x = g.input(10)
    parts = [g.op(x, nbytes=25, seconds=1.0) for _ in range(4)]
    whole = g.op(x, nbytes=100, seconds=3.9)
    g.save(*parts, whole)
    graph = g.graph()

    def moved(seconds: float) -> int:
        menu = recipes(graph, levels=(0.05,), link_bytes=100, moved_seconds=seconds)  # 0.05: the input alone
        found = min((recipe for recipe in menu if recipe.host_bytes == 100), key=lambda r: r.resident_bytes)
        check_recipe(graph, found)
        return len(found.offloaded)

    assert moved(0.0) == 4  # spares 4.0 seconds of replay
    assert moved(0.1) == 1  # spares 3.9, for one copy instead of four


def test_of_what_moves_the_useful_ones_are_taken() -> None:
    """At most so many, in order; at every price that was asked, the best that moves is among them, if any
    that moves is best."""
    graph = llama_block()
    found = recipes(
        graph, levels=[i / 16 for i in range(16, 0, -1)], link_bytes=(30 << 20, 60 << 20, 90 << 20)
    )
    moving = [recipe for recipe in found if recipe.host_bytes]
    assert len(moving) > 6
    assert most_useful(graph, found, 100) == tuple(moving)
    chosen = most_useful(graph, found, 6)
    assert len(chosen) == 6
    assert list(chosen) == [recipe for recipe in found if recipe in chosen]
    assert all(recipe.host_bytes for recipe in chosen)
    scale = max(r.replay_seconds for r in found) / max(r.resident_bytes for r in found)
    best = min(found, key=lambda r: r.replay_seconds + scale * (4 * r.resident_bytes + 0.4 * r.host_bytes))
    assert best.host_bytes
    assert best in chosen


def test_shared_inputs_cost_nothing() -> None:
    g = GraphBuilder()
    x = g.input(1000, shared=True)
    g.save(g.op(x, nbytes=7, seconds=1.0))
    assert least_resident_bytes(g.graph()) == 0


def test_what_is_random_must_stay() -> None:
    g = GraphBuilder()
    x = g.input(10)
    mask = g.op(x, nbytes=40, seconds=1.0, replayable=False)
    g.save(mask, g.op(x, mask, nbytes=80, seconds=1.0))
    assert least_resident_bytes(g.graph()) == 50


def test_outputs_and_foreign_tensors_are_free_sources() -> None:
    g = GraphBuilder()
    x = g.input(10)
    y = g.output(g.op(x, nbytes=64, seconds=9.0))
    other = g.foreign(99)
    g.save(y, other, g.op(y, other, nbytes=64, seconds=1.0))
    recipe = solve(g.graph(), 0)
    assert recipe is not None
    assert (recipe.resident_bytes, recipe.replay_seconds) == (0, 1.0)
    assert g.graph().storages[g.values[y].storage].role is Role.OUTPUT
    assert {g.values[y].storage, g.values[other].storage} <= set(recipe.kept)


def test_a_value_before_a_write_is_rebuilt_not_read_from_what_is_kept() -> None:
    g = GraphBuilder()
    x = g.input(10)
    a = g.op(x, nbytes=20, seconds=1.0)
    b = g.op(a, nbytes=30, seconds=1.0)  # reads `a` as it was before the write
    after = g.write(a, seconds=1.0)
    g.save(after, b)
    recipe = finish(g.graph(), [g.values[x].storage, g.values[after].storage])
    assert recipe.replayed == (0, 1)  # keeping a's storage does not give its first epoch
    check_recipe(g.graph(), recipe)


def test_views_cost_nothing_and_are_replayed_from_what_is_kept() -> None:
    g = GraphBuilder()
    x = g.input(10)
    a = g.op(x, nbytes=100, seconds=4.0)
    g.save(a, g.op(g.view(a, held=False), nbytes=500, seconds=0.5))
    recipe = solve(g.graph(), 100)
    assert recipe is not None
    assert (recipe.replayed, recipe.replay_seconds) == ((1, 2), 0.5)


def test_finish_drops_what_nothing_uses_and_refuses_the_impossible() -> None:
    graph = chain()
    everything = finish(graph, range(len(graph.storages)))
    assert everything.resident_bytes == graph.saved_bytes  # the input is not saved and nothing reads it
    with pytest.raises(ValueError, match="neither kept nor free"):
        finish(graph, [])


def test_levels_are_shares_of_the_saved_bytes() -> None:
    graph = chain()
    found = recipes(graph, levels=(0.6,))
    assert [r.resident_bytes for r in found] == [120, 10]
    with pytest.raises(InputError, match="from 0 to 1"):
        recipes(graph, levels=(1.5,))


def test_a_region_that_saves_nothing_has_no_recipes() -> None:
    g = GraphBuilder()
    g.output(g.op(g.input(8), nbytes=8, seconds=1.0))
    assert recipes(g.graph()) == ()
    assert least_resident_bytes(g.graph()) == 0


def test_working_set_of_a_chain() -> None:
    graph = chain()
    # c is asked for first: a (100), then b beside it, then c: all three, for a and b are asked for later.
    assert working_set_bytes(graph, finish(graph, [0])) == 210
    # With a and b kept only c is rebuilt, and with everything kept nothing is.
    assert working_set_bytes(graph, finish(graph, [1, 2])) == 60
    assert working_set_bytes(graph, finish(graph, [0, 1, 2, 3])) == 0


def test_working_set_releases_after_the_last_reader() -> None:
    g = GraphBuilder()
    x = g.input(10)
    a = g.op(g.op(x, nbytes=1000, seconds=1.0), nbytes=10, seconds=1.0)  # the 1000 bytes are a stepping stone
    b = g.op(x, nbytes=500, seconds=1.0)
    g.save(b, a)  # backward asks for a, then for b
    assert working_set_bytes(g.graph(), finish(g.graph(), [0])) == 1010


def test_working_set_counts_views_once_and_writes_as_copies() -> None:
    g = GraphBuilder()
    x = g.input(10)
    a = g.op(x, nbytes=100, seconds=1.0)
    g.save(g.op(g.view(a), nbytes=1, seconds=1.0), g.write(a, seconds=1.0))
    graph = g.graph()
    # The written copy is asked for first: both epochs at once, then the first (still wanted) and 1 byte.
    assert working_set_bytes(graph, finish(graph, [0])) == 200


# -------------------------------------------------------------------------------------- a real block's size


def test_llama_block_menu_is_a_front_and_is_quick() -> None:
    graph = llama_block()
    start = time.perf_counter()
    menu = recipes(graph)
    seconds = time.perf_counter() - start
    assert seconds < 3.0, f"{seconds:.2f} s for one block's menu"  # 0.2 s on two idle cores
    assert len(menu) >= 8
    for more, less in itertools.pairwise(menu):
        assert more.resident_bytes > less.resident_bytes
        assert more.replay_seconds < less.replay_seconds
    for recipe in menu:
        check_recipe(graph, recipe)
    assert menu[-1].resident_bytes == least_resident_bytes(graph) < 0.1 * graph.saved_bytes
    assert menu == recipes(graph)


def test_llama_block_with_a_link() -> None:
    graph = llama_block(tokens=1024)
    link = graph.saved_bytes // 6
    menu = recipes(graph, link_bytes=link)
    assert any(r.host_bytes for r in menu)
    for recipe in menu:
        check_recipe(graph, recipe)
        assert recipe.host_bytes <= link


# --------------------------------------------------------------------------------------------- brute force


@st.composite
def graphs(draw: st.DrawFn) -> RegionGraph:
    g = GraphBuilder()
    values = [g.input(draw(st.integers(1, 40)), shared=draw(st.booleans())), g.parameter()]
    if draw(st.booleans()):
        values.append(g.foreign(9))
    alive = [i for i, v in enumerate(g.values) if not v.free]
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["op", "op", "op", "two", "view", "write"]))
        inputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=2, unique=True))
        if kind == "view":
            values.append(g.view(inputs[0], held=draw(st.booleans()) and g.values[inputs[0]].held))
        elif kind == "write" and inputs[0] in alive and g.values[inputs[0]].producer is not None:
            values.append(g.write(*inputs, seconds=draw(st.integers(0, 9))))
            storage = g.values[inputs[0]].storage
            values = [v for v in values if g.values[v].storage != storage or v == values[-1]]
        else:
            sizes = (draw(st.integers(1, 40)),) * (2 if kind == "two" else 1)
            first = g.op(
                *inputs,
                nbytes=sizes,
                seconds=draw(st.integers(0, 9)),
                held=draw(st.booleans()),
                replayable=draw(st.sampled_from([True, True, True, False])),
            )
            values.extend(range(first, first + len(sizes)))
    g.output(values[-1])
    g.save(*draw(st.lists(st.sampled_from(values), max_size=4)))
    return g.graph()


def keep_sets(graph: RegionGraph) -> Iterator[frozenset[int]]:
    saved = {graph.values[s.value].storage for s in graph.saved}
    able = {v.storage for v in graph.values if v.held} | saved
    able = {s for s in able if graph.storages[s].role is not Role.PARAMETER}
    fixed = {s for s in able if graph.storages[s].role in (Role.OUTPUT, Role.FOREIGN)}
    free = sorted(able - fixed)
    for size in range(len(free) + 1):
        for chosen in itertools.combinations(free, size):
            yield frozenset(chosen) | fixed


def naive_cost(graph: RegionGraph, kept: frozenset[int]) -> float | None:
    """Seconds to rebuild every saved tensor whose storage is not kept; None if one cannot be rebuilt."""

    def replays(value: int) -> frozenset[int] | None:
        record = graph.values[value]
        if record.free or (record.held and record.storage in kept):
            return frozenset()
        if record.producer is None or not graph.ops[record.producer].replayable:
            return None
        parts = [replays(v) for v in graph.ops[record.producer].inputs]
        if any(part is None for part in parts):
            return None
        return frozenset({record.producer}).union(*(part for part in parts if part is not None))

    total: frozenset[int] = frozenset()
    for saved in graph.saved:
        storage = graph.values[saved.value].storage
        if storage in kept or graph.storages[storage].role is Role.PARAMETER:
            continue
        part = replays(saved.value)
        if part is None:
            return None
        total |= part
    return sum(graph.ops[o].seconds for o in total)


def charge(graph: RegionGraph, kept: frozenset[int]) -> int:
    return sum(graph.storages[s].charge_bytes for s in kept)


@given(graph=graphs(), share=st.floats(0, 1.2))
@settings(max_examples=150, deadline=None)
def test_solve_is_the_best_of_all_keep_sets(graph: RegionGraph, share: float) -> None:
    limit = int(graph.saved_bytes * share)
    costs = {kept: naive_cost(graph, kept) for kept in keep_sets(graph)}
    possible = {kept: cost for kept, cost in costs.items() if cost is not None}
    assert least_resident_bytes(graph) == min(charge(graph, kept) for kept in possible)

    within = [cost for kept, cost in possible.items() if charge(graph, kept) <= limit]
    recipe = solve(graph, limit)
    if not within:
        assert recipe is None
        return
    assert recipe is not None
    check_recipe(graph, recipe)
    assert recipe.resident_bytes <= limit
    assert recipe.replay_seconds == pytest.approx(min(within), abs=1e-3)


@given(graph=graphs(), share=st.floats(0, 1), link=st.integers(0, 60))
@settings(max_examples=100, deadline=None)
def test_offload_is_the_best_of_all_pairs(graph: RegionGraph, share: float, link: int) -> None:
    limit = int(graph.saved_bytes * share)
    best = None
    for kept in keep_sets(graph):
        cost = naive_cost(graph, kept)
        if cost is None or (best is not None and cost >= best):
            continue
        charged = [graph.storages[s].charge_bytes for s in kept]
        subsets = (c for n in range(len(charged) + 1) for c in itertools.combinations(charged, n))
        if any(sum(moved) <= link and sum(charged) - sum(moved) <= limit for moved in subsets):
            best = cost
    recipe = solve(graph, limit, link)
    assert (recipe is None) == (best is None)
    if recipe is not None:
        check_recipe(graph, recipe)
        assert recipe.host_bytes <= link
        assert recipe.resident_bytes <= limit
        assert recipe.replay_seconds == pytest.approx(best, abs=1e-3)


@given(graph=graphs(), link=st.sampled_from([0, 20]))
@settings(max_examples=60, deadline=None)
def test_the_list_is_a_front_of_valid_recipes(graph: RegionGraph, link: int) -> None:
    menu = recipes(graph, link_bytes=link)
    assert menu == recipes(graph, link_bytes=link)
    for recipe in menu:
        check_recipe(graph, recipe)
        assert recipe.dropped or recipe.offloaded
        working_set_bytes(graph, recipe)
    for a, b in itertools.permutations(menu, 2):
        better = (b.resident_bytes, b.host_bytes, b.replay_seconds)
        ours = (a.resident_bytes, a.host_bytes, a.replay_seconds)
        assert any(theirs > own for theirs, own in zip(better, ours, strict=True)), "dominated"


# ------------------------------------------------------------------------------------------- the checker


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"replayed": ()}, "nothing rebuilds its value"),
        ({"dropped": ()}, "is not dropped"),
        ({"kept": (2, 3)}, "without its inputs"),
        ({"kept": (0, 1, 2, 3)}, "is dropped, but its storage"),
        ({"resident_bytes": 1}, "add up to"),
        ({"replay_seconds": 0.5}, "add up to"),
        ({"replayed": (0, 0)}, "names something twice"),
        ({"replayed": (99,)}, "beyond the graph"),
        ({"offloaded": (1,)}, "are not kept"),
    ],
)
def test_check_recipe_catches(change: dict[str, object], complaint: str) -> None:
    graph = chain()
    recipe = finish(graph, [0, 2, 3])
    check_recipe(graph, recipe)
    with pytest.raises(ValueError, match=complaint):
        check_recipe(graph, dataclasses.replace(recipe, **change))  # type: ignore[arg-type]


def test_check_recipe_catches_a_replay_of_something_random() -> None:
    g = GraphBuilder()
    x = g.input(10)
    g.save(g.op(x, nbytes=40, seconds=1.0, replayable=False))
    honest = finish(g.graph(), [1])
    broken = dataclasses.replace(honest, kept=(0,), dropped=(0,), replayed=(0,), resident_bytes=10)
    with pytest.raises(ValueError, match="not replayable"):
        check_recipe(g.graph(), broken)
