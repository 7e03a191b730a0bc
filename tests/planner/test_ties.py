"""Calls that run alike, against brute force over the choices that a region can really run in."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.errors import BudgetError
from remat.planner import compare, keep_everything, least_budget, schedule, simulate, time_lower_bound
from remat.planner.program import programs, solve_milp
from remat.planner.ties import disagreement, tied_calls
from remat.records import Action, LinkRates, Mode, Profile

from .build import entry, kind, layers, llama_stack, stack
from .cases import alike, all_choices, naive_peak, naive_seconds, profiles

ALLOW = (Action.KEEP, Action.RECOMPUTE)


def rounds(p: Profile, regions: int) -> Profile:
    """The same step, but its calls are those of a few regions that run one after the other, several times."""
    kinds = [p.calls[i].kind for i in range(regions)]
    calls = (
        replace(call, name=f"layers.{i % regions}", call=i // regions, kind=kinds[i % regions])
        for i, call in enumerate(p.calls)
    )
    return replace(p, calls=tuple(calls))


def test_calls_of_one_region_with_one_signature_are_tied() -> None:
    p = rounds(layers(6), 2)
    assert tied_calls(p) == ((0, 2, 4), (1, 3, 5))
    other = replace(p.kinds[0], signature="of other inputs")
    calls = [replace(c, kind=1) if i == 4 else c for i, c in enumerate(p.calls)]
    p = replace(p, kinds=(*p.kinds, other), calls=tuple(calls))
    assert tied_calls(p) == ((0, 2), (1, 3, 5), (4,))
    assert disagreement(p, (0, 1, 0, 1, 1, 1)) is None
    assert disagreement(p, (0, 1, 1, 1, 1, 1)) == "layers.0"


def test_a_byte_less_recomputes_one_region_in_all_its_calls() -> None:
    p = rounds(layers(6), 3)
    plan = schedule(p, simulate(p, keep_everything(p)).peak_bytes - 1)
    assert sum(plan.choices) == 2
    assert plan.choices[:3] == plan.choices[3:]
    assert plan.predicted_seconds == 12.0


def test_tied_calls_of_unlike_kinds_have_no_recipe() -> None:
    """What tells them apart is not in the signature: a recipe would meet the other's graph."""
    one = kind(entry(Mode.KEEP, 90, 0.0), entry(Mode.RECIPE, 10, 0.1), entry(Mode.FULL, 0, 4.0))
    two = kind(entry(Mode.KEEP, 80, 0.0), entry(Mode.RECIPE, 10, 0.1), entry(Mode.FULL, 0, 3.0))
    p = stack([one, two], [0, 1])
    p = replace(p, calls=tuple(replace(call, name="block") for call in p.calls))
    plan = schedule(p, simulate(p, (2, 2)).peak_bytes + 40)
    assert plan.choices == (2, 2)
    assert disagreement(p, (1, 1)) == "block"


@given(p=profiles(tied=True), share=st.floats(0, 1.1))
@settings(max_examples=80, deadline=None)
def test_schedule_is_the_best_of_all_that_can_run(p: Profile, share: float) -> None:
    possible = [choices for choices in all_choices(p) if alike(p, choices)]
    assert possible == [choices for choices in all_choices(p) if disagreement(p, choices) is None]
    table = {choices: (naive_peak(p, choices), naive_seconds(p, choices)) for choices in possible}
    least = min(peak for peak, _ in table.values())
    most = max(peak for peak, _ in table.values())
    budget = int(least + share * (most - least))

    assert least_budget(p) == least
    plan = schedule(p, budget)
    assert plan.predicted_peak_bytes == table[plan.choices][0] <= budget
    best = min(seconds for peak, seconds in table.values() if peak <= budget)
    assert plan.predicted_seconds == pytest.approx(best, abs=1e-9)
    assert plan.notes == ()
    assert time_lower_bound(p, budget) <= best + 1e-9
    with pytest.raises(BudgetError) as caught:
        schedule(p, least - 1)
    assert caught.value.needed == least


@given(p=profiles(tied=True))
@settings(max_examples=20, deadline=None)
def test_more_budget_is_never_slower_and_no_strategy_is_faster(p: Profile) -> None:
    least, plain = least_budget(p), simulate(p, keep_everything(p)).peak_bytes
    step = max((plain - least) // 6, 1)
    budgets = range(least, plain + step + 1, step)
    seconds = [schedule(p, budget).predicted_seconds for budget in budgets]
    assert all(later <= earlier for earlier, later in itertools.pairwise(seconds))
    for budget, best in zip(budgets[:2], seconds, strict=False):
        assert all(not row.feasible or row.seconds >= best for row in compare(p, budget))


@given(st.integers(0, 10**6), st.integers(1, 3), st.floats(0.05, 0.95))
@settings(max_examples=15, deadline=None)
def test_the_search_and_the_integer_program_agree(seed: int, regions: int, share: float) -> None:
    """At realistic numbers, boundary tensors that their makers hold among them."""
    p = rounds(llama_stack(2 * regions, entries=6, kinds=2, seed=seed), regions)
    least, plain = least_budget(p), simulate(p, keep_everything(p)).peak_bytes
    budget = int(least + share * (plain - least))
    (problem,) = programs(p, ALLOW)
    found = solve_milp(problem, budget, gap=0.0)
    assert found is not None
    seconds = sum(call.options[i].seconds for call, i in zip(problem.calls, found, strict=True))
    assert schedule(p, budget).predicted_seconds == pytest.approx(p.step_seconds + seconds, abs=1e-9)


@pytest.mark.parametrize(("calls", "regions", "kinds"), [(48, 24, 1), (48, 24, 3), (24, 1, 1), (96, 24, 2)])
def test_shared_towers_and_loops_are_planned_within_a_second(calls: int, regions: int, kinds: int) -> None:
    p = rounds(llama_stack(calls, entries=12, kinds=kinds), regions)
    least, plain = least_budget(p), simulate(p, keep_everything(p)).peak_bytes
    before = float("inf")
    for share in (0.1, 0.5, 0.9):
        start = time.process_time()
        plan = schedule(p, int(least + share * (plain - least)))
        seconds = time.process_time() - start
        assert seconds < 1.0, f"{seconds:.2f} s of CPU"
        assert plan.notes == ()  # proven optimal
        assert plan.predicted_seconds <= before
        before = plan.predicted_seconds


def test_plans_that_offload_tie_as_well() -> None:
    block = kind(
        entry(Mode.KEEP, 100, 0.0, forward=100),
        entry(Mode.RECIPE, 40, 0.1, host=60, backward=60),
        entry(Mode.RECIPE, 10, 0.3, host=90, backward=90),
        entry(Mode.FULL, 0, 1.0, backward=120, inputs=(0,)),
    )
    allow = (*ALLOW, Action.OFFLOAD)
    link = LinkRates(200.0, 200.0, 200.0, 100.0)
    for regions, share in itertools.product((2, 5), (0.2, 0.6)):  # all are tried, or neighbours only
        p = replace(rounds(stack([block], [0] * 10), regions), link=link)
        least, plain = least_budget(p, allow), simulate(p, keep_everything(p)).peak_bytes
        budget = int(least + share * (plain - least))
        plan = schedule(p, budget, allow=allow)
        assert disagreement(p, plan.choices) is None
        assert any(plan.entry(i).host_bytes for i in range(10))
        choices = itertools.product(range(4), repeat=regions)
        possible = (simulate(p, chosen * (10 // regions)) for chosen in choices)
        best = min(t.seconds for t in possible if t.peak_bytes <= budget)
        assert best <= plan.predicted_seconds <= 1.05 * best
