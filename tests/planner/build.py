"""Hand-made graphs and profiles: small builders, so that a test reads as the case it is about."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from remat.records import (
    Entry,
    Environment,
    Kind,
    Mode,
    Op,
    Phase,
    Profile,
    Recipe,
    RegionCall,
    RegionGraph,
    Role,
    Saved,
    Segment,
    StepBytes,
    Storage,
    Value,
)


class GraphBuilder:
    """Builds a RegionGraph operation by operation; every method returns the index of a value."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.saved_values: list[int] = []
        self.inputs: list[int] = []
        self.outputs: list[int] = []

    def _storage(self, nbytes: int, role: Role, shared: bool = False) -> int:
        self.storages.append(Storage(nbytes, role, shared))
        return len(self.storages) - 1

    def _value(
        self, storage: int, producer: int | None, *, held: bool, epoch: int = 0, free: bool = False
    ) -> int:
        shape = (self.storages[storage].nbytes,)
        self.values.append(Value(storage, epoch, shape, (1,), 0, "uint8", producer, held, free))
        return len(self.values) - 1

    def input(self, nbytes: int, *, shared: bool = False) -> int:
        value = self._value(self._storage(nbytes, Role.INPUT, shared), None, held=True)
        self.inputs.append(value)
        return value

    def parameter(self, nbytes: int = 8) -> int:
        return self._value(self._storage(nbytes, Role.PARAMETER), None, held=True, free=True)

    def foreign(self, nbytes: int) -> int:
        return self._value(self._storage(nbytes, Role.FOREIGN), None, held=True)

    def op(
        self,
        *inputs: int,
        nbytes: int | tuple[int, ...],
        seconds: float,
        name: str = "op",
        held: bool = False,
        replayable: bool = True,
    ) -> int:
        """An operation with one fresh storage per output; gives its first output, the others follow it."""
        sizes = (nbytes,) if isinstance(nbytes, int) else nbytes
        index = len(self.ops)
        outputs = tuple(self._value(self._storage(n, Role.INTERNAL), index, held=held) for n in sizes)
        self.ops.append(Op(name, (), (), inputs, outputs, seconds=seconds, replayable=replayable))
        return outputs[0]

    def view(self, base: int, *, held: bool | None = None) -> int:
        index = len(self.ops)
        record = self.values[base]
        seen = record.held if held is None else held
        value = self._value(record.storage, index, held=seen, epoch=record.epoch, free=record.free)
        self.ops.append(Op("view", (), (), (base,), (value,), view=True))
        return value

    def write(self, base: int, *others: int, seconds: float, replayable: bool = True) -> int:
        """An in-place operation: a new epoch of the same storage; what was there before is seen no more."""
        index = len(self.ops)
        record = self.values[base]
        for i, value in enumerate(self.values):
            if value.storage == record.storage:
                self.values[i] = dataclasses.replace(value, held=False)
        value = self._value(record.storage, index, held=record.held, epoch=record.epoch + 1)
        inputs, written = (base, *others), ((0, value),)
        self.ops.append(
            Op("write_", (), (), inputs, (value,), written, seconds=seconds, replayable=replayable)
        )
        return value

    def save(self, *values: int) -> None:
        """Autograd saves these values (and thereby holds them)."""
        for value in values:
            self.values[value] = dataclasses.replace(self.values[value], held=True)
            self.saved_values.append(value)

    def output(self, value: int) -> int:
        storage = self.values[value].storage
        if self.storages[storage].role is Role.INTERNAL:
            self.storages[storage] = dataclasses.replace(self.storages[storage], role=Role.OUTPUT)
        self.values[value] = dataclasses.replace(self.values[value], held=True)
        self.outputs.append(value)
        return value

    def graph(self) -> RegionGraph:
        # Backward asks for what was saved last first; each saved tensor belongs to a node of its own.
        last = len(self.saved_values) - 1
        saved = tuple(
            Saved(last - i, "_saved_self", -1, value, last - i) for i, value in enumerate(self.saved_values)
        )
        return RegionGraph(
            storages=tuple(self.storages),
            values=tuple(self.values),
            ops=tuple(self.ops),
            saved=saved,
            nodes=tuple(("Node", i - 1, 0) for i in range(len(saved))),
            sources=(),
            inputs=tuple(self.inputs),
            outputs=tuple(self.outputs),
        )


def llama_block(tokens: int = 16384, hidden: int = 2048, ffn: int = 5632) -> RegionGraph:
    """A Llama block as eager PyTorch runs it in bf16: RMSNorms in fp32, rotary embedding, SDPA, SwiGLU."""
    g = GraphBuilder()
    row = tokens * 2  # bytes of one bf16 column
    copy = 2.0 / 4e12  # seconds per byte moved, about an H200's

    def elementwise(*inputs: int, nbytes: int) -> int:
        return g.op(*inputs, nbytes=nbytes, seconds=3 * nbytes * copy)

    def linear(x: int, n_in: int, n_out: int) -> int:
        weight = g.view(g.parameter(n_in * n_out * 2))
        flat = g.view(x)
        out = g.op(flat, weight, nbytes=n_out * row, seconds=2 * tokens * n_in * n_out / 600e12, held=True)
        g.save(flat, weight)
        return g.view(out)

    def norm(x: int) -> int:
        wide = elementwise(x, nbytes=2 * hidden * row)
        g.save(wide)
        mean = g.op(g.op(wide, nbytes=2 * hidden * row, seconds=2 * hidden * row * copy),
                    nbytes=4 * tokens, seconds=2 * hidden * row * copy)  # fmt: skip
        scale = g.op(mean, nbytes=4 * tokens, seconds=3e-6)
        g.save(scale)
        product = elementwise(wide, scale, nbytes=2 * hidden * row)
        narrow = elementwise(product, nbytes=hidden * row)
        weight = g.parameter(hidden * 2)
        g.save(narrow, weight)
        return g.op(weight, narrow, nbytes=hidden * row, seconds=2 * hidden * row * copy, held=True)

    def rotate(x: int, cos: int, sin: int) -> int:
        heads = g.view(g.view(x))
        first = elementwise(heads, cos, nbytes=hidden * row)
        half = elementwise(g.view(heads), nbytes=hidden * row // 2)
        turned = elementwise(half, g.view(heads), nbytes=hidden * row)
        second = elementwise(turned, sin, nbytes=hidden * row)
        g.save(cos, sin)
        return elementwise(first, second, nbytes=hidden * row)

    x = g.input(hidden * row)
    cos, sin = g.input(128 * row, shared=True), g.input(128 * row, shared=True)
    normed = norm(x)
    q, k, v = (linear(normed, hidden, hidden) for _ in range(3))
    q, k, v = rotate(q, cos, sin), rotate(k, cos, sin), g.view(v)
    attended = g.op(q, k, v, nbytes=(hidden * row, 16 * tokens * 4), seconds=1.2e-3)
    g.save(q, k, v, attended, attended + 1)
    flat = g.view(g.view(attended))
    h = elementwise(x, linear(flat, hidden, hidden), nbytes=hidden * row)
    normed = norm(h)
    gate, up = linear(normed, hidden, ffn), linear(normed, hidden, ffn)
    g.save(gate)
    active = g.op(gate, nbytes=ffn * row, seconds=2 * ffn * row * copy, held=True)
    g.save(active, up)
    down = linear(elementwise(active, up, nbytes=ffn * row), ffn, hidden)
    g.output(elementwise(h, down, nbytes=hidden * row))
    return g.graph()


# ---------------------------------------------------------------------------------------------- profiles

RECIPE = Recipe(kept=(), dropped=(0,), replayed=(0,))


def entry(
    mode: Mode,
    resident: int,
    seconds: float,
    *,
    forward: int = 0,
    backward: int = 0,
    inputs: tuple[int, ...] = (),
    outputs: tuple[int, ...] = (),
    host: int = 0,
) -> Entry:
    return Entry(
        mode=mode,
        resident_bytes=resident,
        forward_peak_bytes=forward,
        backward_peak_bytes=backward,
        extra_seconds=seconds,
        holds_inputs=inputs,
        holds_outputs=outputs,
        host_bytes=host,
        recipe=RECIPE if mode is Mode.RECIPE else None,
    )


def kind(*menu: Entry, name: str = "block") -> Kind:
    return Kind(signature=name, menu=menu, saved_bytes=menu[0].resident_bytes, forward_seconds=1.0)


def profile(
    kinds: Sequence[Kind],
    calls: Sequence[RegionCall],
    segments: Sequence[Segment],
    *,
    boundary_bytes: Sequence[int] = (),
    step: StepBytes | None = None,
    step_seconds: float = 10.0,
    accumulate: bool = False,
) -> Profile:
    return Profile(
        model="Tiny",
        fingerprint="f",
        signature="s",
        environment=Environment("cpu", "cpu", "2.13"),
        step=step or StepBytes(parameters=0),
        kinds=tuple(kinds),
        calls=tuple(calls),
        boundary_bytes=tuple(boundary_bytes),
        segments=tuple(segments),
        step_seconds=step_seconds,
        accumulate=accumulate,
    )


def stack(
    kinds: Sequence[Kind],
    order: Sequence[int],
    *,
    boundary: int = 10,
    glue: int = 20,
    gradient: int = 3,
    step: StepBytes | None = None,
    accumulate: bool = False,
    step_seconds: float = 10.0,
) -> Profile:
    """A model of stacked blocks with a head: calls in a chain, boundary b between call b-1 and call b.

    The measured step is worked out here: the reference holds its input, the head needs `glue` bytes, and
    every block's backward leaves `gradient` bytes of parameter gradients.
    """
    calls = [
        RegionCall(f"layers.{i}", 0, kind, "layers", (i,), (i + 1,), gradient) for i, kind in enumerate(order)
    ]
    reference = [kinds[k].menu[kinds[k].reference] for k in order]
    segments = []
    level = boundary  # the embedding's output: boundary 0
    segments.append(Segment(Phase.FORWARD, -1, 0, level, level, label="embedding"))
    for i, full in enumerate(reference):
        peak = level + max(full.forward_peak_bytes, boundary + full.resident_bytes)
        end = level + boundary + full.resident_bytes
        segments.append(Segment(Phase.FORWARD, i, level, peak, end))
        level = end
    segments.append(Segment(Phase.FORWARD, -1, level, level + glue, level, label="head"))
    gradients = 0
    for i in range(len(order) - 1, -1, -1):
        full = reference[i]
        peak = level + max(full.backward_peak_bytes, gradient)
        end = level - boundary - full.resident_bytes + gradient
        gradients += gradient
        segments.append(Segment(Phase.BACKWARD, i, level, peak, end, gradients))
        level = end
    if step is None:
        step = StepBytes(parameters=1000, gradients=gradients)
    return profile(
        kinds, calls, segments, boundary_bytes=[boundary] * (len(order) + 1), step=step,
        accumulate=accumulate, step_seconds=step_seconds,
    )  # fmt: skip


def layers(count: int, saved: int = 100, seconds: float = 1.0, **options: int) -> Profile:
    """`count` equal layers that are kept (saved bytes, 0 s) or fully recomputed (0 bytes, `seconds` each)."""
    block = kind(
        entry(Mode.KEEP, saved, 0.0, forward=saved, backward=20),
        entry(Mode.FULL, 0, seconds, forward=20, backward=saved + 20, inputs=(0,)),
    )
    return stack([block], [0] * count, **options)


def llama_stack(count: int, entries: int = 12, kinds: int = 1, seed: int = 0) -> Profile:
    """A large model: `count` calls, menus of `entries` with realistic bytes, seconds and working sets."""
    import random

    rng = random.Random(seed)
    found = []
    for _ in range(kinds):
        total = rng.randint(10**9, 2 * 10**9)
        menu = [entry(Mode.KEEP, total, 0.0, forward=total, backward=total // 4)]
        for i in range(1, entries):
            share = 1 - i / entries
            resident = int(total * share * rng.uniform(0.97, 1.03))
            seconds = 5e-3 * (1 - share) ** 1.7 * rng.uniform(0.9, 1.1)
            last = i == entries - 1
            menu.append(
                entry(
                    Mode.FULL if last else Mode.RECIPE,
                    0 if last else resident,
                    seconds,
                    forward=total // 3 if last else resident + total // 10,
                    backward=int(total * (1.3 - share)),
                    inputs=(0,) if last or i % 2 else (),
                    outputs=(0,) if i % 5 == 0 and not last else (),
                )
            )
        found.append(kind(*menu))
    order = sorted(rng.randrange(kinds) for _ in range(count))
    return stack(found, order, boundary=2**27, glue=2**32, gradient=10**8, step_seconds=0.02 * count)
