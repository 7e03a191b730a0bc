"""What an entry adds to a region's time, where host and device work at the same time.

The host issues operations and the device runs them behind it: whichever has more to do sets the pace, and
what is added to the other is hidden until that one becomes the slower. What the host does for a recipe is
Python that takes as long whatever the region computes, so it is counted in launches: in how long this host
takes to issue one small operation.

Forward and backward are two races. Autograd issues backward much faster than Python issues forward, so a
device that has time to spare over both may still wait for the host in forward; and what a region does when
its forward has returned (looking through the graph, sending tensors) then takes time that nothing hides.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.records import Recipe, RegionGraph

__all__ = ["Pace", "Work", "pace_of", "paced_by_host"]

# What the host does, in launches. Chosen to come near five runs of a launch-bound Llama on an H200, made
# before hooks were generated code, less what that was guessed to save; the ratio of the first two is a CPU's.
_LAUNCHES_PER_REGION = 45.0  # looking through the graph of a region that drops anything
_LAUNCHES_PER_SLOT = 3.0  # dropping and unpacking one tensor
_LAUNCHES_PER_MOVED = 13.0  # sending one storage to the host and having it back
_LAUNCHES_PER_REPLAY = 2.0  # at most, of an operation that may take the device longer
_LAUNCHES_ALONE = 80.0  # more than in a step, of a region by itself: copying inputs, starting backward
_BACKLOG = 0.05  # of a run: a device with more left to do when the host is done has not waited for it
_DEVICE_OVER_FORWARD = 3.0  # backward runs two operations for each of forward's
_FAR_AHEAD = 0.5  # of the device's time: a host that takes no more for forward keeps up whatever is added


@dataclass(frozen=True)
class Work:
    """What host and device have to do; they do it at the same time."""

    host_seconds: float
    device_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.host_seconds, self.device_seconds)

    def __add__(self, other: Work) -> Work:
        return Work(self.host_seconds + other.host_seconds, self.device_seconds + other.device_seconds)


@dataclass(frozen=True)
class Pace:
    """`plain`: forward and backward of a region in a step that keeps everything; `forward`: that of it.
    `launch_seconds`: the host's time to issue one small operation."""

    plain: Work
    launch_seconds: float
    forward: Work = Work(0.0, 0.0)

    @property
    def slot_seconds(self) -> float:
        """What dropping a tensor costs, whatever its size: the host's work for it, where the device waits."""
        return _LAUNCHES_PER_SLOT * self.launch_seconds if self.device_waits else 0.0

    @property
    def moved_seconds(self) -> float:
        """What sending a storage costs beside the time of the link, also where it shows in forward alone."""
        behind = self.device_waits or self.shows_in_forward
        return _LAUNCHES_PER_MOVED * self.launch_seconds if behind else 0.0

    @property
    def device_waits(self) -> bool:
        return self.plain.host_seconds > self.plain.device_seconds

    @property
    def shows_in_forward(self) -> bool:
        """Whether what the host does more in forward may take time beyond what is counted for both."""
        return not self.device_waits and self.forward.host_seconds > _FAR_AHEAD * self.forward.device_seconds

    def forward_extra(self, host_seconds: float) -> float:
        """How much longer forward takes if the host is busy with it for `host_seconds`."""
        if not self.shows_in_forward:
            return 0.0
        added = Work(max(host_seconds - self.forward.host_seconds, 0.0), 0.0)
        return (self.forward + added).seconds - self.forward.seconds

    def extra_seconds(self, added: Work) -> float:
        """How much longer the region takes with `added` to do."""
        return (self.plain + added).seconds - self.plain.seconds

    def recipe_seconds(self, recipe: Recipe, graph: RegionGraph, replay_seconds: float) -> float:
        """How much longer with this recipe, whose operations take the device `replay_seconds`."""
        launches = _LAUNCHES_PER_REGION + _LAUNCHES_PER_SLOT * len(recipe.dropped)
        launches += _LAUNCHES_PER_MOVED * len(recipe.offloaded)
        longest = _LAUNCHES_PER_REPLAY * self.launch_seconds
        issuing = sum(min(graph.ops[op].seconds, longest) for op in recipe.replayed)
        return self.extra_seconds(Work(launches * self.launch_seconds + issuing, replay_seconds))

    def again_seconds(self, host_seconds: float, forward_seconds: float) -> float:
        """How much longer with a second forward, which takes the device `forward_seconds`; by itself the host
        was busy with all of it for `host_seconds`."""
        again = Work(
            _in_a_step(host_seconds, self.launch_seconds), self.plain.device_seconds + forward_seconds
        )
        return again.seconds - self.plain.seconds


def pace_of(
    seconds: float,
    host_seconds: float,
    forward_seconds: float,
    launch_seconds: float,
    host_forward_seconds: float = 0.0,
) -> Pace:
    """The pace of a region that by itself took `seconds`, while the host was busy for `host_seconds`, of them
    `host_forward_seconds` with forward. A device that waited does not show how long it worked: then by its
    forward operations, each timed alone."""
    device = seconds
    if paced_by_host(seconds, host_seconds):
        device = min(_DEVICE_OVER_FORWARD * forward_seconds, seconds)
    forward = Work(host_forward_seconds, forward_seconds)
    return Pace(Work(_in_a_step(host_seconds, launch_seconds), device), launch_seconds, forward)


def paced_by_host(seconds: float, host_seconds: float) -> bool:
    """Whether the device had to wait for the host, told from runs without a break between them."""
    return host_seconds > (1 - _BACKLOG) * seconds


def _in_a_step(host_seconds: float, launch_seconds: float) -> float:
    return max(host_seconds - _LAUNCHES_ALONE * launch_seconds, 0.0)
