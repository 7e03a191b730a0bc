"""What measured rows say: is remat ahead of every peer at the peer's own peak, and are the set targets met.

Pure: rows in, findings out. No torch here, so that results are read and judged anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

__all__ = ["TARGETS", "Judged", "Reach", "Row", "Target", "Verdict", "lines_of", "table", "verdict"]

JUDGED_SHARES = (0.1, 0.9)  # of the plain activation peak: where every peer is to be beaten
PEAK_TOLERANCE = 0.005  # relative: a peak so little above a peer's counts as the same
REACH = 2.0  # times lower than any peer


@dataclass(frozen=True)
class Row:
    """One method of one run. `share` and `time` are ratios to the plain step; without them `why` says what
    went wrong, or why it was not run."""

    label: str
    group: str
    compiled: bool = False
    ours: bool = False
    share: float | None = None
    time: float | None = None
    peak_bytes: int | None = None
    seconds: float | None = None
    spread: float | None = None  # between the quartiles of `seconds`, relative
    runs: int = 0
    why: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        return self.share is not None and self.time is not None

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
    """The lowest peaks. None: nothing of that side was measured."""

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
class Verdict:
    peers: tuple[Judged, ...]
    reach: Reach
    targets: tuple[Met, ...]

    @property
    def ahead(self) -> bool:
        return all(judged.ahead for judged in self.peers)

    def as_json(self) -> dict[str, Any]:
        return {"ahead_of_every_peer": self.ahead, **asdict(self)}


def rivals_of(peer: Row, rows: Iterable[Row]) -> list[Row]:
    """Ours that may be compared: eager for an eager peer, any for a compiled one."""
    return [row for row in rows if row.ours and row.measured and (peer.compiled or not row.compiled)]


def fastest_within(rows: Iterable[Row], share: float) -> Row | None:
    within = [row for row in rows if _share(row) <= share * (1 + PEAK_TOLERANCE)]
    return min(within, key=_time, default=None)


def verdict(rows: Sequence[Row], targets: Sequence[Target] = ()) -> Verdict:
    low, high = JUDGED_SHARES
    peers = [row for row in rows if not row.ours and row.measured and row.group != "plain"]
    judged = tuple(_judge(peer, rows) for peer in peers if low <= _share(peer) <= high)
    return Verdict(judged, _reach(peers, rows), tuple(_met(target, rows) for target in targets))


def _judge(peer: Row, rows: Sequence[Row]) -> Judged:
    found = fastest_within(rivals_of(peer, rows), _share(peer))
    name, share, time = _figures(found)
    ahead = time is not None and time <= _time(peer)
    noise = max(peer.spread or 0.0, (found.spread or 0.0) if found else 0.0) * _time(peer)
    tied = time is not None and abs(time - _time(peer)) < noise
    return Judged(peer.label, _share(peer), _time(peer), name, share, time, ahead, tied)


def _reach(peers: Sequence[Row], rows: Sequence[Row]) -> Reach:
    ours = [row for row in rows if row.ours and row.measured]
    lowest, rival = min(peers, key=_share, default=None), min(ours, key=_share, default=None)
    peer_name, peer_share, _ = _figures(lowest)
    name, share, _ = _figures(rival)
    ahead = share is not None and (peer_share is None or share * REACH <= peer_share)
    return Reach(peer_name, peer_share, name, share, ahead)


def _met(target: Target, rows: Sequence[Row]) -> Met:
    ours = [row for row in rows if row.ours and row.measured]
    if target.how != "any":
        ours = [row for row in ours if row.compiled == (target.how == "compiled")]
    name, share, time = _figures(fastest_within(ours, target.share))
    return Met(target, name, share, time, time is not None and time <= target.time)


def _figures(row: Row | None) -> tuple[str, float | None, float | None]:
    return ("", None, None) if row is None else (row.label, row.share, row.time)


def _share(row: Row) -> float:
    assert row.share is not None
    return row.share


def _time(row: Row) -> float:
    assert row.time is not None
    return row.time


# ---------------------------------------------------------------------------------------------- reading


def table(rows: Sequence[Row]) -> str:
    """One line per method, by peak; what has no figures comes last, with the reason."""
    lines = [f"{'method':<54}{'peak':>8}{'time':>9}{'spread':>9}"]
    for row in sorted((row for row in rows if row.measured), key=_share, reverse=True):
        spread = "" if row.spread is None else f"{row.spread:.3f}"
        lines.append(f"{row.label:<54}{row.share:>8.3f}{row.time:>8.3f}x{spread:>9}  {_notes(row)}".rstrip())
    lines += [f"{row.label:<54}{row.why}" for row in rows if not row.measured]
    return "\n".join(lines)


def _notes(row: Row) -> str:
    shown = {"predicted_time": "predicted {:.3f}x", "fallbacks": "{} fallbacks", "gradients": "gradients {}"}
    return ", ".join(text.format(row.facts[key]) for key, text in shown.items() if row.facts.get(key))


def lines_of(found: Verdict) -> str:
    lines = []
    for each in found.peers:
        against = (
            f"{each.rival} {_ratio(each.rival_time)} at {each.rival_share:.3f}"
            if each.rival
            else "nothing so low"
        )
        sign = "ahead " if each.ahead else "BEHIND"
        tied = ", within the spread" if each.tied else ""
        lines.append(f"{sign} of {each.peer} {each.time:.3f}x at {each.share:.3f}: {against}{tied}")
    reach = found.reach
    if reach.rival_share is not None:
        beside = "no peer" if reach.peer_share is None else f"{reach.peer} {reach.peer_share:.3f}"
        lines.append(
            f"{'ahead ' if reach.ahead else 'BEHIND'} in reach ({REACH:g}x asked): {reach.rival} "
            f"{reach.rival_share:.3f} against {beside}"
        )
    for met in found.targets:
        asked = f"{met.target.how} {met.target.share:.2f} at <= {met.target.time:.2f}x"
        got = (
            f"{met.rival} {_ratio(met.rival_time)} at {met.rival_share:.3f}"
            if met.rival
            else "nothing so low"
        )
        lines.append(f"{'met   ' if met.met else 'MISSED'} target {asked}: {got}")
    return "\n".join(lines)


def _ratio(time: float | None) -> str:
    return "-" if time is None else f"{time:.3f}x"
