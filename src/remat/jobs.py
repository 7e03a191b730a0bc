"""'examples/long_context.py:build' -> what to train: how a training job is named on the command line.

The named function takes no arguments and returns `model, batch`, or `model, batch, loss`, or a dict of the
same names. Model and batch may also be functions that make them.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import remat
from remat.check.step import Loss, loss_of
from remat.errors import InputError
from remat.estimating import optimizer_class
from remat.records import Profile

__all__ = ["Job", "Made", "load_job", "told"]

_NAMES = ("model", "batch", "loss")
_FORMS = 'it must return model, batch (and loss), or a dict with "model", "batch" (and "loss")'


@dataclass(frozen=True)
class Made:
    """What a job trains."""

    model: nn.Module
    batch: Any
    loss: Loss | None = None
    optimizer: torch.optim.Optimizer | None = None


@dataclass(frozen=True)
class Job:
    """A function that makes model, batch and loss; `dtype` and `optimizer` are added to what it makes."""

    name: str  # as the user wrote it
    build: Callable[[], Any]
    dtype: torch.dtype | None = None
    optimizer: str | None = None

    def made(self) -> Made:
        """Everything for real, on this machine."""
        parts = self._parts()
        model = self._model(parts)
        if self.dtype is not None:
            model = model.to(self.dtype)
        optimizer = None if self.optimizer is None else optimizer_class(self.optimizer)(model.parameters())
        return Made(model, self._made(parts["batch"]), parts.get("loss"), optimizer)

    def profile(self, device: str | None = None, **options: Any) -> Profile:
        """remat.profile of this job: on this machine, or with `device` without it and without memory."""
        if device is None:
            made = self.made()
            return remat.profile(made.model, made.batch, loss=made.loss, optimizer=made.optimizer, **options)
        return self._estimate(device, options)

    def _estimate(self, device: str, options: dict[str, Any]) -> Profile:
        """The function is called by the estimate, where tensors take no memory."""
        parts: dict[str, Any] = {}
        errors: list[Exception] = []

        def model() -> nn.Module:
            try:
                parts.update(self._parts())
                return self._model(parts)
            except Exception as error:
                errors.append(error)
                raise

        tries: list[None] = []

        def batch() -> Any:
            if _makes(parts["batch"]):
                return self._made(parts["batch"])
            tries.append(None)
            if len(tries) > 1:  # asked again, for real tensors: that would build the model for real, too
                raise InputError(
                    f"{self.name} cannot make its batch without memory; return functions that make the model "
                    'and the batch: {"model": make_model, "batch": make_batch}'
                )
            return self._parts()["batch"]  # again: small integer tensors are real now, models look at them

        def loss(output: Any, batch: Any) -> torch.Tensor:
            return loss_of(output, batch, parts.get("loss"))

        try:
            return remat.profile(
                model, batch, loss=loss, device=device, dtype=self.dtype, optimizer=self.optimizer, **options
            )
        except InputError:
            if len(errors) > 1 and len({str(error) for error in errors}) == 1:
                raise errors[0] from errors[0].__cause__  # the same with any kind of tensor: its own mistake
            raise

    def _parts(self) -> dict[str, Any]:
        parts = _parts_of(self.name, self._called(self.build))
        loss = parts.get("loss")
        if loss is not None and not callable(loss):
            raise InputError(
                f"{self.name}: loss is a {type(loss).__name__}; give a function of (output, batch)"
            )
        return parts

    def _model(self, parts: Mapping[str, Any]) -> nn.Module:
        model = parts["model"] if isinstance(parts["model"], nn.Module) else self._made(parts["model"])
        if not isinstance(model, nn.Module):
            raise InputError(
                f"{self.name}: model is a {type(model).__name__}; give an nn.Module, or a function of one"
            )
        return model

    def _made(self, thing: Any) -> Any:
        return self._called(thing) if _makes(thing) else thing

    def _called(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            raise InputError(f"{self.name} raised {told(error)}") from error


def _makes(thing: Any) -> bool:
    return callable(thing) and not isinstance(thing, (torch.Tensor, nn.Module))


def _parts_of(name: str, found: Any) -> dict[str, Any]:
    if isinstance(found, Mapping):
        unknown = sorted(set(found) - set(_NAMES))
        if unknown or not {"model", "batch"} <= set(found):
            raise InputError(f"{name} returned a dict with {', '.join(map(repr, found))}; {_FORMS}")
        return dict(found)
    if isinstance(found, (tuple, list)) and len(found) in (2, 3):
        return dict(zip(_NAMES, found, strict=False))
    kind = f"{len(found)} things" if isinstance(found, (tuple, list)) else f"a {type(found).__name__}"
    raise InputError(f"{name} returned {kind}; {_FORMS}")


# --------------------------------------------------------------------------------------- finding the function


def load_job(text: str, *, dtype: str | None = None, optimizer: str | None = None) -> Job:
    """Import 'path/to/file.py:function' or 'package.module:function'. Nothing is called yet."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise InputError(f"{text!r} does not say what to train; write FILE.py:FUNCTION or MODULE:FUNCTION")
    wanted = None if dtype is None else _dtype(dtype)
    if optimizer is not None:
        optimizer_class(optimizer)
    module = _imported(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [n for n in vars(module) if not n.startswith("_")], n=1)
            hint = f"did you mean {near[0]!r}?" if near else "define it there: a function that " + _FORMS[3:]
            raise InputError(f"{place} has no {name!r}; {hint}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{text} is a {type(found).__name__}; it must be a function, and {_FORMS}")
    return Job(text, found, wanted, optimizer)


def _imported(place: str) -> ModuleType:
    path = Path(place)
    is_file = path.suffix == ".py" or path.exists() or "/" in place
    if is_file and not path.is_file():
        raise InputError(f"there is no file {place}; it is looked for from {Path.cwd()}")
    try:
        if not is_file:
            if str(Path.cwd()) not in sys.path:
                sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
            return importlib.import_module(place)
        return _from_file(path)
    except ModuleNotFoundError as error:
        if error.name == place.split(".")[0] and not is_file:
            raise InputError(
                f"there is no module {place!r}; name a file as path/to/file.py:FUNCTION"
            ) from error
        raise InputError(f"importing {place} raised {told(error)}; install it in this environment") from error
    except Exception as error:
        raise InputError(f"importing {place} raised {told(error)}") from error


def _from_file(path: Path) -> ModuleType:
    """Like `python path`: its own folder is searched first."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look their module up by name
    spec.loader.exec_module(module)
    return module


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name, name), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InputError(
            f"dtype={name!r} is no floating-point dtype of torch; say bfloat16, float16 or float32"
        )
    return found


def told(error: BaseException) -> str:
    """'ValueError: no such width (train.py:12)': one line, with the place in the user's own code."""
    text = str(error).strip().splitlines()
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and not frame.filename.startswith((_HOME, "<frozen"))
    ]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{': ' + text[0] if text else ''}{where}"


_HOME = str(Path(__file__).parent)
