"""Measurements against bytes computed by hand."""

import dataclasses
import functools
import time

import pytest
import torch
from torch import nn

import remat
from remat.check.measure import Buckets

WIDTH, ROWS = 32, 8
WEIGHT = WIDTH * WIDTH * 4
ACTIVATION = ROWS * WIDTH * 4


def linear_stack(layers):
    return nn.Sequential(
        *(layer for _ in range(layers) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()))
    )


def test_forward_and_backward_by_hand():
    model, x = linear_stack(3), torch.zeros(ROWS, WIDTH)

    def step():
        model(x).sum().backward()
        model.zero_grad()

    result = remat.measure(step)
    # Held when backward of the last layer starts: three tanh outputs and the loss; then the gradient of the
    # sum (a view of one number), of tanh, and the first weight gradient with the next input gradient.
    assert result.resident_bytes == 3 * WEIGHT + ACTIVATION
    assert result.at_peak.parameters == 3 * WEIGHT
    assert result.at_peak.other == ACTIVATION
    assert result.at_peak.optimizer == 0
    assert result.activation_bytes == result.peak_bytes - result.resident_bytes
    assert 3 * ACTIVATION < result.activation_bytes < 3 * ACTIVATION + 3 * WEIGHT + 3 * ACTIVATION
    assert sum(dataclasses.asdict(result.at_peak).values()) == result.peak_bytes


def test_resident_gradients_and_optimizer_state():
    model, x = linear_stack(2), torch.zeros(ROWS, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    result = remat.measure(step, model=model, optimizer=optimizer)
    state = 2 * (2 * WEIGHT + 4)  # two moments and a step counter for each weight
    assert result.at_peak.optimizer == state
    assert result.resident_bytes == 2 * WEIGHT + 2 * WEIGHT + state + ACTIVATION
    # zero_grad freed the gradients of the last step before the peak was reached
    assert result.at_peak.gradients + result.at_peak.activations == (
        result.peak_bytes - 2 * WEIGHT - state - ACTIVATION
    )


def test_gradients_at_the_peak():
    """A large temporary after backward, while all gradients exist: the buckets say so exactly."""
    model, x = linear_stack(2), torch.zeros(ROWS, WIDTH)

    def step():
        model(x).sum().backward()
        torch.zeros(100_000)
        model.zero_grad()

    result = remat.measure(step)
    assert result.at_peak == Buckets(
        parameters=2 * WEIGHT, gradients=2 * WEIGHT, optimizer=0, activations=400_000, other=ACTIVATION
    )

    def step_before():
        model.zero_grad()
        torch.zeros(100_000)
        model(x).sum().backward()

    result = remat.measure(step_before)
    assert result.resident_bytes == 4 * WEIGHT + ACTIVATION
    assert result.at_peak.gradients == 0
    assert result.at_peak.activations == 400_000


def test_the_counting_run_is_not_timed():
    calls = []

    def step():
        calls.append(time.perf_counter())
        time.sleep(0.02)

    result = remat.measure(step, warmup=2, repeats=3, device="cpu")
    assert len(calls) == 2 + 1 + 3
    assert 0.02 <= result.seconds < 0.2
    assert result.peak_bytes == 0
    assert result.reserved_bytes is None


@pytest.mark.parametrize("form", ["closure", "partial", "method", "named"])
def test_finds_what_the_step_uses(form):
    model, x = linear_stack(1), torch.zeros(ROWS, WIDTH)

    class Trainer:
        def __init__(self):
            self.model, self.x = model, x

        def step(self):
            self.model(self.x).sum().backward()

    def hidden():
        return Trainer().step()

    measured = {
        "closure": lambda: remat.measure(lambda: model(x).sum().backward()),
        "partial": lambda: remat.measure(functools.partial(lambda m, v: m(v).sum().backward(), model, x)),
        "method": lambda: remat.measure(Trainer().step),
        "named": lambda: remat.measure(hidden, model=model),
    }[form]()
    assert measured.at_peak.parameters == WEIGHT
    assert measured.at_peak.other == (0 if form == "named" else ACTIVATION)


def test_hooks_are_taken_off_even_if_the_step_raises():
    model = nn.Linear(2, 2)

    def step():
        model(torch.ones(1, 2)).sum().backward()
        if len(calls := step.__dict__.setdefault("calls", [])) == 1:
            raise ZeroDivisionError
        calls.append(1)

    with pytest.raises(ZeroDivisionError):
        remat.measure(step, model=model)
    assert not model.weight._post_accumulate_grad_hooks


def test_reads_like_a_sentence():
    text = str(remat.measure(lambda: torch.zeros(1024), device="cpu"))
    assert "peak 4.0 KiB on cpu = activations 4.0 KiB" in text
    assert "per step" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"step": 3}, "pass a function"),
        ({"warmup": -1}, "warmup=-1"),
        ({"repeats": 0}, "at least 1"),
        ({"repeats": "3"}, "repeats='3'"),
    ],
)
def test_bad_input(arguments, words):
    arguments = {"step": lambda: None, **arguments}
    with pytest.raises(remat.InputError, match=words):
        remat.measure(**arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda():
    model, x = linear_stack(4).cuda(), torch.zeros(ROWS, WIDTH, device="cuda")

    def step():
        model(x).sum().backward()
        model.zero_grad()

    result = remat.measure(step)
    assert result.at_peak.parameters == 4 * WEIGHT
    assert result.reserved_bytes >= result.peak_bytes > result.resident_bytes
    assert result.seconds > 0
