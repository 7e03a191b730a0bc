"""The link to the host over one step: what is sent, what is held meanwhile, what comes back, who waits.

This follows the engine's own rules (run/offload.py), which make device memory independent of timing:

- when a region's forward has returned, its offloaded storages are sent, in their order. At most
  `window_bytes` of what was sent is held on the device; beyond that the oldest is waited for and let go;
- when backward reaches a region, what it sent comes back (what has not left yet is simply used), and copies
  for the region that sent just before it are started ahead.

Bytes are exact, but for what is fetched ahead, which is counted in full from its start. Seconds are those of
regions in a row, with what is left of the step (head, loss) between forward and backward; each direction
carries one copy at a time.

Where a region's graph is not there (a size that was not measured, or a plan that has to hold at smaller ones,
too), what it sends may come in any pieces, and is counted as if it left byte by byte. No pieces hold more of
the window than that, and a smaller step under the same plan, with its own window, holds no more either; but
in backward, where the last regions have sent less, what they left of the window may still be held by others:
then no more than that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from remat.records import Entry, Kind, LinkRates, Mode, Phase, Profile

__all__ = [
    "LinkPoint",
    "LinkUse",
    "SharedLink",
    "Transfer",
    "hidden_seconds",
    "host_bytes",
    "link_use",
    "pieces",
    "shares_of_link",
    "window_bytes",
]

# Copies that nobody waits for take their share of the device's memory from compute: 0.65 to 0.85 ms per GB,
# there and back, on an H200 (the same plans with a link that takes no time, benchmarks/offload.py).
_HIDDEN_SECONDS_PER_BYTE = 0.75e-12
_A_LITTLE_MORE = 1.15  # than it carries: storages are large, and a short wait may cost less than a replay


class LinkPoint(NamedTuple):
    """The link during one segment of the step; seconds from the step's start, as regions take them.

    `in_flight_bytes`: device memory held at its start for copies to the host. `ahead_bytes`: device memory
    that holds what was fetched for regions whose backward is still to come. `waited_seconds`: how long
    compute stands still for copies.
    """

    start_seconds: float
    end_seconds: float
    out_bytes: int
    back_bytes: int
    in_flight_bytes: int
    ahead_bytes: int
    host_bytes: int
    waited_seconds: float


@dataclass(frozen=True)
class Transfer:
    """What one region call moves, and when. `reused_bytes` had not left the device when backward asked.

    It left the device from `out_seconds` on, was on the host at `host_seconds`, came back from `back_seconds`
    on, and was needed (and there) at `needed_seconds`.
    """

    call: int
    nbytes: int
    reused_bytes: int
    out_seconds: float
    host_seconds: float
    back_seconds: float
    needed_seconds: float


@dataclass(frozen=True)
class LinkUse:
    """One step of the link. `points` and `level_bytes` follow the profile's segments.

    `level_bytes`: device memory held for copies during the segment, but for the segment's own region, whose
    entry counts what it fetched itself.
    """

    window_bytes: int
    host_bytes: int
    waited_seconds: float
    points: tuple[LinkPoint, ...]
    transfers: tuple[Transfer, ...]
    level_bytes: tuple[int, ...]


def pieces(profile: Profile, call: int, entry: Entry) -> tuple[int, ...]:
    """Bytes of the storages that a call sends in this entry, in the order of sending."""
    graph = profile.kinds[profile.calls[call].kind].graph
    if entry.mode is Mode.HOSTED:
        inputs = profile.calls[call].inputs
        sent = dict.fromkeys(inputs[position] for position in entry.fetches_inputs)
        return tuple(profile.boundary_bytes[boundary] for boundary in sent)
    if entry.recipe is None or graph is None or not entry.recipe.offloaded:
        return (entry.host_bytes,) if entry.host_bytes else ()
    return tuple(graph.storages[s].nbytes for s in entry.recipe.offloaded)


def is_divisible(profile: Profile, call: int, entry: Entry) -> bool:
    """Whether the pieces in which this entry sends are not known."""
    graph = profile.kinds[profile.calls[call].kind].graph
    return graph is None and entry.recipe is not None and bool(entry.recipe.offloaded)


def window_bytes(profile: Profile, choices: Sequence[int]) -> int:
    """What the engine may hold on the device for copies, each way: as much as the largest region sends, so
    that a region's copies have the time of the next region."""
    return max((entry.host_bytes for entry in _chosen(profile, choices)), default=0)


def host_bytes(profile: Profile, choices: Sequence[int]) -> int:
    """Host memory that a step takes: all that is sent is there when backward starts."""
    return sum(entry.host_bytes for entry in _chosen(profile, choices))


def hidden_seconds(profile: Profile, nbytes: int) -> float:
    """What so many bytes on the host cost a step, though nobody waits for them. A simulated link is free."""
    return _HIDDEN_SECONDS_PER_BYTE * nbytes if profile.environment.device.startswith("cuda") else 0.0


def shares_of_link(profile: Profile) -> tuple[tuple[int, ...], ...]:
    """Ways to share the link out among calls, in bytes that each may send: to each what it carries during
    that call's own forward, or to every second of a kind twice as much, for what is sent as a whole."""
    if profile.link is None:
        return ()
    steps = SharedLink(profile)
    rate = profile.link.d2h_bytes_per_second
    numbers: dict[int, int] = {}  # calls of each kind so far
    found: list[tuple[int, int]] = []
    for call, seconds in zip(profile.calls, steps.forward_seconds, strict=True):
        number = numbers[call.kind] = numbers.get(call.kind, -1) + 1
        carried = int(_A_LITTLE_MORE * rate * seconds)
        found.append((carried, 0 if number % 2 else 2 * carried))
    return tuple(zip(*found, strict=True)) if found else ()


def _chosen(profile: Profile, choices: Sequence[int]) -> list[Entry]:
    return [profile.kinds[c.kind].menu[i] for c, i in zip(profile.calls, choices, strict=True)]


def link_use(profile: Profile, choices: Sequence[int]) -> LinkUse | None:
    """What the link does if call i runs in entry `choices[i]` of its menu; None if nothing is offloaded."""
    return SharedLink(profile).use(choices)


class SharedLink:
    """The link in many plans over one profile: what does not depend on the choices is worked out once."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        kinds = [profile.kinds[call.kind] for call in profile.calls]
        self.menus = [kind.menu for kind in kinds]
        regions = sum(kind.forward_seconds + _backward_seconds(kind) for kind in kinds)
        pace = self._pace(regions)
        self.forward_seconds = [pace * kind.forward_seconds for kind in kinds]
        self.backward_seconds = [pace * _backward_seconds(kind) for kind in kinds]
        # Head and loss: half of what regions do not take of the plain step, since some lies elsewhere.
        self.seconds_between_passes = max(profile.step_seconds - pace * regions, 0.0) / 2
        self.last_forward = {s.call: k for k, s in enumerate(profile.segments) if s.phase is Phase.FORWARD}
        self.first_backward: dict[int, int] = {}
        for k, segment in enumerate(profile.segments):
            if segment.phase is Phase.BACKWARD:
                self.first_backward.setdefault(segment.call, k)
        self._sent: dict[tuple[int, int], Sent] = {}  # by kind and entry

    def _pace(self, regions_seconds: float) -> float:
        """Of an accelerator: all regions together take no longer than the step, though each of them alone,
        where the host does not run ahead, may. A host's seconds are estimates."""
        if not self.profile.environment.device.startswith("cuda") or not self.profile.step_seconds:
            return 1.0
        return min(1.0, self.profile.step_seconds / max(regions_seconds, 1e-12))

    def use(self, choices: Sequence[int]) -> LinkUse | None:
        chosen = [menu[i] for menu, i in zip(self.menus, choices, strict=True)]
        window = max((entry.host_bytes for entry in chosen), default=0)
        if not window:
            return None
        sent = [self._sent_by(call, choice) for call, choice in enumerate(choices)]
        return _Run(self, chosen, sent, window).whole_step()

    def _sent_by(self, call: int, choice: int) -> Sent:
        key = (self.profile.calls[call].kind, choice)
        if key not in self._sent:
            entry = self.menus[call][choice]
            sizes = pieces(self.profile, call, entry)
            self._sent[key] = Sent(sizes, is_divisible(self.profile, call, entry))
        return self._sent[key]


@dataclass(frozen=True)
class Sent:
    """What a call sends. `divisible`: the pieces in which it does so are not known."""

    sizes: tuple[int, ...]
    divisible: bool


def _backward_seconds(kind: Kind) -> float:
    return kind.backward_seconds or 2 * kind.forward_seconds


@dataclass
class _Direction:
    """One direction of the link: a queue that carries one copy at a time."""

    alone_bytes_per_second: float
    both_bytes_per_second: float
    free_at: float = 0.0

    def carry(self, nbytes: int, asked_at: float, other: _Direction) -> tuple[float, float]:
        start = max(asked_at, self.free_at)
        rate = self.both_bytes_per_second if other.free_at > start else self.alone_bytes_per_second
        self.free_at = start + nbytes / rate
        return start, self.free_at


@dataclass(frozen=True, eq=False)
class _Flight:
    """A copy to the host. `divisible`: what has left the device may be let go while the rest is under way."""

    call: int
    nbytes: int
    begin: float
    end: float
    divisible: bool

    def parted(self, over_bytes: int) -> tuple[_Flight, _Flight | None]:
        """What is let go to be rid of so many bytes, and what stays."""
        if not self.divisible or over_bytes >= self.nbytes:
            return self, None
        between = self.begin + (self.end - self.begin) * over_bytes / self.nbytes
        stays = replace(self, nbytes=self.nbytes - over_bytes, begin=between)
        return replace(self, nbytes=over_bytes, end=between), stays


@dataclass
class _Sender:
    """A region call that has sent something: how many of its bytes are where."""

    nbytes: int
    out_seconds: float
    host_seconds: float = 0.0
    back_seconds: float = 0.0
    arrival: float = 0.0
    claimed: int = 0  # had not left the device when backward came near: stays
    fetched: int = 0
    needed_seconds: float | None = None

    @property
    def ahead(self) -> int:
        return self.claimed + self.fetched


@dataclass
class _Run:
    steps: SharedLink
    chosen: list[Entry]
    sent: list[Sent]
    window: int
    now: float = 0.0
    waited: float = 0.0
    in_flight: int = 0
    flights: deque[_Flight] = field(default_factory=deque)
    senders: dict[int, _Sender] = field(default_factory=dict)  # in the order of forward
    near: dict[int, _Sender] = field(default_factory=dict)  # those that hold device memory for backward
    host_bytes: int = 0
    reached: bool = False

    def __post_init__(self) -> None:
        infinite = float("inf")
        rates = self.steps.profile.link or LinkRates(infinite, infinite, infinite, infinite)
        self.out = _Direction(rates.d2h_bytes_per_second, rates.d2h_both_bytes_per_second)
        self.back = _Direction(rates.h2d_bytes_per_second, rates.h2d_both_bytes_per_second)

    def whole_step(self) -> LinkUse:
        steps = self.steps
        first_backward, last_forward = steps.first_backward, steps.last_forward
        turn = min(first_backward.values(), default=-1)
        points, levels = [], []
        for k, segment in enumerate(steps.profile.segments):
            if k == turn:
                self.now += steps.seconds_between_passes
            call, start, waited, back = segment.call, self.now, self.waited, 0
            begins = call >= 0 and first_backward.get(call) == k
            if begins:
                back = self._reach(call)
            own = call if segment.phase is Phase.BACKWARD else -1
            ahead = sum(sender.ahead for c, sender in self.near.items() if c != own)
            levels.append(self._in_flight_besides(own) + ahead)
            in_flight, out = self.in_flight, 0
            if call >= 0 and last_forward.get(call) == k:
                self.now += steps.forward_seconds[call]
                out = self._send(call)
            elif begins:
                self.now += steps.backward_seconds[call] + self.chosen[call].extra_seconds
                self.near.pop(call, None)
            points.append(
                LinkPoint(
                    start_seconds=start,
                    end_seconds=self.now,
                    out_bytes=out,
                    back_bytes=back,
                    in_flight_bytes=in_flight,
                    ahead_bytes=ahead,
                    host_bytes=self.host_bytes,
                    waited_seconds=self.waited - waited,
                )
            )
        return LinkUse(
            window_bytes=self.window,
            host_bytes=sum(sender.nbytes for sender in self.senders.values()),
            waited_seconds=self.waited,
            points=tuple(points),
            transfers=tuple(self._transfer(call, sender) for call, sender in self.senders.items()),
            level_bytes=tuple(levels),
        )

    def _transfer(self, call: int, sender: _Sender) -> Transfer:
        needed = self.now if sender.needed_seconds is None else sender.needed_seconds
        return Transfer(
            call=call,
            nbytes=sender.nbytes,
            reused_bytes=sender.claimed,
            out_seconds=sender.out_seconds,
            host_seconds=sender.host_seconds,
            back_seconds=sender.back_seconds or needed,
            needed_seconds=needed,
        )

    def _in_flight_besides(self, call: int) -> int:
        if call < 0 or call not in self.senders:
            return self.in_flight
        return sum(flight.nbytes for flight in self.flights if flight.call != call)

    def _wait_until(self, seconds: float) -> None:
        if seconds > self.now:
            self.waited += seconds - self.now
            self.now = seconds

    def _send(self, call: int) -> int:
        sent = self.sent[call]
        if not sent.sizes:
            return 0
        self.senders[call] = sender = _Sender(sum(sent.sizes), self.now)
        self.host_bytes += sender.nbytes
        for nbytes in sent.sizes:
            begin, end = self.out.carry(nbytes, self.now, self.back)
            sender.host_seconds = end
            self.flights.append(_Flight(call, nbytes, begin, end, sent.divisible))
            self.in_flight += nbytes
            while self.in_flight > self.window:
                self._land(self.in_flight - self.window)
        return sender.nbytes

    def _land(self, over_bytes: int) -> None:
        landed, rest = self.flights.popleft().parted(over_bytes)
        self._wait_until(landed.end)
        self.in_flight -= landed.nbytes
        if rest is not None:
            self.flights.appendleft(rest)

    def _reach(self, call: int) -> int:
        """Backward comes to this call; returns the bytes that start to come back now."""
        sender = self.senders.get(call)
        if sender is None:
            return 0
        before = max((c for c in self.senders if c < call), default=-1)
        for each in (call, before):
            if each >= 0:
                self.near[each] = self.senders[each]
                self._claim(each)
        if self.reached:  # a whole region's backward lies behind everything that was in flight
            while self.flights:
                self._land(self.in_flight)
        self.reached = True
        started = self._fetch(sender)
        self._wait_until(sender.arrival)
        sender.needed_seconds = self.now
        self.host_bytes -= sender.nbytes
        return started + (self._fetch(self.senders[before]) if before >= 0 else 0)

    def _claim(self, call: int) -> None:
        """What has not left the device stays."""
        stays = sum(flight.nbytes for flight in self.flights if flight.call == call)
        if stays:
            self.senders[call].claimed += stays
            self.in_flight -= stays
            self.flights = deque(flight for flight in self.flights if flight.call != call)

    def _fetch(self, sender: _Sender) -> int:
        missing = sender.nbytes - sender.ahead
        if missing > 0:
            begin, end = self.back.carry(missing, max(self.now, sender.host_seconds), self.out)
            sender.arrival = max(sender.arrival, end)
            sender.back_seconds = sender.back_seconds or begin
            sender.fetched += missing
        return missing
