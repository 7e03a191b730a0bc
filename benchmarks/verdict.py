"""What measured rows say: is remat ahead of every peer at the peer's own peak, and are the set targets met.

Pure: rows in, findings out. No torch here, so that results are read and judged anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

__all__ = [
    "TARGETS",
    "Judged",
    "Reach",
    "Row",
    "Target",
    "Unsound",
    "Verdict",
    "lines_of",
    "share_of",
    "table",
    "time_of",
    "verdict",
]

JUDGED_SHARES = (0.1, 0.9)  # of the plain activation peak: where every peer is to be beaten
JUDGED = "{:g} to {:g} of the plain peak".format(*JUDGED_SHARES)
PEAK_TOLERANCE = 0.005  # relative: a peak so little above a peer's counts as the same
REACH = 2.0  # times lower than any peer
WRONG_GRADIENTS = ("missing", "different")  # how frontier.py's comparison begins then


@dataclass(frozen=True)
class Row:
    """One method of one run. `share` and `time` are ratios to the plain step; without them `why` says what
    went wrong, or why it was not run. With them `fault` says why they count for nothing all the same."""

    label: str
    group: str
    compiled: bool = False
    ours: bool = False
    share: float | None = None
    time: float | None = None
    peak_bytes: int | None = None
    seconds: float | None = None
    spread: float | None = None  # between the quartiles of single steps over the plain one of their round
    runs: int = 0
    why: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fault(self) -> str:
        """What is wrong with a method that did run: it died later, its gradients are not the plain step's, or
        what ran was not its plan."""
        gradients = str(self.facts.get("gradients", ""))
        found = []
        if self.facts.get("failed_in_the_race"):
            found.append(f"failed in the race: {self.facts['failed_in_the_race']}")
        if gradients.startswith(WRONG_GRADIENTS):
            found.append(f"gradients {gradients}")
        if self.facts.get("fallbacks"):
            found.append(f"{self.facts['fallbacks']} fallbacks")
        return ", ".join(found)

    @property
    def measured(self) -> bool:
        return self.share is not None and self.time is not None and not self.fault

    @property
    def reason(self) -> str:
        """Of a row that is not measured."""
        return self.why or self.fault

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, "", {})}

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Row:
        names = {each.name for each in fields(Row)}
        return Row(**{key: value for key, value in found.items() if key in names})


@dataclass(frozen=True)
class Target:
    """At most `share` of the peak at no more than `time`. `how`: "eager", "compiled", or "any"."""

    how: str
    share: float
    time: float


_SURVEY = (Target("eager", 0.40, 1.06), Target("any", 0.40, 1.06))
TARGETS: dict[str, tuple[Target, ...]] = {
    "llama-1.3b": (
        Target("eager", 0.50, 1.01), Target("eager", 0.25, 1.06), Target("eager", 0.10, 1.11),
        Target("eager", 0.06, 1.15), Target("compiled", 0.45, 0.70), Target("compiled", 0.25, 0.76),
        Target("compiled", 0.10, 0.82), Target("compiled", 0.04, 0.84),
    ),
    "launch-bound": (Target("eager", 0.60, 1.25),),
    "resnet-152": _SURVEY,
    "vit-b16": _SURVEY,
    "gpt2-774m": _SURVEY,
    "llama-7b": _SURVEY,
}  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """One peer, and the fastest of ours at its peak or below. `rival` is "" where none of ours is so low.
    `tied`: the times differ by less than the larger of their spreads, and another run may say otherwise."""

    peer: str
    share: float
    time: float
    rival: str
    rival_share: float | None
    rival_time: float | None
    ahead: bool
    tied: bool = False


@dataclass(frozen=True)
class Reach:
    """The lowest peaks. None: nothing of that side was measured, and there is nothing to be ahead of."""

    peer: str
    peer_share: float | None
    rival: str
    rival_share: float | None
    ahead: bool


@dataclass(frozen=True)
class Met:
    target: Target
    rival: str
    rival_share: float | None
    rival_time: float | None
    met: bool


@dataclass(frozen=True)
class Unsound:
    """A row with figures that are not judged, a peer's or ours."""

    label: str
    fault: str


@dataclass(frozen=True)
class Verdict:
    """`peers` are those with a peak in JUDGED_SHARES; `outside` the others, compared all the same, which
    `ahead` is not about."""

    peers: tuple[Judged, ...]
    outside: tuple[Judged, ...]
    unsound: tuple[Unsound, ...]
    reach: Reach
    targets: tuple[Met, ...]

    @property
    def ahead(self) -> bool:
        return bool(self.peers) and all(judged.ahead for judged in self.peers)

    def as_json(self) -> dict[str, Any]:
        low, high = JUDGED_SHARES
        return {f"ahead_of_every_peer_from_{low:g}_to_{high:g}": self.ahead, **asdict(self)}


def rivals_of(peer: Row, rows: Iterable[Row]) -> list[Row]:
    """Ours that may be compared: eager for an eager peer, any for a compiled one."""
    return [row for row in rows if row.ours and row.measured and (peer.compiled or not row.compiled)]


def fastest_within(rows: Iterable[Row], share: float) -> Row | None:
    within = [row for row in rows if share_of(row) <= share * (1 + PEAK_TOLERANCE)]
    return min(within, key=time_of, default=None)


def verdict(rows: Sequence[Row], targets: Sequence[Target] = ()) -> Verdict:
    low, high = JUDGED_SHARES
    peers = [row for row in rows if not row.ours and row.measured and row.group != "plain"]
    judged = [(low <= share_of(peer) <= high, _judge(peer, rows)) for peer in peers]
    return Verdict(
        peers=tuple(each for inside, each in judged if inside),
        outside=tuple(each for inside, each in judged if not inside),
        unsound=tuple(Unsound(row.label, row.fault) for row in rows if row.fault),
        reach=_reach(peers, rows),
        targets=tuple(_met(target, rows) for target in targets),
    )


def _judge(peer: Row, rows: Sequence[Row]) -> Judged:
    found = fastest_within(rivals_of(peer, rows), share_of(peer))
    name, share, time = _figures(found)
    ahead = time is not None and time <= time_of(peer)
    noise = max(peer.spread or 0.0, (found.spread or 0.0) if found else 0.0) * time_of(peer)
    tied = time is not None and abs(time - time_of(peer)) < noise
    return Judged(peer.label, share_of(peer), time_of(peer), name, share, time, ahead, tied)


def _reach(peers: Sequence[Row], rows: Sequence[Row]) -> Reach:
    ours = [row for row in rows if row.ours and row.measured]
    lowest, rival = min(peers, key=share_of, default=None), min(ours, key=share_of, default=None)
    peer_name, peer_share, _ = _figures(lowest)
    name, share, _ = _figures(rival)
    ahead = share is not None and peer_share is not None and share * REACH <= peer_share
    return Reach(peer_name, peer_share, name, share, ahead)


def _met(target: Target, rows: Sequence[Row]) -> Met:
    ours = [row for row in rows if row.ours and row.measured]
    if target.how != "any":
        ours = [row for row in ours if row.compiled == (target.how == "compiled")]
    name, share, time = _figures(fastest_within(ours, target.share))
    return Met(target, name, share, time, time is not None and time <= target.time)


def _figures(row: Row | None) -> tuple[str, float | None, float | None]:
    return ("", None, None) if row is None else (row.label, row.share, row.time)


def share_of(row: Row) -> float:
    assert row.share is not None
    return row.share


def time_of(row: Row) -> float:
    assert row.time is not None
    return row.time


# ---------------------------------------------------------------------------------------------- reading


def table(rows: Sequence[Row]) -> str:
    """One line per method, by peak; what has no figures comes last, with the reason."""
    lines = [f"{'method':<54}{'peak':>8}{'time':>9}{'spread':>9}"]
    for row in sorted((row for row in rows if row.measured), key=share_of, reverse=True):
        spread = "" if row.spread is None else f"{row.spread:.3f}"
        lines.append(f"{row.label:<54}{row.share:>8.3f}{row.time:>8.3f}x{spread:>9}  {_notes(row)}".rstrip())
    lines += [f"{row.label:<54}{row.reason}" for row in rows if not row.measured]
    return "\n".join(lines)


def _notes(row: Row) -> str:
    shown = {"predicted_time": "predicted {:.3f}x", "gradients": "gradients {}"}
    return ", ".join(text.format(row.facts[key]) for key, text in shown.items() if row.facts.get(key))


def lines_of(found: Verdict) -> str:
    lines = [_headline(found.peers)]
    lines += [f"{'ahead of ' if each.ahead else 'BEHIND   '} {_against(each)}" for each in found.peers]
    lines += [f"outside of {JUDGED}, not counted: {_against(each)}" for each in found.outside]
    lines += [f"not judged: {each.label}: {each.fault}" for each in found.unsound]
    reach = found.reach
    if reach.rival_share is not None:
        ours = f"{reach.rival} {reach.rival_share:.3f}"
        lines.append(
            f"no peer to compare the reach of {ours} with"
            if reach.peer_share is None
            else f"{'ahead ' if reach.ahead else 'BEHIND'} in reach ({REACH:g}x asked): {ours} against "
            f"{reach.peer} {reach.peer_share:.3f}"
        )
    for met in found.targets:
        asked = f"{met.target.how} {met.target.share:.2f} at <= {met.target.time:.2f}x"
        got = _rival(met.rival, met.rival_time, met.rival_share)
        lines.append(f"{'met   ' if met.met else 'MISSED'} target {asked}: {got}")
    return "\n".join(lines)


def _headline(peers: Sequence[Judged]) -> str:
    if not peers:
        return f"no peer was measured from {JUDGED}: there is nothing to be ahead of"
    ahead = sum(each.ahead for each in peers)
    return f"ahead of {ahead} of the {len(peers)} peers measured from {JUDGED}"


def _against(judged: Judged) -> str:
    rival = _rival(judged.rival, judged.rival_time, judged.rival_share)
    tied = ", within the spread" if judged.tied else ""
    return f"{judged.peer} {judged.time:.3f}x at {judged.share:.3f}: {rival}{tied}"


def _rival(label: str, time: float | None, share: float | None) -> str:
    return "nothing so low" if time is None or share is None else f"{label} {time:.3f}x at {share:.3f}"
