"""Why each region and each saved tensor is treated as it is: bytes, action, seconds, source line, reason.

Read from the plan's records alone; nothing here needs the model, or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from remat.planner.simulate import Span, call_label, spans
from remat.records import Action, Entry, Kind, Mode, Plan, Recipe, RegionGraph, Role
from remat.units import format_bytes, format_seconds

__all__ = ["RegionRow", "TensorRow", "explained", "grouped", "region_rows", "tensor_rows", "way"]


@dataclass(frozen=True)
class TensorRow:
    """One piece of memory that autograd wants from forward. `seconds`: spent again in backward because of it;
    an operation that several tensors need counts for the first that backward asks for."""

    operation: str  # that makes it
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    action: str
    seconds: float
    source: str
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "shape": list(self.shape)}


@dataclass(frozen=True)
class RegionRow:
    """One call of a region: what autograd would hold for it, and what becomes of these bytes.

    `kind` and `choice` are equal for calls that are treated alike. `born` and `gone` are the points of the
    timeline between which it holds its bytes (None: it never runs, or nothing of it is held).
    """

    index: int
    name: str  # of the module, or the one given to remat.region
    call: int
    label: str  # the name, and which call of it if there are several
    tower: str
    kind: int
    choice: int
    way: str
    mode: str
    saved_bytes: int
    kept_bytes: int
    recomputed_bytes: int
    offloaded_bytes: int
    extra_seconds: float
    reason: str
    born: int | None
    gone: int | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def way(entry: Entry) -> str:
    """'keep', 'full', 'compiled', 'offload', 'chunk' ('+full': the rest runs again), or 'recipe/9', which
    drops nine saved tensors; '+offload' if others, or the inputs to run again from, wait on the host."""
    if entry.mode is Mode.HOSTED or entry.again:
        ways = (
            Mode.CHUNK.value if entry.in_chunks else "",
            Mode.FULL.value,
            "offload" if entry.host_bytes else "",
        )
        return "+".join(filter(None, ways))
    if entry.mode is not Mode.RECIPE or entry.recipe is None:
        offloads = entry.mode is Mode.COMPILED and entry.host_bytes
        return f"{entry.mode.value}+offload" if offloads else entry.mode.value
    dropped, offloaded = len(entry.recipe.dropped), bool(entry.recipe.offloaded)
    if offloaded and not dropped:
        return "offload"
    return f"recipe/{dropped}" + ("+offload" if offloaded else "")


def region_rows(plan: Plan) -> tuple[RegionRow, ...]:
    """One row per region call, in forward order."""
    profile = plan.profile
    return tuple(
        _region_row(plan, index, span, reason=_region_reason(profile.kinds[call.kind], plan.entry(index)))
        for index, (call, span) in enumerate(zip(profile.calls, spans(profile), strict=True))
    )


def _region_row(plan: Plan, index: int, span: Span | None, reason: str) -> RegionRow:
    call, entry = plan.profile.calls[index], plan.entry(index)
    saved = plan.profile.kinds[call.kind].saved_bytes
    kept = min(entry.resident_bytes, saved)
    offloaded = min(entry.host_bytes, saved - kept)
    return RegionRow(
        index=index,
        name=call.name,
        call=call.call,
        label=call_label(call),
        tower=call.tower,
        kind=call.kind,
        choice=plan.choices[index],
        way=way(entry),
        mode=entry.mode.value,
        saved_bytes=saved,
        kept_bytes=kept,
        recomputed_bytes=saved - kept - offloaded,
        offloaded_bytes=offloaded,
        extra_seconds=entry.extra_seconds,
        reason=reason,
        born=None if span is None else span.forward + 1,
        gone=None if span is None else span.backward,
    )


def _region_reason(kind: Kind, entry: Entry) -> str:
    freed = max(kind.saved_bytes - entry.resident_bytes, 0)
    if entry.mode is Mode.KEEP:
        return _why_kept(kind)
    price = f"frees {format_bytes(freed)} for {format_seconds(entry.extra_seconds)}"
    if entry.mode is Mode.FULL:
        why = f" (no recipes: {kind.note})" if kind.note else ""
        return f"{price}: runs again as a whole{why}"
    if entry.mode in (Mode.CHUNK, Mode.HOSTED):
        parts = []
        if entry.part:
            parts.append(f"{entry.part} runs {entry.chunk_size} positions at a time")
        if entry.cut:
            parts.append(f"runs {_amount(entry.cut)} at a time, and again so in backward")
        elif entry.mode is Mode.HOSTED or entry.again:
            parts.append("the rest again as a whole" if entry.part else "runs again as a whole")
        if entry.host_bytes:
            parts.append(f"its inputs wait on the host ({format_bytes(entry.host_bytes)})")
        return f"{price}: {', '.join(parts)}"
    assert entry.recipe is not None
    if entry.mode is Mode.COMPILED:
        host = f"; {format_bytes(entry.host_bytes)} wait on the host" if entry.host_bytes else ""
        return f"{price}: one compiled graph, which computes {len(entry.recipe.dropped)} tensors again{host}"
    parts = []
    if entry.recipe.dropped:
        tensors, operations = len(entry.recipe.dropped), len(entry.recipe.replayed)
        parts.append(f"{tensors} tensors rebuilt by {operations} operations")
    if entry.recipe.offloaded:
        parts.append(f"{format_bytes(entry.host_bytes)} wait on the host")
    return f"{price}: {', '.join(parts)}"


def _amount(cut: tuple[int, ...]) -> str:
    dim, size = cut
    plural = "" if size == 1 else "s"
    return f"{size} row{plural}" if dim == 0 else f"{size} position{plural} of dimension {dim}"


def _why_kept(kind: Kind) -> str:
    """What would be next if the budget were smaller: the cheapest byte of the menu."""
    offers = [
        (entry.extra_seconds / (kind.saved_bytes - entry.resident_bytes), entry)
        for entry in kind.menu
        if entry.mode is not Mode.KEEP and entry.resident_bytes < kind.saved_bytes
    ]
    if not offers:
        return "there is nothing to free" if not kind.note else f"nothing to free: {kind.note}"
    _, entry = min(offers, key=lambda offer: offer[0])
    freed = format_bytes(kind.saved_bytes - entry.resident_bytes)
    return (
        f"the budget has room; next would be {way(entry)}: {freed} for {format_seconds(entry.extra_seconds)}"
    )


# ------------------------------------------------------------------------------------------------- tensors


def tensor_rows(kind: Kind, entry: Entry) -> tuple[TensorRow, ...]:
    """Every piece of memory that autograd saves in this region (parameters aside), largest first.

    Empty where the region could not be captured: then nothing is known of its tensors.
    """
    graph = kind.graph
    if graph is None:
        return ()
    shown = _shown(graph, entry.recipe)
    charged = _charged_seconds(graph, entry.recipe) if entry.recipe is not None else {}
    rows = [
        _tensor_row(graph, storage, value, entry, charged.get(storage, 0.0))
        for storage, value in shown.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.nbytes))


def _shown(graph: RegionGraph, recipe: Recipe | None) -> dict[int, int]:
    """Storage -> a value that shows it: what autograd saved, and what stays only because recipes read it."""
    shown: dict[int, int] = {}
    for saved in graph.saved:
        shown.setdefault(graph.values[saved.value].storage, saved.value)
    for index, value in enumerate(graph.values):
        if recipe is not None and value.storage in recipe.kept and value.held:
            shown.setdefault(value.storage, index)
    return {s: v for s, v in shown.items() if graph.storages[s].role is not Role.PARAMETER}


def _tensor_row(graph: RegionGraph, storage: int, value: int, entry: Entry, seconds: float) -> TensorRow:
    action, reason = _decision(graph, storage, entry)
    maker = _maker(graph, storage, value)
    made = (v for v in graph.values if v.storage == storage and v.producer == maker)
    seen = graph.values[value] if maker is None else next(made)
    return TensorRow(
        operation=_short(graph.ops[maker].name) if maker is not None else graph.storages[storage].role.value,
        shape=seen.shape,
        dtype=seen.dtype,
        nbytes=graph.storages[storage].nbytes,
        action=action.value,
        seconds=seconds,
        source=graph.ops[maker].source if maker is not None else "",
        reason=reason,
    )


def _maker(graph: RegionGraph, storage: int, value: int) -> int | None:
    """The operation that made the memory: views of it say nothing, and `empty` leaves it to the next one."""
    makers = [v.producer for v in graph.values if v.storage == storage and v.producer is not None]
    made = [maker for maker in makers if not graph.ops[maker].view]
    filled = [maker for maker in made if not _short(graph.ops[maker].name).startswith("empty")]
    return next(iter((*filled, *made)), graph.values[value].producer)


def _short(operation: str) -> str:
    """'aten.mm.default' -> 'mm'."""
    parts = operation.split(".")
    return parts[1] if len(parts) == 3 else operation


def _decision(graph: RegionGraph, storage: int, entry: Entry) -> tuple[Action, str]:
    role, recipe = graph.storages[storage].role, entry.recipe
    if role is Role.OUTPUT:
        return Action.KEEP, "the region's output: alive anyway"
    if role is Role.FOREIGN:
        return Action.KEEP, "from outside the region: never dropped"
    if entry.mode is Mode.KEEP:
        return Action.KEEP, "the region is untouched"
    if entry.mode is Mode.CHUNK and not entry.again:
        return Action.CHUNK, f"kept, or made again by the chunks of {entry.part}"
    if recipe is None:
        if role is Role.INPUT:
            if any(graph.values[graph.inputs[place]].storage == storage for place in entry.fetches_inputs):
                return Action.OFFLOAD, "waits on the host until the region runs again from it"
            return Action.KEEP, "the region runs again from its inputs"
        return Action.RECOMPUTE, "the region runs again as a whole"
    if storage in recipe.offloaded:
        return Action.OFFLOAD, "waits on the host until backward"
    if storage in recipe.kept:
        return Action.KEEP, _why_tensor_kept(graph, storage)
    if entry.mode is Mode.COMPILED:
        return Action.RECOMPUTE, "computed again inside the compiled graph"
    return Action.RECOMPUTE, "rebuilt when backward asks for it"


def _why_tensor_kept(graph: RegionGraph, storage: int) -> str:
    found = graph.storages[storage]
    if found.shared:
        return "another region holds it too: keeping it is free"
    if found.role is Role.INPUT:
        return "an input, from which others are rebuilt"
    makers = [graph.ops[v.producer] for v in graph.values if v.storage == storage and v.producer is not None]
    stuck = [op for op in makers if not op.replayable]
    if stuck:
        why = next((op for op in stuck if not _short(op.name).startswith("empty")), stuck[0])
        return f"cannot be rebuilt: {why.reason or _short(why.name)}"
    cost = sum(op.seconds for op in makers if not op.view)
    return f"worth its bytes: its own operation takes {format_seconds(cost)}"


def _charged_seconds(graph: RegionGraph, recipe: Recipe) -> dict[int, float]:
    """Storage -> seconds of the replayed operations that it is the first to ask for."""
    kept, unpaid = set(recipe.kept), set(recipe.replayed)
    charged: dict[int, float] = {}
    for slot in sorted((graph.saved[i] for i in recipe.dropped), key=lambda saved: saved.order):
        seconds = 0.0
        stack = [slot.value]
        while stack:
            value = graph.values[stack.pop()]
            at_hand = value.free or (value.held and value.storage in kept)
            if at_hand or value.producer is None or value.producer not in unpaid:
                continue
            unpaid.discard(value.producer)
            operation = graph.ops[value.producer]
            seconds += operation.seconds
            stack.extend(operation.inputs)
        storage = graph.values[slot.value].storage
        charged[storage] = charged.get(storage, 0.0) + seconds
    return charged


def grouped(rows: Sequence[RegionRow]) -> list[tuple[RegionRow, int]]:
    """Regions that are treated alike, once: (the first of them, how many)."""
    counts: dict[tuple[str, int, int], int] = {}
    first: dict[tuple[str, int, int], RegionRow] = {}
    for row in rows:
        key = (row.tower, row.kind, row.choice)
        counts[key] = counts.get(key, 0) + 1
        first.setdefault(key, row)
    return [(first[key], count) for key, count in counts.items()]


def explained(plan: Plan) -> dict[str, Any]:
    """Every region call, and the tensors of each distinct (kind, choice), ready for JSON."""
    rows = region_rows(plan)
    return {
        "model": plan.profile.model,
        "device": plan.profile.environment.device_name,
        "budget_bytes": plan.budget_bytes,
        "regions": [row.as_dict() for row in rows],
        "tensors": [
            {
                "kind": row.kind,
                "choice": row.choice,
                "like": row.label,
                "calls": count,
                "tensors": [
                    t.as_dict() for t in tensor_rows(plan.profile.kinds[row.kind], plan.entry(row.index))
                ],
            }
            for row, count in grouped(rows)
        ],
    }
