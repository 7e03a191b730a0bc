"""Model families of transformers and diffusers, tiny and with random weights: `FAMILIES[name].build()`.

A family is one `model_type` of transformers or one model class of diffusers. Widths are a few dozen and depth
a few blocks, so that a training step takes a fraction of a second; batches are large enough for activations,
not gradients, to be most of a step's peak. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 96
HIDDEN, INNER, DEPTH, HEADS, HEAD = 32, 64, 4, 4, 8
BATCH, LENGTH = 6, 48
IMAGE, PATCH = 32, 8


@dataclass(frozen=True)
class Built:
    model: nn.Module
    batch: dict[str, Any]

    def loss(self) -> Tensor:
        """The model's own loss, or the mean square of every tensor that it returns."""
        return loss_of(self.model(**self.batch), self.batch)


def loss_of(output: Any, batch: Any = None) -> Tensor:
    from remat.trees import tensors

    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    return sum((t.float().square().mean() for t in tensors(output) if t.is_floating_point()), torch.zeros(()))


@dataclass(frozen=True)
class Family:
    name: str
    library: str  # "transformers" or "diffusers"
    group: str  # "text", "mixture of experts", "vision", ...
    make: Callable[[], tuple[nn.Module, dict[str, Any]]]

    def build(self) -> Built:
        """Always the same weights and the same batch; the caller's random state is left alone."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model, batch = self.make()
            for (
                module
            ) in model.modules():  # training needs no cache: transformers' Trainer switches it off, too
                config = getattr(module, "config", None)
                if getattr(config, "use_cache", False):
                    config.use_cache = False
            return Built(model.train(), batch)


FAMILIES: dict[str, Family] = {}


def add(name: str, library: str, group: str, make: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> None:
    assert name not in FAMILIES, name
    FAMILIES[name] = Family(name, library, group, make)


def tokens(length: int = LENGTH, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(3, vocabulary, (BATCH, length))


def images(size: int = IMAGE) -> Tensor:
    return torch.randn(BATCH, 3, size, size)


# ------------------------------------------------------------------------------------- transformers, by task


def from_config(task: str, model_type: str, settings: dict[str, Any]) -> nn.Module:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return getattr(transformers, task).from_config(CONFIG_MAPPING[model_type](**settings))


# Names differ between configurations; each takes what it knows. Special tokens lie within the vocabulary.
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": HEAD, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def text(task: str, group: str, model_type: str, base: dict[str, Any] = TEXT, **settings: Any) -> None:
    def make() -> tuple[nn.Module, dict[str, Any]]:
        ids = tokens()
        return from_config(task, model_type, {**base, **settings}), {"input_ids": ids, "labels": ids}

    add(model_type, "transformers", group, make)


CAUSAL, MASKED, SEQ2SEQ = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"

for _name in (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "starcoder2", "stablelm", "cohere", "olmo", "olmo2",
    "olmo3", "granite", "glm", "glm4", "nemotron", "smollm3", "ernie4_5", "helium", "seed_oss", "arcee",
    "apertus", "exaone4", "hunyuan_v1_dense", "diffllama", "gpt_neox", "phi", "persimmon", "opt", "biogpt",
    "xglm", "bitnet", "ministral", "cohere2", "gemma2", "gemma3_text", "nanochat", "doge", "modernbert-decoder",
):  # fmt: skip
    _more: dict[str, Any] = {
        "phi3": {"original_max_position_embeddings": 64},
        "opt": {"ffn_dim": INNER, "word_embed_proj_dim": HIDDEN},
        "xglm": {"d_model": HIDDEN, "ffn_dim": INNER, "num_layers": DEPTH, "attention_heads": HEADS},
        "gemma2": {"sliding_window": 16},
        "gemma3_text": {"sliding_window": 16},
        "cohere2": {"sliding_window": 16},
        "ministral": {"sliding_window": 16},
    }.get(_name, {})
    text(CAUSAL, "text", _name, **_more)

GPT = {
    "vocab_size": VOCABULARY, "n_layer": DEPTH, "n_embd": HIDDEN, "n_head": HEADS, "n_positions": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
text(CAUSAL, "text", "gpt2", GPT)
text(CAUSAL, "text", "gptj", GPT, rotary_dim=4)
text(CAUSAL, "text", "codegen", GPT, rotary_dim=4)
text(CAUSAL, "text", "gpt_bigcode", GPT)
text(CAUSAL, "text", "openai-gpt", GPT)
text(CAUSAL, "text", "bloom", GPT, hidden_size=HIDDEN)
text(
    CAUSAL,
    "text",
    "falcon",
    {k: v for k, v in TEXT.items() if k != "head_dim"},
    new_decoder_architecture=True,
    num_kv_heads=2,
)
text(
    CAUSAL,
    "text",
    "mpt",
    {"vocab_size": VOCABULARY, "d_model": HIDDEN, "n_heads": HEADS, "n_layers": DEPTH, "max_seq_len": 64},
)
text(
    CAUSAL,
    "text",
    "gpt_neo",
    num_layers=DEPTH,
    num_heads=HEADS,
    attention_types=[[["global", "local"], 2]],
    window_size=16,
)

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
text(CAUSAL, "mixture of experts", "mixtral", num_local_experts=4, num_experts_per_tok=2)
text(CAUSAL, "mixture of experts", "qwen2_moe", **EXPERTS, shared_expert_intermediate_size=16)
text(CAUSAL, "mixture of experts", "qwen3_moe", **EXPERTS)
text(CAUSAL, "mixture of experts", "olmoe", **EXPERTS)
text(CAUSAL, "mixture of experts", "phimoe", **EXPERTS)
text(CAUSAL, "mixture of experts", "granitemoe", **EXPERTS)
text(CAUSAL, "mixture of experts", "jetmoe", **EXPERTS, kv_channels=8)
text(CAUSAL, "mixture of experts", "gpt_oss", **EXPERTS, sliding_window=16)
text(CAUSAL, "mixture of experts", "ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=16)
text(
    CAUSAL,
    "mixture of experts",
    "lfm2_moe",
    **EXPERTS,
    num_dense_layers=1,
    layer_types=["conv", "full_attention"] * 2,
)
LATENT = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1, "num_key_value_heads": HEADS,
}  # fmt: skip
text(CAUSAL, "mixture of experts", "deepseek_v2", **LATENT)
text(CAUSAL, "mixture of experts", "deepseek_v3", **LATENT)

text(CAUSAL, "state space", "mamba", state_size=4, time_step_rank=4)
text(CAUSAL, "state space", "mamba2", state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=16)
text(CAUSAL, "state space", "falcon_mamba", state_size=4, time_step_rank=4)
text(
    CAUSAL,
    "state space",
    "jamba",
    mamba_d_state=4,
    mamba_dt_rank=4,
    num_experts=2,
    num_experts_per_tok=1,
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    use_mamba_kernels=False,
)
text(
    CAUSAL,
    "state space",
    "bamba",
    mamba_n_heads=8,
    mamba_d_head=8,
    mamba_d_state=8,
    mamba_n_groups=2,
    mamba_chunk_size=16,
    attn_layer_indices=[1, 3],
)
text(
    CAUSAL,
    "state space",
    "falcon_h1",
    mamba_d_ssm=64,
    mamba_n_heads=8,
    mamba_d_head=8,
    mamba_d_state=8,
    mamba_n_groups=2,
    mamba_chunk_size=16,
)
text(CAUSAL, "state space", "recurrent_gemma", lru_width=HIDDEN, attention_window_size=16)
text(CAUSAL, "state space", "rwkv", attention_hidden_size=HIDDEN, context_length=64)
text(CAUSAL, "state space", "lfm2", layer_types=["conv", "full_attention"] * 2)
text(
    CAUSAL,
    "state space",
    "qwen3_next",
    **EXPERTS,
    shared_expert_intermediate_size=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"] * 2,
)

for _name in (
    "bert", "roberta", "electra", "albert", "deberta", "deberta-v2", "mpnet", "camembert", "convbert",
    "modernbert", "roformer", "nystromformer", "fnet", "squeezebert", "layoutlm", "megatron-bert", "rembert",
    "ernie", "esm", "xlm-roberta", "mobilebert", "ibert", "data2vec-text", "big_bird", "longformer", "yoso",
):  # fmt: skip
    _more = {
        "albert": {"embedding_size": 16},
        "convbert": {"embedding_size": HIDDEN},
        "squeezebert": {
            "embedding_size": HIDDEN,
            "q_groups": 2,
            "k_groups": 2,
            "v_groups": 2,
            "post_attention_groups": 1,
            "intermediate_groups": 2,
            "output_groups": 2,
        },
        "modernbert": {"local_attention": 16, "cls_token_id": 1, "sep_token_id": 2},
        "nystromformer": {"num_landmarks": 8, "segment_means_seq_len": LENGTH},
        "rembert": {"input_embedding_size": 16, "output_embedding_size": 32},
        "mobilebert": {"embedding_size": 16, "true_hidden_size": 16, "intra_bottleneck_size": 16},
        "big_bird": {"attention_type": "original_full"},
        "longformer": {"attention_window": 8},
        "esm": {"position_embedding_type": "rotary", "mask_token_id": 3},
        "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        "roberta": {"max_position_embeddings": 80},
        "camembert": {"max_position_embeddings": 80},
        "xlm-roberta": {"max_position_embeddings": 80},
        "data2vec-text": {"max_position_embeddings": 80},
        "mpnet": {"max_position_embeddings": 80},
        "ibert": {"max_position_embeddings": 80},
    }.get(_name, {})
    text(MASKED, "text", _name, **_more)
text(
    MASKED,
    "text",
    "distilbert",
    {
        **GPT,
        "dim": HIDDEN,
        "hidden_dim": INNER,
        "n_layers": DEPTH,
        "n_heads": HEADS,
        "max_position_embeddings": 64,
    },
)
text(CAUSAL, "text", "xlnet", {**GPT, "d_model": HIDDEN, "d_inner": INNER})
text(
    MASKED,
    "text",
    "funnel",
    {
        "vocab_size": VOCABULARY,
        "block_sizes": [2, 2],
        "num_decoder_layers": 2,
        "d_model": HIDDEN,
        "n_head": HEADS,
        "d_head": HEAD,
        "d_inner": INNER,
    },
)

SEQUENCE = {
    "vocab_size": VOCABULARY, "d_model": HIDDEN, "encoder_layers": 3, "decoder_layers": 3,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": INNER,
    "decoder_ffn_dim": INNER, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": 2,
}  # fmt: skip
for _name in (
    "bart",
    "mbart",
    "pegasus",
    "marian",
    "m2m_100",
    "blenderbot",
    "plbart",
    "mvp",
    "bigbird_pegasus",
):
    text(
        SEQ2SEQ,
        "encoder-decoder",
        _name,
        SEQUENCE,
        **({"attention_type": "original_full"} if _name == "bigbird_pegasus" else {}),
    )
text(
    SEQ2SEQ,
    "encoder-decoder",
    "led",
    SEQUENCE,
    attention_window=8,
    max_encoder_position_embeddings=64,
    max_decoder_position_embeddings=64,
)
text(
    SEQ2SEQ,
    "encoder-decoder",
    "nllb-moe",
    SEQUENCE,
    num_experts=4,
    encoder_sparse_step=2,
    decoder_sparse_step=2,
)
text(
    SEQ2SEQ,
    "encoder-decoder",
    "prophetnet",
    {k: v for k, v in TEXT.items() if k != "num_hidden_layers"},
    hidden_size=HIDDEN,
    num_encoder_layers=3,
    num_decoder_layers=3,
    num_encoder_attention_heads=HEADS,
    num_decoder_attention_heads=HEADS,
    encoder_ffn_dim=INNER,
    decoder_ffn_dim=INNER,
    decoder_start_token_id=1,
)
T5 = {
    "vocab_size": VOCABULARY, "d_model": HIDDEN, "d_ff": INNER, "d_kv": HEAD, "num_layers": 3,
    "num_decoder_layers": 3, "num_heads": HEADS, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
for _name in ("t5", "mt5", "umt5", "longt5"):
    text(SEQ2SEQ, "encoder-decoder", _name, T5, **({"local_radius": 8} if _name == "longt5" else {}))
text(
    SEQ2SEQ,
    "encoder-decoder",
    "switch_transformers",
    T5,
    num_experts=4,
    num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1,
    expert_capacity=64,
)


# --------------------------------------------------------------------------------------------------- vision

VISION: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS,
    "image_size": IMAGE, "patch_size": PATCH, "num_labels": 5,
}  # fmt: skip
CLASSIFY = "AutoModelForImageClassification"


def vision(
    model_type: str,
    base: dict[str, Any] = VISION,
    task: str = CLASSIFY,
    size: int = IMAGE,
    labels: bool = True,
    **settings: Any,
) -> None:
    def make() -> tuple[nn.Module, dict[str, Any]]:
        batch: dict[str, Any] = {"pixel_values": images(size)}
        if labels:
            batch["labels"] = torch.randint(0, 5, (BATCH,))
        return from_config(task, model_type, {**base, **settings}), batch

    add(model_type, "transformers", "vision", make)


for _name in ("vit", "beit", "data2vec-vision", "dinov2", "dinov2_with_registers", "ijepa", "vit_msn"):
    vision(_name, patch_size=4)
vision("dinov3_vit", task="AutoModel", labels=False, patch_size=4)
vision(
    "vit_mae",
    task="AutoModelForPreTraining",
    labels=False,
    patch_size=4,
    decoder_hidden_size=HIDDEN,
    decoder_num_hidden_layers=2,
    decoder_num_attention_heads=HEADS,
    decoder_intermediate_size=INNER,
)
STAGES: dict[str, Any] = {"num_labels": 5, "image_size": IMAGE}
vision("swin", STAGES, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
vision("swinv2", STAGES, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
vision("convnext", STAGES, patch_size=2, hidden_sizes=[8, 16], depths=[2, 3], num_stages=2)
vision("convnextv2", STAGES, patch_size=2, hidden_sizes=[8, 16], depths=[2, 3], num_stages=2)
vision("resnet", STAGES, embedding_size=8, hidden_sizes=[16, 32], depths=[3, 3], layer_type="bottleneck")
vision(
    "regnet", STAGES, embedding_size=8, hidden_sizes=[16, 32], depths=[3, 3], groups_width=8, layer_type="y"
)
vision(
    "segformer",
    STAGES,
    num_encoder_blocks=2,
    depths=[2, 2],
    sr_ratios=[2, 1],
    hidden_sizes=[16, 32],
    patch_sizes=[7, 3],
    strides=[4, 2],
    num_attention_heads=[2, 4],
    mlp_ratios=[2, 2],
    decoder_hidden_size=16,
)
vision(
    "poolformer",
    STAGES,
    num_encoder_blocks=2,
    depths=[3, 3],
    hidden_sizes=[16, 32],
    patch_sizes=[7, 3],
    strides=[4, 2],
    padding=[2, 1],
    mlp_ratio=2.0,
)
vision(
    "mobilevit",
    STAGES,
    hidden_sizes=[16, 16, 24],
    neck_hidden_sizes=[8, 8, 8, 8, 16, 16, 24],
    num_attention_heads=2,
)
vision("mobilenet_v2", STAGES, depth_multiplier=0.25)
vision("efficientnet", STAGES, width_coefficient=0.25, depth_coefficient=0.5, hidden_dim=320)
vision(
    "pvt",
    STAGES,
    num_encoder_blocks=2,
    depths=[2, 2],
    sequence_reduction_ratios=[2, 1],
    hidden_sizes=[16, 32],
    patch_sizes=[4, 2],
    strides=[4, 2],
    num_attention_heads=[2, 4],
    mlp_ratios=[2, 2],
)
vision(
    "focalnet",
    STAGES,
    patch_size=2,
    embed_dim=16,
    depths=[2, 2],
    hidden_sizes=[16, 32],
    focal_levels=[2, 2],
    focal_windows=[3, 3],
)
vision(
    "hiera",
    STAGES,
    size=IMAGE,
    image_size=[IMAGE, IMAGE],
    patch_size=[7, 7],
    patch_stride=[4, 4],
    patch_padding=[3, 3],
    embed_dim=16,
    depths=[2, 2, 2],
    num_heads=[1, 2, 4],
    masked_unit_size=[4, 4],
    query_stride=[2, 2],
    num_query_pool=2,
)
vision(
    "yolos", task="AutoModel", labels=False, image_size=[IMAGE, IMAGE], patch_size=4, num_detection_tokens=4
)
vision(
    "dpt",
    task="AutoModel",
    labels=False,
    patch_size=4,
    backbone_out_indices=[0, 1, 2, 3],
    neck_hidden_sizes=[16, 16, 16, 16],
)


def video(model_type: str, **settings: Any) -> None:
    def make() -> tuple[nn.Module, dict[str, Any]]:
        batch = {"pixel_values": torch.randn(2, 4, 3, IMAGE, IMAGE), "labels": torch.randint(0, 5, (2,))}
        return from_config(
            "AutoModelForVideoClassification", model_type, {**VISION, "num_frames": 4, **settings}
        ), batch

    add(model_type, "transformers", "vision", make)


video("videomae", tubelet_size=2)
video("timesformer")
video("vivit", tubelet_size=[2, PATCH, PATCH])


# ---------------------------------------------------------------------------------------------------- audio

WAVE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS, "conv_dim": [16, 16, 16], "conv_stride": [5, 4, 2], "conv_kernel": [10, 4, 2],
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "layerdrop": 0.0, "pad_token_id": 0,
    "mask_time_prob": 0.0, "ctc_zero_infinity": True, "squeeze_factor": 2,
}  # fmt: skip


def wave(model_type: str, **settings: Any) -> None:
    def make() -> tuple[nn.Module, dict[str, Any]]:
        batch = {"input_values": torch.randn(BATCH, 2000), "labels": tokens(8)}
        return from_config("AutoModelForCTC", model_type, {**WAVE, **settings}), batch

    add(model_type, "transformers", "audio", make)


for _name in (
    "wav2vec2",
    "hubert",
    "wavlm",
    "unispeech",
    "unispeech-sat",
    "data2vec-audio",
    "sew",
    "wav2vec2-conformer",
):
    wave(_name, **({"position_embeddings_type": "rotary"} if _name == "wav2vec2-conformer" else {}))


def speech(model_type: str, length: int, **settings: Any) -> None:
    def make() -> tuple[nn.Module, dict[str, Any]]:
        model = from_config("AutoModelForSpeechSeq2Seq", model_type, {**SEQUENCE, **settings})
        shape = (BATCH, 8, length) if model_type == "whisper" else (BATCH, length, 8)
        return model, {"input_features": torch.randn(shape), "labels": tokens(16)}

    add(model_type, "transformers", "audio", make)


speech(
    "whisper",
    96,
    num_mel_bins=8,
    max_source_positions=48,
    max_target_positions=32,
    suppress_tokens=None,
    begin_suppress_tokens=None,
)
speech(
    "speech_to_text",
    96,
    input_feat_per_channel=8,
    conv_channels=16,
    num_conv_layers=2,
    max_source_positions=96,
    max_target_positions=32,
)


def spectrogram() -> tuple[nn.Module, dict[str, Any]]:
    settings = {
        **VISION,
        "max_length": 64,
        "num_mel_bins": 16,
        "patch_size": 4,
        "frequency_stride": 4,
        "time_stride": 4,
    }
    model = from_config("AutoModelForAudioClassification", "audio-spectrogram-transformer", settings)
    return model, {"input_values": torch.randn(BATCH, 64, 16), "labels": torch.randint(0, 5, (BATCH,))}


add("audio-spectrogram-transformer", "transformers", "audio", spectrogram)


# ----------------------------------------------------------------------------------------------- multimodal

TOWER_TEXT = {**TEXT, "projection_dim": 16, "eos_token_id": 2}
TOWER_VISION = {**VISION, "patch_size": 4, "projection_dim": 16}


def pair(model_type: str, **settings: Any) -> None:
    """Two towers and a contrastive loss."""

    def make() -> tuple[nn.Module, dict[str, Any]]:
        ids = tokens(16)
        ids[:, -1] = 2
        model = from_config(
            "AutoModel",
            model_type,
            {"text_config": TOWER_TEXT, "vision_config": TOWER_VISION, "projection_dim": 16, **settings},
        )
        return model, {
            "input_ids": ids,
            "pixel_values": images(),
            "attention_mask": torch.ones_like(ids),
            "return_loss": True,
        }

    add(model_type, "transformers", "multimodal", make)


for _name in ("clip", "siglip", "chinese_clip", "altclip", "metaclip_2"):
    pair(_name)


def vlm(model_type: str, image_tokens: int, text_type: str = "llama", **settings: Any) -> None:
    """Image features in the place of some tokens of a language model."""

    def make() -> tuple[nn.Module, dict[str, Any]]:
        ids = tokens(image_tokens + 24, VOCABULARY - 2)
        ids[:, 1 : 1 + image_tokens] = VOCABULARY - 1
        given = {
            "vision_config": {"model_type": "siglip_vision_model" if "gemma" in model_type else "clip_vision_model", **TOWER_VISION},
            "text_config": {"model_type": text_type, **TEXT, "max_position_embeddings": 256},
            "image_token_index": VOCABULARY - 1, "image_token_id": VOCABULARY - 1, "pad_token_id": 0, **settings,
        }  # fmt: skip
        batch = {
            "input_ids": ids,
            "labels": ids,
            "pixel_values": images(),
            "attention_mask": torch.ones_like(ids),
        }
        if "gemma" in model_type:
            batch["token_type_ids"] = (ids == VOCABULARY - 1).long()
        return from_config("AutoModelForImageTextToText", model_type, given), batch

    add(model_type, "transformers", "multimodal", make)


vlm("llava", 64)
vlm("vipllava", 64, vision_feature_layers=[-2, -1])
vlm("paligemma", 64, text_type="gemma", projection_dim=HIDDEN)
vlm("gemma3", 16, text_type="gemma3_text", mm_tokens_per_image=16)


def blip() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BlipConfig, BlipForConditionalGeneration

    config = BlipConfig(
        text_config={**TEXT, "encoder_hidden_size": HIDDEN, "projection_dim": 16}, vision_config={**TOWER_VISION},
    )  # fmt: skip
    ids = tokens(16)
    return BlipForConditionalGeneration(config), {"input_ids": ids, "labels": ids, "pixel_values": images()}


add("blip", "transformers", "multimodal", blip)


def git() -> tuple[nn.Module, dict[str, Any]]:
    ids = tokens(16)
    return from_config(CAUSAL, "git", {**TEXT, "vision_config": TOWER_VISION}), {
        "input_ids": ids,
        "labels": ids,
        "pixel_values": images(),
    }


add("git", "transformers", "multimodal", git)


def vilt() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ViltConfig, ViltForQuestionAnswering

    model = ViltForQuestionAnswering(ViltConfig(**{**TEXT, **VISION, "patch_size": 4}, max_image_length=-1))
    return model, {"input_ids": tokens(16), "pixel_values": images(), "labels": torch.rand(BATCH, 5)}


add("vilt", "transformers", "multimodal", vilt)


def detr() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import DetrConfig, DetrModel, ResNetConfig

    backbone = ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], out_features=["stage2"])
    config = DetrConfig(
        **{**SEQUENCE, "num_queries": 8, "use_timm_backbone": False, "use_pretrained_backbone": False},
        backbone=None,
        backbone_config=backbone,
    )
    return DetrModel(config), {
        "pixel_values": images(64),
        "pixel_mask": torch.ones(BATCH, 64, 64, dtype=torch.long),
    }


add("detr", "transformers", "vision", detr)


# ------------------------------------------------------------------------------------------------- diffusers


def diffusion(name: str, kind: str, settings: dict[str, Any], batch: Callable[[], dict[str, Any]]) -> None:
    def make() -> tuple[nn.Module, dict[str, Any]]:
        import diffusers

        return getattr(diffusers, name)(**settings), {**batch(), "return_dict": False}

    add(name, "diffusers", kind, make)


N = 4  # images or videos in a batch


def times() -> Tensor:
    return torch.arange(1, N + 1)


ATTENTION = {"num_attention_heads": 4, "attention_head_dim": 8}
diffusion(
    "UNet2DModel", "U-Net",
    {"sample_size": 16, "in_channels": 3, "out_channels": 3, "block_out_channels": (16, 32), "layers_per_block": 2,
     "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
     "norm_num_groups": 4, "attention_head_dim": 8},
    lambda: {"sample": torch.randn(N, 3, 16, 16), "timestep": times()},
)  # fmt: skip
diffusion(
    "UNet2DConditionModel", "U-Net",
    {"sample_size": 16, "in_channels": 4, "out_channels": 4, "block_out_channels": (16, 32), "layers_per_block": 2,
     "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
     "cross_attention_dim": 16, "norm_num_groups": 4, "attention_head_dim": 8},
    lambda: {"sample": torch.randn(N, 4, 16, 16), "timestep": times(), "encoder_hidden_states": torch.randn(N, 8, 16)},
)  # fmt: skip
diffusion(
    "UNet3DConditionModel", "U-Net",
    {"sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (16, 32), "layers_per_block": 1,
     "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"), "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
     "cross_attention_dim": 16, "norm_num_groups": 4, "attention_head_dim": 8},
    lambda: {"sample": torch.randn(2, 4, 3, 8, 8), "timestep": times()[:2], "encoder_hidden_states": torch.randn(2, 8, 16)},
)  # fmt: skip
diffusion(
    "AutoencoderKL", "autoencoder",
    {"in_channels": 3, "out_channels": 3, "block_out_channels": (8, 16), "layers_per_block": 2, "latent_channels": 4,
     "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 4,
     "sample_size": 16},
    lambda: {"sample": torch.randn(N, 3, 16, 16)},
)  # fmt: skip
diffusion(
    "DiTTransformer2DModel", "image transformer",
    {**ATTENTION, "in_channels": 4, "num_layers": 4, "sample_size": 16, "patch_size": 2, "num_embeds_ada_norm": 10, "norm_num_groups": 4},
    lambda: {"hidden_states": torch.randn(N, 4, 16, 16), "timestep": times(), "class_labels": torch.arange(N)},
)  # fmt: skip
diffusion(
    "PixArtTransformer2DModel", "image transformer",
    {**ATTENTION, "in_channels": 4, "out_channels": 8, "num_layers": 4, "sample_size": 16, "patch_size": 2,
     "cross_attention_dim": 32, "caption_channels": 16, "norm_num_groups": 4},
    lambda: {"hidden_states": torch.randn(N, 4, 16, 16), "timestep": times(), "encoder_hidden_states": torch.randn(N, 8, 16),
             "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
)  # fmt: skip
diffusion(
    "SD3Transformer2DModel", "image transformer",
    {**ATTENTION, "sample_size": 16, "patch_size": 2, "in_channels": 4, "num_layers": 4, "joint_attention_dim": 16,
     "caption_projection_dim": 32, "pooled_projection_dim": 8, "out_channels": 4, "pos_embed_max_size": 16,
     "dual_attention_layers": (0, 1), "qk_norm": "rms_norm"},
    lambda: {"hidden_states": torch.randn(N, 4, 16, 16), "encoder_hidden_states": torch.randn(N, 8, 16),
             "pooled_projections": torch.randn(N, 8), "timestep": times()},
)  # fmt: skip
diffusion(
    "FluxTransformer2DModel", "image transformer",
    {**ATTENTION, "patch_size": 1, "in_channels": 4, "num_layers": 3, "num_single_layers": 3, "joint_attention_dim": 16,
     "pooled_projection_dim": 8, "axes_dims_rope": (2, 2, 4), "guidance_embeds": True},
    lambda: {"hidden_states": torch.randn(N, 64, 4), "encoder_hidden_states": torch.randn(N, 8, 16),
             "pooled_projections": torch.randn(N, 8), "timestep": torch.rand(N), "guidance": torch.rand(N),
             "img_ids": torch.randint(0, 4, (64, 3)).float(), "txt_ids": torch.zeros(8, 3)},
)  # fmt: skip
diffusion(
    "ChromaTransformer2DModel", "image transformer",
    {**ATTENTION, "patch_size": 1, "in_channels": 4, "num_layers": 3, "num_single_layers": 3, "joint_attention_dim": 16,
     "axes_dims_rope": (2, 2, 4), "approximator_num_channels": 16, "approximator_hidden_dim": 16, "approximator_layers": 1},
    lambda: {"hidden_states": torch.randn(N, 64, 4), "encoder_hidden_states": torch.randn(N, 8, 16), "timestep": torch.rand(N),
             "img_ids": torch.randint(0, 4, (64, 3)).float(), "txt_ids": torch.zeros(8, 3)},
)  # fmt: skip
diffusion(
    "QwenImageTransformer2DModel", "image transformer",
    {**ATTENTION, "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 4, "joint_attention_dim": 16,
     "axes_dims_rope": (2, 2, 4)},
    lambda: {"hidden_states": torch.randn(N, 64, 16), "encoder_hidden_states": torch.randn(N, 8, 16), "timestep": torch.rand(N),
             "encoder_hidden_states_mask": torch.ones(N, 8, dtype=torch.bool), "img_shapes": [(1, 8, 8)] * N},
)  # fmt: skip
diffusion(
    "AuraFlowTransformer2DModel", "image transformer",
    {**ATTENTION, "sample_size": 16, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 2, "num_single_dit_layers": 3,
     "joint_attention_dim": 16, "caption_projection_dim": 32, "out_channels": 4, "pos_embed_max_size": 64},
    lambda: {"hidden_states": torch.randn(N, 4, 16, 16), "encoder_hidden_states": torch.randn(N, 8, 16), "timestep": torch.rand(N)},
)  # fmt: skip
diffusion(
    "SanaTransformer2DModel", "image transformer",
    {**ATTENTION, "sample_size": 8, "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 4,
     "num_cross_attention_heads": 4, "cross_attention_head_dim": 8, "cross_attention_dim": 32, "caption_channels": 16},
    lambda: {"hidden_states": torch.randn(N, 4, 8, 8), "encoder_hidden_states": torch.randn(N, 8, 16), "timestep": times()},
)  # fmt: skip
diffusion(
    "Lumina2Transformer2DModel", "image transformer",
    {"sample_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 24, "num_layers": 3, "num_refiner_layers": 1,
     "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2, "norm_eps": 1e-5, "scaling_factor": 1.0,
     "axes_dim_rope": (4, 2, 2), "axes_lens": (128, 128, 128), "cap_feat_dim": 16},
    lambda: {"hidden_states": torch.randn(N, 4, 16, 16), "encoder_hidden_states": torch.randn(N, 8, 16), "timestep": torch.rand(N),
             "encoder_attention_mask": torch.ones(N, 8, dtype=torch.bool)},
)  # fmt: skip
diffusion(
    "WanTransformer3DModel", "video transformer",
    {"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
     "text_dim": 16, "freq_dim": 16, "ffn_dim": 64, "num_layers": 4, "rope_max_seq_len": 32},
    lambda: {"hidden_states": torch.randn(N, 4, 2, 8, 8), "timestep": times(), "encoder_hidden_states": torch.randn(N, 8, 16)},
)  # fmt: skip
diffusion(
    "CogVideoXTransformer3DModel", "video transformer",
    {**ATTENTION, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 16, "num_layers": 4,
     "sample_width": 8, "sample_height": 8, "sample_frames": 5, "patch_size": 2, "temporal_compression_ratio": 4,
     "max_text_seq_length": 8},
    lambda: {"hidden_states": torch.randn(N, 2, 4, 8, 8), "encoder_hidden_states": torch.randn(N, 8, 16), "timestep": times()},
)  # fmt: skip
diffusion(
    "LTXVideoTransformer3DModel", "video transformer",
    {**ATTENTION, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "num_layers": 4, "caption_channels": 16,
     "qk_norm": "rms_norm_across_heads"},
    lambda: {"hidden_states": torch.randn(N, 32, 4), "encoder_hidden_states": torch.randn(N, 8, 16), "timestep": times()[:, None].expand(N, 32),
             "encoder_attention_mask": torch.ones(N, 8, dtype=torch.bool), "num_frames": 2, "height": 4, "width": 4},
)  # fmt: skip
diffusion(
    "HunyuanVideoTransformer3DModel", "video transformer",
    {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10, "num_layers": 2, "num_single_layers": 2,
     "num_refiner_layers": 1, "patch_size": 1, "patch_size_t": 1, "guidance_embeds": True, "text_embed_dim": 16,
     "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4)},
    lambda: {"hidden_states": torch.randn(2, 4, 1, 8, 8), "timestep": times()[:2], "pooled_projections": torch.randn(2, 8),
             "encoder_hidden_states": torch.randn(2, 8, 16), "encoder_attention_mask": torch.ones(2, 8), "guidance": torch.rand(2)},
)  # fmt: skip
diffusion(
    "MochiTransformer3DModel", "video transformer",
    {**ATTENTION, "patch_size": 2, "num_layers": 3, "pooled_projection_dim": 16, "in_channels": 4, "out_channels": None,
     "text_embed_dim": 16, "time_embed_dim": 8, "activation_fn": "swiglu", "max_sequence_length": 8, "qk_norm": "rms_norm"},
    lambda: {"hidden_states": torch.randn(N, 4, 2, 8, 8), "timestep": times(), "encoder_hidden_states": torch.randn(N, 8, 16),
             "encoder_attention_mask": torch.ones(N, 8, dtype=torch.bool)},
)  # fmt: skip
diffusion(
    "AllegroTransformer3DModel", "video transformer",
    {"num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 4, "out_channels": 4, "num_layers": 3,
     "cross_attention_dim": 48, "sample_width": 8, "sample_height": 8, "sample_frames": 4, "caption_channels": 16},
    lambda: {"hidden_states": torch.randn(2, 4, 2, 8, 8), "timestep": times()[:2], "encoder_hidden_states": torch.randn(2, 8, 16),
             "attention_mask": torch.ones(2, 4, 8, 8), "encoder_attention_mask": torch.ones(2, 8), "image_rotary_emb": None},
)  # fmt: skip
diffusion(
    "LatteTransformer3DModel", "video transformer",
    {**ATTENTION, "sample_size": 8, "num_layers": 2, "patch_size": 2, "caption_channels": 8, "in_channels": 4, "cross_attention_dim": 32,
     "out_channels": 8, "attention_bias": True, "activation_fn": "gelu-approximate", "num_embeds_ada_norm": 1000,
     "norm_type": "ada_norm_single", "norm_elementwise_affine": False, "norm_eps": 1e-6, "video_length": 2},
    lambda: {"hidden_states": torch.randn(2, 4, 2, 8, 8), "timestep": times()[:2], "encoder_hidden_states": torch.randn(2, 8, 8)},
)  # fmt: skip
diffusion(
    "StableAudioDiTModel", "audio transformer",
    {"sample_size": 64, "in_channels": 4, "out_channels": 4, "num_layers": 4, "attention_head_dim": 8, "num_attention_heads": 4,
     "num_key_value_attention_heads": 2, "cross_attention_dim": 32, "time_proj_dim": 16, "global_states_input_dim": 16,
     "cross_attention_input_dim": 16},
    lambda: {"hidden_states": torch.randn(N, 4, 64), "timestep": torch.rand(N), "encoder_hidden_states": torch.randn(N, 8, 16),
             "global_hidden_states": torch.randn(N, 1, 16)},
)  # fmt: skip
