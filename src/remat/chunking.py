"""Chunked parts as menu entries: a token-wise part of a region (its MLP) runs over pieces of the sequence.

Found by structure: the largest submodule that is called once, with one tensor of (batch, sequence, ...), and
gives for a piece of the sequence what it gives for the whole. Two entries: the rest of the region as it is,
and the rest recomputed as a whole; a third does that from inputs that wait on the host. Gradients of
parameters are summed over the chunks: equal within rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from remat.check.bench import Bench, bench
from remat.check.regions import gradient_gap, gradients_of, precise_gradients
from remat.errors import RematError
from remat.records import Entry, Mode, RegionGraph
from remat.run.checkpoint import Options, run_checkpointed
from remat.run.chunk_mlp import ChunkedModule, token_wise
from remat.run.wrap import unwrap, wrap
from remat.trace.capture import entry_copies
from remat.trace.joint import is_random
from remat.trace.survey import Species

__all__ = ["chunk_entries"]

_CHUNKS = 8
_SHORTEST = 64  # positions; below that a part's activations are not what fills memory
_DIM = 1

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
MakeEntry = Callable[..., Entry]


@dataclass(frozen=True)
class _Part:
    name: str
    module: nn.Module
    size: int  # positions in one chunk
    share: float  # of the region's parameters


def chunk_entries(
    species: Species,
    inputs: Inputs,
    device: torch.device,
    keep: Bench,
    forward_seconds: float,
    make: MakeEntry,
    hosted: Callable[[Entry], Entry | None] | None = None,
) -> list[Entry]:
    """The entries of this region that run a part of it in chunks, measured; none if no part can be. `hosted`:
    the same with inputs on the host, of an entry that runs the region again."""
    example = species.example
    part = _find(example.module, example.forward, inputs)
    if part is None:
        return []
    modules = (example.module,)

    def again(*args: Any, **kwargs: Any) -> Any:
        return run_checkpointed(example.forward, args, kwargs, Options(name=example.name), modules)

    expected = gradients_of(example.forward, inputs, modules)

    is_certain = species.graph is not None and not is_random(species.graph)

    def precise() -> list[torch.Tensor] | None:
        return precise_gradients(example.module, example.forward, inputs, expected)

    entries = []
    for whole, call in ((False, example.forward), (True, again)):
        try:
            with _chunked(part):
                found = gradients_of(call, inputs, modules)
            gap = gradient_gap(found, expected, precise if is_certain else None)
            del found
            with _chunked(part):
                measured = bench(call, inputs, modules, device)
        except RematError:  # it uses tensors that are not its own
            return []
        if not gap.ok:
            continue
        seconds = forward_seconds * (part.share + whole)  # chunks run again in backward, whatever else does
        extra = seconds if device.type == "cpu" else max(measured.seconds - keep.seconds, 0.8 * seconds)
        graph: RegionGraph | None = None  # what a chunked part saves is not in the captured graph
        entry = make(Mode.CHUNK, measured, extra, graph, len(example.inputs))
        entry = replace(entry, part=part.name, chunk_size=part.size, again=whole, gradient_gap=gap.worst)
        entries.append(entry)
        if whole and hosted is not None:
            with _chunked(part):
                sent = hosted(entry)
            entries += [sent] if sent is not None else []
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
def _chunked(part: _Part) -> Iterator[None]:
    wrap(part.module, ChunkedModule(part.name, part.size, _DIM))
    try:
        yield
    finally:
        unwrap(part.module)
