"""remat: fit a PyTorch training step into a memory budget stated in bytes.

The names below are the public interface. They are imported when they are first used, so that `import remat`
is quick and the planner works without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from remat._lazy import submodules

if TYPE_CHECKING:
    from remat.api import Handle, apply, fit, plan, profile, verify
    from remat.batchsize import largest
    from remat.check.measure import Measurement, measure
    from remat.check.verify import Verification
    from remat.errors import (
        BudgetError,
        CaptureError,
        HostMemoryError,
        InputError,
        OffloadError,
        PlanError,
        RecomputeError,
        RecoveryError,
        RematError,
        VerificationError,
    )
    from remat.records import Action, Plan, Profile
    from remat.run.byhand import disable, enable, status
    from remat.run.checkpoint import (
        checkpoint,
        checkpoint_fn,
        checkpoint_sequential,
        gradient_checkpoint_forward,
    )
    from remat.run.chunked import chunked
    from remat.run.functions import region

__version__ = "0.1.0"

__all__ = [
    "Action",
    "BudgetError",
    "CaptureError",
    "Handle",
    "HostMemoryError",
    "InputError",
    "Measurement",
    "OffloadError",
    "Plan",
    "PlanError",
    "Profile",
    "RecomputeError",
    "RecoveryError",
    "RematError",
    "Verification",
    "VerificationError",
    "apply",
    "checkpoint",
    "checkpoint_fn",
    "checkpoint_sequential",
    "chunked",
    "disable",
    "enable",
    "fit",
    "gradient_checkpoint_forward",
    "largest",
    "measure",
    "plan",
    "profile",
    "region",
    "status",
    "verify",
]

_EXPORTS: dict[str, str] = {
    "Action": "remat.records",
    "BudgetError": "remat.errors",
    "CaptureError": "remat.errors",
    "Handle": "remat.api",
    "HostMemoryError": "remat.errors",
    "InputError": "remat.errors",
    "Measurement": "remat.check.measure",
    "OffloadError": "remat.errors",
    "Plan": "remat.records",
    "PlanError": "remat.errors",
    "Profile": "remat.records",
    "RecomputeError": "remat.errors",
    "RecoveryError": "remat.errors",
    "RematError": "remat.errors",
    "Verification": "remat.check.verify",
    "VerificationError": "remat.errors",
    "apply": "remat.api",
    "checkpoint": "remat.run.checkpoint",
    "checkpoint_fn": "remat.run.checkpoint",
    "checkpoint_sequential": "remat.run.checkpoint",
    "chunked": "remat.run.chunked",
    "disable": "remat.run.byhand",
    "enable": "remat.run.byhand",
    "fit": "remat.api",
    "gradient_checkpoint_forward": "remat.run.checkpoint",
    "largest": "remat.batchsize",
    "measure": "remat.check.measure",
    "plan": "remat.api",
    "profile": "remat.api",
    "region": "remat.run.functions",
    "status": "remat.run.byhand",
    "verify": "remat.api",
}


_submodule = submodules(__name__)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        return _submodule(name)
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
