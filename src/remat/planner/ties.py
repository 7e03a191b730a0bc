"""Calls that run alike: one region, called several times in a step with inputs of the same signature.

A region finds what to do by the signature of its inputs, the same in any order of calls: with two forwards
before a backward, under gradient accumulation, with an evaluation in between. So such calls cannot be told
apart when they run, and a plan gives them all the same entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remat.records import Profile

__all__ = ["disagreement", "tied_calls", "ways"]


def tied_calls(profile: Profile) -> tuple[tuple[int, ...], ...]:
    """Every call in exactly one group, alone or with those it is tied to, in the order of first calls."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index, call in enumerate(profile.calls):
        groups.setdefault((call.name, profile.kinds[call.kind].signature), []).append(index)
    return tuple(map(tuple, groups.values()))


def ways(profile: Profile, group: Sequence[int]) -> tuple[dict[int, Any], ...]:
    """For each of these tied calls: entry -> what the region does in it. Calls that agree in that agree in
    everything. Of calls that are tied but unlike (other operations, hidden from the signature) only those
    that need no recipe: a recipe is of one graph."""
    if len({profile.calls[i].kind for i in group}) == 1:
        count = len(profile.kinds[profile.calls[group[0]].kind].menu)
        return tuple({entry: entry for entry in range(count)} for _ in group)
    return tuple(
        {
            number: (entry.mode, entry.part, entry.chunk_size, entry.again, entry.fetches_inputs, entry.cut)
            for number, entry in enumerate(profile.kinds[profile.calls[i].kind].menu)
            if entry.recipe is None
        }
        for i in group
    )


def disagreement(profile: Profile, choices: Sequence[int]) -> str | None:
    """The first region of which tied calls are to run in different ways; None: there is none."""
    for group in tied_calls(profile):
        if len(group) > 1:
            found = [way.get(choices[i]) for i, way in zip(group, ways(profile, group), strict=True)]
            if None in found or any(way != found[0] for way in found):
                return profile.calls[group[0]].name
    return None
