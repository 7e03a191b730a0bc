"""The spot check: did replay give back what was dropped?

A Python number that is baked into a recipe (a temperature, a drop-path rate) may change between steps
without any shape changing. So a few elements of dropped tensors are kept and compared with the replayed ones,
on the device: of all tensors but those that cannot be wrong if the others are right. And one region per step,
in turn, compares a checksum over all bits of one of those tensors, in turn as well. The
result is read once, when backward ends: loss.backward() itself raises, before an optimizer can use the
gradients. Only the host compares what it has itself at once, so that nothing of it is held till then.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from remat._torch_private import at_end_of_backward, current_backward, current_stream_handle
from remat.errors import RecomputeError
from remat.run.gather import Flag
from remat.run.same import bits, checksum
from remat.run.samples import Probes

__all__ = ["Check", "Pass", "SpotCheck", "expect"]

_BACKWARDS_REMEMBERED = 16  # backwards that raised never read their checks; only so many are held

Report = Callable[[int], str]  # told which slot differs; gives the sentence for the error


class Check(Protocol):
    """What is looked at when a backward pass ends. `region`: what cannot be run again as a whole, if that is
    what it says; "" for a recipe."""

    region: str

    def stacked(self) -> torch.Tensor | None:
        """All samples, expected and found, in one tensor; None: they come in `pairs`."""

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]: ...

    def is_complete(self) -> bool: ...

    def is_flagged(self) -> bool:
        """Whether the flag of its pass is up if anything differs; otherwise that takes comparing."""

    def forget(self) -> None:
        """What was seen in a pass that has been read. With retain_graph there may be another."""

    def describe(self) -> str | None:
        """The sentence for what differs; None: nothing that matters does."""


class SpotCheck:
    """What one graph expects of the tensors that it dropped."""

    __slots__ = (
        "_backward", "_flagged", "_found", "_nan", "_report", "_running", "_samples", "_sums", "region",
    )  # fmt: skip

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        probes: Probes,
        report: Report,
        *,
        phase: int,
        whole: Sequence[int] = (),
    ) -> None:
        """Sample those of the dropped tensors that `probes` names. `phase` moves the samples; of the places
        in `whole` checksums are taken, too."""
        self._report, self.region = report, ""
        self._backward = -2  # the pass that is looked at: with retain_graph there may be several
        self._running: Pass | None = None
        self._samples = probes.expect(tensors, phase)
        self._sums = {place: checksum(tensors[place]) for place in whole}
        self._found: dict[int, torch.Tensor] = {}  # checksums, too
        self._nan: dict[int, torch.Tensor] = {}  # sums that are NaN if the tensor has one
        self._flagged = True  # whether a flag is up if any of these checksums differs

    def see(self, place: int, tensor: torch.Tensor) -> None:
        """Take the same samples of the replayed tensor (only for the places that were given)."""
        backward = current_backward()
        if backward != self._backward:
            self.forget()
            self._backward = backward
            self._running = expect(self, backward)
        running, samples = self._running, self._samples
        flag_at = 0 if running is None or samples.device is None else running.flag_at()
        taken = samples.see(place, tensor, flag_at)
        if place in self._sums:
            self._found[place] = found = checksum(tensor)
            self._flagged &= samples.compare(self._sums[place], found, flag_at)
            if tensor.is_floating_point() and tensor.element_size() > 1:
                self._nan[place] = tensor.sum()  # the bits of a NaN are the device's own
            taken = True
        if running is None:  # unpacked by hand
            return
        device = samples.device or tensor.device
        if device.type == "cuda":
            running.has_seen(self, device)
        elif taken and self.is_complete() and self._is_on_host() and not _differ([self]):
            running.checks.remove(self)
            self.forget()

    def stacked(self) -> torch.Tensor | None:
        """All samples, expected and found, in one tensor; None: they come in `pairs`."""
        return self._samples.stacked()

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(expected, found) of the tensors that were replayed, unless they are stacked; of some their
        checksums, too."""
        if self._samples.stacked() is None:
            yield from self._samples.pairs()
        for place, found in self._found.items():
            yield self._sums[place], found

    def is_complete(self) -> bool:
        return self._samples.is_complete()

    def is_flagged(self) -> bool:
        """Whether the flag of its pass is up if anything differs; otherwise that takes comparing."""
        return self._flagged and self._samples.device is not None

    def _is_on_host(self) -> bool:
        """To compare then waits for nobody."""
        return self.stacked() is None and all(found.device.type == "cpu" for _, found in self.pairs())

    def forget(self) -> None:
        """What was seen in a pass that has been read. With retain_graph there may be another."""
        self._backward, self._running = -2, None
        self._samples.forget()
        self._found.clear()
        self._nan.clear()
        self._flagged = True

    def describe(self) -> str | None:
        """The sentence for the first tensor that differs, in the order of forward; None: none does."""
        wrong = [place for place in self._samples.places() if _any_unequal(*self._samples.pair(place))]
        for place, found in self._found.items():
            nan = place in self._nan and bool(self._nan[place].isnan())
            if not nan and _any_unequal(self._sums[place], found):
                wrong.append(place)
        return self._report(max(wrong)) if wrong else None


def _any_unequal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(_unequal(a, b).any())


def _unequal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Differ in any bit; all NaNs count as one."""
    differs = bits(a) != bits(b)
    return differs & ~(a.isnan() & b.isnan()) if a.is_floating_point() else differs


# ------------------------------------------------------------------------------ when a backward pass ends


class Pass:
    """The checks of one backward pass, the flag that its kernels raise, and on CUDA where in its stream the
    last of them was taken."""

    __slots__ = ("checks", "flag", "mark", "marked", "streams")

    def __init__(self) -> None:
        self.checks: list[Check] = []
        self.flag: Flag | None = None
        self.streams: set[tuple[torch.device, int]] = set()  # that tensors were seen on
        self.mark: tuple[torch.device, torch.cuda.Event] | None = None
        self.marked = False  # nothing was seen since

    def flag_at(self) -> int:
        if self.flag is None:
            self.flag = _flags.pop() if _flags else Flag()
        return self.flag.address

    def has_seen(self, check: Check, device: torch.device) -> None:
        """Remember how far the stream has to be for all samples to be there. Marking takes the host as long
        as an operation, so it is done where the last check of the pass is expected. With several streams
        there is no such place: whoever reads looks at their number, too."""
        self.streams.add((device, current_stream_handle(device)))
        self.marked = False
        if len(self.checks) < _checks_before or len(self.streams) > 1 or not check.is_complete():
            return
        if self.mark is None:
            self.mark = (device, torch.cuda.Event())  # type: ignore[no-untyped-call]
        self.mark[1].record(torch.cuda.current_stream(device))
        self.marked = True


_flags: list[Flag] = []  # that no pass has; all down, but for a kernel that was slower than its pass

# By the number of the pass: its worker threads share it.
_running: collections.OrderedDict[int, Pass] = collections.OrderedDict()
_lock = threading.Lock()
_readers: dict[torch.device, torch.cuda.Stream] = {}
_checks_before = 0  # in the pass that ended last


def expect(check: Check, backward: int) -> Pass | None:
    """Have this check read when the running backward pass ends."""
    first = False
    running = _running.get(backward)
    if running is None:
        with _lock:
            first = backward not in _running
            running = _running.setdefault(backward, Pass())
            while len(_running) > _BACKWARDS_REMEMBERED:
                _running.popitem(last=False)
    running.checks.append(check)
    if first and not at_end_of_backward(functools.partial(_read, backward)):
        _running.pop(backward, None)  # unpacked by hand, outside of any backward: nobody will read it
        return None
    return running


def _read(backward: int) -> None:
    """Raise if any replay of this backward pass differed: read once for all regions."""
    global _checks_before
    running = _running.pop(backward, None)
    if running is None:  # there were too many
        return
    _checks_before = len(running.checks)
    try:
        if not _is_settled(running):
            with _beside(running):
                wrong = _differ(running.checks)
            if wrong:
                _raise(running.checks)
    finally:
        if running.flag is not None:
            running.flag.lower()
            _flags.append(running.flag)
        for check in running.checks:  # each knows its pass, which knows them all
            check.forget()


def _is_settled(running: Pass) -> bool:
    """Whether everything was compared where it was taken, and nothing differed. Waits for that, and for
    nothing that backward has queued since: the host then queues the next step before the device runs dry."""
    if running.mark is None or running.flag is None or not _is_marked(running):
        return False
    for check in running.checks:
        if not check.is_flagged():
            return False
    running.mark[1].synchronize()
    return not running.flag.is_up()


def _is_marked(running: Pass) -> bool:
    """Whether the mark in the one stream lies behind all that was taken."""
    if not running.marked or len(running.streams) != 1:
        return False
    return all(check.is_complete() for check in running.checks)


def _raise(checks: Sequence[Check]) -> None:
    told = [(sentence, check.region) for check in checks if (sentence := check.describe()) is not None]
    if not told:  # nothing but NaNs, or rounding
        return
    sentence, region = told[-1]
    more = f" {len(told) - 1} more regions differ too." if len(told) > 1 else ""
    raise RecomputeError(
        f"{sentence}{more} The gradients of this step are wrong and must not be used: call zero_grad() and "
        "run the step again.",
        region=region,
    )


@contextmanager
def _beside(running: Pass) -> Iterator[None]:
    """Compare on a stream of its own, which waits for the samples and not for what backward has queued since:
    the host then has the answer, and queues the next step, before the device runs dry.

    What is read there is let go only after the host has waited for it, so no stream reuses it too early.
    """
    if running.mark is None or not _is_marked(running):
        yield
        return
    device, mark = running.mark
    reader = _readers.get(device)
    if reader is None:
        reader = _readers.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    reader.wait_event(mark)
    with torch.cuda.stream(reader):
        yield


def _differ(checks: Sequence[Check]) -> bool:
    """Whether any sample or checksum differs in any bit. All NaNs count as one only in `describe`."""
    stacks: dict[Any, list[torch.Tensor]] = {}
    groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for check in checks:
        stack = check.stacked()
        if stack is not None:
            stacks.setdefault(stack.device, []).append(stack)
        for expected, found in check.pairs():
            ours, theirs = groups.setdefault((found.device, found.dtype, found.dim()), ([], []))
            ours.append(expected)
            theirs.append(found)
    if not all(torch.equal(*torch.cat(each, 1).unbind()) for each in stacks.values()):
        return True
    return not all(torch.equal(bits(torch.cat(a)), bits(torch.cat(b))) for a, b in groups.values())
