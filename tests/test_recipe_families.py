"""Families of real models, tiny and with random weights: gradients equal to the bit at 0.6, 0.3 and 0.1 of
what each block saves, in fp32 and bf16, over two steps with a weight update in between."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import ZOO, Case, _llama_sizes, _tokens, own_loss, squared
from planning import Planned, assert_planned_equals_plain, fallbacks, regions_at, survey_of, train
from remat.records import Mode
from remat.trace.survey import Survey
from remat.trees import map_tensors

FAMILIES: dict[str, Callable[[], Case]] = {
    name: ZOO[name]
    for name in (
        "llama", "gpt2", "bert", "t5", "vit", "paligemma", "resnet", "lstm", "shared_block", "tied", "mlp",
        "writes_input", "rrelu_last", "pytrees", "keyword_only", "lora",
    )
}  # fmt: skip


def family(build: Callable[[], Case]) -> Callable[[], Case]:
    def seeded() -> Case:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            case = build()
            case.model.train()
            return case

    FAMILIES[build.__name__] = seeded
    return seeded


# ------------------------------------------------------------------------------------------- transformers


@family
def swin() -> Case:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4,
        drop_path_rate=0.1, hidden_dropout_prob=0.1, num_labels=3,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 2])}
    return Case(SwinForImageClassification(config), batch, own_loss)


@family
def clip() -> Case:
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={
            **sizes,
            "vocab_size": 64,
            "max_position_embeddings": 16,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
        vision_config={**sizes, "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    tokens = _tokens()
    tokens[:, -1] = 2
    batch = {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 16, 16), "return_loss": True}
    return Case(CLIPModel(config), batch, own_loss)


@family
def gemma2() -> Case:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    tokens = _tokens()
    config = Gemma2Config(**_llama_sizes(), sliding_window=4)
    return Case(Gemma2ForCausalLM(config), {"input_ids": tokens, "labels": tokens}, own_loss)


@family
def gemma() -> Case:
    from transformers import GemmaConfig, GemmaForCausalLM

    tokens = _tokens()
    return Case(
        GemmaForCausalLM(GemmaConfig(**_llama_sizes())), {"input_ids": tokens, "labels": tokens}, own_loss
    )


@family
def mixtral() -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    tokens = _tokens()
    config = MixtralConfig(**_llama_sizes(), num_local_experts=4, num_experts_per_tok=2)
    return Case(MixtralForCausalLM(config), {"input_ids": tokens, "labels": tokens}, own_loss)


@family
def mamba() -> Case:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2, time_step_rank=2)
    tokens = _tokens()
    return Case(MambaForCausalLM(config), {"input_ids": tokens, "labels": tokens}, own_loss)


@family
def whisper() -> Case:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=64, num_mel_bins=8, d_model=16, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        max_source_positions=12, max_target_positions=16, dropout=0.1, attention_dropout=0.1,
        activation_dropout=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    batch = {"input_features": torch.randn(2, 8, 24), "labels": _tokens(shape=(2, 6))}
    return Case(WhisperForConditionalGeneration(config), batch, own_loss)


@family
def lora_peft() -> Case:
    """Adapters on a frozen base, with dropout in the adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], lora_dropout=0.1, init_lora_weights=False)
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**_llama_sizes())), config)
    tokens = _tokens()
    return Case(model, {"input_ids": tokens, "labels": tokens}, own_loss)


# ---------------------------------------------------------------------------------------------- diffusers


@family
def dit() -> Case:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=4, patch_size=2,
        num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip
    batch = {
        "hidden_states": torch.randn(2, 4, 4, 4),
        "timestep": torch.tensor([1, 7]),
        "class_labels": torch.tensor([0, 3]),
        "return_dict": False,
    }
    return Case(model, batch, squared)


@family
def sd3() -> Case:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=4, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=8, out_channels=4,
        pos_embed_max_size=8, dual_attention_layers=(0,),
    )  # fmt: skip
    batch = {
        "hidden_states": torch.randn(2, 4, 4, 4),
        "encoder_hidden_states": torch.randn(2, 5, 16),
        "pooled_projections": torch.randn(2, 8),
        "timestep": torch.tensor([1.0, 7.0]),
        "return_dict": False,
    }
    return Case(model, batch, squared)


@family
def flux() -> Case:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=8, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    batch = {
        "hidden_states": torch.randn(2, 6, 4),
        "encoder_hidden_states": torch.randn(2, 5, 16),
        "pooled_projections": torch.randn(2, 8),
        "timestep": torch.tensor([0.1, 0.7]),
        "img_ids": torch.randint(0, 4, (6, 3)).float(),
        "txt_ids": torch.zeros(5, 3),
        "return_dict": False,
    }
    return Case(model, batch, squared)


@family
def wan() -> Case:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=16, freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    batch = {
        "hidden_states": torch.randn(2, 4, 2, 4, 4),
        "timestep": torch.tensor([1, 7]),
        "encoder_hidden_states": torch.randn(2, 5, 16),
        "return_dict": False,
    }
    return Case(model, batch, squared)


@family
def autocast() -> Case:
    """Weights in fp32, products in bf16."""
    case = ZOO["llama"]()

    class Autocast(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, **batch: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(**batch)

    return Case(Autocast(case.model), case.batch, own_loss)


# -------------------------------------------------------------------------------------------------- tests

LEVELS = (0.6, 0.3, 0.1)
DTYPES = (torch.float32, torch.bfloat16)

# Blocks that keep everything at every level: their only saved tensor is their own output, written in place.
NOTHING_TO_DROP = {"writes_input"}
# Regions that have no recipe (they recompute as a whole), and why.
NO_RECIPE: dict[str, str] = {}
# Regions that keep everything at run time although they have a recipe, and why.
FALLS_BACK: dict[str, str] = {}


def in_dtype(case: Case, dtype: torch.dtype) -> Case:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return Case(case.model.to(dtype), map_tensors(cast, case.batch), case.loss)


@functools.lru_cache(maxsize=1)
def prepared(name: str, dtype: torch.dtype) -> tuple[Case, Survey, dict[str, Tensor]]:
    case = in_dtype(FAMILIES[name](), dtype)
    found = survey_of(case.model, case.run)
    return case, found, train(copy.deepcopy(case.model), case.run)


def assert_explained(name: str, planned: Planned) -> None:
    for region, note in planned.notes.items():
        assert NO_RECIPE.get(name, "no reason") in note, f"{name}, {region} has no recipe: {note}"
    for region, why in fallbacks(planned).items():
        assert FALLS_BACK.get(name, "no reason") in why, f"{name}, {region} fell back: {why}"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_equal_to_the_bit(name: str, dtype: torch.dtype, level: float) -> None:
    if dtype is not torch.float32 and name in ("autocast", "keyword_only"):
        pytest.skip("mixes precisions by itself")
    case, found, expected = prepared(name, dtype)
    planned = regions_at(found, level)
    assert_planned_equals_plain(case.model, case.run, planned, expected)
    assert_explained(name, planned)
    recipes = [r for r in planned.regions if any(v.mode is Mode.RECIPE for v in r.variants.values())]
    assert recipes or name in NO_RECIPE or name in NOTHING_TO_DROP, (
        "no region ran a recipe: nothing was tested"
    )
