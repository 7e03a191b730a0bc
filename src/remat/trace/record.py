"""One run of a region, written down: every operation, and the values that it read and wrote.

A value is (storage, epoch, offset, shape, stride, dtype, conjugate bit, negative bit). The epoch of a storage
is counted up by every operation whose schema writes to it, so a value never changes: static single
assignment over memory that does change. Storages are told apart by weak references, so that a freed address
that is used again is another storage; only a capture that will be priced holds its tensors.
"""

from __future__ import annotations

import os
import sys
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from remat.records import Arg, Const, Ref, Role
from remat.trace.flops import flops_of

__all__ = ["RANDOM", "RawOp", "RawValue", "Recorder", "draws_random_numbers"]

Key = tuple[Any, ...]

RANDOM = "draws random numbers"  # why an operation is not replayable

# In training these update running statistics although their schema does not say so; their results do not
# depend on the statistics, so a replay gets None for them.
_BATCH_NORMS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
_SYNCED_NORMS = {"batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"}
_STATISTICS = {"running_mean", "running_var"}
_COLLECTIVES = {"c10d", "c10d_functional", "_c10d_functional"}
_UNINITIALISED = ("empty", "new_empty")
_DATA_DEPENDENT = {
    "_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "bincount",
    "unique_consecutive", "repeat_interleave", "nonzero_static",
}  # fmt: skip
_LIFTED = {"lift_fresh", "lift", "lift_fresh_copy"}
# Their second result is a workspace that only their own backward understands.
_WORKSPACES = {
    "_cudnn_rnn",
    "miopen_rnn",
    "mkldnn_rnn_layer",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
}
# These write their target without reading it, so a replay starts from fresh memory.
OVERWRITES = {"copy_", "fill_", "zero_"}
_HOME = os.path.dirname(os.path.dirname(__file__))
_LIBRARIES = (os.path.dirname(torch.__file__), _HOME)
_DEMO = os.path.join(_HOME, "demo.py")  # a model like any user's
_COMMANDS = os.path.join(_HOME, "cli.py")  # above it there is no line of the user's


@dataclass
class RawValue:
    storage: int
    epoch: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    bits: int
    producer: int | None = None
    parameter: str = ""


@dataclass
class RawOp:
    overload: Any  # torch._ops.OpOverload
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    inputs: list[int]
    outputs: list[int]
    written: list[tuple[int, int]]
    view: bool
    flops: int = 0
    reason: str = ""
    source: str = ""


@dataclass
class RawStorage:
    nbytes: int
    role: Role
    epoch: int = 0


class _NotEncodableError(Exception):
    pass


@dataclass
class _Encoder:
    """Arguments as plain values; tensors become references."""

    recorder: Recorder
    refs: list[int] = field(default_factory=list)

    def encode(self, arg: Any) -> Arg:
        if isinstance(arg, torch.Tensor):
            value = self.recorder.intern(arg)
            self.refs.append(value)
            return Ref(value)
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return arg
        if isinstance(arg, (list, tuple)):
            return tuple(self.encode(item) for item in arg)
        if isinstance(arg, torch.dtype):
            return Const("dtype", str(arg).removeprefix("torch."))
        if isinstance(arg, torch.device):
            return Const("device", str(arg))
        if isinstance(arg, torch.layout):
            return Const("layout", str(arg).removeprefix("torch."))
        if isinstance(arg, torch.memory_format):
            return Const("memory_format", str(arg).removeprefix("torch."))
        if isinstance(arg, complex):
            return Const("complex", repr(arg))
        raise _NotEncodableError(type(arg).__name__)


class Recorder(TorchDispatchMode):
    """Writes down the operations below autograd while it is active."""

    def __init__(
        self, parameters: list[tuple[str, torch.Tensor]], inputs: list[torch.Tensor], *, hold: bool = True
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: list[RawValue] = []
        self.storages: list[RawStorage] = []
        self.tensors: list[torch.Tensor] = []  # of every value, if held
        self.ops: list[RawOp] = []
        self._index: dict[Key, int] = {}
        self._storage_index: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._hold = hold
        for name, tensor in parameters:
            if has_storage(tensor):
                self.values[self.intern(tensor, Role.PARAMETER)].parameter = name
        self.inputs = [self.intern(tensor, Role.INPUT) for tensor in inputs]

    # -- identity

    def storage_of(self, tensor: torch.Tensor, role: Role = Role.FOREIGN) -> int:
        storage = tensor.untyped_storage()
        known = self._storage_index.get(storage._cdata)
        if known is not None and known[0]() is storage:
            return known[1]
        index = len(self.storages)
        self._storage_index[storage._cdata] = (weakref.ref(storage), index)
        self.storages.append(RawStorage(storage.nbytes(), role))
        return index

    def key(self, tensor: torch.Tensor, role: Role = Role.FOREIGN) -> Key:
        storage = self.storage_of(tensor, role)
        return (
            storage, self.storages[storage].epoch, tensor.storage_offset(), tuple(tensor.shape),
            tensor.stride(), tensor.dtype, int(tensor.is_conj()) | int(tensor.is_neg()) << 1,
        )  # fmt: skip

    def find(self, tensor: torch.Tensor) -> int | None:
        """The value that this tensor is now, if it was seen."""
        return self._index.get(self.key(tensor))

    def intern(self, tensor: torch.Tensor, role: Role = Role.FOREIGN, producer: int | None = None) -> int:
        key = self.key(tensor, role)
        value = self._index.get(key)
        if value is None:
            value = self._index[key] = len(self.values)
            self.values.append(RawValue(*key))
            self.values[value].producer = producer
            if self._hold:
                self.tensors.append(tensor)
        return value

    def is_final(self, value: int) -> bool:
        """Nothing wrote to its storage after it was made: the live storage still holds it."""
        raw = self.values[value]
        return raw.epoch == self.storages[raw.storage].epoch

    # -- recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # `x.device` of a fake tensor: a question, not an operation
            return func(*args, **kwargs)
        encoder = _Encoder(self)
        reason = ""
        try:
            plain_args = tuple(encoder.encode(arg) for arg in args)
            plain_kwargs = tuple((name, encoder.encode(arg)) for name, arg in kwargs.items())
        except _NotEncodableError as error:
            plain_args, plain_kwargs, reason = (), (), f"argument of type {error}"
        written = _written_arguments(func, args, kwargs)
        result = func(*args, **kwargs)
        for tensor in (*written.values(), *_written_unsaid(func, args, kwargs)):
            self.storages[self.storage_of(tensor)].epoch += 1
        self._add(func, args, kwargs, plain_args, plain_kwargs, encoder.refs, written, result, reason)
        return result

    def _add(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        plain_args: tuple[Arg, ...],
        plain_kwargs: tuple[tuple[str, Arg], ...],
        refs: list[int],
        written: dict[int, torch.Tensor],
        result: Any,
        reason: str,
    ) -> None:
        number = len(self.ops)  # of this operation, if it is kept
        name = func._schema.name.split("::")[-1]
        if any(place < 0 for place in written):
            reason = reason or "writes to a list of tensors"
        written_values = [(p, self.intern(tensor, Role.INTERNAL, number)) for p, tensor in written.items()]
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        outputs = [
            self.intern(item, Role.INTERNAL, number) if isinstance(item, torch.Tensor) else -1
            for item in results
        ]
        made = [value for value in outputs if value >= 0]
        if made and not written and set(made) <= set(refs):
            return  # detach, alias: the same value under another name, and autograd calls them as it likes
        read_storages = {self.values[ref].storage for ref in refs}
        view = not written and bool(made) and all(self.values[v].storage in read_storages for v in made)
        inputs = list(refs)
        if name in OVERWRITES:
            inputs = inputs[1:]
        if _moves_statistics(func, args, kwargs):
            plain_args, plain_kwargs, inputs = _without_statistics(func, plain_args, plain_kwargs)
        self.ops.append(
            RawOp(
                overload=func,
                args=plain_args,
                kwargs=plain_kwargs,
                inputs=inputs,
                outputs=outputs,
                written=written_values,
                view=view,
                flops=flops_of(func, args, kwargs, result),
                reason=reason or _why_not_replayable(func, name, args, kwargs),
                source=_user_line(),
            )
        )


def has_storage(tensor: torch.Tensor) -> bool:
    """Sparse tensors and wrapper subclasses have none of their own."""
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, torch.Tensor]:
    """Schema position -> tensor for every argument that the operation writes to."""
    if not func._schema.is_mutable:
        return {}
    written: dict[int, torch.Tensor] = {}
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            if isinstance(given, torch.Tensor):
                written[place] = given
            elif isinstance(given, (list, tuple)):  # foreach operations: no functional twin is attempted
                for item in given:
                    written[-1 - len(written)] = item
    return written


def _moves_statistics(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = func._schema.name.split("::")[-1]
    return name in _SYNCED_NORMS or (name in _BATCH_NORMS and bool(_argument(func, args, kwargs, "training")))


def _written_unsaid(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Running statistics that this operation moves: whoever read them before read something else."""
    if not _moves_statistics(func, args, kwargs):
        return []
    found = [_argument(func, args, kwargs, name) for name in sorted(_STATISTICS)]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[place] if place < len(args) else kwargs.get(name, argument.default_value)
    return None


def _without_statistics(
    func: Any, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]
) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...], list[int]]:
    names = [argument.name for argument in func._schema.arguments]
    plain = tuple(None if names[i] in _STATISTICS else arg for i, arg in enumerate(args))
    named = tuple((name, None if name in _STATISTICS else arg) for name, arg in kwargs)
    refs = [arg.value for arg in (*plain, *(arg for _, arg in named)) if isinstance(arg, Ref)]
    return plain, named, refs


def _why_not_replayable(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if name.startswith(_UNINITIALISED):
        return "uninitialised memory"
    if draws_random_numbers(func, args, kwargs):
        return RANDOM
    if torch.Tag.inplace_view in func.tags:
        return "changes the shape of a tensor in place"
    if func.namespace in _COLLECTIVES:
        return "talks to other processes"
    if name in _DATA_DEPENDENT:
        return "its result depends on data that Python reads"
    if name in _LIFTED:
        return "a constant made outside"
    if name in _WORKSPACES:
        return "its workspace cannot be rebuilt"
    if any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values())):
        return RANDOM
    return ""


def draws_random_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Attention is tagged so, whether it drops out or not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    dropout = _argument(func, args, kwargs, "dropout_p")
    return dropout is None or dropout > 0


def _user_line() -> str:
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path == _COMMANDS:
            return ""
        if path == _DEMO or not path.startswith((*_LIBRARIES, "<")):
            return f"{path.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
