"""Hand-made graphs and profiles: small builders, so that a test reads as the case it is about."""

from __future__ import annotations

import dataclasses

from remat.records import Op, RegionGraph, Role, Saved, Storage, Value


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
