"""The link to the host, as profiling sees it: its rates, how much a region can send behind compute, and the
engine that menu entries are measured with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from remat.errors import HostMemoryError
from remat.records import LinkRates, Profile, RegionGraph
from remat.run.hostmem import available_host_bytes
from remat.run.offload import HOST_SHARE, Engine, Group

__all__ = ["Hosting", "Settling", "hosting", "link_amounts"]

_EVERYTHING = 1 << 60  # a limit that never binds: a region alone is measured without back-pressure
_SIMULATED_BYTES = 2**20  # copied to calibrate a simulated link
# Shares of what a region can send behind compute. A little more than that, because storages are large: one
# that just does not fit would be recomputed for far more than the wait, which the simulator counts.
_WINDOWS = (1.1, 0.6)


@dataclass(frozen=True)
class Hosting:
    """What it takes to measure entries that offload."""

    rates: LinkRates
    host_limit_bytes: int
    engine: Engine


@contextmanager
def hosting(device: torch.device, like: Profile | None = None) -> Iterator[Hosting]:
    """Calibrate the link and have an engine for a while. HostMemoryError: no host memory can be had. `like`:
    a profile that has measured this link, so that it is not measured again."""
    limit = None if like is None else like.host_limit_bytes
    limit = int(available_host_bytes() * HOST_SHARE) if limit is None else limit
    engine = Engine(device, in_flight_limit_bytes=_EVERYTHING, host_limit_bytes=limit)
    try:
        try:
            link, rates = engine.link, None if like is None else like.link
            if rates is None:
                rates = link.calibrate() if device.type == "cuda" else link.calibrate(_SIMULATED_BYTES, 1)
        except (RuntimeError, MemoryError, OSError) as error:
            raise HostMemoryError(f"the link to the host cannot be measured: {error}") from error
        yield Hosting(rates, limit, engine)
    finally:
        engine.close()


def link_amounts(
    rates: LinkRates, forward_seconds: float, backward_seconds: float, graph: RegionGraph
) -> tuple[int, ...]:
    """How many bytes a region may send: a little more than its own seconds hide, out during forward and back
    during backward, and a little more than half of that; never more than it has. Where its inputs are more
    than that, as much as they take, too: nothing but the host can hold those, and some budgets ask for it."""
    hidden = min(rates.d2h_bytes_per_second * forward_seconds, rates.h2d_bytes_per_second * backward_seconds)
    amounts = [min(int(hidden * share), graph.saved_bytes) for share in _WINDOWS]
    if 0 < max(amounts) < graph.saved_input_bytes:
        amounts.append(graph.saved_input_bytes)
    return tuple(dict.fromkeys(amount for amount in amounts if amount > 0))


@dataclass
class Settling:
    """A region's call, with everything that it sent gone from the device when it returns. In a step, what it
    sent is on its way back when its backward begins: `fetch` sees to that."""

    call: Callable[..., Any]
    engine: Engine
    group: Group | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.call(*args, **kwargs)
        self.engine.settle()
        self.group = self.engine.last_group()
        return output

    def fetch(self) -> None:
        if self.group is not None:
            self.group.prefetch()
            self.group = None
