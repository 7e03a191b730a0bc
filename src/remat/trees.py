"""What goes into a region and what comes out: flat lists of leaves, and the signature that names them.

Lists, tuples and dicts (and their subclasses, transformers' ModelOutput among them) and dataclasses are
looked into; any other object is one opaque leaf. This is the hot path of every planned region, so it is
written out by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

__all__ = ["describe_call", "field_names", "leaves", "map_tensors", "signature", "tensors", "with_fields"]

_PLAIN = (bool, int, float, str, bytes, Enum, torch.dtype, torch.device)
_FIELDS = "__dataclass_fields__"


def leaves(tree: Any, out: list[Any] | None = None) -> list[Any]:
    """Every leaf of a nest of lists, tuples, dicts and dataclasses, in order."""
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
        names = field_names(tree)
        for name in names:
            leaves(getattr(tree, name), out)
        if not names:
            out.append(tree)
    return out


def field_names(tree: Any) -> tuple[str, ...]:
    """Of a dataclass, those that are set; () for anything else, modules among it."""
    names = getattr(type(tree), _FIELDS, None)
    if names is None or isinstance(tree, torch.nn.Module):
        return ()
    return tuple(name for name in names if hasattr(tree, name))


def with_fields(tree: Any, values: dict[str, Any]) -> Any:
    """A copy of a dataclass, frozen or not, with other values."""
    twin = copy.copy(tree)
    for name, value in values.items():
        object.__setattr__(twin, name, value)
    return twin


def tensors(tree: Any) -> list[torch.Tensor]:
    """Every tensor of a nest of lists, tuples, dicts and dataclasses, in order."""
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
        twin = copy.copy(tree)
        for key, item in tree.items():
            twin[key] = map_tensors(change, item)
        return twin
    names = field_names(tree)
    return with_fields(tree, {n: map_tensors(change, getattr(tree, n)) for n in names}) if names else tree


def describe_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], training: bool
) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """(signature, tensors) of a call, in one walk over its arguments.

    The signature is hashable: two calls with equal signatures run the same operations, unless their Python
    code decides otherwise. Tensors count by shape, stride, dtype, device and requires_grad; numbers and text
    by value; other objects by type.
    """
    found: list[torch.Tensor] = []
    parts: list[Any] = [training]
    for arg in args:
        _note(arg, parts, found)
    for name, arg in kwargs.items():
        parts.append(name)
        if arg is None:  # most often
            parts.append(None)
        else:
            _note(arg, parts, found)
    device = found[0].device.type if found else "cpu"
    if torch.is_autocast_enabled(device):
        parts.append(torch.get_autocast_dtype(device))
    return tuple(parts), found


def _note(tree: Any, parts: list[Any], found: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        found.append(tree)
        parts.append((tree.shape, tree.stride(), tree.dtype, tree.requires_grad, tree.device))
    elif tree is None:
        parts.append(None)
    elif isinstance(tree, _PLAIN):
        parts += (type(tree), tree)  # 1, 1.0 and True are equal, and not the same
    elif isinstance(tree, (tuple, list)):
        parts += (type(tree), len(tree))
        for item in tree:
            _note(item, parts, found)
    elif isinstance(tree, dict):
        parts += (type(tree), len(tree))
        for name, item in tree.items():
            parts.append(name)
            _note(item, parts, found)
    else:
        parts.append(type(tree))
        for name in field_names(tree):
            parts.append(name)
            _note(getattr(tree, name), parts, found)


def signature(args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> tuple[Any, ...]:
    return describe_call(args, kwargs, training)[0]
