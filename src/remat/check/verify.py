"""Does the checkpointed step compute what the untouched step computes? Loss, gradients, buffers, bit by bit.

The untouched step is run twice: what differs between two runs of the same thing is the step's own noise
(atomics, non-deterministic kernels), and no checkpointed step can be asked to be closer than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from remat import trees
from remat.check.step import Loss, run_step
from remat.check.untouched import backward, untouched
from remat.errors import InputError, VerificationError
from remat.run.functions import functions
from remat.run.wrap import bypass, wrapped

__all__ = ["Difference", "Outcome", "Verification", "compare", "difference", "observe", "verify"]

Around = Callable[[], AbstractContextManager[Any]]
Step = Callable[[nn.Module, Any], Tensor]  # forward and loss

# Two draws from the same noise differ by more than one draw from another, now and then.
_NOISE_FACTOR = 4.0
# Of a tensor's magnitude: what kernels that add in any order explain, through all layers.
_MOST_NOISE = {torch.bfloat16: 0.2, torch.float16: 0.1}
_MOST_NOISE_ELSE = 0.02


@dataclass(frozen=True)
class Verification:
    """How the checkpointed step compares with the untouched one.

    `max_abs_diff` and `noise` are the largest absolute differences to the first untouched run: of the
    checkpointed run, and of the second untouched run. `worst` names where it is largest relative to the
    tensor's own magnitude. `missing`: there is a gradient without checkpointing and none with it;
    `unexpected`: the reverse; both fail. `untrained`: trainable parameters that get no gradient either way.
    `within`: what a difference may come from; "rounding" where the order of sums differs (compiled blocks,
    chunks). `repeatable`: the untouched step gives the same twice, but for rounding; if not, nothing can be
    said of it, and it is not ok.
    """

    bitwise: bool
    ok: bool
    max_abs_diff: float
    noise: float
    compared: int
    worst: str = ""
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    untrained: tuple[str, ...] = ()
    how: str = "whole step"
    within: str = "the step's own noise"
    repeatable: bool = True

    def raise_if_different(self) -> None:
        """VerificationError unless ok."""
        if not self.ok:
            raise VerificationError(f"{self}; do not train with this: take it off and report the model")

    def __str__(self) -> str:
        if self.missing or self.unexpected:
            verdict = "different"
            detail = [
                f"{len(names)} gradients {word}, first {names[0]}"
                for word, names in (("missing", self.missing), ("unexpected", self.unexpected))
                if names
            ]
        elif not self.repeatable:
            return (
                f"cannot be told: two untouched steps from the same random state differ by {self.noise:.3g} "
                f"(worst: {self.worst}); the model has state that is not in its buffers, or a generator of "
                "its own"
            )
        elif self.bitwise and not self.compared:
            return f"nothing compared in the step: {self.how}"
        elif self.bitwise:
            verdict, detail = "equal bit for bit", []
        else:
            verdict = f"equal within {self.within}" if self.ok else "different"
            measured = (
                f"largest difference {self.max_abs_diff:.3g} (worst: {self.worst}), noise {self.noise:.3g}"
            )
            detail = [measured] if self.worst else []
        return ", ".join([f"{verdict}: {self.compared} tensors compared, {self.how}", *detail])


@dataclass(frozen=True)
class Outcome:
    """What one step computed, by name: the loss, gradients of parameters and inputs, buffers after it."""

    tensors: Mapping[str, Tensor]
    without_gradient: tuple[str, ...] = ()


@dataclass(frozen=True)
class Difference:
    """Largest absolute difference of two tensors, and the same over the first one's largest magnitude."""

    bitwise: bool
    absolute: float = 0.0
    relative: float = 0.0


def verify(
    model: nn.Module,
    batch: Any,
    planned: Around | None = None,
    *,
    loss: Loss | None = None,
    run: Step | None = None,
    inputs: bool = True,
    tolerance: float = 0.0,
    how: str = "whole step",
) -> Verification:
    """Compare the step with and without checkpointing; the model, its gradients and the RNG stay as they are.

    Whatever is wrapped is bypassed for the reference. Without `planned`, the model runs checkpointed already.
    `planned` makes a context in which the step runs planned. `run(model, batch)` replaces the
    forward and loss of one step. With `inputs`, gradients of all floating-point inputs are compared too.
    """
    if planned is None and not (functions(model) or any(wrapped(module) for module in model.modules())):
        raise InputError(
            f"nothing in this {type(model).__name__} is checkpointed, so there is nothing to verify; call "
            "remat.enable(model) first, or pass a plan"
        )
    return compare(
        bypass,
        nullcontext if planned is None else planned,
        model,
        batch,
        run=run or (lambda model, batch: run_step(model, batch, loss)),
        inputs=inputs,
        tolerance=tolerance,
        how=how,
    )


def compare(
    plain: Around,
    planned: Around,
    model: nn.Module,
    batch: Any,
    *,
    run: Step = run_step,
    inputs: bool = False,
    tolerance: float = 0.0,
    how: str = "whole step",
) -> Verification:
    """Run the step twice inside `plain()` and once inside `planned()`, from the same random state.

    `tolerance` is allowed on top of the noise, relative to each tensor's largest magnitude.
    """
    try:
        reference = observe(plain, model, batch, run, inputs=inputs)
    except RuntimeError as error:
        if not inputs or isinstance(error, torch.OutOfMemoryError):
            raise
        # Some operation has no derivative for an input that is data, not an activation.
        inputs, how = False, f"{how} without input gradients ({str(error).splitlines()[0]})"
        reference = observe(plain, model, batch, run, inputs=False)
    reference = Outcome({name: t.cpu() for name, t in reference.tensors.items()}, reference.without_gradient)
    noise = _differences(reference, observe(plain, model, batch, run, inputs=inputs))
    outcome = observe(planned, model, batch, run, inputs=inputs)
    missing = tuple(sorted(reference.tensors.keys() - outcome.tensors.keys()))
    unexpected = tuple(sorted(outcome.tensors.keys() - reference.tensors.keys()))
    found = _differences(reference, outcome)
    bitwise = not missing and not unexpected and all(d.bitwise for d in found.values())
    allowed = _NOISE_FACTOR * max((d.relative for d in noise.values()), default=0.0) + tolerance
    worst = max(found, key=lambda name: found[name].relative, default="")
    close = bool(found) and math.isfinite(found[worst].relative) and found[worst].relative <= allowed
    repeatable = bitwise or all(_is_rounding(d, reference.tensors[name]) for name, d in noise.items())
    if not repeatable:
        worst = max(noise, key=lambda name: noise[name].relative)
    return Verification(
        bitwise=bitwise,
        ok=bitwise or (not missing and not unexpected and close and repeatable),
        max_abs_diff=max((d.absolute for d in found.values()), default=0.0),
        noise=max((d.absolute for d in noise.values()), default=0.0),
        compared=len(found),
        worst="" if bitwise else worst,
        missing=missing,
        unexpected=unexpected,
        untrained=reference.without_gradient,
        how=how,
        within="rounding" if tolerance else Verification.within,
        repeatable=repeatable,
    )


def _is_rounding(noise: Difference, of: Tensor) -> bool:
    return noise.relative <= _MOST_NOISE.get(of.dtype, _MOST_NOISE_ELSE)


def observe(
    around: Around, model: nn.Module, batch: Any, run: Step = run_step, *, inputs: bool = False
) -> Outcome:
    """One forward and backward inside `around()`: what it computed, without what it did to the model."""
    given = _copy(batch, inputs)
    with untouched(model):
        with torch.enable_grad(), around():
            loss = run(model, given)
            if not loss.requires_grad:
                raise InputError(
                    "the loss does not depend on anything that requires a gradient; nothing to verify"
                )
            backward(loss)
        tensors = {"loss": loss.detach()}
        without = []
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                tensors[f"gradient of {name}"] = parameter.grad
            elif parameter.requires_grad:
                without.append(name)
        for index, leaf in enumerate(trees.tensors(given)):
            if leaf.requires_grad and leaf.grad is not None:
                tensors[f"gradient of input {index}"] = leaf.grad
        # Cloned: when this returns they hold their old values again.
        tensors |= {f"buffer {name}": buffer.detach().clone() for name, buffer in model.named_buffers()}
    return Outcome(tensors, tuple(without))


def _copy(batch: Any, inputs: bool) -> Any:
    """A batch of its own for each run: the step may write to it, and its gradients are ours."""

    def twin(tensor: Tensor) -> Tensor:
        wanted = tensor.requires_grad or (inputs and (tensor.is_floating_point() or tensor.is_complex()))
        return tensor.detach().clone().requires_grad_(wanted)

    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        batch = dict(batch)
    return trees.map_tensors(twin, batch)


def _differences(reference: Outcome, outcome: Outcome) -> dict[str, Difference]:
    return {
        name: difference(value, outcome.tensors[name])
        for name, value in reference.tensors.items()
        if name in outcome.tensors
    }


def difference(reference: Tensor, other: Tensor) -> Difference:
    """Compare two tensors, where `other` lies; equal NaNs and infinities are no difference."""
    if reference.shape != other.shape or reference.dtype != other.dtype:
        return Difference(False, math.inf, math.inf)
    a, b = _plain(reference).to(other.device), _plain(other)
    if _same_bits(a, b):
        return Difference(True)
    wide = torch.float64 if not a.is_complex() else torch.complex128
    a, b = a.to(wide), b.to(wide)
    apart = (a - b).abs()
    apart[(a == b) | (a.isnan() & b.isnan())] = 0.0  # inf - inf is no difference
    absolute = float(apart.nan_to_num(nan=math.inf).max())
    magnitude = float(a.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return Difference(False, absolute, absolute / magnitude if magnitude else (math.inf if absolute else 0.0))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = a.contiguous(), b.contiguous()
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()
