"""Bytes: "16GiB" <-> int. GiB is 2**30, GB is 10**9, and they are never mixed up."""

from __future__ import annotations

import math
import re

from remat.errors import InputError

__all__ = ["format_bytes", "format_seconds", "parse_bytes"]

_FACTORS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)\s*")
_EXAMPLES = 'say bytes as an int, or "16GiB", "16GB", "80%"'


def parse_bytes(text: int | str, *, total: int | None = None, what: str = "budget") -> int:
    """Read a number of bytes; "80%" is a share of `total` (the device's memory)."""
    if isinstance(text, bool) or not isinstance(text, (int, str)):
        raise InputError(f"{what}={text!r} is a {type(text).__name__}; {_EXAMPLES}")
    if isinstance(text, int):
        value = text
    else:
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise InputError(f"{what}={text!r} is not a number of bytes; {_EXAMPLES}")
        number, unit = float(match[1]), match[2].lower()
        if unit == "%":
            if total is None:
                raise InputError(
                    f"{what}={text!r}: a share needs a device whose memory size is known; {_EXAMPLES}"
                )
            if number > 100:
                raise InputError(f"{what}={text!r} is more than the whole device; {_EXAMPLES}")
            value = math.floor(total * number / 100)
        elif unit in _FACTORS:
            value = math.floor(number * _FACTORS[unit])
        else:
            raise InputError(f"{what}={text!r}: unknown unit {match[2]!r}; {_EXAMPLES}")
    if value <= 0:
        raise InputError(f"{what}={text!r} must be more than 0 bytes; {_EXAMPLES}")
    return value


def format_bytes(nbytes: float) -> str:
    """12884901888 -> '12.0 GiB'."""
    sign, size = ("-", -nbytes) if nbytes < 0 else ("", nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.1f} {unit}"
        size /= 1024
    return f"{sign}{size:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """0.00041 -> '410 us'."""
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"
