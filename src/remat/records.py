"""The values that flow through remat: plain, frozen, checked on construction, saved as JSON.

    model, batch -> trace -> Profile -> plan(budget) -> Plan -> apply -> Handle

Nothing here imports torch: dtypes, devices and operator names are text. Bytes are int, seconds are float,
and the unit is in the name. `remat.codec` turns every record into JSON and back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    from remat.show.text import Report

__all__ = [
    "Action", "Arg", "Const", "Entry", "Environment", "HeadChunks", "Kind", "LinkRates", "Mode", "Op",
    "Phase", "Plan", "Profile", "Recipe", "Ref", "RegionCall", "RegionGraph", "Role", "Saved", "Segment",
    "Source", "Stem", "StepBytes", "Storage", "Value",
]  # fmt: skip

SCHEMA_VERSION = 1


class Action(str, Enum):
    """What happens to one saved tensor."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    CHUNK = "chunk"


class Mode(str, Enum):
    """How one region runs."""

    KEEP = "keep"  # untouched: nothing is hooked
    RECIPE = "recipe"  # some saved tensors are dropped and rebuilt one by one
    COMPILED = "compiled"  # one compiled graph, which holds what its recipe keeps and computes the rest again
    CHUNK = "chunk"  # a part of it (its MLP) or all of it runs over pieces, and again so in backward
    FULL = "full"  # torch.utils.checkpoint: the whole region runs again in backward
    HOSTED = "hosted"  # the same from inputs that wait on the host meanwhile; all or a part perhaps in chunks


class Role(str, Enum):
    """What a storage is to its region."""

    PARAMETER = "parameter"  # parameters and buffers: resident anyway, looked up at replay
    INPUT = "input"
    OUTPUT = "output"  # alive anyway: dropping it frees nothing
    INTERNAL = "internal"
    FOREIGN = "foreign"  # from a closure or an attribute: never rebuilt, never dropped


class Phase(str, Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


# ---------------------------------------------------------------------------------- one region's op graph


@dataclass(frozen=True)
class Ref:
    """An operation's argument that is a value of the region."""

    value: int


@dataclass(frozen=True)
class Const:
    """An operation's argument that is neither number nor text: Const("dtype", "bfloat16")."""

    kind: str
    text: str


Arg: TypeAlias = "bool | int | float | str | Ref | Const | tuple[Arg, ...] | None"


@dataclass(frozen=True)
class Storage:
    """A piece of memory. `shared`: an input that other regions hold too, so that keeping it costs nothing."""

    nbytes: int
    role: Role
    shared: bool = False

    @property
    def charge_bytes(self) -> int:
        """What holding it until backward costs this region."""
        free = self.shared or self.role in (Role.PARAMETER, Role.OUTPUT, Role.FOREIGN)
        return 0 if free else self.nbytes


@dataclass(frozen=True)
class Value:
    """One tensor as seen at one time: a view of a storage between two writes to it.

    `held`: if the storage is kept, this value can be had from it at run time.
    `free`: it is (a view of) a parameter or buffer that the region does not write: always at hand.
    `producer`: the operation whose replay rebuilds it; None for inputs, parameters and foreign tensors.
    """

    storage: int
    epoch: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str
    producer: int | None
    held: bool
    free: bool = False
    parameter: str = ""
    bits: int = 0  # 1: lazily conjugated, 2: lazily negated


@dataclass(frozen=True)
class Op:
    """One operation. `inputs` are the values that a replay reads, `outputs` the values that it gives."""

    name: str  # "aten.mm.default"
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]  # result positions; -1 for a result that is not a tensor
    written: tuple[tuple[int, int], ...] = ()  # (flat position of a written argument, value after the write)
    seconds: float = 0.0
    flops: int = 0
    replayable: bool = True
    view: bool = False
    reason: str = ""  # why it is not replayable
    source: str = ""  # "modeling_llama.py:62"
    once_seconds: float = 0.0  # beyond `seconds`: what forward does and a replay does not


@dataclass(frozen=True)
class Saved:
    """One tensor that autograd saved: `attribute` (item `item`) of node `node` of the region's graph.

    `order` counts backward: 0 is the first that backward asks for.
    """

    node: int
    attribute: str
    item: int
    value: int
    order: int


@dataclass(frozen=True)
class Source:
    """Where a held value is found at run time, if not among the saved tensors.

    kind: "input" (position among the region's flattened tensor inputs), "module_input" / "module_output"
    (submodule, number of its call within the region, position among its flattened tensors).
    """

    value: int
    kind: str
    position: int
    module: str = ""
    call: int = 0


@dataclass(frozen=True)
class RegionGraph:
    """One call of a region: operations, values, storages, and what autograd saved of them.

    `nodes` describes the autograd graph that was built: for each node its name and the (parent, edge) by
    which it is reached; a parent below 0 is output -parent-1 itself.
    """

    storages: tuple[Storage, ...]
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    saved: tuple[Saved, ...]
    nodes: tuple[tuple[str, int, int], ...]
    sources: tuple[Source, ...]
    inputs: tuple[int, ...]  # value of each flattened tensor input
    outputs: tuple[int, ...]  # value of each flattened tensor output

    @property
    def forward_seconds(self) -> float:
        return sum(op.seconds + op.once_seconds for op in self.ops)

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd keeps for this region when nothing is planned (each storage once)."""
        return sum(self.storages[s].charge_bytes for s in self.saved_storages)

    @property
    def saved_input_bytes(self) -> int:
        """Those of them that are inputs."""
        inputs = {self.values[value].storage for value in self.inputs}
        return sum(self.storages[s].charge_bytes for s in inputs & self.saved_storages)

    @property
    def saved_storages(self) -> frozenset[int]:
        return frozenset(self.values[s.value].storage for s in self.saved)

    @property
    def saved_outputs(self) -> frozenset[int]:
        """Storages of outputs that the region's own autograd graph holds, as that of a last relu does."""
        return frozenset(s for s in self.saved_storages if self.storages[s].role is Role.OUTPUT)


@dataclass(frozen=True)
class Recipe:
    """Which storages of a region stay, which saved tensors are dropped, which operations rebuild them."""

    kept: tuple[int, ...]
    dropped: tuple[int, ...]  # indices into RegionGraph.saved
    replayed: tuple[int, ...]  # indices into RegionGraph.ops, in execution order
    offloaded: tuple[int, ...] = ()
    resident_bytes: int = 0
    host_bytes: int = 0
    replay_seconds: float = 0.0
    fused: bool = False  # elementwise operations run as one kernel each chain: seen to give the same bits


# ------------------------------------------------------------------------------------- profile and plan


@dataclass(frozen=True)
class Entry:
    """One way to run a region.

    `resident_bytes`: held from the end of its forward to its backward, boundary tensors not counted.
    `holds_inputs` / `holds_outputs`: positions of the boundary tensors that stay alive because of it.
    `lends_outputs`: of those, what stays only until the region that reads it has sent it to the host.
    `forward_peak_bytes`: above the level at its entry. `backward_peak_bytes`: above the level when its
    backward starts (where the gradient of its output exists and everything it holds is still there).
    """

    mode: Mode
    resident_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    extra_seconds: float
    holds_inputs: tuple[int, ...] = ()
    holds_outputs: tuple[int, ...] = ()
    lends_outputs: tuple[int, ...] = ()
    host_bytes: int = 0
    recipe: Recipe | None = None
    measured: bool = False
    gradient_gap: float = 0.0  # to the untouched region's, as a share of their norm; 0.0: equal to the bit
    part: str = ""  # modes CHUNK and HOSTED: the submodule that runs in chunks
    chunk_size: int = 0  # positions in one chunk
    again: bool = False  # with such a part, or a cut: the rest of the region is recomputed as a whole
    fetches_inputs: tuple[
        int, ...
    ] = ()  # positions of inputs that wait on the host; its backward peak has them
    cut: tuple[int, ...] = ()  # modes CHUNK and HOSTED: all of it in pieces: a dimension, and positions there

    def __post_init__(self) -> None:
        if (self.recipe is not None) != (self.mode in (Mode.RECIPE, Mode.COMPILED)):
            raise ValueError("a recipe belongs to modes RECIPE and COMPILED, and to no other")
        if self.cut and (self.part or not self.again or len(self.cut) != 2):
            raise ValueError("what runs in pieces is all of a region, which runs again in backward")

    @property
    def in_chunks(self) -> bool:
        """Whether all or a part of the region runs over pieces: equal within rounding, not to the bit."""
        return bool(self.part or self.cut)


@dataclass(frozen=True)
class Kind:
    """A distinct region: all calls with the same operations, constants and input signature share it.

    `menu` is sorted from most to least resident bytes; the first entry keeps everything, and exactly one
    entry has mode FULL (the reference that the profile's timeline was measured with). Seconds are above those
    of the fastest entry: the first one, unless the kind is compiled.
    """

    signature: str
    menu: tuple[Entry, ...]
    saved_bytes: int
    forward_seconds: float
    graph: RegionGraph | None = None
    note: str = ""  # why there is no recipe, when there is none
    compiler: str = ""  # the backend of its compiled entries; `graph` is then the joint graph
    backward_seconds: float = 0.0  # keeping everything; 0: not measured
    device_seconds: float = 0.0  # that forward and backward take the accelerator at the least; 0: not known

    @property
    def reference(self) -> int:
        return next(i for i, entry in enumerate(self.menu) if entry.mode is Mode.FULL)


@dataclass(frozen=True)
class RegionCall:
    """One call of a region in the step, in forward order. Boundaries index `Profile.boundary_bytes`."""

    name: str  # module path, or the name given to remat.region
    call: int  # 0 for the first call of this region in the step
    kind: int
    tower: str
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    gradient_bytes: int = 0  # of the parameters it trains


@dataclass(frozen=True)
class Segment:
    """A stretch of the measured step, all regions in their reference entry. Bytes are above the step's start.

    `call` is the region call it belongs to, -1 for what lies between regions (embedding, head, loss).
    `gradient_bytes`: parameter gradients that exist at its end.
    """

    phase: Phase
    call: int
    start_bytes: int
    peak_bytes: int
    end_bytes: int
    gradient_bytes: int = 0
    label: str = ""


@dataclass(frozen=True)
class StepBytes:
    """What is resident around the step. `state` and `temporary` belong to the optimizer.

    `outputs`: what the model gave in one step lives on in the next, in a loop that says `out = model(batch)`,
    until forward has returned.
    """

    parameters: int
    buffers: int = 0
    gradients: int = 0  # all parameter gradients, once they exist
    optimizer_state: int = 0
    optimizer_temporary: int = 0
    other: int = 0  # whatever else is allocated on the device when the step starts (the batch, ...)
    outputs: int = 0  # of the last step, in forward

    @property
    def resident(self) -> int:
        return self.fixed + self.optimizer_state

    @property
    def fixed(self) -> int:
        """What is resident beside the optimizer's state."""
        return self.parameters + self.buffers + self.other


@dataclass(frozen=True)
class Environment:
    """Where a profile was taken. `total_bytes` is 0 where the device has no stated size.

    `estimated`: the device was not there; nothing of the profile was measured.
    """

    device: str
    device_name: str
    torch_version: str
    total_bytes: int = 0
    estimated: bool = False


@dataclass(frozen=True)
class HeadChunks:
    """The same step measured with the head and its loss in chunks: what then takes the place of the profile's
    own segments and seconds. Gradients are equal within rounding, not to the bit."""

    head: str  # name of the head module
    segments: tuple[Segment, ...]
    step_seconds: float
    trunks: tuple[str, ...] = ()  # modules that the step calls, without the head, around all blocks
    output_bytes: int = 0  # then `StepBytes.outputs`
    columns: bool = False  # chunks are of some classes each, for all rows
    finer: HeadChunks | None = None  # another way to cut it, with less memory and for more seconds


@dataclass(frozen=True)
class Stem:
    """What runs before the first region and is saved for backward, as far as it can wait on the host: seen
    to be gone from the device when that region has returned."""

    region: str  # the first one, before which it is sent
    nodes: tuple[str, ...]  # of the autograd graph behind the inputs of that region, in the order of a walk
    saved: tuple[tuple[int, str, int], ...]  # node, attribute, place in a list (-1: it is none)
    sizes: tuple[int, ...]  # bytes of the storages that those are of
    nbytes: int  # that the step holds less meanwhile


@dataclass(frozen=True)
class LinkRates:
    """What the link to the host moves: each direction alone, and each while the other one is busy too."""

    d2h_bytes_per_second: float
    h2d_bytes_per_second: float
    d2h_both_bytes_per_second: float
    h2d_both_bytes_per_second: float


_Record = TypeVar("_Record", bound="Saveable")


class Saveable:
    """Saved as JSON with a schema version; a file of another kind or version is refused with a sentence."""

    def save(self, path: str | Path) -> Path:
        from remat.codec import to_json

        path = Path(path)
        path.write_text(to_json(self), encoding="utf-8")
        return path

    @classmethod
    def load(cls: type[_Record], path: str | Path) -> _Record:
        from remat.codec import from_json

        return from_json(cls, Path(path).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Profile(Saveable):
    """Everything that planning needs to know about one training step."""

    model: str  # class name
    fingerprint: str  # of names, shapes and dtypes of the parameters and buffers
    signature: str  # of the batch
    environment: Environment
    step: StepBytes
    kinds: tuple[Kind, ...]
    calls: tuple[RegionCall, ...]
    boundary_bytes: tuple[int, ...]
    segments: tuple[Segment, ...]
    step_seconds: float  # of the step with every region untouched (predicted where it cannot run)
    accumulate: bool = False  # gradients are resident when the step starts
    notes: tuple[str, ...] = ()
    head: HeadChunks | None = None  # measured only if Action.CHUNK is allowed
    chunked: bool = False  # segments and seconds are those of `head`
    names_head: bool = False  # the model says which module its head is, and there it can be measured so
    link: LinkRates | None = None  # to the host, measured only if Action.OFFLOAD is allowed
    host_limit_bytes: int | None = None  # what may wait on the host at one time; None: not known
    passing: tuple[int, ...] = ()  # boundaries made outside of regions, held in backward by who reads them
    elsewhere: tuple[int, ...] = ()  # boundaries that something else holds, too, whatever regions do
    one_graph: bool = False  # compiled blocks are parts of one graph, of the model or of its trunk
    stem: Stem | None = None  # measured only if Action.OFFLOAD is allowed, and where it is worth it
    stem_sent: bool = False  # segments and seconds are those of a step that sends it
    schema: int = SCHEMA_VERSION

    @property
    def graph_roots(self) -> tuple[str, ...]:
        """The modules that run as one compiled graph each: "" is the model. With the head in chunks, which
        are not for the compiler, the trunks that it stands on. None: blocks are compiled one by one."""
        if not self.one_graph:
            return ()
        return self.head.trunks if self.chunked and self.head is not None else ("",)


@dataclass(frozen=True)
class Plan(Saveable):
    """One menu entry per region call, with what is predicted of it. `choices[i]` indexes the call's menu."""

    profile: Profile
    choices: tuple[int, ...]
    budget_bytes: int
    predicted_peak_bytes: int
    predicted_seconds: float
    plain_peak_bytes: int
    plain_seconds: float
    strategy: str = "optimal"
    allow: tuple[Action, ...] = (Action.KEEP, Action.RECOMPUTE)
    notes: tuple[str, ...] = field(default=())
    schema: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if len(self.choices) != len(self.profile.calls):
            raise ValueError(f"{len(self.choices)} choices for {len(self.profile.calls)} region calls")

    def entry(self, call: int) -> Entry:
        """The menu entry that region call `call` runs with."""
        return self.profile.kinds[self.profile.calls[call].kind].menu[self.choices[call]]

    def report(self) -> Report:
        """What was decided and predicted, for reading: print it, or save it as .html, .json or .txt."""
        from remat.show.text import Report

        return Report(self)
