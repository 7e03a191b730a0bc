"""The doctor: each known problem, put into a small model on purpose, is found; a healthy one passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import remat
from commands import remat as command
from remat.doctor import Finding, examine
from remat.jobs import Made
from remat.units import format_bytes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """A trained embedding before the blocks, so that their inputs need gradients."""

    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def findings(model: nn.Module, batch: Any = None) -> dict[str, Finding]:
    torch.manual_seed(0)
    return {f.title: f for f in diagnose(model, batch).findings}


def diagnose(model: nn.Module, batch: Any = None):
    return examine(Made(model, torch.randn(4, 16) if batch is None else batch))


def test_a_healthy_model_passes_every_check():
    model = Stack()
    before = copy.deepcopy(model.state_dict())
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    found = diagnose(model)
    assert found.findings == ()
    assert found.ok
    assert found.verification.bitwise
    assert "nested checkpointing" in found.passed
    assert found.skipped == ("fragmentation: only CUDA's allocator has it",)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all(p.grad is None for p in model.parameters())


class Checkpointed(Block):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class Nested(Stack):
    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

        return checkpoint(run, self.enter(x), use_reentrant=False).square().mean()


def test_nested_checkpoints():
    found = findings(Nested(Checkpointed))["Nested checkpointing"]
    assert found.level == "problem"
    assert "12 forwards where 8 would do" in found.what  # torch stops before the last block
    assert "take one of them off" in found.remedy


def test_another_checkpointing():
    found = findings(Stack(Checkpointed))["Another checkpointing is on"]
    assert "6 forwards of 6 modules" in found.what


def test_reentrant_leftovers():
    found = findings(Stack(Reentrant))["Reentrant checkpointing"]
    assert found.level == "problem"
    assert "3 calls" in found.what


def test_a_switch_that_does_nothing():
    model = Stack()
    model.gradient_checkpointing = True
    model.eval()
    found = findings(model)
    assert "eval mode" in found["Checkpointing is switched on and does not run"].what
    assert "The model is in eval mode" in found


def test_frozen_inputs_and_untrained_parameters():
    class Loose(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.detach())

    model = Loose()
    model.enter.requires_grad_(False)
    model.unused = nn.Linear(4, 4)
    found = findings(model)
    assert "blocks.0" in found["Blocks whose inputs need no gradient"].what
    assert "unused.weight" in found["Trainable parameters without a gradient"].what


def test_tied_weights():
    model = Stack()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    found = findings(model)["Tied weights"]
    assert "blocks.0.up.weight = blocks.1.up.weight" in found.what


def test_numbers_that_change():
    class Scaled(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1.0 + float(x.detach().sum()) % 1.0)

    found = findings(Stack(Scaled))
    assert "Regions whose operations change" in found or "Regions without recipes" in found


def test_random_operations():
    class Dropped(Block):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.1)

    found = findings(Stack(Dropped))["Random operations"]
    assert "test_doctor.py:" in found.what
    assert found.level == "note"


def test_a_step_that_is_not_reproducible():
    class Drifting(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Drifting.calls += 1
            return super().forward(x) + 1e-3 * torch.tensor(float(Drifting.calls % 7))

    assert "The plain step is not reproducible" in findings(Stack(Drifting))


def test_tensors_on_ctx():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.kept = x.clone()
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * ctx.kept * grad

    class Squared(Block):
        def forward(self, x: Tensor) -> Tensor:
            return Square.apply(super().forward(x))

    found = findings(Stack(Squared))["Tensors kept on ctx"]
    assert format_bytes(3 * 4 * 16 * 4) in found.what
    assert "SquareBackward" in found.what


def test_a_cache_in_training():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=512
    )
    tokens = torch.zeros(2, 8, dtype=torch.long)
    found = findings(LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens})
    assert "use_cache = False" in found["A KV cache is filled in training"].remedy
    assert "chunk" in found["Logits decide the peak"].remedy


def test_compiled_modules_are_named():
    model = Stack()
    model.blocks[0]._compiled_call_impl = model.blocks[0]._call_impl  # what module.compile() sets
    assert "blocks.0" in findings(model)["Compiled modules"].what


def test_a_model_that_remat_runs_on_already():
    model = Stack()
    remat.enable(model)
    assert "already runs" in findings(model)["No plan could be made"].what


def test_wrong_gradients_are_a_problem(monkeypatch):
    from remat.check.verify import Verification

    wrong = Verification(False, False, 0.5, 0.0, 3, worst="gradient of enter.weight")
    monkeypatch.setattr(remat, "verify", lambda *args, **kwargs: wrong)
    found = diagnose(Stack())
    assert not found.ok
    assert found.findings[0].title == "Planned gradients differ"
    assert "do not train with this plan" in found.findings[0].remedy


def test_fragmentation_is_read_from_the_allocator(monkeypatch):
    from remat import doctor

    monkeypatch.setattr(doctor, "device_of", lambda model: torch.device("cuda"))
    stats = {"reserved_bytes.all.peak": 1000, "inactive_split_bytes.all.peak": 300}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    found = findings(Stack())["Fragmentation"]
    assert "expandable_segments" in found.remedy


@pytest.mark.parametrize(("block", "code"), [("Block", 0), ("Reentrant", 1)])
def test_the_command(tmp_path, block, code):
    job = f"from test_doctor import *\ndef build():\n    return Stack({block}), torch.randn(4, 16)\n"
    (tmp_path / "sick.py").write_text(job)
    ran = command("doctor", f"{tmp_path}/sick.py:build")
    assert ran.code == code, ran.err
    assert ("Reentrant checkpointing" in ran.out) == bool(code)
    assert "equal bit for bit" in ran.out
    assert command("doctor", f"{tmp_path}/sick.py:build", "--json").json["ok"] is not bool(code)
