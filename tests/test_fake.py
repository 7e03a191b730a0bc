"""Fake tensors: the same capture as real ones, and no memory."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from models import ZOO
from remat.run.rng import RandomState
from remat.trace.capture import capture
from remat.trace.flops import flops_of


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
