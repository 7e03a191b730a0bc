"""Menu entries that run in chunks, measured: a part of a region, or all of it.

A part is token-wise (the MLP) and runs over pieces of the sequence. It is found by structure: the largest
submodule that is called once, with one tensor of (batch, sequence, ...), and gives for a piece of the
sequence what it gives for the whole. Two entries: the rest of the region as it is, and recomputed as a whole.

All of a region runs over pieces of the batch, where its rows do not see each other: then what one piece holds
is all that the region ever takes, which no other way gets as low. Of few pieces, several and many.

What is recomputed may do so from inputs that wait on the host: one more entry. Gradients of parameters are
summed over the pieces: equal within rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from remat import ranks
from remat.check.bench import Bench, bench
from remat.check.regions import GradientGap, gradient_gap, gradients_of, precise_gradients
from remat.records import Entry, Mode, RegionGraph
from remat.run.checkpoint import Options, needs_gradients, run_checkpointed
from remat.run.chunk_mlp import ChunkedModule, draws, token_wise
from remat.run.pieces import Cut, in_pieces, length_along
from remat.run.same import checksum, nearly_same
from remat.run.standins import Parameters
from remat.run.wrap import unwrap, wrap
from remat.trace.capture import entry_copies
from remat.trace.joint import is_random
from remat.trace.survey import Sighting, Species
from remat.trees import leaves, tensors

__all__ = ["ForwardExtra", "Hosted", "Trial", "chunk_entries"]

_LOG = logging.getLogger(__name__)

_CHUNKS = 8  # of a part
_SHORTEST = 64  # positions; below that a part's activations are not what fills memory
_DIM = 1  # of the sequence
_PIECES = (2, 4, 16)  # of a region: the host issues so many times as many operations

# Operations that rank or number positions: whether rows see each other by them depends on the data (a router
# whose experts have a capacity).
_RANKING = (
    "argsort", "bincount", "cummax", "cummin", "cumprod", "cumsum", "histc", "nonzero", "sort", "unique",
)  # fmt: skip
_NOT_STATE = ("_modules", "_parameters")
_NUMBERS = (bool, int, float, complex, str, bytes)
_DEPTH = 3  # of lists, dictionaries and objects in each other

_PLAIN = (Tensor, nn.Parameter, bool, int, float, str, torch.dtype, torch.device)

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Call = Callable[..., Any]
MakeEntry = Callable[..., Entry]
Hosted = Callable[[Entry, float], "Entry | None"]  # told what it adds to backward, too
ForwardExtra = Callable[[Call], float]


def chunk_entries(trial: Trial) -> list[Entry]:
    """The entries of this region that run in chunks; none if it cannot."""
    return [*_part_entries(trial), *_region_entries(trial)]


@dataclass
class Trial:
    """Compares ways to run a region with the region as it is, and measures them. `in_forward`: seconds that a
    way adds because the host has more to do in forward. `hosted`: the same way with inputs on the host, of
    one that runs the region again."""

    species: Species
    inputs: Inputs
    device: torch.device
    keep: Bench
    forward_seconds: float
    make: MakeEntry
    in_forward: ForwardExtra
    hosted: Hosted | None
    expected: list[Tensor] | None = None  # gradients of the region as it is, once they were asked for

    @property
    def example(self) -> Sighting:
        return self.species.example

    def entries(self, call: Call, forwards: float, what: dict[str, Any]) -> list[Entry]:
        """`call` as an entry of the menu, with these fields, and perhaps the same from inputs on the host; []
        if its gradients are others. `forwards`: so many times the region's forward is run once more."""
        found = self._measured(call)
        if not ranks.all_of(found is not None) or found is None:
            return []
        measured, gap = found
        seconds = forwards * self.forward_seconds
        if self.device.type != "cpu":
            seconds = max(measured.seconds - self.keep.seconds, 0.8 * seconds)
        # What is saved in chunks is not in the captured graph.
        inputs = len(self.example.inputs)
        entry = self.make(Mode.CHUNK, measured, seconds + self.in_forward(call), None, inputs)
        entry = replace(entry, gradient_gap=gap.worst, **what)
        sent = self.hosted(entry, seconds) if self.hosted is not None and entry.again else None
        if not ranks.all_of(sent is not None) or sent is None:
            return [entry]
        return [entry, sent]

    def _measured(self, call: Call) -> tuple[Bench, GradientGap] | None:
        modules = (self.example.module,)
        try:
            gap = self._gap(call)
            return (bench(call, self.inputs, modules, self.device), gap) if gap.ok else None
        except Exception as error:  # the region's code, to other shapes; or there is no memory to try
            _LOG.info("%s does not run in chunks: %s", self.example.name, error)
            return None

    def _gap(self, call: Call) -> GradientGap:
        example, graph = self.example, self.species.graph
        modules = (example.module,)
        if self.expected is None:
            self.expected = gradients_of(example.forward, self.inputs, modules)
        expected = self.expected

        def precise() -> list[Tensor] | None:
            return precise_gradients(example.module, example.forward, self.inputs, expected)

        is_certain = graph is not None and not is_random(graph)
        found = gradients_of(call, self.inputs, modules)
        return gradient_gap(found, expected, precise if is_certain else None)


# -------------------------------------------------------------------------------------------- a part of it


@dataclass(frozen=True)
class _Part:
    name: str
    module: nn.Module
    size: int  # positions in one chunk
    share: float  # of the region's parameters


def _part_entries(trial: Trial) -> list[Entry]:
    example = trial.example
    part = _find(example.module, example.forward, trial.inputs)
    if not ranks.all_of(part is not None) or part is None:
        return []

    def again(*args: Any, **kwargs: Any) -> Any:
        return run_checkpointed(example.forward, args, kwargs, Options(name=example.name), (example.module,))

    entries: list[Entry] = []
    for whole, call in ((False, example.forward), (True, again)):
        what = {"part": part.name, "chunk_size": part.size, "again": whole}
        with _chunked(part) as around:
            # Chunks run again in backward, whatever else does.
            found = trial.entries(call, part.share + whole, what)
            if not ranks.all_of(not around.plain):  # something outside holds what is inside of it
                return []
            entries += found
    return entries


def _find(module: nn.Module, forward: Callable[..., Any], inputs: Inputs) -> _Part | None:
    seen: dict[str, list[Any]] = {}
    handles = []
    total = sum(p.numel() for p in module.parameters())
    sizes = {
        name: sum(p.numel() for p in child.parameters())
        for name, child in module.named_modules()
        if name and sum(isinstance(m, nn.Linear) for m in child.modules()) > 1
    }

    def note(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs: seen.setdefault(name, []).append((args, kwargs))

    try:
        for name in sizes:
            child = module.get_submodule(name)
            handles.append(child.register_forward_pre_hook(note(name), with_kwargs=True))
        args, kwargs = entry_copies(*inputs)
        with torch.no_grad():
            forward(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    for name in sorted(seen, key=lambda name: -sizes[name]):
        (args, kwargs), *more = seen[name]
        if more or kwargs or len(args) != 1 or type(args[0]) is not Tensor or args[0].dim() < _DIM + 2:
            continue
        length = args[0].shape[_DIM]
        child = module.get_submodule(name)
        if length >= _SHORTEST and token_wise(child, args[0], _DIM):
            return _Part(name, child, -(-length // _CHUNKS), sizes[name] / max(total, 1))
    return None


@contextmanager
def _chunked(part: _Part) -> Iterator[ChunkedModule]:
    around = ChunkedModule(part.name, part.size, _DIM)
    wrap(part.module, around)
    try:
        yield around
    finally:
        unwrap(part.module)


# ---------------------------------------------------------------------------------------------- all of it


def _region_entries(trial: Trial) -> list[Entry]:
    example = trial.example
    given = tensors(trial.inputs)
    if example.tower == "functions" or not needs_gradients(given, (example.module,)):
        return []
    if draws(example.module) or not all(_is_plain(leaf) for leaf in leaves(trial.inputs)):
        return []
    if _may_rank_rows(trial.species.graph):
        return []
    for dim in (0, 1):  # some models have the batch second
        length = length_along(given, dim)
        sizes = dict.fromkeys(-(-length // pieces) for pieces in _PIECES) if length > 1 else {}
        if not sizes or not ranks.all_of(_rows_are_independent(trial, (dim, next(iter(sizes))))):
            continue
        found = (
            trial.entries(_pieces_of(trial, (dim, size)), 1.0, {"again": True, "cut": (dim, size)})
            for size in sizes
        )
        return [entry for entries in found for entry in entries]
    return []


def _may_rank_rows(graph: RegionGraph | None) -> bool:
    """A region that could not be captured may do anything."""
    return graph is None or any(op.name.split(".")[1].lstrip("_").startswith(_RANKING) for op in graph.ops)


def _pieces_of(trial: Trial, cut: Cut) -> Call:
    example = trial.example

    def call(*args: Any, **kwargs: Any) -> Any:
        return in_pieces(example.name, example.module, example.forward, args, kwargs, cut)

    return call


def _is_plain(leaf: Any) -> bool:
    """No object of which pieces would each need a part of their own."""
    return leaf is None or type(leaf) in _PLAIN


def _rows_are_independent(trial: Trial, cut: Cut) -> bool:
    """Tried on the inputs, on other ones, and with other weights: every element of the outputs is the same
    but for rounding, and nothing is left in the module that a second run would change again."""
    example = trial.example
    call = _pieces_of(trial, cut)
    weights = Parameters(example.module)
    try:
        for turn, shaken in ((False, nullcontext()), (True, nullcontext()), (False, weights.shaken())):
            before = _State(example.module)
            with torch.enable_grad(), shaken:
                args, kwargs = entry_copies(*trial.inputs, turn=turn)
                expected = _detached(example.forward(*args, **kwargs))
                if not before.is_now():
                    return False
                found = _detached(call(*args, **kwargs))
            if len(found) != len(expected) or not all(map(_alike, expected, found)):
                return False
    except Exception as error:  # the region's code, to other shapes; or there is no memory to try
        _LOG.info("%s does not run in pieces: %s", example.name, error)
        return False
    return True


def _detached(output: Any) -> list[Any]:
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves(output)]


def _alike(expected: Any, found: Any) -> bool:
    """What is no tensor (the number of rows, say) is that of the whole, too."""
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        return nearly_same(expected, found)
    return type(expected) is type(found) and bool(expected == found)


@dataclass
class _State:
    """What calls may change: buffers and attributes, by content, and what stands in their lists, dictionaries
    and objects. `alive`: what is told by its identity, which nothing else gets as long as it lives."""

    module: nn.Module
    found: list[Any] = field(default_factory=list)
    alive: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        for submodule in self.module.modules():
            for name, value in vars(submodule).items():
                if name not in _NOT_STATE:
                    self.found.append((name, self._read(value, _DEPTH)))

    def is_now(self) -> bool:
        return self.found == _State(self.module).found

    def _read(self, value: Any, depth: int) -> Any:
        if value is None or type(value) in _NUMBERS:
            return type(value), repr(value)
        self.alive.append(value)
        if isinstance(value, Tensor):
            return id(value), 0 if value.is_inference() else value._version, _content(value)
        if depth and isinstance(value, dict):
            return id(value), [(str(key), self._read(item, depth - 1)) for key, item in value.items()]
        if depth and isinstance(value, (list, tuple, set, frozenset)):
            return id(value), [self._read(item, depth - 1) for item in value]
        if depth and hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type, ModuleType)):
            return id(value), self._read(vars(value), depth)
        return id(value)


def _content(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_meta or type(tensor) is not Tensor:
        return None
    return checksum(tensor.detach()).tolist() if tensor.numel() else []
