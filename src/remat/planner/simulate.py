"""Replay a plan over a profile: the memory of one training step, point by point, in exact integers.

The profile holds the measured timeline of one step in which every region ran in its reference entry (the
whole region recomputed). Every other choice differs from it in ways that are known:

- from the end of a call's forward to the end of its backward, the level differs by what the chosen entry
  holds beyond what the reference holds;
- the reference holds every input of a region. A boundary tensor that one region makes and exactly one reads
  is let go between the reader's forward and its backward, if neither of the two entries holds it;
- an output that a call holds for its own backward is there from when its last reader has let go of it;
- inside a region's own segments the peak is the entry's own;
- what is on its way to the host or back is held on the device meanwhile (`link.py`), and where compute has to
  wait for it, the step takes longer, and a little where it has not.

What else happened in the measured step (embedding, head, loss, gradients that appear) shifts with the level.
In forward the outputs of the step before are there, too, if a loop holds them, and with them whatever regions
hold for a backward that never ran them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from remat.planner.link import LinkUse, SharedLink, hidden_seconds
from remat.records import Entry, Mode, Phase, Profile, RegionCall, Segment

__all__ = [
    "Boundary",
    "HeldOutput",
    "Point",
    "Simulator",
    "Span",
    "Timeline",
    "boundaries",
    "call_label",
    "extra_bytes",
    "extra_seconds",
    "held_outputs",
    "returned_inputs",
    "segment_peak",
    "simulate",
    "spans",
]


class Point(NamedTuple):
    """One segment of the step. The last six fields add up to `peak_bytes`, absolute on the device.

    `parameters` includes buffers and whatever else was resident before the step; `kept` is what regions and
    the code between them hold for backward; `working` is what the segment needs above the level at its start;
    `moving` is on its way to the host, or back from it for a region that comes later.
    """

    label: str
    phase: Phase
    call: int
    start_bytes: int
    peak_bytes: int
    parameters: int
    gradients: int
    optimizer: int
    kept: int
    working: int
    moving: int = 0


@dataclass(frozen=True)
class Timeline:
    """A simulated step: its points in time order, its peak and where that is, and its seconds.

    `link` is None where nothing is offloaded; its points are those of the same place here, the optimizer's
    own step aside.
    """

    points: tuple[Point, ...]
    peak_bytes: int
    peak_at: str
    seconds: float
    link: LinkUse | None = None

    @property
    def peak(self) -> Point:
        """The point that decides the peak (the first of them)."""
        return next(point for point in self.points if point.peak_bytes == self.peak_bytes)


@dataclass(frozen=True)
class Span:
    """When a call holds memory, in indices of segments: after `forward`, up to and including `backward`.

    `returns` is the first backward segment, where a released boundary tensor is counted again: whether it is
    still needed there is not known, so that the prediction errs on the safe side.
    """

    forward: int
    returns: int
    backward: int
    recorded: bool  # it has a backward at all


@dataclass(frozen=True)
class Boundary:
    """A boundary tensor that may be let go: made by `producer`, read by `consumer` and by no other call.

    `sent`: the reader sends it to the host whenever it does not hold it. Then a producer that lends it does
    not hold it, either, and it comes back in the reader's own peak.
    """

    nbytes: int
    producer: int
    output_position: int
    consumer: int
    input_position: int
    sent: bool = False

    def held(self, producer: Entry, consumer: Entry) -> bool:
        return (
            consumer.mode is Mode.FULL  # the reference: it needs all its inputs to run again
            or self.input_position in consumer.holds_inputs
            or self.held_by_producer(producer)
        )

    def held_by_producer(self, producer: Entry) -> bool:
        if self.sent and self.output_position in producer.lends_outputs:
            return False
        return self.output_position in producer.holds_outputs

    def last_gone(self, reader: Span) -> int:
        """The last segment in which it can be gone."""
        return reader.backward if self.sent else reader.returns - 1


@dataclass(frozen=True)
class Passing:
    """A boundary tensor that no region makes and only `consumer` reads. The model's own code has it until
    forward has returned: it can be gone in the segments from `first` to `last`, in backward."""

    nbytes: int
    consumer: int
    input_position: int
    first: int
    last: int

    def held(self, consumer: Entry) -> bool:
        return consumer.mode is Mode.FULL or self.input_position in consumer.holds_inputs


@dataclass(frozen=True)
class HeldOutput:
    """An output that other regions read and that the call itself may hold, too, for its own backward. The
    measured step has let go of it when the last reader is done: from segment `first` to `last` it is on top.
    """

    nbytes: int
    producer: int
    output_position: int
    first: int
    last: int

    def held(self, entry: Entry, reference: Entry) -> bool:
        position = self.output_position
        return position in entry.holds_outputs and position not in reference.holds_outputs


def spans(profile: Profile) -> tuple[Span | None, ...]:
    """When each call holds memory; None for a call that never ran forward in the measured step."""
    where: dict[tuple[Phase, int], list[int]] = {}
    for index, segment in enumerate(profile.segments):
        where.setdefault((segment.phase, segment.call), []).append(index)
    found: list[Span | None] = []
    for call in range(len(profile.calls)):
        forward = where.get((Phase.FORWARD, call))
        backward = where.get((Phase.BACKWARD, call))
        if forward is None:
            found.append(None)
        elif backward is None:  # nothing in it trains, or its output is not used: what it holds stays
            end = len(profile.segments) - 1
            found.append(Span(forward[-1], end, end, recorded=False))
        else:
            found.append(Span(forward[-1], backward[0], backward[-1], recorded=True))
    return tuple(found)


def boundaries(profile: Profile) -> tuple[Boundary, ...]:
    """The boundary tensors that a plan can let go; all others stay as in the measured step."""
    makers: dict[int, list[tuple[int, int]]] = {}
    readers: dict[int, list[tuple[int, int]]] = {}
    for index, call in enumerate(profile.calls):
        for position, boundary in enumerate(call.outputs):
            makers.setdefault(boundary, []).append((index, position))
        for position, boundary in enumerate(call.inputs):
            readers.setdefault(boundary, []).append((index, position))
    recorded, elsewhere = spans(profile), set(profile.elsewhere)
    found = []
    for boundary, nbytes in enumerate(profile.boundary_bytes):
        made, read = makers.get(boundary, []), readers.get(boundary, [])
        if len(made) != 1 or len(read) != 1 or boundary in elsewhere:
            continue
        span = recorded[read[0][0]]
        if span is not None and span.recorded:  # without a backward, the reference held nothing to let go
            reader, position = read[0]
            menu = profile.kinds[profile.calls[reader].kind].menu
            found.append(Boundary(nbytes, *made[0], reader, position, _holds_or_sends(menu, position)))
    return tuple(found)


def _holds_or_sends(menu: Sequence[Entry], position: int) -> bool:
    """Whether every entry that does not hold this input sends it, and one does."""
    others = [e for e in menu if e.mode is not Mode.FULL and position not in e.holds_inputs]
    return bool(others) and all(position in entry.fetches_inputs for entry in others)


def passing_boundaries(profile: Profile) -> tuple[Passing, ...]:
    """Those that come from outside of regions and that a plan can let go."""
    recorded = spans(profile)
    backward = (k for k, segment in enumerate(profile.segments) if segment.phase is Phase.BACKWARD)
    turn = next(backward, len(profile.segments))
    found = []
    for boundary in profile.passing:
        read = [
            (index, position)
            for index, call in enumerate(profile.calls)
            for position, one in enumerate(call.inputs)
            if one == boundary
        ]
        made = any(boundary in call.outputs for call in profile.calls)
        span = recorded[read[0][0]] if len(read) == 1 else None
        if not made and span is not None and span.recorded:
            first = max(turn, span.forward + 1)
            found.append(Passing(profile.boundary_bytes[boundary], *read[0], first, span.returns - 1))
    return tuple(found)


def returned_inputs(profile: Profile) -> tuple[dict[int, int], ...]:
    """Per call: position -> bytes of the inputs that are counted again in its backward and that nobody but
    the call itself can hold. An entry that fetches such an input from the host has it in its own peak."""
    found: tuple[dict[int, int], ...] = tuple({} for _ in profile.calls)
    for boundary in boundaries(profile):
        menu = profile.kinds[profile.calls[boundary.producer].kind].menu
        if not boundary.sent and not any(boundary.output_position in entry.holds_outputs for entry in menu):
            found[boundary.consumer][boundary.input_position] = boundary.nbytes
    for passing in passing_boundaries(profile):
        found[passing.consumer][passing.input_position] = passing.nbytes
    return found


def unread_outputs(profile: Profile) -> tuple[dict[int, int], ...]:
    """Per call: position -> bytes of the outputs that no region reads. What holds such a tensor is the region
    that made it, and nobody else counts it."""
    read = {boundary for call in profile.calls for boundary in call.inputs}
    return tuple(
        {p: profile.boundary_bytes[b] for p, b in enumerate(call.outputs) if b not in read}
        for call in profile.calls
    )


def held_outputs(profile: Profile) -> tuple[HeldOutput, ...]:
    """The outputs that may be held when the regions that read them have let go."""
    recorded = spans(profile)
    done: dict[int, int] = {}  # by boundary: the last segment in which a reader surely has it
    for call, span in zip(profile.calls, recorded, strict=True):
        if span is None:
            continue
        for boundary in call.inputs:
            # Without a backward, the reference has it no longer than its forward runs. One in several parts
            # (an input's gradient is asked for later) has what it holds in the first, perhaps not in others.
            end = span.returns if span.recorded else span.forward
            done[boundary] = max(done.get(boundary, end), end)
    return tuple(
        HeldOutput(
            profile.boundary_bytes[boundary],
            index,
            position,
            max(min(done[boundary] + 1, span.returns), span.forward + 1),
            span.backward,
        )
        for index, (call, span) in enumerate(zip(profile.calls, recorded, strict=True))
        if span is not None and span.recorded
        for position, boundary in enumerate(call.outputs)
        if boundary in done
    )


def held_bytes(entry: Entry, unread: dict[int, int]) -> int:
    """What a call holds in this entry from forward to backward, boundary tensors read by others aside."""
    return entry.resident_bytes + sum(unread.get(position, 0) for position in entry.holds_outputs)


def extra_bytes(span: Span | None, entry: Entry, reference: Entry, unread: dict[int, int]) -> int:
    """What a call holds in this entry beyond what it holds in the reference."""
    if span is None:
        return 0
    extra = held_bytes(entry, unread) - held_bytes(reference, unread)
    # Without a backward, whether the reference held anything is unknown: count what is added only.
    return extra if span.recorded else max(extra, 0)


def extra_seconds(span: Span | None, entry: Entry) -> float:
    """What a call takes longer in this entry: all of it in backward, so that without one it is nothing."""
    return entry.extra_seconds if span is None or span.recorded else 0.0


def simulate(profile: Profile, choices: Sequence[int]) -> Timeline:
    """The memory timeline of one step, and its seconds, if call i runs in entry `choices[i]` of its menu."""
    return Simulator(profile).run(choices)


class Simulator:
    """Many plans over one profile: what does not depend on the choices is worked out once."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._menus = [profile.kinds[call.kind].menu for call in profile.calls]
        self._references = [
            profile.kinds[call.kind].menu[profile.kinds[call.kind].reference] for call in profile.calls
        ]
        self._spans = spans(profile)
        self._boundaries = boundaries(profile)
        self._passing = passing_boundaries(profile)
        self._unread = unread_outputs(profile)
        self._outputs: list[list[HeldOutput]] = [[] for _ in profile.calls]
        for output in held_outputs(profile):
            self._outputs[output.producer].append(output)
        self._returned = returned_inputs(profile)
        self._link = SharedLink(profile)
        self._labels = [_label(profile, segment) for segment in profile.segments]
        self._added_at_once = _head_gradients(profile) if profile.chunked else 0
        self._extras: dict[tuple[int, int], int] = {}  # by call and choice
        self._held: dict[tuple[int, int], tuple[HeldOutput, ...]] = {}
        self._peaks: dict[tuple[int, int], int] = {}  # by segment and choice

    def run(self, choices: Sequence[int]) -> Timeline:
        profile = self.profile
        if len(choices) != len(profile.calls):
            raise ValueError(f"{len(choices)} choices for {len(profile.calls)} region calls")
        chosen = [menu[choice] for menu, choice in zip(self._menus, choices, strict=True)]
        extras = [self._extra_bytes(call, choice) for call, choice in enumerate(choices)]
        shifts = self._shifts(choices, chosen, extras)
        lives_on = self._lives_on(extras)
        link = self._link.use(choices)
        moving = [0] * len(shifts) if link is None else link.level_bytes
        points = []
        gradients = 0  # that exist at the start of the segment, in the measured step
        for number, (segment, shift, held) in enumerate(zip(profile.segments, shifts, moving, strict=True)):
            above = self._above(number, choices[segment.call] if segment.call >= 0 else -1)
            # Under accumulation all gradients are there from the start. New ones are made and added to them,
            # so their bytes are a part of the segment's own peak, but not of any later level.
            present = gradients
            if profile.accumulate:
                present = profile.step.gradients + self._unadded(gradients)
            start = profile.step.resident + segment.start_bytes + (present - gradients) + shift + held
            # A loop that says `out = model(batch)` lets go of the last step's when forward returns.
            last = profile.step.outputs + lives_on if segment.phase is Phase.FORWARD else 0
            label = self._labels[number]
            points.append(_point(profile, label, segment, start + last, above, present, held, last))
            gradients = segment.gradient_bytes
        if profile.step.optimizer_state or profile.step.optimizer_temporary:
            points.append(_optimizer_point(profile, lives_on))

        worst = max(points, key=lambda point: point.peak_bytes, default=None)
        return Timeline(
            points=tuple(points),
            peak_bytes=profile.step.resident if worst is None else worst.peak_bytes,
            peak_at="" if worst is None else worst.label,
            seconds=profile.step_seconds
            + sum(map(extra_seconds, self._spans, chosen))
            + (0.0 if link is None else link.waited_seconds + hidden_seconds(profile, link.host_bytes)),
            link=link,
        )

    def _extra_bytes(self, call: int, choice: int) -> int:
        key = (call, choice)
        if key not in self._extras:
            entry, reference = self._menus[call][choice], self._references[call]
            self._extras[key] = extra_bytes(self._spans[call], entry, reference, self._unread[call])
        return self._extras[key]

    def _held_outputs(self, call: int, choice: int) -> tuple[HeldOutput, ...]:
        key = (call, choice)
        if key not in self._held:
            entry, reference = self._menus[call][choice], self._references[call]
            self._held[key] = tuple(one for one in self._outputs[call] if one.held(entry, reference))
        return self._held[key]

    def _above(self, number: int, choice: int) -> int:
        """The peak of a segment above the level at its start."""
        key = (number, choice)
        if key not in self._peaks:
            segment = self.profile.segments[number]
            if segment.call < 0:
                self._peaks[key] = max(segment.peak_bytes - segment.start_bytes, 0)
            else:
                entry, reference = self._menus[segment.call][choice], self._references[segment.call]
                self._peaks[key] = segment_peak(segment, entry, reference, self._returned[segment.call])
        return self._peaks[key]

    def _unadded(self, gradients: int) -> int:
        """Of these new gradients, what waits to be added to those that are there. A compiled graph hands them
        all over when its backward has ended; a head in chunks is not part of it."""
        return max(gradients - self._added_at_once, 0) if self.profile.graph_roots else 0

    def _lives_on(self, extras: Sequence[int]) -> int:
        """What lives on with the outputs, if they are held: of the calls that backward did not come to."""
        if not self.profile.step.outputs:
            return 0
        pairs = zip(self._spans, extras, strict=True)
        return sum(extra for span, extra in pairs if span is not None and not span.recorded)

    def _shifts(self, choices: Sequence[int], chosen: Sequence[Entry], extras: Sequence[int]) -> list[int]:
        """By how much the level at the start of each segment differs from the measured step's."""
        changes = [0] * (len(self.profile.segments) + 1)

        def between(first: int, last: int, nbytes: int) -> None:
            """The level differs at the start of segments first..last."""
            if first <= last:
                changes[first] += nbytes
                changes[last + 1] -= nbytes

        for span, extra in zip(self._spans, extras, strict=True):
            if span is not None:
                between(span.forward + 1, span.backward, extra)
        for call, choice in enumerate(choices):
            for output in self._held_outputs(call, choice):
                between(output.first, output.last, output.nbytes)
        for boundary in self._boundaries:
            span = self._spans[boundary.consumer]
            if span is not None and not boundary.held(chosen[boundary.producer], chosen[boundary.consumer]):
                between(span.forward + 1, boundary.last_gone(span), -boundary.nbytes)
        for passing in self._passing:
            if not passing.held(chosen[passing.consumer]):
                between(passing.first, passing.last, -passing.nbytes)
        last = self._spans[-1] if self._spans and self.profile.chunked and self.profile.graph_roots else None
        if last is not None:  # what the head hands to the trunk's graph stays as long as its backward runs
            handed = sum(self.profile.boundary_bytes[output] for output in self.profile.calls[-1].outputs)
            between(last.backward + 1, len(self.profile.segments) - 1, handed)

        levels, level = [], 0
        for change in changes[:-1]:
            level += change
            levels.append(level)
        return levels


def segment_peak(segment: Segment, entry: Entry, reference: Entry, returned: dict[int, int]) -> int:
    """The peak of a region's segment above the level at its start, if the region runs in `entry`."""
    measured = max(segment.peak_bytes - segment.start_bytes, 0)
    if entry == reference:
        return measured
    # Menu entries are measured on the region alone. In the step, more may happen in the same segment (hooks,
    # gradients of inputs that are summed, allocator rounding): what the reference showed in the step beyond
    # what it showed alone is added to every other entry. Where it showed less, nothing is taken off.
    in_situ = max(measured - _peak_alone(segment, reference), 0)
    if segment.phase is not Phase.BACKWARD:
        return _peak_alone(segment, entry) + in_situ
    twice = sum(returned.get(position, 0) for position in entry.fetches_inputs)
    return max(_peak_alone(segment, entry) - twice, 0) + in_situ


def _peak_alone(segment: Segment, entry: Entry) -> int:
    return entry.forward_peak_bytes if segment.phase is Phase.FORWARD else entry.backward_peak_bytes


def _point(
    profile: Profile,
    label: str,
    segment: Segment,
    start: int,
    above: int,
    gradients: int,
    moving: int,
    last: int,
) -> Point:
    step = profile.step
    return Point(
        label=label,
        phase=segment.phase,
        call=segment.call,
        start_bytes=start,
        peak_bytes=start + above,
        parameters=step.fixed + last,
        gradients=gradients,
        optimizer=step.optimizer_state,
        kept=start - step.resident - last - gradients - moving,
        working=above,
        moving=moving,
    )


def _optimizer_point(profile: Profile, lives_on: int) -> Point:
    """The optimizer's own step: all gradients, its temporaries, and what the training step left behind."""
    step = profile.step
    left = lives_on
    if profile.segments:
        last = profile.segments[-1]
        left += max(last.end_bytes - last.gradient_bytes, 0)
    start = step.resident + step.gradients + left
    return Point(
        label="optimizer step",
        phase=Phase.OPTIMIZER,
        call=-1,
        start_bytes=start,
        peak_bytes=start + step.optimizer_temporary,
        parameters=step.fixed,
        gradients=step.gradients,
        optimizer=step.optimizer_state,
        kept=left,
        working=step.optimizer_temporary,
    )


def _head_gradients(profile: Profile) -> int:
    """Bytes of the gradients that exist when the backward of the first region begins."""
    backward = (segment for segment in profile.segments if segment.phase is Phase.BACKWARD)
    found = 0
    for segment in backward:
        if segment.call >= 0:
            break
        found = segment.gradient_bytes
    return found


def call_label(call: RegionCall) -> str:
    """'layers.3', or 'layers.3 (call 2)' for a region that the step calls again."""
    return call.name if call.call == 0 else f"{call.name} (call {call.call + 1})"


def _label(profile: Profile, segment: Segment) -> str:
    if segment.call >= 0:
        return f"{call_label(profile.calls[segment.call])} {segment.phase.value}"
    return segment.label or f"between regions, {segment.phase.value}"
