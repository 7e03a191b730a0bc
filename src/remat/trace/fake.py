"""A training step on tensors without memory, as it would run on a device that is not at hand.

What was found with a torch that is built for the CPU alone:

- Fake tensors on "cuda" are no way: autograd asks for a device guard that is not linked in, and a leaf that
  requires a gradient ends the process.
- "meta" tensors take attention's plain path: its scores alone are many times what a fused kernel saves.
- Fake CPU tensors take `_scaled_dot_product_flash_attention_for_cpu`, which saves what the fused kernels of
  an accelerator save: queries, keys, values, output and one number per row.

So tensors are fake CPU tensors. Three things are still told to them:

- integers and masks stay real while they are small, because models read them (is anything padded? are
  sequences packed?) and take another path when they may not: see `RealIntegers`;
- dropout runs as on an accelerator, where its mask is one byte per element, also inside of attention: see
  `AcceleratorKernels`;
- seconds are counted from bytes and FLOPs: see `OpSeconds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from remat._torch_private import run_backward
from remat.errors import InputError
from remat.trace.flops import flops_of
from remat.trees import map_tensors, tensors

__all__ = ["AcceleratorKernels", "OpSeconds", "RealIntegers", "build", "faking", "new_mode", "without_memory"]

_REAL_ELEMENTS = 2**25  # an integer tensor with more elements than this is faked, too


def new_mode() -> FakeTensorMode:
    """The mode that model and batch of one estimate share: fake tensors of two modes do not mix."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def faking(mode: FakeTensorMode, *, accelerator: bool) -> Iterator[AcceleratorKernels]:
    """Tensors that are made in here take no memory, except small integer ones."""
    kernels = AcceleratorKernels()
    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(RealIntegers(mode))
        if accelerator:
            stack.enter_context(kernels)
        yield kernels


# ------------------------------------------------------------------------------------------- the model


def build(factory: Callable[[], nn.Module], mode: FakeTensorMode) -> nn.Module:
    """Call the factory with nothing allocated; on "meta" where it reads values, which fake tensors lack."""
    try:
        with mode:
            model = factory()
    except Exception as first:
        try:
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                model = factory()
        except Exception as second:
            raise InputError(
                "the model cannot be built without memory, because it reads values of its tensors meanwhile "
                f"(fake tensors: {_brief(first)}; meta tensors: {_brief(second)}); build it beforehand and "
                "pass the module itself, if it fits into host memory"
            ) from first
    if not isinstance(model, nn.Module):
        raise InputError(f"the model factory returned a {type(model).__name__}; it must return an nn.Module")
    return model


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120] if str(error).strip() else ''}"


@contextmanager
def without_memory(
    model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None = None
) -> Iterator[None]:
    """Inside, every parameter and buffer is a fake CPU tensor, of `dtype` if it is a float; afterwards all is
    as it was. A tensor that is registered twice (tied weights) stays one tensor."""
    fakes: dict[int, Any] = {}

    def fake(tensor: Tensor) -> Any:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode and tensor.dtype is wanted:
            return tensor
        if id(tensor) not in fakes:
            with mode:
                twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device="cpu")
                if isinstance(tensor, nn.Parameter):
                    twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            fakes[id(tensor)] = twin
        return fakes[id(tensor)]

    places: list[dict[str, Any]] = [d for m in model.modules() for d in (m._parameters, m._buffers)]
    before = [dict(place) for place in places]
    try:
        for place in places:
            place.update({name: fake(tensor) for name, tensor in place.items() if tensor is not None})
        yield
    finally:
        for place, tensors_before in zip(places, before, strict=True):
            place.clear()  # a fake buffer that a forward has registered shall not stay
            place.update(tensors_before)


# ------------------------------------------------------------------------------------- what stays real


class RealIntegers(TorchDispatchMode):
    """Operations that read no fake tensor run for real, unless they would make floats out of nothing.

    Token ids, positions and masks are small beside activations, and the model's Python asks what is in them.
    To be entered inside of `mode`, which must allow real inputs.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors((args, kwargs))
        if any(isinstance(tensor, FakeTensor) for tensor in given):
            return func(*args, **kwargs)
        if func._schema.is_mutable or _asks(func):
            return _really(func, args, kwargs)
        # Tried on fakes first: it may be large. Converted by hand, because the mode computes some for real.
        fake_args, fake_kwargs = map_tensors(self._mode.from_tensor, (args, kwargs))
        fake = func(*fake_args, **fake_kwargs)
        made = tensors(fake)
        small = all(tensor.numel() <= _REAL_ELEMENTS for tensor in made)
        if small and (given or not any(t.is_floating_point() or t.is_complex() for t in made)):
            return _really(func, args, kwargs)
        return fake


def _really(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def _asks(func: Any) -> bool:
    """Does it return what is no tensor, or one whose size depends on values? Only real tensors can tell."""
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return True
    return not any(isinstance(r.type, (torch.TensorType, torch.ListType)) for r in func._schema.returns)


# ------------------------------------------------------------------------------- an accelerator's kernels

_DROPOUTS = {F.dropout, torch.dropout, torch._VF.dropout}
_ATTENTION = {F.scaled_dot_product_attention}


class AcceleratorKernels(TorchFunctionMode):
    """Dropout as accelerators run it: fused, with a mask of one byte per element, and inside attention with
    no mask at all. Attention that drops is recorded as attention that does not; `attention_drops` remembers
    that, because it cannot be replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_drops = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.backward:
            return self._backward(*args, **kwargs)
        if func in _DROPOUTS:
            fused = _fused_dropout(*args, **kwargs)
            if fused is not None:
                return fused
        elif func in _ATTENTION:
            args, kwargs = self._without_dropout(args, kwargs)
        return func(*args, **kwargs)

    def _backward(self, loss: Tensor, gradient: Any = None, **options: Any) -> None:
        """What is recomputed in backward runs on the same kernels, so this mode must be on when it begins."""
        with self:
            run_backward(loss, torch.ones_like(loss) if gradient is None else gradient, **options)

    def _without_dropout(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        place = 4  # query, key, value, attn_mask, dropout_p
        rate = args[place] if len(args) > place else kwargs.get("dropout_p", 0.0)
        if rate:
            self.attention_drops = True
            args = (*args[:place], 0.0, *args[place + 1 :]) if len(args) > place else args
            kwargs = {name: value for name, value in kwargs.items() if name != "dropout_p"}
        return args, kwargs


def _fused_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None
) -> Tensor | None:
    """What nn.Dropout runs on an accelerator; None where nothing is fused."""
    on = training if train is None else train
    if not on or inplace or not 0 < p < 1 or not input.is_floating_point():
        return None
    return torch.native_dropout(input, p, True)[0]


# --------------------------------------------------------------------------------------------- seconds


class OpSeconds(TorchDispatchMode):
    """Adds up what every operation takes: the longest of moving its bytes, doing its FLOPs, and starting it.

    `flops_per_second` is asked with the name of the dtype that an operation computes in.
    """

    def __init__(
        self, bytes_per_second: float, flops_per_second: Callable[[str], float], launch_seconds: float
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bytes_per_second = bytes_per_second
        self._flops_per_second = flops_per_second
        self._launch_seconds = launch_seconds
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.seconds += self._seconds(func, args, kwargs, out)
        return out

    def _seconds(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
        made, read = tensors(out), tensors((args, kwargs))
        floats = [tensor for tensor in read or made if tensor.is_floating_point()]
        if not made or (not floats and not read) or _is_view(func, made, read):
            return 0.0
        nbytes = sum(_touched_bytes(tensor) for tensor in {id(t): t for t in (*made, *read)}.values())
        dtype = str(floats[0].dtype).removeprefix("torch.") if floats else "float32"
        flops = flops_of(func, args, kwargs, out)
        return max(
            nbytes / self._bytes_per_second, flops / self._flops_per_second(dtype), self._launch_seconds
        )


def _is_view(func: Any, made: list[Tensor], read: list[Tensor]) -> bool:
    if func._schema.is_mutable:
        return False
    known = {tensor.untyped_storage()._cdata for tensor in read}
    return all(tensor.untyped_storage()._cdata in known for tensor in made)


def _touched_bytes(tensor: Tensor) -> int:
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1  # an expanded dimension is read once
    return count
