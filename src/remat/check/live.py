"""Bytes that are allocated on a device, exactly, with or without an accelerator.

On CUDA the allocator knows. Everywhere else `LiveBytes` counts tensor storages: each one once, however many
views it has, from the operation that made it until it is really freed. It stands on two facts of torch: every
operation passes through an active dispatch mode, backward included, and the Python object of a storage lives
as long as the storage itself, so that a weak reference to it tells when the memory goes.

Not seen: memory that an operator takes and gives back inside one call (convolution workspace), and what a
compiled graph allocates. `untyped_storage().resize_()` is no operation either: growth is seen at the first
write, shrinking at the next reading (for good once a storage has been seen to change its size).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from remat.units import format_bytes

__all__ = ["LiveBytes", "Meter", "local_bytes", "storages_of"]

# Operations whose output is memory that no earlier operation has made, though it aliases an argument:
# torch.tensor([1.0]) and torch.from_numpy(a) build the tensor first and then only lift it.
_ADOPT = (
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.set_.source_Storage,
    torch.ops.aten.set_.source_Storage_storage_offset,
)
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def storages_of(tensor: Tensor) -> Iterator[tuple[torch.UntypedStorage, torch.device]]:
    """The memory behind a tensor with its device (a fake tensor's fake one): one storage for a plain tensor,
    those of the inner tensors for a wrapper subclass, those of the parts for a sparse tensor."""
    anything: Any = tensor  # torch's type guard claims that no Tensor can be a wrapper
    if is_traceable_wrapper_subclass(anything):
        for name in anything.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # a DTensor names its device mesh here, too
                yield from storages_of(inner)
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage(), tensor.device
    else:
        for part in _SPARSE_PARTS.get(tensor.layout, ()):
            yield from storages_of(getattr(tensor, part)())


def local_bytes(tensor: Tensor) -> int:
    """Bytes of the elements that this process has of a tensor: of a DTensor its own shard."""
    part = getattr(tensor, "to_local", None)  # importing DTensor to ask for it takes seconds
    mine: Tensor = tensor if part is None else part()
    return mine.numel() * mine.element_size()


class _Entry(weakref.ReferenceType):  # type: ignore[type-arg]
    """A weak reference to a storage that remembers how many bytes were counted for it."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


class LiveBytes(TorchDispatchMode):
    """Counts the storages of one device type that exist, from entering on.

        with LiveBytes() as live:
            step()
        live.peak_bytes

    Storages made before count only when they are given to `watch`. Frees are counted after the exit too.
    With `limit_bytes`, an operation that would lift the level above it raises torch.OutOfMemoryError: a
    machine with that much memory. Other modes may be active outside or inside; with FakeTensorMode, enter
    this one inside it.
    """

    supports_higher_order_operators = True  # their results count; what runs inside of one is not seen

    def __init__(self, device: str | torch.device = "cpu", *, limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = torch.device(device).type
        self.limit_bytes = limit_bytes
        self._level = 0
        self._peak = 0
        self._entries: dict[int, _Entry] = {}
        self._foreign: dict[int, _Entry] = {}  # made before, not watched: known, so as not to be counted
        self._elastic: set[int] = set()  # have changed their size once: looked at again at every operation

    @property
    def current_bytes(self) -> int:
        """Bytes that exist now."""
        self._reread(list(self._entries))
        return self._level

    @property
    def peak_bytes(self) -> int:
        """The most bytes that existed at one time since the start or the last `reset_peak`."""
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self.current_bytes

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """The compiler may work inside: its own operations are not counted, its graphs run as they are."""
        return True

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Count these too: tensors that were made before."""
        for tensor in tensors:
            for storage, device in storages_of(tensor):
                if device.type == self.device_type and id(storage) not in self._entries:
                    self._foreign.pop(id(storage), None)
                    self._add(storage)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(_dispatches, types)):
            return NotImplemented  # its own operations, on the inner tensors, will come by here
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._elastic:
            self._reread(self._elastic)
        try:
            self._see(out, func, args, kwargs)
        except torch.OutOfMemoryError:
            del out  # the traceback keeps this frame: it must not keep the memory
            raise
        return out

    def _see(self, out: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(out, Tensor):
            if out.layout is torch.strided and type(out) is Tensor:
                self._see_storage(out.untyped_storage(), out.device, func, args, kwargs)
            else:
                for storage, device in storages_of(out):
                    self._see_storage(storage, device, func, args, kwargs)
        elif isinstance(out, (tuple, list)):
            for item in out:
                self._see(item, func, args, kwargs)

    def _see_storage(
        self,
        storage: torch.UntypedStorage,
        device: torch.device,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        entry = self._entries.get(id(storage))
        if entry is not None:
            if entry.nbytes != storage.nbytes():
                self._resize(entry, storage.nbytes())
        elif device.type == self.device_type and id(storage) not in self._foreign:
            if func not in _ADOPT and (_holds(args, storage) or _holds(tuple(kwargs.values()), storage)):
                self._foreign[id(storage)] = self._entry(storage, self._forget)
            else:
                self._add(storage)

    def _entry(self, storage: torch.UntypedStorage, on_free: Any) -> _Entry:
        entry = _Entry(storage, on_free)
        entry.key, entry.nbytes = id(storage), storage.nbytes()
        return entry

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._raise_level(storage.nbytes())  # first: what is refused must not be taken off when it is freed
        entry = self._entry(storage, self._free)
        self._entries[entry.key] = entry

    def _resize(self, entry: _Entry, nbytes: int) -> None:
        self._elastic.add(entry.key)
        growth, entry.nbytes = nbytes - entry.nbytes, nbytes
        if growth > 0:
            self._raise_level(growth)
        else:
            self._level += growth

    def _raise_level(self, nbytes: int) -> None:
        if self.limit_bytes is not None and self._level + nbytes > self.limit_bytes:
            self._reread(list(self._entries))  # something may have shrunk unseen
            if self._level + nbytes > self.limit_bytes:
                raise torch.OutOfMemoryError(
                    f"tried to allocate {nbytes} bytes ({format_bytes(nbytes)}) with {self._level} bytes "
                    f"({format_bytes(self._level)}) in use; the limit is {self.limit_bytes} bytes "
                    f"({format_bytes(self.limit_bytes)}) of live {self.device_type} tensors"
                )
        self._level += nbytes
        self._peak = max(self._peak, self._level)

    def _reread(self, keys: Iterable[int]) -> None:
        for key in tuple(keys):
            entry = self._entries.get(key)
            storage = entry() if entry is not None else None
            if entry is not None and storage is not None and storage.nbytes() != entry.nbytes:
                self._resize(entry, storage.nbytes())

    def _free(self, entry: _Entry) -> None:
        self._level -= entry.nbytes
        del self._entries[entry.key]
        self._elastic.discard(entry.key)

    def _forget(self, entry: _Entry) -> None:
        self._foreign.pop(entry.key, None)


def _dispatches(kind: type) -> bool:
    """Is this a tensor subclass that carries out operations by others? A fake tensor counts as plain."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not issubclass(kind, FakeTensor)  # type: ignore[attr-defined]


def _holds(args: Iterable[Any], storage: torch.UntypedStorage) -> bool:
    """Does one of the arguments live in this storage?"""
    for arg in args:
        if isinstance(arg, Tensor):
            if any(held is storage for held, _ in storages_of(arg)):
                return True
        elif isinstance(arg, (tuple, list)) and _holds(arg, storage):
            return True
    return False


class Meter:
    """One interface to the bytes allocated on a device.

        with Meter(device) as meter:
            step()
        meter.peak_bytes()

    On CUDA it reads the allocator and costs nothing between the operations; elsewhere it is a LiveBytes.
    """

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        self._live = None if self.device.type == "cuda" else LiveBytes(self.device)

    def __enter__(self) -> Meter:
        if self._live is not None:
            self._live.__enter__()  # type: ignore[no-untyped-call]
        else:
            self.reset_peak()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made before (the allocator does so by itself)."""
        if self._live is not None:
            self._live.watch(tensors)

    def current_bytes(self) -> int:
        if self._live is not None:
            return self._live.current_bytes
        return int(torch.cuda.memory_stats(self.device)["allocated_bytes.all.current"])

    def peak_bytes(self) -> int:
        if self._live is not None:
            return self._live.peak_bytes
        return int(torch.cuda.memory_stats(self.device)["allocated_bytes.all.peak"])

    def reset_peak(self) -> None:
        if self._live is not None:
            self._live.reset_peak()
        else:
            torch.cuda.reset_peak_memory_stats(self.device)

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
