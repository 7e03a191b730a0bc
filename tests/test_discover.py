"""The repeated blocks of models of every build."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from models import ZOO, Bottleneck, MlpBlock
from remat.errors import InputError
from remat.trace.discover import find_blocks, resolve


def towers(model: nn.Module) -> dict[str, int]:
    found: dict[str, int] = {}
    for block in find_blocks(model):
        assert model.get_submodule(block.name) is block.module
        found[block.tower] = found.get(block.tower, 0) + 1
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mlp", {"": 4}),
        ("resnet", {"layer1": 2, "layer2": 3}),
        ("writes_input", {"": 3}),
        ("tied", {"blocks": 3}),
        ("shared_block", {"blocks": 2}),  # three entries, two modules
        ("lstm", {"layers": 3}),
        ("joint", {"vision_tower": 3, "language_model.layers": 3, "action_expert.layers": 3}),
        ("llama", {"model.layers": 3}),
        ("gpt2", {"transformer.h": 3}),
        ("bert", {"bert.encoder.layer": 3}),
        ("t5", {"encoder.block": 2, "decoder.block": 3}),
        ("vit", {"vit.layers": 3}),
        ("paligemma", {"model.vision_tower.encoder.layers": 2, "model.language_model.layers": 3}),
    ],
)
def test_zoo(name: str, expected: dict[str, int]) -> None:
    assert towers(ZOO[name]().model) == expected


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(MlpBlock(4) for _ in range(4))


class ByAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2 = MlpBlock(4), MlpBlock(4)
        self.head = nn.Linear(4, 4)


def test_experts_lie_inside_their_layer() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([MlpBlock(4), Moe(), Moe()])})
    assert towers(model) == {"layers": 3}  # the dense layer before the MoE layers belongs to the stack


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), {"": 2}),
        (nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), {"": 3}),
        (ByAttribute(), {"": 2}),
        (nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)]), {"": 3}),
        (nn.ModuleList([nn.Sequential(Bottleneck(4), Bottleneck(4)) for _ in range(2)]), {"0": 2, "1": 2}),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), {}),
        (nn.Sequential(nn.Sequential(nn.Linear(4, 4)), MlpBlock(4)), {"1": 2}),  # its two Linear layers
        (nn.Linear(4, 4), {}),
        (nn.LSTM(4, 4, num_layers=2), {}),
        (nn.Sequential(nn.ReLU(), nn.ReLU()), {}),
    ],
)
def test_structures(model: nn.Module, expected: dict[str, int]) -> None:
    assert towers(model) == expected


class Stage(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MlpBlock(width) for _ in range(depth))
        self.down = nn.Linear(width, 2 * width)


def test_the_blocks_of_stages_are_the_units() -> None:
    model = nn.ModuleDict({"stages": nn.ModuleList([Stage(4, 2), Stage(8, 3), Stage(16, 1)])})
    # the last one holds a single block: it is one itself
    assert towers(model) == {"stages.0.blocks": 2, "stages.1.blocks": 3, "stages": 1}


def test_diffusers_unet_and_sd3() -> None:
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        unet = towers(diffusers.UNet2DConditionModel())
        sd3 = towers(diffusers.SD3Transformer2DModel(num_layers=4))
    # Down and up blocks are stages: the units are the blocks in them, also where a stage has no sibling.
    assert unet["down_blocks.0.resnets"] == unet["down_blocks.0.attentions"] == 2
    assert unet["down_blocks.3.resnets"] == 2
    assert unet["up_blocks.0.resnets"] == 3
    assert sd3 == {"transformer_blocks": 4}


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (None, 5),
        ("model.language_model.layers.1", 1),
        ("model.language_model", 3),  # a sub-model stands for its blocks
        ("*.self_attn", 5),
        (["*.vision_tower.*.self_attn", "model.language_model.layers.0"], 3),
    ],
)
def test_only(only: Any, expected: int) -> None:
    assert len(resolve(ZOO["paligemma"]().model, only)) == expected


def test_classes_and_exclude() -> None:
    model = ZOO["resnet"]().model
    assert len(resolve(model, Bottleneck)) == 5
    assert resolve(model, nn.BatchNorm2d, exclude="stem.1")[0].name == "layer1.0.bn1"
    assert [b.name for b in resolve(model, exclude="layer2")] == ["layer1.0", "layer1.1"]
    assert [b.name for b in resolve(model, exclude=["layer1", "layer2.0", "layer2.2"])] == ["layer2.1"]
    assert [b.name for b in resolve(model, ["layer1.0", "layer1.0.conv1"])] == ["layer1.0"]  # outermost


@pytest.mark.parametrize("what", ["only", "exclude"])
@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("layr1.0", "did you mean 'layer1.0'"),
        ("*.nothing", "no module of this name"),
        (nn.LSTM, "LSTM"),
        (3, "3"),
    ],
)
def test_unknown_names_are_refused_with_a_hint(what: str, selector: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(ZOO["resnet"]().model, **{what: [selector]})
