"""Two kernels of the spot check, and the flag that they raise.

`take` copies a few elements of up to eight tensors, byte by byte, into memory that is there already, and can
compare them with what it copied before; `unlike` compares two rows of numbers. Whichever finds a difference
writes to a flag on the host, so that nothing has to be compared or copied when backward ends: the host waits
for the last of them and looks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from remat._torch_private import current_stream_handle, direct_launch
from remat.run.fused import jit

__all__ = ["AT_ONCE", "SAMPLES", "WIDEST", "WORDS", "Flag", "Kernels", "compiled"]

SAMPLES = 16  # elements of each tensor
WIDEST = 8  # bytes of an element, at most
AT_ONCE = 8  # tensors that one launch looks at
WORDS = 64  # of eight bytes, at most, that are compared with others

Launch = Callable[..., None]  # (how many programs, stream, arguments)


class Flag:
    """A number on the host that kernels can write to."""

    def __init__(self) -> None:
        self._memory = torch.zeros(1, dtype=torch.int32, pin_memory=torch.cuda.is_available())
        self._number = self._memory.numpy()
        self.address = self._memory.data_ptr()

    def is_up(self) -> bool:
        """Of kernels that the host has waited for."""
        return bool(self._number[0])

    def lower(self) -> None:
        self._number[0] = 0


@dataclass(frozen=True)
class Kernels:
    """`take(tensors, stream, out, table, sizes, first, back, flag, *addresses)`: into the rows of `out` from
    `first` on; `back` is where what they are compared with lies, in bytes from there, 0 for nothing.
    `unlike(1, stream, one, other, count, flag)`: numbers of eight bytes each. `flag` is an address."""

    take: Launch
    unlike: Launch


_POINTERS = [f"p{number}" for number in range(AT_ONCE)]
_RAISE = "tl.store(flag.to(tl.pointer_type(tl.int32)), 1, mask=wrong > 0)"
_TAKE = f"""
def take(out, table, sizes, first, back, flag, {", ".join(_POINTERS)}):
    number = tl.program_id(0)
    base = p0
{"".join(f"    base = tl.where(number == {n}, p{n}, base){chr(10)}" for n in range(1, AT_ONCE))}
    row = first + number
    size = tl.load(sizes + row)
    sample = tl.arange(0, {SAMPLES})[:, None]
    byte = tl.arange(0, {WIDEST})[None, :]
    at = base + tl.load(table + row * {SAMPLES} + sample) + byte
    found = tl.load(at.to(tl.pointer_type(tl.uint8)), mask=(byte < size) & (sample >= 0), other=0)
    place = (row * {SAMPLES} + sample) * {WIDEST} + byte
    tl.store(out + place, found)
    if back != 0:
        before = tl.load(out + back + place)
        wrong = tl.sum(tl.sum((before != found).to(tl.int32), axis=1), axis=0)
        {_RAISE}
"""
_UNLIKE = f"""
def unlike(one, other, count, flag):
    at = tl.arange(0, {WORDS})
    a = tl.load(one + at, mask=at < count, other=0)
    b = tl.load(other + at, mask=at < count, other=0)
    wrong = tl.sum((a != b).to(tl.int32), axis=0)
    {_RAISE}
"""
_ADDRESS = (1 << 40) + 3  # neither one nor a multiple of anything: Triton compiles for such, too


def compiled(device: torch.device) -> Kernels | None:
    """Ready to launch on the current device, which is this one; None if Triton launches otherwise. Raises
    whatever a compiler raises."""
    bytes_, offsets, sizes = (
        torch.zeros(WORDS, dtype=kind, device=device) for kind in (torch.uint8, torch.int64, torch.int32)
    )
    take = _ready(
        jit(_TAKE, "take", ("first", "back", "flag", *_POINTERS)),
        [bytes_, offsets, sizes, 3, 5, *[_ADDRESS] * (1 + AT_ONCE)],
        device,
    )
    unlike = _ready(jit(_UNLIKE, "unlike", ("count", "flag")), [offsets, offsets, 3, _ADDRESS], device)
    return None if take is None or unlike is None else Kernels(take, unlike)


def _ready(code: Any, arguments: list[Any], device: torch.device) -> Launch | None:
    ready = code[(0, 1, 1)](*arguments, num_warps=1)
    given = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
    return direct_launch(ready, current_stream_handle(device), *given)
