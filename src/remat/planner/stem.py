"""What runs before the first region, on the host: for budgets that nothing else meets.

A region is planned by what its recipes cost; what runs before all of them (the stem of a convolutional
network) has no recipes. It can wait on the host, all of it, from when the first region has returned until
backward has come back to it. Nothing hides those copies but that region's forward, so both ways are charged
in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from remat.records import Phase, Profile, Segment

__all__ = ["places_away", "with_stem_sent", "without_stem_sent"]


def with_stem_sent(profile: Profile) -> Profile | None:
    """The profile of the step that sends its stem; None if it has none, or the host no memory for it."""
    stem, link = profile.stem, profile.link
    if stem is None or link is None or profile.stem_sent or profile.one_graph:
        return None
    sent = sum(stem.sizes)
    limit = profile.host_limit_bytes
    if limit is not None and sent > limit:
        return None
    if places_away(profile.segments) is None:
        return None
    return _moved(profile, sent, stem.nbytes, True)


def without_stem_sent(profile: Profile) -> Profile:
    """The profile of the same step with its stem where it is: as it was measured."""
    if profile.stem is None or not profile.stem_sent:
        return profile
    return _moved(profile, -sum(profile.stem.sizes), -profile.stem.nbytes, False)


def _moved(profile: Profile, sent: int, nbytes: int, stem_sent: bool) -> Profile:
    places, link, limit = places_away(profile.segments), profile.link, profile.host_limit_bytes
    assert places is not None
    assert link is not None
    return replace(
        profile,
        segments=tuple(_sent(s, i, places, nbytes) for i, s in enumerate(profile.segments)),
        step_seconds=profile.step_seconds
        + sent / link.d2h_bytes_per_second
        + sent / link.h2d_bytes_per_second,
        host_limit_bytes=None if limit is None else limit - sent,
        stem_sent=stem_sent,
    )


def places_away(segments: Sequence[Segment]) -> range | None:
    """The segments that begin without the stem: from after what follows the first region's forward, up to the
    last of backward, which begins with having it back. None: it has no backward of its own."""
    regions = [place for place, segment in enumerate(segments) if segment.call >= 0]
    backward = [place for place, segment in enumerate(segments) if segment.phase is Phase.BACKWARD]
    if not regions or not backward or segments[backward[-1]].call >= 0:
        return None
    between = regions[0] + 1  # the region's outputs are there, and its hooks run
    return range(between + 1, backward[-1] + 1)


def _sent(segment: Segment, place: int, away: range, nbytes: int) -> Segment:
    start, peak, end = segment.start_bytes, segment.peak_bytes, segment.end_bytes
    if place in away:
        start -= nbytes
    if place in away[:-1]:
        peak -= nbytes
    if place + 1 in away:
        end -= nbytes
    return replace(segment, start_bytes=start, peak_bytes=peak, end_bytes=end)
