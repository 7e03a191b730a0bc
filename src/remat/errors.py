"""Every error that remat raises, in one tree.

RematError
├── InputError         an argument is wrong; nothing was changed (also a ValueError)
├── BudgetError        the budget is below the least this step can run in; carries `.needed` bytes
├── PlanError          a plan does not belong to this model, input, schema or torch version
├── CaptureError       a region could not be captured (the planner then uses full recompute for it)
├── RecomputeError     recomputation did not give what was dropped; the gradients must not be used
├── HostMemoryError    the host memory that a plan wants for offload cannot be had; nothing was moved
├── RecoveryError      a step ran out of memory and cannot be run again (also a RuntimeError)
├── OffloadError       an offloaded tensor could not be brought back as it was (also a RuntimeError)
└── VerificationError  the planned step differs from the untouched one

Each message carries the number, the cause and the remedy.
"""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "CaptureError",
    "HostMemoryError",
    "InputError",
    "OffloadError",
    "PlanError",
    "RecomputeError",
    "RecoveryError",
    "RematError",
    "VerificationError",
]


class RematError(Exception):
    """Base of every error of remat."""


class InputError(RematError, ValueError):
    """An argument is wrong. Raised before anything is changed."""


class BudgetError(RematError):
    """The budget is out of reach. `needed` is the least number of bytes this step can run in.

    `hints`: what else would help; `where`: where the peak is and what it is made of.
    """

    def __init__(self, message: str, *, needed: int, hints: tuple[str, ...] = (), where: str = "") -> None:
        super().__init__(message)
        self.needed = needed
        self.hints = hints
        self.where = where


class PlanError(RematError):
    """A plan or profile does not fit this model, input, schema version or torch version."""


class CaptureError(RematError):
    """A region could not be captured as a graph of operations."""


class RecomputeError(RematError, RuntimeError):
    """Recomputation did not reproduce what the forward pass had saved. `region`: the module or function that
    cannot be run again, where that is what it says."""

    def __init__(self, message: str, *, region: str = "") -> None:
        super().__init__(message)
        self.region = region


class RecoveryError(RematError, RuntimeError):
    """A step ran out of memory, and running it again did not help or is not safe. `needed`: the least number
    of bytes that the last plan was predicted to take, or None where that is not known."""

    def __init__(self, message: str, *, needed: int | None = None) -> None:
        super().__init__(message)
        self.needed = needed


class HostMemoryError(RematError):
    """Pinned host memory (or disk) was refused, or is above its limit. Raised before anything is moved."""


class OffloadError(RematError, RuntimeError):
    """A tensor that was sent to the host cannot be brought back as it was."""


class VerificationError(RematError):
    """The planned step's gradients differ from the untouched step's by more than its own noise."""
