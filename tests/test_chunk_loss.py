"""The chunked loss equals the plain one: value and every gradient, against a reference in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import LoraLinear
from remat.check.live import LiveBytes
from remat.errors import RecomputeError, RematError
from remat.run import chunk_loss, chunk_softmax
from remat.run.chunk import HeadHandle, chunk_head
from remat.run.chunk_loss import chunk_rows, no_row_ignored

VOCABULARY, WIDTH, BATCH, LENGTH = 37, 8, 3, 11
IGNORED = -100


class Model(nn.Module):
    """A body, a head, and a loss that is written as users write it."""

    def __init__(self, head: Callable[[], nn.Module] | None = None, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if head is None else head()
        if tied:
            self.head.weight = self.embed.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(tokens))))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels[:, ::4] = IGNORED
    return tokens, labels


def flat(logits: Tensor) -> Tensor:
    return logits.view(-1, VOCABULARY)


def softcapped(logits: Tensor) -> Tensor:
    logits = logits / 3.0
    logits = torch.tanh(logits)
    return logits * 3.0


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels[..., 1:].contiguous().view(-1))


def weights(like: Tensor) -> Tensor:
    return torch.linspace(0.0, 2.0, VOCABULARY).to(like.dtype)


def masked(labels: Tensor) -> Tensor:
    return torch.full_like(labels, IGNORED)


Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "mean": lambda x, y: F.cross_entropy(flat(x), y.view(-1)),
    "module": lambda x, y: nn.CrossEntropyLoss()(flat(x), y.view(-1)),
    "sum": lambda x, y: F.cross_entropy(flat(x), y.view(-1), reduction="sum"),
    "none": lambda x, y: (
        F.cross_entropy(flat(x), y.view(-1), reduction="none") * torch.arange(y.numel()).to(x.dtype)
    ).sum(),
    "none, class second": lambda x, y: (
        F.cross_entropy(x.transpose(1, 2), y, reduction="none").square().mean()
    ),
    "num_items_in_batch": lambda x, y: F.cross_entropy(flat(x), y.view(-1), reduction="sum") / 71,
    "num_items tensor": lambda x, y: (
        F.cross_entropy(flat(x), y.view(-1), reduction="sum") / torch.tensor(71)
    ),
    "another ignore_index": lambda x, y: F.cross_entropy(
        flat(x), y.masked_fill(y < 0, 5).view(-1), ignore_index=5
    ),
    "nothing ignored": lambda x, y: F.cross_entropy(flat(x), y.clamp(min=0).view(-1)),
    "all masked, sum": lambda x, y: F.cross_entropy(flat(x), masked(y).view(-1), reduction="sum"),
    "one row": lambda x, y: F.cross_entropy(x[0, :1], y[0, 1:2]),
    "label smoothing": lambda x, y: F.cross_entropy(flat(x), y.view(-1), label_smoothing=0.1),
    "smoothing, none": lambda x, y: (
        F.cross_entropy(flat(x), y.view(-1), label_smoothing=0.1, reduction="none").square().sum()
    ),
    "class weights": lambda x, y: F.cross_entropy(flat(x), y.view(-1), weight=weights(x)),
    "weights, smoothing": lambda x, y: F.cross_entropy(
        flat(x), y.view(-1), weight=weights(x), label_smoothing=0.2
    ),
    "weights, smoothing, sum": lambda x, y: F.cross_entropy(
        flat(x), y.view(-1), weight=weights(x), label_smoothing=0.2, reduction="sum"
    ),
    "weights, smoothing, none": lambda x, y: F.cross_entropy(
        flat(x), y.view(-1), weight=weights(x), label_smoothing=0.2, reduction="none"
    ).square().sum(),
    "softcap": lambda x, y: F.cross_entropy(flat(softcapped(x)), y.view(-1)),
    "softcap, none": lambda x, y: F.cross_entropy(
        flat(softcapped(x)), y.view(-1), reduction="none"
    ).square().sum(),
    "tanh last": lambda x, y: F.cross_entropy(flat(x).tanh(), y.view(-1)),
    "logit scale": lambda x, y: F.cross_entropy(flat(x * 0.25), y.view(-1)),
    "scale from the left": lambda x, y: F.cross_entropy(flat(2 * x / 3), y.view(-1)),
    "shifted": shifted,
    "class second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "permuted": lambda x, y: F.cross_entropy(x.permute(0, 2, 1), y, label_smoothing=0.1),
    "chosen by a mask": lambda x, y: F.cross_entropy(x[y >= 0], y[y >= 0]),
    "chosen by numbers": lambda x, y: F.cross_entropy(
        x[torch.tensor([0, 2, 0]), torch.tensor([1, 1, 3])], y[[0, 2, 0], [1, 1, 3]]
    ),
    "some of the batch": lambda x, y: F.cross_entropy(
        x[1:, 2:7].reshape(-1, VOCABULARY), y[1:, 2:7].reshape(-1)
    ),
    "flattened": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    "two losses of the same logits": lambda x, y: (
        F.cross_entropy(flat(x), y.view(-1))
        + 0.3 * F.cross_entropy(flat(x * 2.0), y.view(-1), reduction="sum")
    ),
    "accumulated": lambda x, y: F.cross_entropy(flat(x), y.view(-1)) / 4,
}  # fmt: skip


@dataclass
class Found:
    loss: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)


def step(model: nn.Module, loss: Loss, context: Any = nullcontext, passes: int = 1) -> Found:
    tokens, labels = batch()
    for _ in range(passes):
        with context():
            value = loss(model(tokens), labels)
        value.backward()
    return Found(value.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


def assert_close(reference: Found, found: Found, rounding: float = 4e-6) -> None:
    """Within a few roundings of the largest number of each gradient."""
    assert reference.gradients.keys() == found.gradients.keys()
    pairs = {"loss": (reference.loss, found.loss)}
    pairs.update({n: (g, found.gradients[n]) for n, g in reference.gradients.items()})
    for name, (expected, value) in pairs.items():
        slack = rounding * max(1e-3, float(expected.abs().max()))
        torch.testing.assert_close(
            value.double(), expected.double(), rtol=0, atol=slack, msg=lambda m, n=name: f"{n}: {m}"
        )


HEADS: dict[str, Callable[[], Model]] = {
    "linear": Model,
    "tied": lambda: Model(tied=True),
    "bias": lambda: Model(lambda: nn.Linear(WIDTH, VOCABULARY)),
    "lora": lambda: Model(lambda: LoraLinear(nn.Linear(WIDTH, VOCABULARY))),
    "own module": lambda: Model(
        lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        )
    ),
    "saves its result": lambda: Model(lambda: nn.Sequential(nn.Linear(WIDTH, VOCABULARY), nn.Tanh())),
    "frozen": lambda: _frozen(Model()),
    "weight norm": lambda: Model(
        lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, VOCABULARY, bias=False))
    ),
}  # fmt: skip


def _frozen(model: Model) -> Model:
    model.head.requires_grad_(False)
    return model


def chunked(model: Model, rows: int = 4, **options: Any) -> HeadHandle:
    return chunk_head(model, rows=rows, fuse=False, **options)


CUTS = {"rows": {}, "columns": {"columns": True, "chunk_bytes": 33 * 4 * 5}}  # five classes at a time


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_every_loss_against_fp64(loss: Loss, cut: dict[str, Any]) -> None:
    model = Model()
    reference = step(copy.deepcopy(model).double(), loss)
    handle = chunked(model, **cut)
    assert_close(reference, step(model, loss))
    assert handle.counts.losses >= 1
    assert (handle.counts.materialised, handle.counts.plain) == (0, 0)


@pytest.mark.parametrize("rows", [1, 4, 33, 1000])
@pytest.mark.parametrize("build", HEADS.values(), ids=HEADS)
def test_every_head_against_fp64(build: Callable[[], Model], rows: int) -> None:
    model = build()
    loss = LOSSES["label smoothing"]
    reference = step(copy.deepcopy(model).double(), loss)
    handle = chunked(model, rows)
    assert_close(reference, step(model, loss))
    assert (handle.counts.losses, handle.counts.materialised, handle.counts.plain) == (1, 0, 0)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("name", ["none", "smoothing, none", "mean"])
@pytest.mark.parametrize("build", HEADS.values(), ids=HEADS)
def test_rows_with_their_own_gradients(build: Callable[[], Model], name: str, cut: dict[str, Any]) -> None:
    model = build()
    reference = step(copy.deepcopy(model).double(), LOSSES[name])
    chunked(model, **cut)
    assert_close(reference, step(model, LOSSES[name]))


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_equal_to_the_bit_in_fp64_up_to_the_order_of_sums(cut: dict[str, Any]) -> None:
    model = Model().double()
    reference = step(copy.deepcopy(model), LOSSES["softcap"])
    chunked(model, **cut)
    assert_close(reference, step(model, LOSSES["softcap"]), rounding=1e-14)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_gradient_accumulation(cut: dict[str, Any]) -> None:
    model = Model()
    reference = step(copy.deepcopy(model).double(), LOSSES["accumulated"], passes=4)
    chunked(model, **cut)
    assert_close(reference, step(model, LOSSES["accumulated"], passes=4))


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_all_masked_is_what_torch_gives(reduction: str, smoothing: float, cut: dict[str, Any]) -> None:
    """A sum is a connected zero, a mean is nan (0/0) as in torch; the gradients are zero, never nan."""
    tokens, labels = batch()

    def run(model: Model) -> tuple[Tensor, dict[str, Tensor]]:
        loss = F.cross_entropy(
            flat(model(tokens)), masked(labels).view(-1), reduction=reduction, label_smoothing=smoothing
        )
        loss.sum().backward()
        return loss.detach(), {n: p.grad for n, p in model.named_parameters()}

    model = Model()
    expected, gradients = run(copy.deepcopy(model))
    chunked(model, **cut)
    found, own = run(model)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)
    for name, gradient in gradients.items():
        assert torch.equal(own[name], gradient), name
        assert not gradient.any()


# ------------------------------------------------------------------------------------------ precision


def bf16_errors(model: Model, context: Any = nullcontext, **cut: Any) -> tuple[float, float]:
    """Distance of the plain and of the chunked weight gradient from fp64, relative to its norm."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(flat(x.float()) if x.dtype != torch.float64 else flat(x), y.view(-1))

    reference = step(copy.deepcopy(model).double(), loss).gradients["head.weight"]
    plain = step(copy.deepcopy(model), loss, context).gradients["head.weight"]
    chunked(model, **{"rows": 2, **cut})
    own = step(model, loss, context).gradients["head.weight"]
    assert own.dtype == plain.dtype
    return tuple(float((g.double() - reference).norm() / reference.norm()) for g in (plain, own))  # type: ignore[return-value]


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_bf16_weights_sum_their_gradient_in_fp32(cut: dict[str, Any]) -> None:
    plain, own = bf16_errors(Model().bfloat16(), **cut)
    assert own < 1.3 * plain


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_autocast(cut: dict[str, Any]) -> None:
    plain, own = bf16_errors(Model(), lambda: torch.autocast("cpu", torch.bfloat16), **cut)
    assert 1e-4 < plain < 2e-2  # autocast really was on
    assert own < 1.3 * plain


@pytest.mark.parametrize("build", [Model, HEADS["lora"]], ids=["linear", "lora"])
def test_autocast_of_the_head_not_of_the_loss(build: Callable[[], Model]) -> None:
    """The head ran under autocast, the loss is taken outside: the head's products are bf16 all the same."""
    tokens, labels = batch()

    def run(model: Model) -> Found:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
        assert logits.dtype == torch.bfloat16
        loss = F.cross_entropy(logits.float().view(-1, VOCABULARY), labels.view(-1))
        loss.backward()
        return Found(loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None})

    model = build()
    reference = run(copy.deepcopy(model))
    handle = chunked(model)
    assert_close(reference, run(model), rounding=2e-2)
    assert handle.counts.losses == 1


def test_autocast_loses_no_gradient_in_a_module_head() -> None:
    """autocast remembers casts: one made without gradients would cut the head off."""
    model = HEADS["lora"]()
    context = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    loss = LOSSES["mean"]
    reference = step(copy.deepcopy(model), loss, context)
    chunked(model)
    assert_close(reference, step(model, loss, context), rounding=2e-2)


def test_loss_of_bf16_logits_has_their_dtype_and_fp32_under_autocast() -> None:
    model = Model().bfloat16()
    tokens, labels = batch()
    chunked(model)
    assert LOSSES["mean"](model(tokens), labels).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert LOSSES["mean"](model(tokens), labels).dtype == torch.float32


def test_fp16_gradients_do_not_underflow_before_the_scaler() -> None:
    """With a mean over many rows each row's slope is below fp16's least number until the loss is scaled."""
    torch.manual_seed(0)
    head = nn.Linear(4, 7, bias=False).half()
    hidden = torch.randn(4096, 4).half().mul_(0.05)
    labels = torch.randint(7, (4096,))
    reference = copy.deepcopy(head).double()
    F.cross_entropy(reference(hidden.double()), labels).mul(2.0**16).backward()
    handle = chunk_head(nn.Sequential(head), head="0", rows=512)
    F.cross_entropy(head(hidden).float(), labels).mul(2.0**16).backward()
    assert handle.counts.losses == 1
    torch.testing.assert_close(head.weight.grad.double(), reference.weight.grad, rtol=2e-3, atol=2.0)


# ------------------------------------------------------------------------------------------- autograd


def test_retain_graph_gives_the_same_gradients_again() -> None:
    model = Model()
    chunked(model)
    tokens, labels = batch()
    loss = LOSSES["mean"](model(tokens), labels)
    loss.backward(retain_graph=True)
    once = {n: p.grad.clone() for n, p in model.named_parameters()}
    loss.backward(torch.tensor(2.0))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 3 * once[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["mean", "none"])
def test_second_derivatives_are_refused(name: str) -> None:
    model = Model()
    chunked(model)
    tokens, labels = batch()
    loss = LOSSES[name](model(tokens), labels)
    with pytest.raises(RematError, match="no second derivative"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


@pytest.mark.parametrize("build", [Model, HEADS["lora"], HEADS["tied"]], ids=["linear", "lora", "tied"])
def test_hooks_on_a_parameter_fire_once(build: Callable[[], Model]) -> None:
    model = build()
    fired: list[str] = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.register_hook(lambda g, n=name: fired.append(n))
            p.register_post_accumulate_grad_hook(lambda _, n=name: fired.append(f"{n} accumulated"))
    chunked(model, rows=2)
    step(model, LOSSES["mean"])
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert sorted(fired) == sorted([*trained, *(f"{n} accumulated" for n in trained)])


def test_two_graphs_alive_and_one_never_used() -> None:
    model = Model()
    loss = LOSSES["mean"]
    reference = step(copy.deepcopy(model), loss, passes=2)
    chunked(model)
    tokens, labels = batch()
    first, unused, second = (loss(model(tokens), labels) for _ in range(3))
    second.backward()
    first.backward()
    del unused
    assert_close(reference, Found(first.detach(), {n: p.grad for n, p in model.named_parameters()}))


def test_a_weight_written_before_the_loss_is_an_error() -> None:
    model = Model()
    chunked(model)
    tokens, labels = batch()
    logits = model(tokens)
    with torch.no_grad():
        model.head.weight.add_(1.0)
    with pytest.raises(RecomputeError, match=r"'weight' of Linear was written .* optimizer.step"):
        LOSSES["mean"](logits, labels)


def test_hidden_states_written_before_the_loss_are_an_error() -> None:
    head = nn.Linear(4, 7)
    handle = chunk_head(nn.Sequential(head), head="0")
    hidden = torch.randn(3, 4, requires_grad=True) * 1.0
    logits = head(hidden)
    hidden.mul_(2.0)
    with pytest.raises(RecomputeError, match="hidden states were written in place"):
        F.cross_entropy(logits, torch.tensor([0, 1, 2]))
    assert handle.counts.losses == 0


def test_a_label_out_of_range_raises_as_in_torch_and_leaves_nothing() -> None:
    model = HEADS["lora"]()
    parameters = dict(model.named_parameters())
    handle = chunked(model)
    tokens, labels = batch()
    labels[0, 1] = VOCABULARY
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        LOSSES["mean"](model(tokens), labels)
    assert all(p is parameters[n] and p.grad is None for n, p in model.named_parameters())
    labels[0, 1] = 1
    step_after = LOSSES["mean"](model(tokens), labels)
    step_after.backward()
    handle.remove()


def test_an_exception_in_the_head_leaves_its_parameters() -> None:
    class Moody(nn.Linear):
        patience = 1000

        def forward(self, x: Tensor) -> Tensor:
            self.patience -= x.numel() > 0
            if self.patience == 0:
                raise RuntimeError("moody")
            return super().forward(x)

    model = Model(lambda: Moody(WIDTH, VOCABULARY))
    weight = model.head.weight
    chunked(model)
    tokens, labels = batch()
    LOSSES["mean"](model(tokens), labels).backward()  # it has been tried whether this head can be cut
    model.head.patience = 3
    with pytest.raises(RuntimeError, match="moody"):
        LOSSES["mean"](model(tokens), labels)
    assert model.head.weight is weight
    assert isinstance(model.head.weight, nn.Parameter)
    LOSSES["mean"](model(tokens), labels).backward()


# --------------------------------------------------------------------------------------------- memory


def peak_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> int:
    model.zero_grad(set_to_none=True)
    with LiveBytes("cpu") as live:
        F.cross_entropy(model(tokens).float().view(-1, 512), labels.view(-1)).backward()
        return live.peak_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_falls_by_the_logits(dtype: torch.dtype) -> None:
    """Plain: logits, their float copy, log-probabilities and gradients; chunked: one chunk in fp32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(512, 16), nn.Linear(16, 512, bias=False)).to(dtype)
    tokens, labels = torch.randint(512, (4, 256)), torch.randint(512, (4, 256))
    plain = peak_of(model, tokens, labels)
    with chunk_head(model, head="1", rows=32):
        own = peak_of(model, tokens, labels)
    logits = 1024 * 512
    chunk = 32 * 512
    width, weight = dtype.itemsize, 512 * 16
    assert plain >= logits * 4 * 2
    # hidden states with their gradients; the weight's gradient as a sum and as handed over; a chunk
    assert own <= 3 * 1024 * 16 * width + weight * (4 + width) * 2 + chunk * (4 + 2 * width) + 65536
    assert own < plain / 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [64, 1024])
def test_no_labels_take_more_than_when_no_row_is_ignored(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(512, 64), nn.Linear(64, 512, bias=False)).to(dtype)
    tokens, labels = torch.randint(512, (4, 256)), torch.randint(512, (4, 256))
    with chunk_head(model, head="1", rows=rows):
        peaks = []
        for ignored in (0, 1, 700, 1000, 1024):
            given = labels.clone()
            given.view(-1)[:ignored] = IGNORED
            peaks.append(peak_of(model, tokens, given))
        with no_row_ignored():
            most = {peak_of(model, tokens, given), peak_of(model, tokens, labels)}
    assert max(most) >= max(peaks)
    assert max(most) <= max(peaks) * 1.01  # a bound that is reached
    assert max(most) - min(most) < 64


@pytest.mark.parametrize("name", ["mean", "none"])
def test_ignored_rows_have_no_gradient_whatever_comes_from_above(name: str) -> None:
    model, (_, labels) = Model(), batch()
    found = []
    for context in (nullcontext, lambda: chunked(model)):
        with context():
            hidden = torch.zeros(BATCH, LENGTH, WIDTH, requires_grad=True)
            loss = F.cross_entropy(
                flat(model.head(hidden)), labels.view(-1), ignore_index=IGNORED, reduction=name
            )
            loss.backward(torch.full_like(loss, torch.inf))
            found.append(hidden.grad[labels == IGNORED])
    assert not found[0].any()
    assert not found[1].any()


def test_200_steps_leak_nothing() -> None:
    model = HEADS["lora"]()
    chunked(model)
    tokens, labels = batch()
    levels = []
    with LiveBytes("cpu") as live:
        for _ in range(200):
            model.zero_grad(set_to_none=True)
            loss = LOSSES["softcap"](model(tokens), labels)
            loss.backward()
            del loss
            levels.append(live.current_bytes)
    assert len(set(levels[2:])) == 1


def test_memory_is_released_by_backward_even_if_the_loss_is_kept() -> None:
    model = Model()
    chunked(model)
    tokens, labels = batch()
    with LiveBytes("cpu") as live:
        loss = LOSSES["mean"](model(tokens), labels)
        before = live.current_bytes
        loss.backward()
        model.zero_grad(set_to_none=True)
        assert live.current_bytes <= before - model.head.weight.nbytes


@pytest.mark.parametrize("name", ["mean", "none"])
def test_losses_that_are_kept_hold_nothing_but_themselves(name: str) -> None:
    """`losses.append(loss)`: of the graph, labels and indices of rows are gone after backward."""
    model = Model()
    chunked(model)
    tokens, labels = batch()
    losses, levels = [], []
    with LiveBytes("cpu") as live:
        for _ in range(4):
            losses.append(LOSSES[name](model(tokens), labels))
            losses[-1].backward()
            model.zero_grad(set_to_none=True)
            levels.append(live.current_bytes)
    assert levels[3] - levels[2] == levels[2] - levels[1] == losses[-1].nbytes
    with pytest.raises(RuntimeError, match="second time"):
        losses[-1].backward()


@pytest.mark.parametrize(
    ("count", "vocabulary", "device", "rows", "nbytes", "expected"),
    [
        (100, 10, "cpu", 30, None, 25),
        (100, 10, "cpu", 1000, None, 100),
        (16384, 32000, "cuda", None, None, 2048),
        (16384, 131072, "cuda", None, None, 1024),
        (16384, 131072, "cuda", None, 64 << 20, 128),
        (4096, 32768, "cpu", None, None, 512),
        (0, 10, "cpu", None, None, 1),
        (10, 1 << 40, "cpu", None, None, 1),
    ],
)
def test_chunks_are_equal_and_sized_by_bytes(
    count: int, vocabulary: int, device: str, rows: int | None, nbytes: int | None, expected: int
) -> None:
    assert chunk_rows(count, vocabulary, torch.device(device), rows, nbytes) == expected


# -------------------------------------------------------------------------------------------- kernels


STEPS: dict[str, tuple[chunk_softmax.Step, ...]] = {
    "none": (),
    "float": (("cast", torch.float32),),
    "softcap": (("div", 3.0), ("tanh", None), ("mul", 3.0), ("cast", torch.float32)),
    "scale": (("mul", 0.5),),
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("upstream", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_fusible_and_in_place_softmax_agree_with_autograd(
    steps: tuple[chunk_softmax.Step, ...], weighted: bool, upstream: bool, smoothing: float
) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(6, 19).double(), torch.randint(19, (6,))
    steps = tuple((k, torch.float64 if k == "cast" else v) for k, v in steps)
    weight = torch.rand(19).double() if weighted else None
    scale = torch.rand(6).double() if upstream else None
    leaf = logits.clone().requires_grad_()
    x = chunk_softmax.apply_steps(steps, leaf)
    expected = F.cross_entropy(x, target, weight=weight, label_smoothing=smoothing, reduction="none")
    (slope,) = torch.autograd.grad(expected, leaf, torch.ones(6).double() if scale is None else scale)
    common = (target, steps, torch.float64, smoothing, weight, scale)
    wider = torch.cat([logits, 50 * torch.randn(6, 5).double()], 1)  # five columns that mean nothing
    of_wider = chunk_softmax.softmax_fusible(wider, *common, 19)
    assert not of_wider[1][:, 19:].any()
    for loss, own in (
        (of_wider[0], of_wider[1][:, :19]),
        chunk_softmax.softmax_fusible(logits, *common, 19),
        chunk_softmax.softmax_in_place(logits, *common, False, True),
        chunk_softmax.softmax_in_place(logits.clone(), *common, True, True),
    ):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(own, slope, rtol=1e-12, atol=1e-12)


def test_half_precision_logits_are_widened_on_cuda_only() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert chunk_loss._columns_to_add(50257, torch.bfloat16, cuda) == 50304 - 50257
    assert chunk_loss._columns_to_add(32000, torch.bfloat16, cuda) == 0
    assert chunk_loss._columns_to_add(50257, torch.float32, cuda) == 0
    assert chunk_loss._columns_to_add(50257, torch.bfloat16, cpu) == 0
    assert chunk_loss._columns_to_add(33, torch.bfloat16, cuda) == 0  # 31 more would be as many again
    assert chunk_loss._columns_to_add(1025, torch.float16, cuda) == 63


@pytest.mark.parametrize("rows", [4, 1000])
@pytest.mark.parametrize("added", [0, 3])
def test_the_gradient_of_a_tied_weight_is_added_in_place(
    monkeypatch: pytest.MonkeyPatch, rows: int, added: int
) -> None:
    """The embedding's comes second: one more tensor of the weight's size would be a large one."""
    monkeypatch.setattr(chunk_loss, "_columns_to_add", lambda *_: added)
    model = Model(tied=True)
    reference = step(copy.deepcopy(model).double(), LOSSES["mean"])
    with chunk_head(model, rows=rows, fuse=False):
        assert_close(reference, step(model, LOSSES["mean"]))
        model.zero_grad(set_to_none=True)
        tokens, labels = batch()
        loss = LOSSES["mean"](model(tokens), labels)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ) as p:
            loss.backward()
    shape = [VOCABULARY, WIDTH]
    added_up = {
        e.name for e in p.events() if e.name in ("aten::add", "aten::add_") and shape in e.input_shapes
    }
    assert added_up == {"aten::add_"}


def test_a_weight_of_a_subclass_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    class Weight(Tensor):
        pass

    monkeypatch.setattr(chunk_loss, "_columns_to_add", lambda *_: pytest.fail("not for us to copy"))
    model = Model()
    frozen = model.head.weight.detach().as_subclass(Weight)
    model.head.weight = nn.Parameter(frozen, requires_grad=False)
    assert type(model.head.weight) is not nn.Parameter
    with chunk_head(model, rows=4) as handle:
        step(model, LOSSES["mean"])
        assert handle.counts.losses


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [4, 1000])
def test_wider_logits_give_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch, name: str, bias: bool, rows: int
) -> None:
    """As on CUDA, where the number of classes is a bad one for products of matrices."""
    seen = []

    def softmax(logits: Tensor, *more: Any) -> Any:
        seen.append((logits.shape[1], more[-1]))
        return chunk_softmax.softmax_fusible(logits, *more)

    model, loss = Model(lambda: nn.Linear(WIDTH, VOCABULARY, bias=bias)), LOSSES[name]
    reference = step(copy.deepcopy(model).double(), loss)
    monkeypatch.setattr(chunk_loss, "_columns_to_add", lambda *_: 3)
    monkeypatch.setattr(chunk_loss, "compiled_softmax", softmax)
    for fuse in (True, False):
        model.zero_grad(set_to_none=True)
        with chunk_head(model, rows=rows, fuse=fuse):
            assert_close(reference, step(model, loss))
    assert set(seen) == (set() if "all masked" in name else {(VOCABULARY + 3, VOCABULARY)})


def test_without_a_compiler_it_runs_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_: Any, **__: Any) -> Any:
        def kernel(*_: Any) -> Any:
            raise RuntimeError("no C++ compiler on this machine")

        return kernel

    monkeypatch.setattr(torch, "compile", no_compiler)
    fresh = chunk_softmax.Compiled()
    monkeypatch.setattr("remat.run.chunk_loss.compiled_softmax", fresh)
    model = Model()
    reference = step(copy.deepcopy(model).double(), LOSSES["mean"])
    chunk_head(model, rows=4, fuse=True)
    assert_close(reference, step(model, LOSSES["mean"]))
    assert fresh.works is False


def test_while_a_dispatch_mode_looks_on_it_runs_unfused_and_does_not_give_up() -> None:
    fresh = chunk_softmax.Compiled()
    with LiveBytes("cpu"):
        assert fresh(torch.ones(2, 3), torch.tensor([0, 1]), (), torch.float32, 0.0, None, None, 3) is None
    assert fresh.works is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = chunk_softmax.Compiled()
    monkeypatch.setattr("remat.run.chunk_loss.compiled_softmax", fresh)
    model = Model()
    reference = step(copy.deepcopy(model).double(), LOSSES["softcap"])
    chunk_head(model, rows=4, fuse=True)
    assert_close(reference, step(model, LOSSES["softcap"]))
    if fresh.works is False:
        pytest.skip("nothing can be compiled on this machine")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    chunk_head(model, rows=7, fuse=True)
    model.zero_grad(set_to_none=True)
    assert_close(reference, step(model, LOSSES["softcap"]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs  # other lengths, the same kernel
