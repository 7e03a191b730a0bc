"""The verifier: equal steps pass, and every kind of broken recompute is caught."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from remat import InputError, VerificationError
from remat.check.verify import Difference, Verification, compare, difference, verify
from remat.run.wrap import bypass, wrap


class Block(nn.Module):
    def __init__(self, dropout=0.0, norm=False):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.norm(self.linear(x)).tanh())


def build(**options):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(**options) for _ in range(3)), nn.Linear(8, 1), nn.Flatten(0)), torch.randn(
        6, 8
    )


def mean(output, batch):
    return output.pow(2).mean()


@contextlib.contextmanager
def forward_of(module, replacement):
    """Run a module's forward in some other way for a while."""
    original = module.forward
    module.forward = lambda x: replacement(original, x)
    try:
        yield
    finally:
        del module.forward


def run(model, batch):
    return mean(model(batch), batch)


def against(model, batch, replacement, **options):
    return compare(
        contextlib.nullcontext, lambda: forward_of(model[1], replacement), model, batch, run=run, **options
    )


def test_a_right_checkpoint_is_equal_bit_for_bit():
    model, x = build(dropout=0.5)
    result = against(model, x, lambda f, x: checkpoint(f, x, use_reentrant=False), inputs=True)
    assert result.bitwise
    assert result.ok
    assert result.max_abs_diff == result.noise == 0.0
    assert result.compared == 1 + len(list(model.parameters())) + 1  # loss, parameters, the input
    assert str(result) == "equal bit for bit: 10 tensors compared, whole step"
    result.raise_if_different()


def test_nothing_compared_is_not_called_equal():
    nothing = Verification(True, True, 0.0, 0.0, compared=0, how="1 recompute as a whole")
    assert str(nothing) == "nothing compared in the step: 1 recompute as a whole"


def scaled_recompute(factor):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.tanh()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            rebuilt = x.tanh() * factor  # not what the forward pass had
            return grad * (1 - rebuilt**2)

    return (
        lambda forward, x: forward(x) * 0.5 + Broken.apply(x),
        lambda forward, x: forward(x) * 0.5 + x.tanh(),
    )


def test_a_broken_recompute_is_caught():
    model, x = build()
    broken, right = scaled_recompute(1.001)
    result = compare(
        lambda: forward_of(model[1], right),
        lambda: forward_of(model[1], broken),
        model,
        x,
        run=run,
        inputs=True,
    )
    assert not result.bitwise
    assert not result.ok
    assert 0 < result.max_abs_diff < 0.1
    assert result.noise == 0.0
    assert result.worst.startswith("gradient of")
    with pytest.raises(VerificationError, match="different: 10 tensors compared"):
        result.raise_if_different()


def test_another_dropout_mask_on_recompute_is_caught():
    model, x = build(dropout=0.5)
    result = against(model, x, lambda f, x: checkpoint(f, x, use_reentrant=False, preserve_rng_state=False))
    assert not result.ok


def test_a_missing_gradient_is_caught():
    model, x = build()
    result = against(model, x, lambda f, x: x + (f(x) - x).detach())
    assert not result.ok
    assert result.missing == ("gradient of 1.linear.bias", "gradient of 1.linear.weight")
    assert "2 gradients missing, first gradient of 1.linear.bias" in str(result)


def test_an_unexpected_gradient_is_caught():
    model, x = build()
    result = compare(
        lambda: forward_of(model[1], lambda f, x: x + (f(x) - x).detach()),
        contextlib.nullcontext,
        model,
        x,
        run=run,
    )
    assert not result.ok
    assert result.untrained == ("1.linear.weight", "1.linear.bias")
    assert "gradient of 1.linear.weight" in result.unexpected


def test_statistics_counted_twice_are_caught():
    model, x = build(norm=True)
    result = against(model, x, lambda f, x: checkpoint(f, x, use_reentrant=False))
    assert not result.ok
    assert result.worst.startswith("buffer 1.norm")


def test_noise_of_the_step_itself_is_allowed():
    """A step that is never twice the same: the checkpointed one may differ by as much."""
    model, x = build()
    generator = torch.Generator().manual_seed(1)

    def noisy(model, batch):
        return (model(batch) * (1 + 1e-6 * torch.rand(6, generator=generator))).pow(2).mean()

    result = compare(contextlib.nullcontext, contextlib.nullcontext, model, x, run=noisy)
    assert result.ok
    assert not result.bitwise
    assert result.noise > 0
    assert "within the step's own noise" in str(result)


def test_tolerance_is_allowed_on_top():
    model, x = build()
    broken, right = scaled_recompute(1.00001)
    around = [lambda: forward_of(model[1], right), lambda: forward_of(model[1], broken)]
    assert not compare(*around, model, x, run=run).ok
    assert compare(*around, model, x, run=run, tolerance=1e-3).ok


def test_inputs_without_a_derivative_are_left_out_and_said():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, target):
            target[target < 0] = 0.0  # a leaf that requires a gradient cannot be written
            return F.mse_loss(self.linear(x), target)

    batch = {"x": torch.randn(2, 4), "target": torch.randn(2, 4)}
    before = batch["target"].clone()
    result = verify(Model(), batch, contextlib.nullcontext)
    assert result.bitwise
    assert "without input gradients" in result.how
    assert torch.equal(batch["target"], before)


def test_the_model_and_the_batch_are_untouched():
    model, x = build(norm=True, dropout=0.5)
    run(model, x).backward()
    gradients = [(p.grad, p.grad.clone()) for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    state = torch.get_rng_state()
    against(model, x, lambda f, x: checkpoint(f, x, use_reentrant=False), inputs=True)
    assert all(
        p.grad is g and torch.equal(g, v) for p, (g, v) in zip(model.parameters(), gradients, strict=True)
    )
    assert all(torch.equal(b, c) for b, c in zip(model.buffers(), buffers, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is None
    assert not x.requires_grad


class Counting:
    """A wrapper that counts how often it runs."""

    owner = "test"

    def __init__(self):
        self.calls = 0

    def __call__(self, module, forward, args, kwargs):
        self.calls += 1
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def test_an_enabled_model_is_compared_with_its_wrappers_bypassed():
    model, x = build(dropout=0.5)
    around = Counting()
    wrap(model[0], around)
    result = verify(model, x, loss=mean)
    assert result.bitwise
    assert around.calls == 1  # the two reference runs did not come by
    with bypass():
        run(model, x)
    assert around.calls == 1


def test_nothing_to_verify():
    model, x = build()
    with pytest.raises(InputError, match=r"remat.enable\(model\) first"):
        verify(model, x, loss=mean)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(InputError, match="requires a gradient"):
        compare(contextlib.nullcontext, contextlib.nullcontext, model, x, run=run)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], Difference(True)),
        ([1.0, 2.0], [1.0, 2.5], Difference(False, 0.5, 0.25)),
        ([math.nan, math.inf], [math.nan, math.inf], Difference(True)),
        ([1.0, math.inf], [2.0, math.inf], Difference(False, 1.0, 1.0)),
        ([1.0], [math.nan], Difference(False, math.inf, math.inf)),
        ([0.0], [-0.0], Difference(False, 0.0, 0.0)),
        ([0.0], [1.0], Difference(False, 1.0, math.inf)),
        ([1.0], [1.0, 1.0], Difference(False, math.inf, math.inf)),
        ([], [], Difference(True)),
    ],
)
def test_difference(a, b, expected):
    assert difference(torch.tensor(a), torch.tensor(b)) == expected


def test_difference_looks_at_dtypes_layouts_and_strides():
    a = torch.eye(3)
    assert difference(a, a.double()).absolute == math.inf
    assert difference(a.t(), a).bitwise
    assert difference(a.to_sparse(), a.to_sparse()).bitwise
    assert difference(a.bfloat16(), a.bfloat16()).bitwise
    assert difference(a.to(torch.complex64), 2 * a.to(torch.complex64)).absolute == 1.0
