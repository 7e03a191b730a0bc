"""Saved tensors of a compiled block that wait on the host.

When a compiled block has returned, some of what its graph holds for backward is let go: the tensors are sent,
and what stands for them in the graph's node fetches them when backward asks. The compiled code is the same as
without, so that one saved set serves with nothing, some or all of it on the host.

A compiled graph does not name what it saves, least of all one that comes from the compiler's cache. But all
tensors of one size weigh the same, so that those that forward makes itself are told by their place in the
order of sizes (which is the same at every length), and inputs by their memory. Parameters, buffers and
outputs are alive anyway and never sent.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from remat._torch_private import active_saved_tensors_hooks, saved_slots, storage_ref
from remat.records import Recipe, RegionGraph, Role
from remat.run.meter import storages_of
from remat.run.moved import Moved, unmove
from remat.run.offload import Engine

__all__ = ["Outgoing", "outgoing", "send_out"]


@dataclass(frozen=True)
class Outgoing:
    """`inputs`: positions among the block's tensor inputs. `ranks`: places among what forward makes and the
    graph holds, largest first. `nbytes`: how much that is together; 0: at a length that was not measured."""

    inputs: tuple[int, ...]
    ranks: tuple[int, ...]
    nbytes: int = 0


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
) -> str:
    """Send what is to go. Returns why not, if not: what was not sent stays, more memory and nothing else."""
    if active_saved_tensors_hooks() is not None:
        return "another saved-tensor hook is active (an outer checkpoint, save_on_cpu)"
    saved: dict[Hashable, list[int]] = {}
    found = node.saved_tensors
    for position, tensor in enumerate(found):
        if tensor is not None:
            saved.setdefault(storage_ref(tensor), []).append(position)
    chosen, problem = _chosen(what, saved, found, storages_of([module]), inputs, outputs)
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
    for one in moved:
        one.send(group)
    return problem


def _chosen(
    what: Outgoing,
    saved: dict[Hashable, list[int]],
    found: Sequence[Tensor],
    stays: set[Hashable],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> tuple[list[int], str]:
    """Places of the saved tensors to send, in the order of saving; and what could not be told."""
    stays = stays | {storage_ref(tensor) for tensor in outputs}
    given = {storage_ref(tensor) for tensor in inputs}
    made = [key for key in saved if key not in stays and key not in given]
    made.sort(key=lambda key: -found[saved[key][0]].untyped_storage().nbytes())
    keys = [made[rank] for rank in what.ranks if rank < len(made)]
    whole = [inputs[i] for i in what.inputs if i < len(inputs) and _fills_storage(inputs[i])]
    keys += [key for tensor in whole if (key := storage_ref(tensor)) in saved and key not in stays]
    sizes = {key: found[saved[key][0]].untyped_storage().nbytes() for key in keys}
    places = sorted(position for key in sizes for position in saved[key])
    total = sum(sizes.values())
    if what.nbytes and total != what.nbytes:
        return places, f"{total} bytes of its saved tensors go to the host, and not {what.nbytes} as planned"
    return places, ""


def _fills_storage(tensor: Tensor) -> bool:
    """Otherwise it is a part of a larger tensor, which somebody else has."""
    return bool(tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size())
