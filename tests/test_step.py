"""The calling convention: batches in, losses out, and what names a model and a batch."""

from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from remat import InputError
from remat.check.step import batch_to, call_model, fingerprint, loss_of, run_step, signature, tensors_of


class Echo(nn.Module):
    def forward(self, *args, **kwargs):
        return args, kwargs


X, Y = torch.ones(2, 3), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "args", "kwargs"),
    [
        ({"x": X, "flag": True}, (), {"x": X, "flag": True}),
        (UserDict(x=X), (), {"x": X}),  # transformers' BatchEncoding is one
        ((X, Y), (X, Y), {}),
        ([X, {"y": Y}], (X, {"y": Y}), {}),
        (X, (X,), {}),
    ],
)
def test_call_model(batch, args, kwargs):
    assert call_model(Echo(), batch) == (args, kwargs)
    assert all(isinstance(t, torch.Tensor) for t in tensors_of(batch))


def test_a_batch_of_another_kind_is_refused():
    with pytest.raises(InputError, match="batch is a str; give a dict"):
        call_model(Echo(), "text")


SCALAR = torch.tensor(2.0)


@pytest.mark.parametrize(
    "output",
    [SimpleNamespace(loss=SCALAR, logits=X), {"loss": SCALAR}, UserDict(loss=SCALAR), SCALAR],
    ids=["attribute", "dict", "mapping", "scalar"],
)
def test_default_loss(output):
    assert loss_of(output, None) is SCALAR


def test_own_loss():
    assert loss_of(X, Y, lambda output, batch: output.sum() + batch.sum()).item() == 6.0
    assert run_step(nn.Identity(), X, lambda output, batch: output.mean()).item() == 1.0


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (X, r"returned float32\[2, 3\], and no loss"),
        ((SCALAR, X), "returned a tuple"),
        (SimpleNamespace(loss=None, logits=X), "pass loss=lambda output, batch"),
        ({"logits": X}, "labels in the batch"),
    ],
)
def test_no_loss_says_what_to_pass(output, words):
    with pytest.raises(InputError, match=words):
        loss_of(output, None)


@pytest.mark.parametrize("value", [X, 1.0, None])
def test_a_loss_that_is_no_scalar(value):
    with pytest.raises(InputError, match="must return one number as a tensor"):
        loss_of(X, None, lambda output, batch: value)


def test_signature():
    batch = {"x": X, "rest": [Y, (None, 3, "a")], "o": object()}
    assert signature(batch) == "{x: float32[2, 3], rest: [int64[4], (None, 3, 'a')], o: a object}"
    assert signature(X) == "float32[2, 3]"


def test_batch_to():
    moved = batch_to({"x": X, "n": 3, "l": [Y]}, "meta")
    assert moved["x"].is_meta
    assert moved["l"][0].is_meta
    assert moved["n"] == 3


def test_fingerprint_names_the_model_and_not_its_values():
    one, two = nn.Linear(2, 3), nn.Linear(2, 3)
    assert fingerprint(one) == fingerprint(two)
    others = [
        nn.Linear(3, 2),
        nn.Linear(2, 3, bias=False),
        nn.Linear(2, 3).double(),
        nn.Sequential(nn.Linear(2, 3)),
    ]
    one.register_buffer("extra", torch.zeros(1))
    assert len({fingerprint(model) for model in [one, two, *others]}) == 6
