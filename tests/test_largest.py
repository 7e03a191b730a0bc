"""The largest batch within a budget, against trying them all."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models import MlpBlock
from remat.api import fit, plan, profile
from remat.batchsize import largest, search
from remat.check.step import fingerprint
from remat.errors import BudgetError, InputError
from remat.planner.bounds import least_budget

WIDTH = 16


def squared(output, batch):
    return output.float().square().mean()


def model():
    torch.manual_seed(0)
    return nn.Sequential(*[MlpBlock(WIDTH, dropout=0.1) for _ in range(4)])


def batch(n):
    return torch.randn(8 * n, WIDTH)


def by_trying_all(net, budget, sizes, **options):
    """The largest size with a plan, and every size's plan."""
    plans = {}
    for n in sizes:
        try:
            plans[n] = plan(profile(net, batch(n), loss=squared, **options), budget)
        except BudgetError:
            break
    return plans


@pytest.mark.parametrize("share", [0.3, 0.7, pytest.param(1.02, marks=pytest.mark.slow)])
def test_the_largest_is_the_one_that_trying_all_finds(share):
    net = model()
    budget = int(share * least_budget(profile(net, batch(20), loss=squared)))
    plans = by_trying_all(net, budget, range(1, 30))
    before = fingerprint(net), torch.get_rng_state()
    answer = largest(net, batch, budget, loss=squared)
    assert answer.size == max(plans)
    assert answer.largest.confirmed
    assert answer.largest.peak_bytes <= budget
    assert all(candidate.peak_bytes <= budget for candidate in answer.tried)
    assert answer.fastest.confirmed
    assert answer.fastest.samples_per_second >= answer.largest.samples_per_second
    assert (before[0], all(p.grad is None for p in net.parameters())) == (fingerprint(net), True)
    assert "largest" in str(answer)
    with fit(net, batch(answer.size), budget, loss=squared):  # the answer is good for fit
        pass
    with pytest.raises(BudgetError):
        plan(profile(net, batch(answer.size + 1), loss=squared), budget)


def test_the_size_that_needs_no_recomputation_is_tried_too():
    net = model()
    whole = profile(net, batch(10), loss=squared)
    budget = plan(whole, activations=1.0).plain_peak_bytes
    answer = largest(net, batch, budget, loss=squared)
    assert answer.size > 10
    untouched = [c for c in answer.tried if c.slowdown == 1.0]
    assert 8 <= max(c.size for c in untouched) <= 10


def test_the_optimizer_counts():
    net = model()
    budget = least_budget(profile(net, batch(12), loss=squared))
    plain = largest(net, batch, budget, loss=squared).size
    adam = largest(net, batch, budget, loss=squared, optimizer=torch.optim.Adam(net.parameters())).size
    assert adam < plain


class Speaker(nn.Module):
    """Blocks and a head whose logits are most of the step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(2000, WIDTH)
        self.blocks = nn.ModuleList(MlpBlock(WIDTH, dropout=0.0) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2000)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("action", ["chunk", "offload"])
def test_it_counts_on_what_is_allowed(action):
    """The answer is as large as the one that fit is able to do."""
    if action == "chunk":
        net, given, options = Speaker(), lambda n: torch.arange(64 * n).view(n, 64) % 2000, {}
        allow = ["keep", "recompute", "chunk"]
    else:
        net, given, options = model(), batch, {"loss": squared}
        allow = ["keep", "offload"]
    with pytest.raises(BudgetError) as error:
        fit(net, given(4), 1000, allow=allow, **options)
    answer = largest(net, given, int(error.value.needed * 1.02), allow=allow, limit=8, **options)
    assert answer.size >= 4


def test_the_limit_is_kept():
    net = model()
    assert largest(net, batch, "1GiB", loss=squared, limit=6).size == 6


def test_a_size_that_does_not_stay_within_the_budget_is_not_the_answer(monkeypatch):
    """What was planned is run; the real step has the last word."""
    net = model()
    ran = []

    def stubborn(model, given, *args, **options):
        ran.append(len(given) // 8)
        if ran[-1] > 4:
            raise torch.OutOfMemoryError("not here")
        return fit(model, given, *args, **options)

    monkeypatch.setattr("remat.batchsize.fit", stubborn)
    answer = largest(net, batch, "1GiB", loss=squared, limit=7)
    assert answer.size == 4
    assert ran[:4] == [7, 6, 5, 4]
    assert {c.size for c in answer.tried} <= {1, 2, 3, 4}


def test_not_even_one():
    net = model()
    needed = least_budget(profile(net, batch(3), loss=squared))
    with pytest.raises(BudgetError) as error:
        largest(net, batch, needed - 1, loss=squared, start=3)
    assert error.value.needed == needed


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"start": 0}, "start=0 must be an int of at least 1"),
        ({"limit": True}, "limit=True must be"),
        ({"start": 9, "limit": 3}, "start=9 is above limit=3"),
        ({"budget": "16 gigs"}, "unknown unit"),
        ({"allow": "recompute"}, "allow='recompute' is one text"),
        ({"allow": ["shrink"]}, "the actions are keep"),
    ],
)
def test_bad_arguments(options, sentence):
    with pytest.raises(InputError, match=sentence):
        largest(model(), batch, **{"budget": "1GiB", "loss": squared, **options})


# ---------------------------------------------------------------------------------------------- the search


@given(
    fixed=st.integers(0, 10**6),
    each=st.integers(1, 10**4),
    square=st.integers(0, 50),
    bump=st.integers(0, 10**4),
    budget=st.integers(1, 10**8),
    limit=st.integers(1, 3000),
)
@settings(max_examples=300, deadline=None)
def test_search_finds_the_last_that_fits(fixed, each, square, bump, budget, limit):
    asked = []

    def needed(n):
        asked.append(n)
        return fixed + each * n + square * n * n + bump * (n // 8)  # a line, a parabola, steps

    if needed(1) > budget:
        return
    asked.clear()
    found = search(needed, budget, 1, limit)
    assert len(asked) <= 26
    assert needed(found) <= budget
    assert found == limit or needed(found + 1) > budget


def test_search_asks_few_questions_about_a_line():
    asked = []

    def needed(n):
        asked.append(n)
        return 1000 + 37 * n

    assert search(needed, 1000 + 37 * 500 + 5, 1, 65536) == 500
    assert len(asked) <= 9


def test_search_survives_sizes_that_cannot_be_profiled():
    assert search(lambda n: 10 * n if n < 40 else 2**62, 10**6, 1, 65536) == 39
