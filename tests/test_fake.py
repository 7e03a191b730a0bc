"""Fake tensors: the same capture as real ones, and no memory."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

from models import ZOO
from remat.run.rng import RandomState
from remat.trace.capture import capture
from remat.trace.fake import OpSeconds, build, faking, new_mode, without_memory
from remat.trace.flops import flops_of
from remat.trace.joint import _share_out_rows


def test_random_state_can_be_compared_while_tensors_are_fake():
    with FakeTensorMode():
        state = RandomState(())
        assert state == state.now()
    torch.rand(1)
    with FakeTensorMode():
        assert state != state.now()


def block_of(name):
    case = ZOO[name]()
    model = case.model
    return {"mlp": lambda: model[0], "resnet": lambda: model.layer1[0]}[name]()


@pytest.mark.parametrize(("name", "shape"), [("mlp", (8, 16)), ("resnet", (4, 8, 8, 8))])
def test_a_region_is_captured_alike_on_fake_and_real_tensors(name, shape):
    block, x = block_of(name), torch.randn(shape, requires_grad=True)
    real = capture(block, (x * 1,), {}, block)
    with FakeTensorMode():
        block, x = block_of(name), torch.randn(shape, requires_grad=True)
        fake = capture(block, (x * 1,), {}, block)
    assert fake.graph == real.graph


def test_attention_on_the_host_counts_its_flops():
    q = torch.randn(2, 3, 16, 8)
    seen = {}

    class See(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen[func._schema.name] = flops_of(func, args, kwargs or {}, out)
            return out

    with See():
        F.scaled_dot_product_attention(q, q, q)
        whole = seen["aten::_scaled_dot_product_flash_attention_for_cpu"]
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
        causal = seen["aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert whole == 2 * (2 * 2 * 3 * 16 * 16 * 8)
    assert causal == whole // 2


def test_products_by_groups_count_their_flops():
    op = torch.ops.aten._grouped_mm.default
    rows, batch, square = torch.empty(64, 8), torch.empty(4, 8, 16), torch.empty(8, 16)
    assert flops_of(op, (rows, batch), {}, None) == 2 * 64 * 8 * 16
    assert flops_of(op, (torch.empty(4, 64, 8), batch), {}, None) == 4 * 2 * 64 * 8 * 16
    assert flops_of(op, (torch.empty(4, 64, 8), square), {}, None) == 2 * 64 * 8 * 16


def test_products_by_groups_are_timed_with_rows_in_every_group():
    op = torch.ops.aten._grouped_mm.default
    for left, right, ends in [
        ((64, 8), (4, 8, 16), [16, 32, 48, 64]),  # rows
        ((64, 8), (8, 16), [2, 4, 6, 8]),  # what is summed over
        ((4, 64, 8), (8, 16), [4, 8, 12, 16]),  # columns
    ]:
        offs = torch.zeros(4, dtype=torch.int32)
        _share_out_rows(op, (torch.empty(left), torch.empty(right)), {"offs": offs})
        assert offs.tolist() == ends
        offs.zero_()
        _share_out_rows(op, (torch.empty(left), torch.empty(right), offs), {})
        assert offs.tolist() == ends
    _share_out_rows(torch.ops.aten.mm.default, (torch.empty(2, 2), torch.empty(2, 2)), {})
    _share_out_rows(torch.ops.higher_order.flex_attention, (torch.empty(2, 2),), {})  # has no schema


# ----------------------------------------------------------------------------------------- without memory


def fake(tensor):
    return isinstance(tensor, FakeTensor)


def test_integers_stay_real_and_floats_do_not():
    """Models read masks and positions in Python, and take another path when they may not."""
    with faking(new_mode(), accelerator=False):
        tokens = torch.randint(9, (2, 5))
        mask = torch.ones(2, 5, dtype=torch.bool)
        mask[0, 3:] = False
        assert not fake(tokens)
        assert not mask.all()
        assert mask.nonzero().shape == (8, 2)
        assert int(tokens.max()) < 9
        assert torch.tensor([1.5, 2.5]).sum().item() == 4.0  # all there is of it is real
        weights = torch.randn(9, 4)
        assert fake(weights)
        assert fake(nn.functional.embedding(tokens, weights))
        assert fake(torch.empty(2**13, 2**13, dtype=torch.bool))  # too large to be real


def test_integers_that_were_real_can_be_written():
    with faking(new_mode(), accelerator=False):
        positions = torch.arange(6)
        positions += 2
        positions[0] = 7
        assert positions.tolist() == [7, 3, 4, 5, 6, 7]
        far = torch.arange(10**4)
        assert fake(far[:, None] * far[None])  # too large to be real


def test_a_model_that_reads_values_while_it_is_built_is_built_on_meta():
    def factory():
        linear = nn.Linear(4, 4)
        nn.init.trunc_normal_(linear.weight)  # draws again until all values are within bounds: asks for them
        return linear

    mode = new_mode()
    model = build(factory, mode)
    assert model.weight.is_meta
    with without_memory(model, mode, torch.bfloat16):
        assert fake(model.weight)
        assert isinstance(model.weight, nn.Parameter)
        assert (model.weight.device.type, model.weight.dtype) == ("cpu", torch.bfloat16)


def test_parameters_come_back_after_an_error():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = dict(model.state_dict(keep_vars=True))

    def fail():
        with without_memory(model, new_mode(), torch.float16):
            assert all(map(fake, model.parameters()))
            assert model[1].num_batches_tracked.dtype is torch.int64
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in before.items())


def test_seconds_are_the_longest_of_bytes_flops_and_start():
    def seconds(run):
        clock = OpSeconds(1e9, lambda dtype: {"float32": 1e6, "bfloat16": 1e9}[dtype], 1e-6)
        with clock:
            run()
        return clock.seconds

    a = torch.randn(64, 64)
    half = a.bfloat16()
    assert seconds(lambda: a @ a) == pytest.approx(2 * 64**3 / 1e6)
    assert seconds(lambda: half @ half) == pytest.approx(2 * 64**3 / 1e9)
    assert seconds(lambda: a + 1) == pytest.approx(2 * a.nbytes / 1e9)
    assert seconds(lambda: a[0, :1] + 1) == pytest.approx(1e-6)  # shorter than its start
    assert seconds(lambda: a.t()[1:]) == 0.0  # views are free


def test_dropout_runs_on_an_accelerators_kernels_in_forward_and_backward():
    with faking(new_mode(), accelerator=True) as kernels:
        x = torch.randn(4, 4, requires_grad=True)

        def block(x):
            return nn.functional.dropout(x, 0.5)

        y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        block(y).sum().backward()  # recomputes: the same kernels, or torch would say that they differ
        assert x.grad.shape == (4, 4)
        q = torch.randn(1, 2, 8, 4)
        F.scaled_dot_product_attention(q, q, q)
        assert not kernels.attention_drops
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.2)
        assert kernels.attention_drops
