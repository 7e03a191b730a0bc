"""Saved tensors of a compiled block that wait on the host.

When a compiled block has returned, some of what its graph holds for backward is let go: the tensors are sent,
and what stands for them in the graph's node fetches them when backward asks. The compiled code is the same as
without, so that one saved set serves with nothing, some or all of it on the host.

A compiled graph does not name what it saves, least of all one that comes from the compiler's cache. But all
tensors of one size weigh the same, so that those that forward makes itself are told by their place in the
order of sizes (which is the same at every length), and inputs by their memory. Parameters, buffers and
outputs are alive anyway and never sent. What is where in a graph's node does not change from call to call, so
that it is looked at once.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from remat._torch_private import active_saved_tensors_hooks, saved_slots, storage_ref
from remat.records import Recipe, RegionGraph, Role
from remat.run.meter import storages_of
from remat.run.moved import Moved, send_all, unmove
from remat.run.offload import Engine

__all__ = ["Layouts", "Outgoing", "outgoing", "send_out"]


@dataclass(frozen=True)
class Outgoing:
    """`inputs`: positions among the block's tensor inputs. `ranks`: places among what forward makes and the
    graph holds, largest first. `nbytes`: how much that is together; 0: at a length that was not measured."""

    inputs: tuple[int, ...]
    ranks: tuple[int, ...]
    nbytes: int = 0


# Which saved tensors go: by what is to be sent, the class of the node (every compiled graph has one of its
# own) and the bytes of all that it has saved.
Layouts = MutableMapping[tuple["Outgoing", type, tuple[int, ...]], Sequence[int]]
_LAYOUTS = 64  # that a region remembers: one for every length


def outgoing(graph: RegionGraph, recipe: Recipe) -> Outgoing | None:
    """What a recipe for a joint graph sends to the host; None: nothing."""
    if not recipe.offloaded:
        return None
    kept = (s for s in recipe.kept if graph.storages[s].role is Role.INTERNAL)
    made = sorted(kept, key=lambda s: -graph.storages[s].nbytes)
    return Outgoing(
        inputs=tuple(i for i, v in enumerate(graph.inputs) if graph.values[v].storage in recipe.offloaded),
        ranks=tuple(rank for rank, storage in enumerate(made) if storage in recipe.offloaded),
        nbytes=recipe.host_bytes,
    )


def send_out(
    what: Outgoing,
    node: Any,
    module: nn.Module,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    engine: Engine,
    place: int,
    name: str,
    layouts: Layouts,
) -> str:
    """Send what is to go. Returns why not, if not: what was not sent stays, more memory and nothing else.
    `layouts` is the caller's, for the next call."""
    if active_saved_tensors_hooks() is not None:
        return "another saved-tensor hook is active (an outer checkpoint, save_on_cpu)"
    found = node.saved_tensors
    sizes = tuple([-1 if tensor is None else tensor.untyped_storage().nbytes() for tensor in found])
    layout, problem = (what, type(node), sizes), ""
    chosen = layouts.get(layout)
    if chosen is None:
        chosen, problem = _chosen(what, found, storages_of([module]), inputs, outputs)
        if len(layouts) >= _LAYOUTS:
            layouts.clear()
        if not problem:
            layouts[layout] = chosen
    slots = saved_slots(node)
    moved = []
    try:
        for position in chosen:
            one = Moved(name)
            slots[position].register_hooks(one.pack, unmove)
            moved.append(one)
    except RuntimeError as error:  # somebody else has hooked it
        problem = f"a saved tensor cannot be replaced ({error})"
        for one in moved:
            one.keep()
        return problem
    group = engine.group(place)
    send_all(moved, group)
    return problem


def _chosen(
    what: Outgoing,
    found: Sequence[Tensor | None],
    stays: set[Hashable],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> tuple[list[int], str]:
    """Places of the saved tensors to send, in the order of saving; and what could not be told."""
    saved: dict[Hashable, list[int]] = {}
    nbytes: dict[Hashable, int] = {}
    for position, tensor in enumerate(found):
        if tensor is not None:
            key = storage_ref(tensor)
            saved.setdefault(key, []).append(position)
            nbytes[key] = tensor.untyped_storage().nbytes()
    stays = stays | {storage_ref(tensor) for tensor in outputs}
    given = {storage_ref(tensor) for tensor in inputs}
    made = [key for key in saved if key not in stays and key not in given]
    made.sort(key=lambda key: -nbytes[key])
    keys = [made[rank] for rank in what.ranks if rank < len(made)]
    whole = [inputs[i] for i in what.inputs if i < len(inputs) and _fills_storage(inputs[i])]
    keys += [key for tensor in whole if (key := storage_ref(tensor)) in saved and key not in stays]
    places = sorted(position for key in set(keys) for position in saved[key])
    total = sum(nbytes[key] for key in set(keys))
    if what.nbytes and total != what.nbytes:
        return places, f"{total} bytes of its saved tensors go to the host, and not {what.nbytes} as planned"
    return places, ""


def _fills_storage(tensor: Tensor) -> bool:
    """Otherwise it is a part of a larger tensor, which somebody else has."""
    return bool(tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size())
