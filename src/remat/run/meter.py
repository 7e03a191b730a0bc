"""Count the bytes that autograd saves: each storage once, parameters and buffers not at all."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from torch import Tensor, nn

from remat._torch_private import storage_ref

__all__ = ["SavedBytes", "storages_of"]


def storages_of(modules: Sequence[nn.Module]) -> set[Hashable]:
    """Keys of everything that is resident anyway."""
    return {storage_ref(t) for m in modules for t in (*m.parameters(), *m.buffers()) if _has_storage(t)}


class SavedBytes:
    """Adds up storages as they are saved. The keys are weak: counting keeps no tensor alive."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.parameters = storages_of(modules)
        self._seen = set(self.parameters)
        self.nbytes = 0

    def add(self, tensor: Tensor) -> None:
        if not _has_storage(tensor):
            self.nbytes += tensor.numel() * tensor.element_size()
            return
        key = storage_ref(tensor)
        if key not in self._seen:
            self._seen.add(key)
            self.nbytes += tensor.untyped_storage().nbytes()

    def add_all(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.add(tensor)


def _has_storage(tensor: Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors, some subclasses
        return False
    return True
