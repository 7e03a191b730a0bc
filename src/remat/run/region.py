"""A planned region at run time.

During forward nothing of ours runs between the operations (a module hook where a recipe reads a value that
only passes between submodules). When forward has returned, the autograd graph that it built is walked along
the captured path; only if every node and every tensor is as captured are the chosen saved tensors replaced
by rows from which they are rebuilt on demand. Any mismatch keeps everything: more memory, never a wrong
gradient.

State belongs to the graph that was built: rows live in the graph's nodes and die with them, so two
forwards before a backward, retain_graph, a forward that is never backwarded and threads need no care.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from remat._torch_private import (
    active_saved_tensors_hooks,
    compiled_node,
    compiler_errors,
    compiler_reason,
    in_functorch,
)
from remat.records import Mode
from remat.run.checkpoint import Options, needs_gradients, run_checkpointed
from remat.run.compiled import CompiledBlock
from remat.run.holders import Counts, Frame, Kept
from remat.run.inputs import Leaving
from remat.run.moved import Moved, send_all, unmove
from remat.run.offload import Engine
from remat.run.outgoing import Layouts, Outgoing, send_out
from remat.run.pieces import WholeOnlyError, in_pieces
from remat.run.program import Program
from remat.run.replay import replaying
from remat.run.same import same_bits
from remat.run.spotcheck import SpotCheck
from remat.run.taps import NOTHING, Passing, open_taps
from remat.run.wrap import RegionStatus, unwrap, wrap
from remat.trees import describe_call, tensors

__all__ = ["PlannedRegion", "Variant", "trained_count"]

_FALLBACKS_BEFORE_FULL = 3  # mismatches after which a region recomputes as a whole


@dataclass(frozen=True)
class Variant:
    """How a region runs for one input signature."""

    mode: Mode
    program: Program | None = None
    saved_bytes: int = 0
    resident_bytes: int = 0
    compiled: CompiledBlock | None = None
    gradient_gap: float = 0.0
    host_bytes: int = 0
    chunk: tuple[str, int] | None = None  # the part that runs in chunks, and their size
    again: bool = False  # mode CHUNK: the rest runs again as a whole
    outgoing: Outgoing | None = None  # mode COMPILED: what of its saved set waits on the host
    inside: tuple[str, ...] = ()  # submodules that recompute, each as a whole, where the region is to
    sends: tuple[int, ...] = ()  # mode HOSTED: places of the tensor inputs that wait on the host
    cut: tuple[
        int, ...
    ] = ()  # modes CHUNK and HOSTED: the dimension it is cut along, and how long pieces are


# -------------------------------------------------------------------------------------------- the region


class Owners:
    """The dictionaries that hold some parameters and buffers, with their names there."""

    __slots__ = ("_edges", "tables")

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self.tables: list[tuple[dict[str, Any], str]] = []
        edges: dict[str, tuple[dict[str, Any], str, nn.Module]] = {}
        for full in names:
            *path, name = full.split(".")
            owner = module
            for depth, step in enumerate(path):
                child = owner.get_submodule(step)
                edges[".".join(path[: depth + 1])] = (owner._modules, step, child)
                owner = child
            self.tables.append((owner._parameters if name in owner._parameters else owner._buffers, name))
        self._edges = tuple(edges.values())

    def in_place(self) -> bool:
        """Nobody has put another submodule in the place of one of these."""
        for modules, name, child in self._edges:  # noqa: SIM110 (a loop is faster than all())
            if modules.get(name) is not child:
                return False
        return True


@dataclass
class PlannedRegion:
    """Runs one region as planned (an `Around`): one variant per input signature, full recompute for others.

    Copies (deepcopy, pickle) share the programs, which hold no tensors, and start with fresh counts.
    """

    name: str
    tower: str
    variants: dict[str, Variant]  # by the text of the signature
    check: bool = True
    shadow: bool = False  # compare every rebuilt tensor with the real one, when the region returns
    turn: int = 0  # which step of the rotation takes this region's checksums
    turns: int = 0  # steps of a whole rotation; 0: no checksums
    otherwise: Variant | None = None  # for every signature, where there are no variants
    counts: Counts = field(default_factory=Counts)
    known: dict[Any, Variant] = field(default_factory=dict)  # by the signature itself
    owners: dict[int, Owners] = field(default_factory=dict)
    layouts: Layouts = field(default_factory=dict)  # of compiled graphs, some of whose tensors are sent
    owner: str = "remat.apply"
    on_fallback: Callable[[str, str, bool], None] | None = None  # told name, why, whether a recipe failed
    engine: Engine | None = None  # moves what goes to the host; without it that stays on the device
    place: int = 0  # among the regions of one forward
    trained: int | None = None  # parameters that trained when it was put on; None: nobody looks

    def __deepcopy__(self, memo: Any) -> PlannedRegion:
        copy = PlannedRegion(*self._as_planned())
        copy.engine, copy.place = self.engine, self.place
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return PlannedRegion, self._as_planned()

    def _as_planned(self) -> tuple[Any, ...]:
        settings = self.check, False, self.turn, self.turns, self.otherwise
        return self.name, self.tower, dict(self.variants), *settings

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        counts = self.counts
        if counts.in_backward:
            counts.in_backward, counts.rebuilt = False, 0
            counts.steps += 1
            if self.trained is not None and counts.steps % max(self.turns, 1) == self.turn:
                self._see_that_no_more_trains(module)
        counts.calls += 1
        key, inputs = describe_call(args, kwargs, module.training)
        variant = self.known.get(key) or self._variant(key, module, inputs)
        if variant.mode is Mode.KEEP or in_functorch() or (variant.chunk and not variant.again):
            return forward(*args, **kwargs)
        if variant.compiled is not None:
            return self._run_compiled(key, variant, variant.compiled, module, forward, args, kwargs, inputs)
        if variant.cut:
            return self._run_in_pieces(variant, module, forward, args, kwargs, inputs)
        if variant.program is None:
            return self._recompute(variant, module, forward, args, kwargs, inputs)
        if self._is_hooked():
            return forward(*args, **kwargs)
        return self._run_recipe(variant.program, module, forward, args, kwargs, inputs)

    def _is_hooked(self) -> bool:
        if active_saved_tensors_hooks() is None:
            return False
        self._fall_back("another saved-tensor hook is active (an outer checkpoint, save_on_cpu)")
        return True

    def _see_that_no_more_trains(self, module: nn.Module) -> None:
        """In its turn: what unfrozen parameters need for their gradients is not in the plan."""
        now = trained_count(module)
        if self.trained is not None and now > self.trained:
            why = f"{now - self.trained} more parameters train than when the plan was made; fit again"
            self.trained = None
            self._fall_back(why)
            self.switch_off(f"recomputes as a whole: {why}")

    def _variant(self, key: tuple[Any, ...], module: nn.Module, inputs: list[torch.Tensor]) -> Variant:
        """The variant of a signature that is seen for the first time."""
        variant = self.variants.get(repr(key)) if self.variants else self.otherwise
        if variant is None:
            if not needs_gradients(inputs, (module,)):
                return Variant(Mode.KEEP)  # not remembered: parameters may be trained later
            variant = self._for_any_signature()
        self.known[key] = variant
        return variant

    def _for_any_signature(self) -> Variant:
        """A saved set is for every length; a recipe is for the one that was captured."""
        compiled = [variant for variant in self.variants.values() if variant.compiled is not None]
        if compiled:
            least = min(compiled, key=lambda variant: variant.resident_bytes)
            sent = least.outgoing and replace(least.outgoing, nbytes=0)
            return replace(least, outgoing=sent)
        self._fall_back("an input signature that was not planned")
        return Variant(Mode.FULL)

    def _recompute(
        self,
        variant: Variant,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
    ) -> Any:
        if variant.inside:  # recomputing a whole model holds all of it in backward
            with ExitStack() as stack:
                for name in variant.inside:
                    submodule = module.get_submodule(name)
                    wrap(submodule, PlannedRegion(name, self.tower, {}, otherwise=Variant(Mode.FULL)))
                    stack.callback(unwrap, submodule)
                return forward(*args, **kwargs)
        # What stands behind a function is found by looking into it.
        modules = () if self.tower == "functions" else (module,)
        leaving = self._leaving(variant, inputs)
        options = Options(name=self.name, check=self.check)
        return run_checkpointed(forward, args, kwargs, options, modules, leaving=leaving)

    def _leaving(self, variant: Variant, inputs: list[torch.Tensor]) -> Leaving | None:
        if not variant.sends or self.engine is None:
            return None
        return Leaving([inputs[place] for place in variant.sends], self.engine.group(self.place))

    def _run_in_pieces(
        self,
        variant: Variant,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
    ) -> Any:
        if not torch.is_grad_enabled() or not needs_gradients(inputs, (module,)):
            return forward(*args, **kwargs)
        if self._is_hooked():
            return forward(*args, **kwargs)
        dim, size = variant.cut
        leaving = self._leaving(variant, inputs)
        try:
            return in_pieces(self.name, module, forward, args, kwargs, (dim, size), leaving)
        except WholeOnlyError as error:
            self._fall_back(str(error))
            self.switch_off(f"recomputes as a whole: {error}")
            return self._recompute(Variant(Mode.FULL), module, forward, args, kwargs, inputs)

    def _run_compiled(
        self,
        key: tuple[Any, ...],
        variant: Variant,
        block: CompiledBlock,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
    ) -> Any:
        try:
            output = block(module, forward, args, kwargs)
        except Exception as error:
            if not isinstance(error, compiler_errors()):
                raise
            self._fall_back(compiler_reason(error))
            self.known[key] = again = Variant(Mode.FULL, inside=variant.inside)
            return self._recompute(again, module, forward, args, kwargs, inputs)
        sends = variant.outgoing is not None and self.engine is not None
        node = compiled_node(tensors(output), inputs) if sends or self.counts.calls == 1 else None
        if self.counts.calls == 1 and node is None:
            self._fall_back("the compiled code did not run: a mode or an outer compiler is in its way")
        elif self.counts.calls == 1 and block.lost:
            lost = sorted(block.lost)
            self._fall_back(f"{lost[0]} is not found in the whole model's graph ({len(lost)} blocks are not)")
        if sends and node is not None:
            self._send_out(variant.outgoing, node, module, inputs, tensors(output))
        return output

    def _send_out(
        self,
        what: Outgoing | None,
        node: Any,
        module: nn.Module,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        assert what is not None
        assert self.engine is not None
        problem = send_out(
            what, node, module, inputs, outputs, self.engine, self.place, self.name, self.layouts
        )
        if problem:
            self._fall_back(problem)

    def _run_recipe(
        self,
        program: Program,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
    ) -> Any:
        seen = NOTHING
        entries = {tensor.grad_fn for tensor in inputs}  # now: a region may write to an input
        entries.discard(None)
        if not program.passed:
            output = forward(*args, **kwargs)
        else:
            seen, taps = Passing(), open_taps()
            taps.append(seen)
            try:
                output = forward(*args, **kwargs)
            finally:
                taps.pop()
        outputs = tensors(output)
        for tensor in outputs:
            if tensor.grad_fn is not None and tensor.grad_fn not in entries:
                break
        else:  # nothing was recorded, or it was skipped and handed its inputs on
            return output
        problem = self._drop(program, module, outputs, inputs, seen, entries)
        if problem:
            self._fall_back(problem, recipe_failed=True)
            if self.counts.fallbacks >= _FALLBACKS_BEFORE_FULL:
                self.switch_off(f"recomputes as a whole: {problem}")
        return output

    def _drop(
        self,
        program: Program,
        module: nn.Module,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        seen: Passing,
        entries: set[Any],
    ) -> str:
        """Replace saved tensors by rows. Returns why not, if not: then nothing was let go."""
        try:
            nodes = program.find(outputs, entries)
            if type(nodes) is int:
                return f"node {nodes} of the autograd graph is not the one captured"
            kept = program.collect(nodes, self._parameters(program, module), inputs, seen)
            if type(kept) is not tuple:
                return kept if type(kept) is str else f"{program.kept[kept]} is not as captured"
            try:
                frame = Frame(self.name, self.counts, program, kept)
            except RuntimeError:  # some were made in inference mode
                kept = tuple(map(_with_version, kept))
                frame = Frame(self.name, self.counts, program, kept)
        except torch.OutOfMemoryError:  # a RuntimeError, too
            raise
        except (AttributeError, IndexError, KeyError, TypeError, RuntimeError) as error:
            return f"the autograd graph is not the one captured ({type(error).__name__}: {error})"
        moved: list[Moved] = []
        if self.engine is not None and (program.send_order or program.lent):
            moved = [Moved(self.name) for _ in (*program.moved, *program.lent)]
        taps = [Moved(self.name, kept[tap]) for tap in program.moved_taps]
        if taps:
            kept = _with_taps(kept, program.moved_taps, taps)
        for tap in taps:
            tap.keep()
        rows = program.rows(frame, kept)
        dropped: list[torch.Tensor] = []
        problem = self._hook(program, nodes, rows, dropped, moved)
        if problem:
            for place, tensor in enumerate(dropped):  # it may have broken off after some
                rows[place][0] = Kept(self.name, program.slots[place], tensor)
            for one in moved:
                one.keep()
        elif self.check and program.probes.places:
            frame.check = self._spot_check(program, dropped)
        dropped.clear()  # the hooks know this list
        if problem:
            return problem
        if self.engine is not None:
            group = self.engine.group(self.place) if program.send_order else None
            for lent in moved[len(program.moved) :]:
                lent.lend(self.engine, group)
            if group is not None:
                together = (*moved[: len(program.moved)], *taps)
                send_all([together[number] for number in program.send_order], group)
        return ""

    def _hook(
        self,
        program: Program,
        nodes: Any,
        rows: Sequence[list[Any]],
        dropped: list[torch.Tensor],
        moved: list[Moved],
    ) -> str:
        """Put the rows in and look at every tensor that they replace. Returns what is wrong."""
        try:
            program.hook(nodes, rows, dropped.append)
            if moved:
                program.move(nodes, moved, unmove)
        except torch.OutOfMemoryError:  # a RuntimeError, too; some rows may be in
            raise
        except (AttributeError, IndexError, TypeError, RuntimeError) as error:
            return f"a saved tensor cannot be replaced ({type(error).__name__}: {error})"
        place = program.differs(dropped)
        if place is not None:
            slot = program.slots[place]
            return f"{slot.label} ({slot.source}) has another shape, stride or dtype now"
        if moved:
            for expected, one in zip((*program.moved, *program.lent), moved, strict=True):
                if not one.is_as_captured(expected):
                    return f"{expected.label} has another shape, stride or dtype now"
        return self._shadow(program, rows, dropped) if self.shadow and rows else ""

    def _parameters(self, program: Program, module: nn.Module) -> list[Any]:
        """Looked up at every call: FSDP swaps them, functional_call replaces them. Where is remembered."""
        owners = self.owners.get(id(program))
        if owners is None or not owners.in_place():
            owners = self.owners[id(program)] = Owners(module, program.parameters)
        return [tensors[name] for tensors, name in owners.tables]

    def _spot_check(self, program: Program, dropped: list[torch.Tensor]) -> SpotCheck:
        number = self.counts.calls
        return SpotCheck(
            dropped,
            program.probes,
            self._report(program),
            phase=number,
            whole=self._summed_up(program.probes.places),
        )

    def _summed_up(self, places: Sequence[int]) -> tuple[int, ...]:
        """Those of the tensors looked at whose checksum this step takes: one, if it is this region's turn."""
        if not self.turns or self.counts.steps % self.turns != self.turn:
            return ()
        return (places[self.counts.steps // self.turns % len(places)],)

    def _report(self, program: Program) -> Callable[[int], str]:
        def sentence(place: int) -> str:
            slot = program.slots[place]
            self.switch_off(f"replay of {slot.label} differed")
            return (
                f"region {self.name}: the replay of {slot.label}, made at "
                f"{slot.source or 'an unknown line'}, differs from what forward computed; a Python number "
                "in the region has changed since it was captured, or memory was written "
                "behind autograd's back. From now on it recomputes as a whole."
            )

        return sentence

    def _shadow(self, program: Program, rows: Sequence[list[Any]], dropped: list[torch.Tensor]) -> str:
        """Rebuild everything while the real tensors are still there, and compare bit for bit."""
        memo = rows[0][0].memo
        try:
            for slot, row, tensor in zip(program.slots, rows, dropped, strict=True):
                try:
                    with replaying():
                        same = same_bits(slot.rebuild(row, memo), tensor)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:  # operations of another size than the tensors
                    self.switch_off(f"the replay of {slot.label} ({slot.source}) fails: {error}")
                    return self.counts.why
                if not same:
                    self.switch_off(f"the replay of {slot.label} ({slot.source}) does not give the same bits")
                    return self.counts.why
        finally:
            memo[:] = [None] * len(memo)
        return ""

    def _fall_back(self, why: str, *, recipe_failed: bool = False) -> None:
        self.counts.fallbacks += 1
        self.counts.why = why
        if self.on_fallback is not None:
            self.on_fallback(self.name, why, recipe_failed)

    def switch_off(self, why: str) -> None:
        """From now on this region recomputes as a whole."""
        self.counts.why = why
        self.variants = {key: Variant(Mode.FULL) for key in self.variants}
        self.known.clear()

    def status(self) -> RegionStatus:
        modes = {variant.mode for variant in self.variants.values()}
        sizes = [variant for variant in self.variants.values() if variant.saved_bytes]
        return RegionStatus(
            name=self.name or "(the whole model)",
            tower=self.tower,
            mode="+".join(sorted(mode.value for mode in modes)),
            active=True,
            calls=self.counts.calls,
            recomputed=self.counts.rebuilt,
            saved_bytes_before=sum(v.saved_bytes for v in sizes) if sizes else None,
            saved_bytes_after=sum(v.resident_bytes for v in sizes) if sizes else None,
            fallbacks=self.counts.fallbacks,
            why=self.counts.why,
            host_bytes=sum(v.host_bytes for v in self.variants.values()),
        )


def trained_count(module: nn.Module) -> int:
    return sum(parameter.requires_grad for parameter in module.parameters())


def _with_version(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as an ordinary tensor: one of inference mode counts no writes, and allows none."""
    if not tensor.is_inference():
        return tensor
    fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return fresh.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _with_taps(kept: tuple[Any, ...], places: tuple[int, ...], taps: list[Moved]) -> tuple[Any, ...]:
    """The kept tensors, those of offloaded storages in a form that can be sent away."""
    found = list(kept)
    for place, tap in zip(places, taps, strict=True):
        found[place] = tap
    return tuple(found)
