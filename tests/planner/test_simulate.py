"""The simulated timeline: exact cases, and an independent re-computation on random profiles."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.planner import keep_everything, schedule, simulate
from remat.records import Mode, Phase, Profile, RegionCall, Segment, StepBytes

from .build import entry, kind, layers, profile
from .cases import all_choices, naive_peak, naive_peaks, naive_seconds, profiles


def test_the_reference_reproduces_the_measured_peaks() -> None:
    p = layers(3)
    timeline = simulate(p, [1, 1, 1])
    assert [t.peak_bytes for t in timeline.points] == [1000 + s.peak_bytes for s in p.segments]
    assert timeline.seconds == 13.0


def test_keeping_holds_more_until_backward_and_lets_the_boundaries_go() -> None:
    p = layers(2, saved=100, boundary=10, glue=20, gradient=3)
    timeline = simulate(p, keep_everything(p))
    by_label = {point.label: point for point in timeline.points}
    # At the head: both layers' 100 bytes, boundary 0 (made by the embedding, so it stays) and boundary 2 (the
    # last output, read by no region); boundary 1 is let go.
    assert by_label["head"].start_bytes == 1000 + 200 + 20
    assert by_label["layers.1 backward"].peak_bytes == 1000 + 200 + 30 + 20 + 0
    assert by_label["layers.0 backward"].gradients == 3
    assert timeline.peak_at == "layers.1 backward"
    assert timeline.peak.label == "layers.1 backward"


def test_a_boundary_stays_if_its_producer_holds_it() -> None:
    block = kind(
        entry(Mode.KEEP, 50, 0.0),
        dataclasses.replace(entry(Mode.KEEP, 50, 0.0), holds_outputs=(0,)),
        entry(Mode.FULL, 0, 1.0, inputs=(0,)),
    )
    base = layers(2)
    p = dataclasses.replace(base, kinds=(block,))
    head = next(i for i, s in enumerate(p.segments) if s.label == "head")
    free, held = (simulate(p, c).points[head].start_bytes for c in ([0, 0], [1, 0]))
    assert held - free == 10


def test_in_situ_extra_is_added_to_every_entry_and_never_taken_off() -> None:
    block = kind(entry(Mode.KEEP, 0, 0.0, forward=5), entry(Mode.FULL, 0, 1.0, forward=8))
    call = RegionCall("r", 0, 0, "t")
    for measured, expected in ((11, 8), (8, 5), (6, 5)):
        p = profile([block], [call], [Segment(Phase.FORWARD, 0, 100, 100 + measured, 100)])
        assert simulate(p, [1]).peak_bytes == 100 + measured
        assert simulate(p, [0]).peak_bytes == 100 + expected


def test_accumulation_starts_with_the_gradients() -> None:
    p = layers(2, gradient=3)
    accumulating = dataclasses.replace(p, accumulate=True)
    before, after = simulate(p, [0, 0]), simulate(accumulating, [0, 0])
    assert [a.peak_bytes - b.peak_bytes for a, b in zip(after.points, before.points, strict=True)] == [
        6, 6, 6, 6, 6, 3,
    ]  # fmt: skip
    assert {point.gradients for point in after.points} == {6}


def test_the_optimizer_step_is_the_last_point() -> None:
    step = StepBytes(
        parameters=100, buffers=1, gradients=40, optimizer_state=80, optimizer_temporary=30, other=2
    )
    p = dataclasses.replace(layers(1), step=step)
    last = simulate(p, [0]).points[-1]
    # What is left above the gradients at the end of the measured step is still there: the last output.
    left = p.segments[-1].end_bytes - p.segments[-1].gradient_bytes
    assert (last.label, last.phase) == ("optimizer step", Phase.OPTIMIZER)
    assert last.peak_bytes == 100 + 1 + 2 + 80 + 40 + 30 + left


def test_outputs_of_the_last_step_are_there_until_forward_has_returned() -> None:
    p = layers(2, gradient=3)
    held = dataclasses.replace(p, step=dataclasses.replace(p.step, outputs=7))
    before, after = simulate(p, [0, 1]), simulate(held, [0, 1])
    for a, b in zip(after.points, before.points, strict=True):
        more = 7 if a.phase is Phase.FORWARD else 0
        assert (a.start_bytes - b.start_bytes, a.parameters - b.parameters) == (more, more)


def test_what_backward_never_came_to_lives_on_with_the_outputs() -> None:
    """Of the last step and of this one: in forward it is there twice, in the optimizer's step once."""
    p = layers(2, gradient=3)
    step = dataclasses.replace(p.step, outputs=7, optimizer_temporary=1)
    unused = tuple(s for s in p.segments if s.phase is Phase.FORWARD or s.call != 1)
    held = dataclasses.replace(p, step=step, segments=unused)
    full, kept = simulate(held, [1, 1]), simulate(held, [1, 0])
    more = p.kinds[0].menu[0].resident_bytes - p.kinds[0].menu[1].resident_bytes
    forward = next(k for k, s in enumerate(unused) if s.phase is Phase.FORWARD and s.call == 1)
    assert more > 0
    for k, (a, b) in enumerate(zip(kept.points, full.points, strict=True)):
        last = more if a.phase is Phase.FORWARD else 0
        assert a.parameters - b.parameters == last
        assert a.start_bytes - b.start_bytes == last + (more if k > forward else 0)
    assert kept.points[-1].phase is Phase.OPTIMIZER
    assert kept.seconds == full.seconds, "what backward does not come to is not recomputed"
    assert schedule(held, kept.peak_bytes - 1).choices[1] == 1


def test_labels_name_repeated_calls() -> None:
    block = kind(entry(Mode.KEEP, 1, 0.0), entry(Mode.FULL, 0, 1.0))
    calls = [RegionCall("shared", 0, 0, "t"), RegionCall("shared", 1, 0, "t")]
    segments = [
        Segment(Phase.FORWARD, 0, 0, 0, 0),
        Segment(Phase.FORWARD, 1, 0, 0, 0),
        Segment(Phase.FORWARD, -1, 0, 9, 0),
    ]
    labels = [point.label for point in simulate(profile([block], calls, segments), [0, 0]).points]
    assert labels == ["shared forward", "shared (call 2) forward", "between regions, forward"]


def test_wrong_number_of_choices() -> None:
    with pytest.raises(ValueError, match="3 choices for 2 region calls"):
        simulate(layers(2), [0, 0, 0])


def test_a_step_without_segments_is_what_is_resident() -> None:
    p = profile([], [], [], step=StepBytes(parameters=5))
    assert simulate(p, []).peak_bytes == 5


@given(data=st.data(), p=profiles())
@settings(max_examples=200, deadline=None)
def test_every_point_equals_the_naive_one(data: st.DataObject, p: Profile) -> None:
    choices = data.draw(st.sampled_from(all_choices(p)))
    timeline = simulate(p, choices)
    assert [point.peak_bytes for point in timeline.points[: len(p.segments)]] == naive_peaks(p, choices)
    assert timeline.peak_bytes == naive_peak(p, choices)
    assert timeline.seconds == naive_seconds(p, choices)
    for point in timeline.points:
        parts = point.parameters + point.gradients + point.optimizer + point.kept + point.working
        assert parts == point.peak_bytes
    reference = [p.kinds[call.kind].reference for call in p.calls]
    if not p.accumulate:
        last = [p.step.outputs if segment.phase is Phase.FORWARD else 0 for segment in p.segments]
        measured = [p.step.resident + s.peak_bytes + n for s, n in zip(p.segments, last, strict=True)]
        assert naive_peaks(p, reference) == measured
