"""Every record survives the way through JSON, and foreign files are refused with a sentence."""

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat import Action, Plan, PlanError, Profile, records
from remat.codec import from_json, to_json
from remat.records import (
    Const,
    Entry,
    Environment,
    Kind,
    Mode,
    Op,
    Phase,
    Recipe,
    Ref,
    RegionCall,
    RegionGraph,
    Role,
    Saved,
    Segment,
    Source,
    StepBytes,
    Storage,
    Value,
)

COUNTS = st.integers(0, 2**50)
TEXT = st.text(max_size=8)
FLOATS = st.floats()
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    FLOATS,
    TEXT,
    st.builds(Ref, COUNTS),
    st.builds(Const, TEXT, TEXT),
)
ARGS = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)


def some(strategy):
    return st.lists(strategy, max_size=3).map(tuple)


GRAPHS = st.builds(
    RegionGraph,
    storages=some(st.builds(Storage, COUNTS, st.sampled_from(Role), st.booleans())),
    values=some(
        st.builds(
            Value,
            COUNTS,
            COUNTS,
            some(COUNTS),
            some(COUNTS),
            COUNTS,
            TEXT,
            st.none() | COUNTS,
            st.booleans(),
            st.booleans(),
        )
    ),
    ops=some(
        st.builds(
            Op,
            TEXT,
            some(ARGS),
            some(st.tuples(TEXT, ARGS)),
            some(COUNTS),
            some(st.integers(-1, 9)),
            written=some(st.tuples(COUNTS, COUNTS)),
            seconds=FLOATS,
        )
    ),
    saved=some(st.builds(Saved, COUNTS, TEXT, COUNTS, COUNTS, COUNTS)),
    nodes=some(st.tuples(TEXT, st.integers(-3, 9), COUNTS)),
    sources=some(st.builds(Source, COUNTS, TEXT, COUNTS, TEXT, COUNTS)),
    inputs=some(COUNTS),
    outputs=some(COUNTS),
)
RECIPES = st.builds(Recipe, some(COUNTS), some(COUNTS), some(COUNTS), some(COUNTS), COUNTS, COUNTS, FLOATS)
ENTRIES = st.one_of(
    st.builds(Entry, st.just(Mode.RECIPE), COUNTS, COUNTS, COUNTS, FLOATS, some(COUNTS), recipe=RECIPES),
    st.builds(Entry, st.sampled_from([Mode.KEEP, Mode.FULL]), COUNTS, COUNTS, COUNTS, FLOATS),
)
PROFILES = st.builds(
    Profile,
    model=TEXT,
    fingerprint=TEXT,
    signature=TEXT,
    environment=st.builds(Environment, TEXT, TEXT, TEXT, COUNTS),
    step=st.builds(StepBytes, COUNTS, COUNTS, COUNTS),
    kinds=some(st.builds(Kind, TEXT, some(ENTRIES), COUNTS, FLOATS, st.none() | GRAPHS)),
    calls=some(st.builds(RegionCall, TEXT, COUNTS, COUNTS, TEXT, some(COUNTS), some(COUNTS), COUNTS)),
    boundary_bytes=some(COUNTS),
    segments=some(
        st.builds(Segment, st.sampled_from(Phase), st.integers(-1, 5), COUNTS, COUNTS, COUNTS, COUNTS, TEXT)
    ),
    step_seconds=FLOATS,
)


def plan_of(profile):
    return Plan(
        profile, (0,) * len(profile.calls), 1, 2, 3.0, 4, math.inf, allow=(Action.KEEP, Action.OFFLOAD)
    )


def same(one, two):
    # repr, not ==: it tells True from 1, 1.0 from 1, a tuple from a list, and NaN equals NaN.
    return repr(one) == repr(two)


@settings(max_examples=60, deadline=None)
@given(PROFILES)
def test_round_trip(profile):
    assert same(from_json(Profile, to_json(profile)), profile)
    plan = plan_of(profile)
    back = from_json(Plan, to_json(plan))
    assert same(back, plan)
    assert to_json(back) == to_json(plan)


def small_profile():
    return Profile(
        model="M", fingerprint="f", signature="s", environment=Environment("cpu", "cpu", "2.13.0"),
        step=StepBytes(parameters=8), kinds=(), calls=(), boundary_bytes=(), segments=(), step_seconds=0.5,
    )  # fmt: skip


def test_the_text_is_strict_json():
    profile = dataclasses.replace(small_profile(), step_seconds=math.nan)
    data = json.loads(to_json(profile), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert data["remat"] == "Profile"
    assert data["schema"] == records.SCHEMA_VERSION
    assert math.isnan(from_json(Profile, to_json(profile)).step_seconds)


def changed(**fields):
    return json.dumps({**json.loads(to_json(small_profile())), **fields})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "holds 'list'"),
        ("{}", "holds None"),
        (to_json(plan_of(small_profile())), "holds 'Plan', not a remat Profile"),
        (changed(schema=999), "schema version 999, this remat reads version"),
        (changed(schema=None), "schema version None"),
        (changed(step=3), "damaged"),
        (changed(kinds=[{"menu": 1}]), "damaged"),
        (json.dumps({k: v for k, v in json.loads(changed()).items() if k != "model"}), "damaged"),
    ],
)
def test_refused_with_a_sentence(text, words):
    with pytest.raises(PlanError, match=words):
        from_json(Profile, text)
