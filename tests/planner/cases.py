"""Random small profiles, and a naive twin of the simulator and the solver to hold them against."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from remat.records import Entry, Kind, Mode, Phase, Profile, RegionCall, Segment, StepBytes

from .build import entry, kind, profile

small = st.integers(0, 40)


@st.composite
def kinds(draw: st.DrawFn) -> Kind:
    """KEEP first, FULL last, recipes in between; seconds are multiples of 1/8, so that sums are exact."""
    positions = st.sampled_from([(), (0,), (0, 1)])
    sends = draw(st.booleans())  # what a recipe does not hold of its inputs, and keeping holds all

    def some(mode: Mode, seconds: float) -> Entry:
        made = entry(
            mode,
            draw(small),
            seconds,
            forward=draw(small),
            backward=draw(small),
            inputs=(0, 1) if mode is Mode.FULL or (mode is Mode.KEEP and sends) else draw(positions),
            outputs=draw(st.sampled_from([(), (), (0,)])),
        )
        if mode is not Mode.RECIPE:
            return made
        fetched = tuple({0, 1} - {*made.holds_inputs}) if sends else draw(positions)
        lent = made.holds_outputs if draw(st.booleans()) else ()
        return replace(made, fetches_inputs=fetched, lends_outputs=lent)

    between = [some(Mode.RECIPE, draw(st.integers(0, 24)) / 8) for _ in range(draw(st.integers(0, 2)))]
    return kind(some(Mode.KEEP, 0.0), *between, some(Mode.FULL, draw(st.integers(0, 24)) / 8))


@st.composite
def profiles(draw: st.DrawFn, *, nested: bool | None = None, tied: bool = False) -> Profile:
    """A few calls of a few kinds, random wiring, glue between; backward in reverse order, or not. `tied`: of
    one or two regions only, and kinds perhaps of the same signature."""
    menu = draw(st.lists(kinds(), min_size=1, max_size=2))
    count = draw(st.integers(1, 5))
    sizes = [draw(small) for _ in range(2)]
    calls = []
    for i in range(count):
        inputs = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=2, unique=True))
        if i and draw(st.booleans()):
            inputs = [*calls[-1].outputs[:1], *inputs[:1]]
        outputs = tuple(range(len(sizes), len(sizes) + draw(st.integers(1, 2))))
        sizes.extend(draw(small) for _ in outputs)
        which = draw(st.integers(0, len(menu) - 1))
        inputs = list(dict.fromkeys(inputs))
        region = draw(st.integers(0, 1)) if tied else i
        calls.append(RegionCall(f"r{region}", 0, which, "t", tuple(inputs), outputs))
    if tied and len(menu) > 1 and draw(st.booleans()):
        menu[1] = replace(menu[1], signature="other")
    order = list(range(count - 1, -1, -1))
    if nested is False or (nested is None and draw(st.booleans())):
        order = list(draw(st.permutations(order)))
        order = order[: draw(st.integers(0, count))]
    walk = [(Phase.FORWARD, i) for i in range(count)] + [(Phase.BACKWARD, i) for i in order]
    segments, gradients = [], 0
    for phase, call in walk:
        if draw(st.booleans()):
            segments.append(_segment(draw, phase, -1, gradients))
        gradients += draw(small) if phase is Phase.BACKWARD else 0
        segments.append(_segment(draw, phase, call, gradients))
    step = StepBytes(
        parameters=draw(small),
        buffers=draw(small),
        gradients=gradients,
        optimizer_state=draw(st.sampled_from([0, 7])),
        optimizer_temporary=draw(st.sampled_from([0, 60])),
        other=draw(small),
        outputs=draw(st.sampled_from([0, 9])),
    )
    made = profile(
        menu,
        calls,
        segments,
        boundary_bytes=sizes,
        step=step,
        accumulate=draw(st.booleans()),
        step_seconds=10.0,
    )
    return replace(made, passing=tuple(draw(st.sets(st.sampled_from([0, 1])))))


def _segment(draw: st.DrawFn, phase: Phase, call: int, gradients: int) -> Segment:
    start = draw(st.integers(0, 80))
    return Segment(phase, call, start, start + draw(small), draw(st.integers(0, 80)), gradients)


def naive_peaks(given: Profile, choices: Sequence[int]) -> list[int]:
    """The peak of every segment, straight from the definitions, one segment and one call at a time."""
    menus = [given.kinds[call.kind].menu for call in given.calls]
    chosen = [menu[choice] for menu, choice in zip(menus, choices, strict=True)]
    full = [next(e for e in menu if e.mode is Mode.FULL) for menu in menus]
    forward = {s.call: k for k, s in enumerate(given.segments) if s.phase is Phase.FORWARD and s.call >= 0}
    backward = {s.call: k for k, s in enumerate(given.segments) if s.phase is Phase.BACKWARD and s.call >= 0}
    peaks = []
    for k, segment in enumerate(given.segments):
        level = given.step.parameters + given.step.buffers + given.step.optimizer_state + given.step.other
        level += segment.start_bytes
        if segment.phase is Phase.FORWARD:
            level += given.step.outputs + naive_lives_on(given, choices)
        if given.accumulate:
            level += given.step.gradients - (given.segments[k - 1].gradient_bytes if k else 0)
        for call in range(len(given.calls)):
            extra = chosen[call].resident_bytes - full[call].resident_bytes
            for position, boundary in enumerate(given.calls[call].outputs):
                if not any(boundary in other.inputs for other in given.calls):  # only its maker can hold it
                    holds = [position in entry.holds_outputs for entry in (chosen[call], full[call])]
                    extra += given.boundary_bytes[boundary] * (holds[0] - holds[1])
            if call in backward and forward[call] < k <= backward[call]:
                level += extra
                for position, boundary in enumerate(given.calls[call].outputs):  # when its readers are done
                    readers = [i for i, other in enumerate(given.calls) if boundary in other.inputs]
                    done = all(k > backward.get(reader, forward[reader]) for reader in readers)
                    only = position in chosen[call].holds_outputs and position not in full[call].holds_outputs
                    if readers and only and (done or k == backward[call]):
                        level += given.boundary_bytes[boundary]
            if call not in backward and forward[call] < k:
                level += max(extra, 0)
        for boundary, nbytes in enumerate(given.boundary_bytes):
            makers = [i for i, call in enumerate(given.calls) if boundary in call.outputs]
            readers = [i for i, call in enumerate(given.calls) if boundary in call.inputs]
            if boundary in given.passing and not makers and len(readers) == 1 and readers[0] in backward:
                reader = readers[0]
                position = given.calls[reader].inputs.index(boundary)
                free = chosen[reader].mode is not Mode.FULL and position not in chosen[reader].holds_inputs
                turned = any(s.phase is Phase.BACKWARD for s in given.segments[: k + 1])
                if free and turned and forward[reader] < k < backward[reader]:
                    level -= nbytes
            if len(makers) != 1 or len(readers) != 1 or readers[0] not in backward:
                continue
            maker, reader = makers[0], readers[0]
            read_at, made_at = (
                given.calls[reader].inputs.index(boundary),
                given.calls[maker].outputs.index(boundary),
            )
            sent = naive_sends(menus[reader], read_at)
            held = (
                chosen[reader].mode is Mode.FULL
                or read_at in chosen[reader].holds_inputs
                or (
                    made_at in chosen[maker].holds_outputs
                    and not (sent and made_at in chosen[maker].lends_outputs)
                )
            )
            if not held and forward[reader] < k < backward[reader] + sent:
                level -= nbytes
        above = segment.peak_bytes - segment.start_bytes
        if segment.call >= 0 and chosen[segment.call] != full[segment.call]:
            mine, reference = chosen[segment.call], full[segment.call]
            if segment.phase is Phase.FORWARD:
                above = mine.forward_peak_bytes + max(above - reference.forward_peak_bytes, 0)
            else:
                alone = mine.backward_peak_bytes - naive_counted_twice(given, segment.call, mine, backward)
                above = max(alone, 0) + max(above - reference.backward_peak_bytes, 0)
        peaks.append(level + above)
    return peaks


def naive_sends(menu: Sequence[Entry], position: int) -> bool:
    """Whoever does not hold this input sends it, and somebody does."""
    others = [e for e in menu if e.mode is not Mode.FULL and position not in e.holds_inputs]
    return bool(others) and all(position in entry.fetches_inputs for entry in others)


def naive_counted_twice(given: Profile, call: int, mine: Entry, backward: Mapping[int, int]) -> int:
    """Inputs that this entry fetches and that come back by themselves in the measured step."""
    twice = 0
    for position, boundary in enumerate(given.calls[call].inputs):
        makers = [i for i, other in enumerate(given.calls) if boundary in other.outputs]
        readers = [i for i, other in enumerate(given.calls) if boundary in other.inputs]
        if position not in mine.fetches_inputs or readers != [call] or call not in backward:
            continue
        if not makers:
            twice += given.boundary_bytes[boundary] if boundary in given.passing else 0
        if len(makers) != 1 or naive_sends(given.kinds[given.calls[call].kind].menu, position):
            continue
        made_at = given.calls[makers[0]].outputs.index(boundary)
        if not any(made_at in e.holds_outputs for e in given.kinds[given.calls[makers[0]].kind].menu):
            twice += given.boundary_bytes[boundary]
    return twice


def naive_lives_on(given: Profile, choices: Sequence[int]) -> int:
    """What calls that backward never came to hold of the last step, with the outputs that a loop holds."""
    if not given.step.outputs:
        return 0
    backward = {segment.call for segment in given.segments if segment.phase is Phase.BACKWARD}
    held = 0
    for index, (call, choice) in enumerate(zip(given.calls, choices, strict=True)):
        menu = given.kinds[call.kind].menu
        extra = 0
        for one, sign in ((menu[choice], 1), (next(e for e in menu if e.mode is Mode.FULL), -1)):
            extra += sign * one.resident_bytes
            for position in one.holds_outputs:
                unread = position < len(call.outputs) and not any(
                    call.outputs[position] in other.inputs for other in given.calls
                )
                extra += sign * given.boundary_bytes[call.outputs[position]] if unread else 0
        held += max(extra, 0) if index not in backward else 0
    return held


def naive_peak(given: Profile, choices: Sequence[int]) -> int:
    step = given.step
    resident = step.parameters + step.buffers + step.optimizer_state + step.other
    peaks = [resident, *naive_peaks(given, choices)] if not given.segments else naive_peaks(given, choices)
    if step.optimizer_state or step.optimizer_temporary:
        last = given.segments[-1]
        left = max(last.end_bytes - last.gradient_bytes, 0)
        left += naive_lives_on(given, choices)
        peaks.append(resident + step.gradients + left + step.optimizer_temporary)
    return max(peaks)


def all_choices(given: Profile) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(given.kinds[call.kind].menu)) for call in given.calls)))


def alike(given: Profile, choices: Sequence[int]) -> bool:
    """Do calls of one region with one signature run in the same way, two by two?"""
    for (a, i), (b, j) in itertools.combinations(zip(given.calls, choices, strict=True), 2):
        ours, theirs = given.kinds[a.kind], given.kinds[b.kind]
        if (a.name, ours.signature) != (b.name, theirs.signature):
            continue
        whole = ours.menu[i].recipe is None and ours.menu[i].mode is theirs.menu[j].mode
        if not (i == j if a.kind == b.kind else whole):
            return False
    return True


def naive_seconds(given: Profile, choices: Sequence[int]) -> float:
    menus = [given.kinds[call.kind].menu for call in given.calls]
    chosen = [menu[choice].extra_seconds for menu, choice in zip(menus, choices, strict=True)]
    backward = {segment.call for segment in given.segments if segment.phase is Phase.BACKWARD}
    return given.step_seconds + sum(seconds for call, seconds in enumerate(chosen) if call in backward)
