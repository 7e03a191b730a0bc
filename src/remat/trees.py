"""What goes into a region and what comes out: flat lists of leaves, and the signature that names them.

Lists, tuples and dicts (and their subclasses, transformers' ModelOutput among them) are looked into; any
other object is one opaque leaf. This is the hot path of every planned region, so it is written out by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["leaves", "map_tensors", "signature", "tensors"]

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


def leaves(tree: Any, out: list[Any] | None = None) -> list[Any]:
    """Every leaf of a nest of lists, tuples and dicts, in order."""
    if out is None:
        out = []
    if isinstance(tree, torch.Tensor):
        out.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            leaves(item, out)
    elif isinstance(tree, dict):
        for item in tree.values():
            leaves(item, out)
    else:
        out.append(tree)
    return out


def tensors(tree: Any) -> list[torch.Tensor]:
    """Every tensor of a nest of lists, tuples and dicts, in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def map_tensors(change: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The same nest with every tensor replaced by `change(tensor)`."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, (tuple, list)):
        items = [map_tensors(change, item) for item in tree]
        if hasattr(tree, "_fields"):  # a named tuple takes its items one by one
            return type(tree)(*items)
        return type(tree)(items)
    if isinstance(tree, dict):
        if type(tree) is dict:
            return {key: map_tensors(change, item) for key, item in tree.items()}
        import copy

        twin = copy.copy(tree)
        for key, item in tree.items():
            twin[key] = map_tensors(change, item)
        return twin
    return tree


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, leaf.device)
    return leaf if isinstance(leaf, _PLAIN) else type(leaf)


def _structure(tree: Any) -> Any:
    if isinstance(tree, (tuple, list)):
        return (type(tree), *map(_structure, tree))
    if isinstance(tree, dict):
        return (type(tree), *((key, _structure(item)) for key, item in tree.items()))
    return _describe(tree)


def signature(args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> tuple[Any, ...]:
    """Hashable: two calls with equal signatures run the same operations, unless their Python code decides
    otherwise. Tensors count by shape, stride, dtype, device and requires_grad; numbers and text by value;
    other objects by type."""
    return (_structure(args), _structure(kwargs), training, _autocast_state(args))


def _autocast_state(args: Iterable[Any]) -> Any:
    device = next((leaf.device.type for leaf in leaves(tuple(args)) if isinstance(leaf, torch.Tensor)), "cpu")
    if torch.is_autocast_enabled(device):
        return (device, torch.get_autocast_dtype(device))
    return None
