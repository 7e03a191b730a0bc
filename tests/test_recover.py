"""Steps that run out of memory, and what is left of them: nothing."""

import copy
import functools
import gc
import random

import numpy
import pytest
import torch
from torch import nn

import remat
from remat.check.live import LiveBytes
from remat.planner.schedule import make_plan
from remat.run import recover
from remat.run.recover import Gradients, is_out_of_memory


@pytest.fixture(autouse=True, scope="module")
def quick_collections():
    """Recovering collects garbage, which takes long where many modules are loaded: leave those out."""
    gc.freeze()
    yield
    gc.unfreeze()


class Block(nn.Module):
    """Running statistics, dropout, and maybe a number from each generator that is not torch's."""

    def __init__(self, width, chance):
        super().__init__()
        self.chance = chance
        self.norm = nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        scale = random.random() + numpy.random.rand() if self.chance else 1.0
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x))))) * scale


class Net(nn.Module):
    def __init__(self, depth=3, width=8):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, i == 1) for i in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def seed(number=0):
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def batches(steps=20, rows=128, width=8):
    return list(torch.randn(steps, rows, width, generator=torch.Generator().manual_seed(7)))


def random_state():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def state_of(model, optimizer=None):
    """Every bit of weights, gradients, buffers and optimizer state."""
    found = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    found |= {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    if optimizer is not None:
        for number, state in enumerate(optimizer.state_dict()["state"].values()):
            found |= {f"{number}.{key}": value.clone() for key, value in state.items()}
    return found


def assert_same_state(expected, found):
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


class Faults:
    """Raises torch.OutOfMemoryError at the given places: the number of a block, and the pass."""

    def __init__(self, model):
        self.pending = []
        self.raised = 0
        for number, block in enumerate(model.blocks):
            block.register_forward_hook(self.around(number))

    def at(self, phase, number, times=1):
        self.pending += [(phase, number)] * times

    def strike(self, phase, number):
        if (phase, number) in self.pending[:1]:
            self.pending.pop(0)
            self.raised += 1
            raise torch.OutOfMemoryError(f"injected in {phase} of block {number}")

    def around(self, number):
        def after(module, args, output):
            self.strike("forward", number)
            if output.requires_grad:
                output.register_hook(lambda gradient: self.strike("backward", number))

        return after


PLACES = [(phase, number) for phase in ("forward", "backward") for number in range(3)]


@functools.cache
def plan_for(share):
    seed()
    return remat.fit(Net(), batches(1)[0], activations=share).plan


def fitted(model, share=0.7):
    return remat.apply(model, plan_for(share))


def offloading(model):
    """Every region that can sends what it can to the host, also after running out of memory."""
    seed()
    allow = [remat.Action.KEEP, remat.Action.RECOMPUTE, remat.Action.OFFLOAD]
    profile = remat.profile(model, batches(1)[0], allow=allow)
    menus = [profile.kinds[call.kind].menu for call in profile.calls]
    choices = [next((i for i, e in enumerate(menu) if e.host_bytes), 0) for menu in menus]
    handle = remat.apply(model, make_plan(profile, choices, 1 << 40, strategy="all", allow=allow))
    handle._tighten = lambda failure: None
    return handle


def plain_training(model, micro_steps, accumulate):
    seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, batch in enumerate(micro_steps):
        model(batch).backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return state_of(model, optimizer), random_state()


@pytest.mark.parametrize(
    ("accumulate", "times", "plan"),
    [(1, 1, fitted), (3, 1, fitted), (1, 2, fitted), (3, 2, fitted), (3, 2, offloading)],
)
def test_twenty_faulted_steps_equal_the_plain_ones(accumulate, times, plan):
    """A fault at every region call of forward and of backward in turn, also twice in a row."""
    model = Net()
    reference, expected_chance = plain_training(copy.deepcopy(model), batches(), accumulate)
    handle = plan(model)
    faults = Faults(model)
    seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, batch in enumerate(batches()):
        faults.at(*PLACES[number % len(PLACES)], times)
        loss = handle.step(lambda batch=batch: model(batch))
        assert loss.grad_fn is None
        assert not faults.pending
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert faults.raised == 20 * times
    if plan is offloading:
        assert handle.engine.counts.sent_bytes > 0
        assert handle.engine.counts.used_bytes == 0
    assert handle.stats.recovered == 20
    assert_same_state(reference, state_of(model, optimizer))
    assert random_state() == expected_chance


def test_the_step_before_was_not_faulted_either():
    """Without faults step() is forward and backward, and no more."""
    model = Net()
    reference, expected_chance = plain_training(copy.deepcopy(model), batches(4), 1)
    handle = fitted(model)
    seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches(4):
        handle.step(lambda batch=batch: model(batch), optimizer=optimizer)
        optimizer.zero_grad()
    assert handle.stats.steps == 4
    assert "recovered" not in handle.stats.counts
    assert_same_state(reference, state_of(model, optimizer))
    assert random_state() == expected_chance


def test_never_an_endless_loop():
    model = Net()
    handle = fitted(model)
    before = state_of(model)
    seed(3)
    chance = random_state()
    calls = []

    def step():
        calls.append(1)
        model(batches(1)[0])
        raise torch.OutOfMemoryError("always")

    with pytest.raises(remat.RecoveryError, match="are needed at least") as error:
        handle.step(step)
    assert len(calls) == 4
    assert error.value.needed > 0
    assert "tried" in str(error.value)
    assert_same_state(before, state_of(model))
    assert random_state() == chance


@pytest.mark.parametrize("tries", [1, 2, 7])
def test_as_many_tries_as_were_asked_for(tries):
    model = Net()
    handle = fitted(model, share=1.0)
    calls = []

    def step():
        calls.append(1)
        raise torch.OutOfMemoryError("always")

    with pytest.raises(remat.RecoveryError):
        handle.step(step, tries=tries)
    assert len(calls) == tries


@pytest.mark.parametrize("tries", [0, -1, True, "many"])
def test_tries_must_be_a_number(tries):
    with pytest.raises(remat.InputError, match="tries"):
        fitted(Net()).step(lambda: None, tries=tries)


def test_every_recovery_takes_a_tighter_plan():
    model = Net()
    handle = fitted(model, share=1.0)
    faults = Faults(model)
    peaks = [handle.plan.predicted_peak_bytes]
    for _ in range(3):
        faults.at("forward", 1)
        handle.step(lambda: model(batches(1)[0]))
        peaks.append(handle.plan.predicted_peak_bytes)
    assert peaks[1] < peaks[0]
    assert peaks == sorted(peaks, reverse=True)
    assert handle.stats.counts["plan changed"] >= 1


@pytest.mark.parametrize("failures", [1, 3, 4])
def test_memory_that_lacks_for_copies_of_buffers(failures, monkeypatch):
    """What a step changes is copied before it begins: that is part of the step, and tried again with it."""
    model = Net()
    handle = fitted(model, share=1.0)
    seed(3)
    expected = copy.deepcopy(model)
    expected(batches(1)[0]).backward()
    chance = random_state()
    seed(3)
    remember, calls = recover.remember_buffers, []

    def lacking(of):
        calls.append(1)
        if len(calls) <= failures:
            raise torch.OutOfMemoryError("no room for copies")
        return remember(of)

    monkeypatch.setattr(recover, "remember_buffers", lacking)
    if failures == 4:  # as often as is tried
        before = state_of(model)
        with pytest.raises(remat.RecoveryError, match="no room for copies"):
            handle.step(lambda: model(batches(1)[0]))
        assert_same_state(before, state_of(model))
        return
    handle.step(lambda: model(batches(1)[0]))
    assert handle.stats.counts["recovered"] == 1
    assert_same_state(state_of(expected), state_of(model))
    assert random_state() == chance


def test_other_errors_pass_through_and_leave_no_hooks():
    model = Net()
    handle = fitted(model)
    model(batches(1)[0]).backward()

    def step():
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        handle.step(step)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters() if p._post_accumulate_grad_hooks)


def test_a_step_that_changed_weights_is_not_run_again():
    model = Net()
    handle = fitted(model)

    def step():
        with torch.no_grad():
            model.head.weight.add_(1)
        raise torch.OutOfMemoryError("too late")

    with pytest.raises(remat.RecoveryError, match=r"changed 1 parameters, first head\.weight"):
        handle.step(step)


class Masked(Net):
    """Buffers that are only read, one that is written in place, and one that is written behind autograd."""

    def __init__(self, sometimes=False):
        super().__init__()
        for number, block in enumerate(self.blocks):
            block.register_buffer("mask", torch.ones(32, 32))
            block.register_buffer("average", torch.zeros(8))
            block.register_buffer("count", torch.zeros(1))
            block.register_forward_pre_hook(functools.partial(self.read, number))
        self.sometimes = sometimes

    def read(self, number, block, args):
        with torch.no_grad():
            block.average.lerp_(args[0].mean(0) + block.mask[0, 0], 0.1)
        block.count.data += 1
        if self.sometimes and number == 0:
            block.mask.data.mul_(0.5)


def test_copies_of_buffers_are_within_the_budget():
    """A plan that has no room for them gives way to one that has, the first time that a step is to copy."""
    seed()
    model, x = Masked(), torch.randn(2048, 8)
    copies = sum(buffer.nbytes for buffer in model.buffers())
    with remat.fit(model, x, activations=0.9) as loose:
        budget = loose.plan.predicted_peak_bytes + copies // 2
    handle = remat.fit(model, x, budget)
    planned = handle.plan
    assert planned.predicted_peak_bytes + copies > planned.budget_bytes
    resident = [*model.parameters(), *model.buffers(), x]
    for _ in range(2):
        with LiveBytes() as live:
            live.watch(resident)
            live.reset_peak()
            handle.step(lambda: model(x))
            assert live.peak_bytes <= planned.budget_bytes == handle.plan.budget_bytes
    assert [event.kind for event in handle.stats.events] == ["plan changed"]
    assert "buffers that handle.step copies" in handle.stats.events[0].text
    assert planned.budget_bytes >= handle.plan.predicted_peak_bytes
    assert handle.plan.choices != planned.choices


def test_copies_that_no_plan_has_room_for_are_told():
    seed()
    model, x = Masked(), batches(1)[0]
    with pytest.raises(remat.BudgetError) as caught:
        remat.fit(model, x, 1000)
    handle = remat.fit(model, x, caught.value.needed)
    handle.step(lambda: model(x))
    assert [event.kind for event in handle.stats.events] == ["over budget", "plan changed"]
    assert "no plan leaves room" in handle.stats.events[0].text


def test_buffers_of_all_kinds_are_put_back():
    seed()
    plain = Masked()
    model = copy.deepcopy(plain)
    handle = remat.fit(model, batches(1)[0], activations=0.7)
    faults = Faults(model)
    faults.at("backward", 0, times=2)
    seed()
    plain(batches(1)[0]).backward()
    seed()
    handle.step(lambda: model(batches(1)[0]))
    assert faults.raised == 2
    assert_same_state(state_of(plain), state_of(model))


@pytest.mark.parametrize("fitted_in_training", [False, True])
def test_a_buffer_that_was_not_written_before_is_put_back(fitted_in_training):
    """Not in the steps that were measured, and by a write that nothing counts."""
    seed()
    plain, x = Masked(), batches(1)[0]
    model = copy.deepcopy(plain)
    handle = remat.fit(model.train(fitted_in_training), x, activations=0.7)
    model.train()
    plain.sometimes = model.sometimes = True
    faults = Faults(model)
    faults.at("backward", 0)
    seed()
    plain(x).backward()
    seed()
    handle.step(lambda: model(x))
    assert faults.raised == 1
    assert_same_state(state_of(plain), state_of(model))


def test_a_loss_is_asked_for():
    with pytest.raises(remat.InputError, match="must return the loss"):
        fitted(Net()).step(lambda: None)


def test_a_backward_of_ones_own():
    model = Net()
    handle = fitted(model)
    seen = []

    def backward(loss):
        seen.append(loss)
        (3 * loss).backward()

    seed(2)
    handle.step(lambda: model(batches(1)[0]), backward=backward)
    found = model.head.weight.grad.clone()
    model.zero_grad()
    seed(2)
    model(batches(1)[0]).backward()
    assert len(seen) == 1
    assert torch.allclose(found, 3 * model.head.weight.grad)


def test_the_failed_step_is_freed_before_the_next_try():
    """A traceback would hold the first try's tensors while the second runs."""
    import weakref

    model = Net()
    handle = fitted(model)
    alive = []
    seen = []

    def step():
        seen.append([ref() is not None for ref in alive])
        loss = model(batches(1)[0])
        hidden = loss * 2
        alive.append(weakref.ref(hidden))
        if len(alive) == 1:
            raise torch.OutOfMemoryError("once")
        return loss

    handle.step(step)
    assert seen == [[], [False]]


# ------------------------------------------------------------------------------------------ gradients


def test_gradients_that_are_added_to_several_times():
    """Two backward passes in one step: the second run skips exactly what the first one added."""
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.full((4,), 0.1)
    gradients = Gradients([weight])
    for adds in (1, 2, 3):
        gradients.begin()
        for _ in range(adds):
            (weight * 0.3).sum().backward()
        if adds < 3:
            gradients.put_back()
    gradients.finish()
    expected = torch.full((4,), 0.1)
    for _ in range(3):
        expected += torch.full((4,), 0.3)
    assert torch.equal(weight.grad, expected)
    assert not weight._post_accumulate_grad_hooks


# ------------------------------------------------------------------------------------------ the optimizer


@pytest.mark.parametrize("own_backward", [False, True])
@pytest.mark.parametrize("steps", [1, 2])  # with gradients of an earlier step, and without
def test_a_head_outside_the_model(steps, own_backward):
    def made():
        seed()
        model, head = Net(), nn.Linear(1, 1)
        return model, head, lambda: head(model(batches(1)[0])[None]).square().sum()

    model, head, loss = made()
    for _ in range(steps):
        loss().backward()
    expected = [head.weight.grad.clone(), head.bias.grad.clone(), model.head.weight.grad.clone()]

    model, head, loss = made()
    handle = remat.fit(model, step=loss, activations=0.7)
    assert head.weight.grad is None
    made()  # leaves the random state in which the plain steps ran
    faults = Faults(model)

    def whole():
        value = loss()
        value.backward()
        return value.detach()

    for _ in range(steps):
        faults.at("backward", 1, times=2)
        if own_backward:
            handle.step(whole, backward=lambda value: None)
        else:
            handle.step(loss)
    assert faults.raised == 2 * steps
    found = [head.weight.grad, head.bias.grad, model.head.weight.grad]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


class Faulty(torch.optim.AdamW):
    """Runs out of memory at the beginning, while making its state, or after the first write."""

    fault = ""

    def step(self, closure=None):
        fault, self.fault = self.fault, ""
        if fault == "first":
            raise torch.OutOfMemoryError("injected")
        if fault == "state":
            parameter = self.param_groups[0]["params"][0]
            self.state[parameter]["step"] = torch.zeros(())
            raise torch.OutOfMemoryError("injected")
        result = super().step(closure)
        if fault == "last":
            raise torch.OutOfMemoryError("injected")
        return result


@pytest.mark.parametrize("fault", ["first", "state"])
def test_the_optimizer_is_run_again(fault):
    model = Net()
    plain = copy.deepcopy(model)
    seed(1)
    optimizer = torch.optim.AdamW(plain.parameters())
    for batch in batches(3):
        plain(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle = fitted(model)
    seed(1)
    faulty = Faulty(model.parameters())
    for number, batch in enumerate(batches(3)):
        faulty.fault = fault if number == 0 or fault == "first" else ""
        handle.step(lambda batch=batch: model(batch), optimizer=faulty)
        faulty.zero_grad()
    assert handle.stats.recovered
    assert_same_state(state_of(plain, optimizer), state_of(model, faulty))


def test_an_optimizer_that_has_written_is_not_run_again():
    model = Net()
    handle = fitted(model)
    faulty = Faulty(model.parameters())
    faulty.fault = "last"
    with pytest.raises(remat.RecoveryError, match="after it had written"):
        handle.step(lambda: model(batches(1)[0]), optimizer=faulty)


def test_an_optimizer_that_never_succeeds():
    model = Net()
    handle = fitted(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []

    def hopeless(*args):
        calls.append(1)
        raise torch.OutOfMemoryError("always")

    optimizer.register_step_pre_hook(hopeless)
    with pytest.raises(remat.RecoveryError, match="4 times, before it had written"):
        handle.step(lambda: model(batches(1)[0]), optimizer=optimizer)
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("size mismatch"), False),
        (remat.RecoveryError("ran out of memory"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_running_out_of_memory_looks_like(error, memory):
    assert is_out_of_memory(error) is memory
