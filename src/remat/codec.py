"""Records <-> JSON, by their type hints. Floats keep inf and nan; tuples come back as tuples; no pickle."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from remat import records
from remat.errors import PlanError
from remat.records import SCHEMA_VERSION, Const, Ref

__all__ = ["from_json", "to_json"]

T = TypeVar("T")


def to_json(record: Any) -> str:
    """The record as JSON text."""
    return json.dumps(
        {"remat": type(record).__name__, **_encode(record)}, separators=(",", ":"), allow_nan=False
    )


def from_json(cls: type[T], text: str) -> T:
    """Read a record of type `cls`; refuses other records and other schema versions with a sentence."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(
            f"not JSON: {error}; save the {cls.__name__.lower()} again with .save(path)"
        ) from None
    if not isinstance(data, dict) or data.get("remat") != cls.__name__:
        found = data.get("remat") if isinstance(data, dict) else type(data).__name__
        raise PlanError(f"this file holds {found!r}, not a remat {cls.__name__}")
    if data.get("schema") != SCHEMA_VERSION:
        raise PlanError(
            f"this {cls.__name__.lower()} has schema version {data.get('schema')}, this remat reads version "
            f"{SCHEMA_VERSION}; make it again with this version of remat"
        )
    try:
        return typing.cast(T, _decode(cls, data))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PlanError(f"the {cls.__name__.lower()} file is damaged: {error!r}; make it again") from error


def _encode(value: Any) -> Any:
    if isinstance(value, Ref):
        return {"ref": value.value}
    if isinstance(value, Const):
        return {"const": [value.kind, value.text]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, vars(records))


def _decode(hint: Any, data: Any) -> Any:
    if hint in (records.Arg, Any):
        return _decode_arg(data)
    origin = typing.get_origin(hint)
    if origin is tuple:
        items = typing.get_args(hint)
        if len(items) == 2 and items[1] is Ellipsis:
            return tuple(_decode(items[0], item) for item in data)
        return tuple(_decode(item_hint, item) for item_hint, item in zip(items, data, strict=True))
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if "Arg" in str(hint):
            return _decode_arg(data)
        return None if data is None else _decode(next(o for o in options if o is not type(None)), data)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        names = {f.name for f in dataclasses.fields(hint)}
        return hint(**{key: _decode(_hints(hint)[key], item) for key, item in data.items() if key in names})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(data)
    return _decode_arg(data) if isinstance(data, dict) else data


def _decode_arg(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_decode_arg(item) for item in data)
    if isinstance(data, dict):
        if "ref" in data:
            return Ref(data["ref"])
        if "const" in data:
            return Const(*data["const"])
        return float(data["float"])
    return data
