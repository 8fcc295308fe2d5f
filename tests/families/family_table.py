"""The families of the test bed, as data: how their configurations shrink, and which families are left out and why."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from zipmoe.codecs.codec_settings import CodecSettings

CODECS = (
    CodecSettings("fx3", None, 1),
    CodecSettings("zstd", "huf", 2),
    CodecSettings("lz4", None, 3),
    CodecSettings("lz4hc", 9, 2),
    CodecSettings("zstd", 3, 1),
)
"""FX3 packs every family; the others take turns."""

VOCABULARY = 128
SPECIAL_TOKENS = 16
"""The last ids of the vocabulary: never drawn as input; a configuration that wants an image token gets one of them."""
TOKENS = 12
"""Length of the test sequences; longer than the sliding windows of the tiny models."""
HIDDEN = 64
EXPERTS = 8
MAX_LAYERS = 4

SMALL: dict[str, Any] = {
    # sizes
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "unpadded_vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "d_model": HIDDEN,
    "intermediate_size": 80,
    "intermediate_size_mlp": 80,
    "dense_intermediate_size": 80,
    "ffn_hidden_size": 80,
    "d_ff": 80,
    "moe_intermediate_size": 48,
    "expert_ffn_hidden_size": 48,
    "shared_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "shared_experts_intermediate_size": 48,
    "share_expert_dim": 48,
    "moe_shared_expert_intermediate_size": 48,
    "moe_latent_size": 32,
    "moe_hidden_size": 32,
    # attention
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_heads": 4,
    "num_heads": 4,
    "head_dim": 16,
    "kv_channels": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 8,
    "rel_extent": 32,
    "d_kv": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 8,
    "sliding_window": 8,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # experts and routing; at least three of eight, because only then the orders of combination differ
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "num_experts_per_token": 3,
    "moe_topk": 3,
    "moe_k": 3,
    "top_k_experts": 3,
    # state space layers
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_dt_rank": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    # depth
    "num_layers": 2,
    "num_decoder_layers": 2,
    "n_layers": 2,
    "num_dense_layers": 1,
    "first_k_dense_replace": 1,
    # vision and audio towers: present, never run
    "depth": 2,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 80,
    "out_hidden_size": HIDDEN,
    "output_dim": HIDDEN,
    "output_channels": 16,
    "downsample_hidden_size": 16,
    "projector_hidden_size": 32,
    "projection_intermediate_size": 80,
    "position_embedding_size": 64,
    "num_position_embeddings": 64,
    "max_source_positions": 64,
    "image_size": 64,
    "max_image_size": 64,
    "mlp_dim": 80,
}
WIDE = SMALL | {
    "hidden_size": 2048,
    "d_model": 2048,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "expert_ffn_hidden_size": 256,
    "d_ff": 256,
    "num_layers": 1,
    "n_layers": 1,
    "num_hidden_layers": 1,
}
"""Rows as long as in real models: only there do products come out differently for other numbers of rows."""
GROUPED_ROUTING = {"n_group": 4, "topk_group": 3, "num_expert_group": 4}
"""Applied where the default configuration routes through more than one group of experts."""
TOKEN_ID = re.compile(r".*token_(id|index)$")


@dataclasses.dataclass(frozen=True)
class TinyFamily:
    """What the general rules cannot know about one family."""

    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Configuration fields, applied after shrinking; a mapping goes into the sub-configuration of that name."""
    architecture: str | None = None
    """Model class; None: the family's only ``*ForCausalLM``, or else its ``*ForConditionalGeneration``."""
    top_k: int = 3
    """Experts that each token uses, where the family does not let us have three."""
    inputs: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """Extra integer inputs (tokens,) of the forward pass, the same for each sequence of the batch."""
    seed: int | None = None
    """Seed of the weights, where the usual one makes a router that sends all tokens to the same experts."""
    reset_on_load: tuple[str, ...] = ()
    """Last part of the names of stored tensors that Transformers itself overwrites while loading."""


_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}}
_GATE_IN_ONE_RUN = {"moe_intermediate_size": 96}
"""For families whose gate computes on contiguous rows (as gpt_oss): torch computes what is left of a run after whole
vectors of 32 FP32 values with other code, so that with other widths the last bit depends on how many rows a run has."""

FAMILIES: dict[str, TinyFamily] = {
    "afmoe": TinyFamily(),
    "aria": TinyFamily(),
    "axk1": TinyFamily(),
    "axk2": TinyFamily(),
    "bailing_hybrid": TinyFamily(),
    "beam": TinyFamily(),
    "cohere2_moe": TinyFamily(),
    "dbrx": TinyFamily(
        {
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 3},
        }
    ),
    "deepseek_ocr2": TinyFamily(
        {
            "text_config": {"mlp_layer_types": ["dense", "sparse", "sparse"], "num_experts_per_tok": 3},
            "vision_config": {"sam_config": {"downsample_channels": [16, HIDDEN]}},
        }
    ),
    "deepseek_v2": TinyFamily({"num_experts_per_tok": 3}),
    "deepseek_v3": TinyFamily(),
    "deepseek_v32": TinyFamily(),
    "deepseek_v4": TinyFamily({"o_lora_rank": 32, "o_groups": 2, **_GATE_IN_ONE_RUN}),
    "diffusion_gemma": TinyFamily(
        {"text_config": {"global_head_dim": 32, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 48}},
        architecture="DiffusionGemmaForBlockDiffusion",
    ),
    "dots1": TinyFamily({"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1}),
    "dots3_note": TinyFamily(
        {
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_q_lora_rank": 32,
            "swa_kv_lora_rank": 32,
            "swa_head_dim": 32,
            "swa_qk_nope_head_dim": 16,
            "swa_v_head_dim": 16,
        }
    ),
    "ernie4_5_moe": TinyFamily(),
    "ernie4_5_vl_moe": TinyFamily(
        {"text_config": {"moe_intermediate_size": [48, 32], **_MROPE}},
        architecture="Ernie4_5_VLMoeForConditionalGeneration",
        inputs={"moe_mm_token_type_ids": (0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0)},
    ),
    "exaone_moe": TinyFamily(),
    "flex_olmo": TinyFamily(),
    "flint": TinyFamily({"mlp_only_layers": [0]}),
    "gemma4": TinyFamily(
        {
            "global_head_dim": 32,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 48,
        }
    ),
    "glm4_moe": TinyFamily(),
    "glm4_moe_lite": TinyFamily(),
    "glm4v_moe": TinyFamily({"text_config": {**_MROPE, "partial_rotary_factor": 1.0}}),
    "glm5_next": TinyFamily(
        {"text_config": {"qk_rope_head_dim": 0, "head_dim": 0, "index_kpool": 4, **_GATE_IN_ONE_RUN}}
    ),
    "glm_moe_dsa": TinyFamily(),
    "gpt_oss": TinyFamily({"intermediate_size": 96}),
    "granitemoe": TinyFamily(),
    "granitemoe_swa": TinyFamily(),
    "granitemoehybrid": TinyFamily({"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}),
    "granitemoeshared": TinyFamily(),
    "hunyuan_v1_moe": TinyFamily({"head_dim": 16, "num_experts": 8, "moe_topk": 3}),
    "hy_v3": TinyFamily(),
    "hy_v4": TinyFamily(_GATE_IN_ONE_RUN),
    "hy_v4_vl": TinyFamily({"text_config": {**_MROPE, **_GATE_IN_ONE_RUN}}),
    "inkling": TinyFamily(),
    "inkling2": TinyFamily(),
    "inkling2_loop": TinyFamily(),
    "jamba": TinyFamily({"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 3}),
    "jetmoe": TinyFamily(),
    "kimi_linear": TinyFamily(),
    "kolibri1": TinyFamily(),
    "laguna": TinyFamily(),
    "lara_mini": TinyFamily(),
    "lfm2_moe": TinyFamily({"layer_types": ["conv", "full_attention", "conv"]}),
    "llama4": TinyFamily({"num_experts_per_tok": 3}),
    "longcat_flash": TinyFamily({"zero_expert_num": 4}),
    "mellum": TinyFamily(),
    "mimo_v2_flash": TinyFamily(),
    "minimax": TinyFamily(),
    "minimax_m2": TinyFamily(),
    "minimax_m3_vl": TinyFamily(),
    "mistral4": TinyFamily(),
    "mistral_large4": TinyFamily(),
    "mixtral": TinyFamily(),
    "muse_spark": TinyFamily({"audio_config": {"hidden_sizes": [8, 16, 32], "depths": [1, 1, 1]}}),
    "nemotron_h": TinyFamily(),
    "olmoe": TinyFamily(),
    "openai_privacy_filter": TinyFamily(architecture="OpenAIPrivacyFilterForTokenClassification"),
    "phimoe": TinyFamily(top_k=2),
    "qwen2_moe": TinyFamily(),
    "qwen3_5_moe": TinyFamily(),
    "qwen3_moe": TinyFamily(),
    "qwen3_next": TinyFamily(),
    "qwen3_omni_moe": TinyFamily(architecture="Qwen3OmniMoeThinkerForConditionalGeneration"),
    "qwen3_vl_moe": TinyFamily(),
    "qwen4_exp": TinyFamily(
        {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
            "hc_lowrank": 16,
        }
    ),
    "solar_open": TinyFamily(),
    "step3p7": TinyFamily({"text_config": {"sliding_window": 8, "n_routed_experts": 8}}),
    "switch_transformers": TinyFamily(
        {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "decoder_start_token_id": 0}, top_k=1
    ),
    "unlimited_ocr": TinyFamily({"vision_config": {"sam_config": {"downsample_channels": [16, HIDDEN]}}}),
    "zaya": TinyFamily(
        {"num_experts_per_tok": 1, "router_hidden_size": 128},
        top_k=1,
        seed=4,
        reset_on_load=("balancing_biases",),
    ),
}
"""Every family of the test bed: all of Transformers' experts interface, and those with an expert loop of their own."""

EXCLUDED: dict[str, str] = {
    "doge": "its experts are single rows of two embeddings, found by product keys: there is no expert matrix to pack",
    "nllb_moe": "broken upstream: whatever the router chooses, only expert_0 and expert_1 are ever computed",
    "vitpose_backbone": "a vision backbone with one expert per data set, chosen by the caller: not a language model",
}
"""Families with experts that the test bed leaves out, and why."""

OWN_LOOP_EXPERTS: dict[str, dict[str, tuple[str, ...]]] = {
    "dbrx": {"DbrxExpertGLU": ("w1", "v1", "w2")},
    "jetmoe": {"JetMoeParallelExperts": ("weight",)},
    "llama4": {"Llama4TextExperts": ("gate_up_proj", "down_proj")},
    "longcat_flash": {"LongcatFlashExperts": ("gate_up_proj", "down_proj")},
    "step3p7": {"Step3p7Experts": ("gate_up_proj", "down_proj")},
    "switch_transformers": {
        "SwitchTransformersExperts": tuple(f"expert_{e}.{m}.weight" for e in range(EXPERTS) for m in ("wi", "wo"))
    },
}
"""Families outside the interface: expert module class and the names of its expert matrices."""


def second_codec(family: str) -> CodecSettings:
    """The codecs besides FX3 take turns, so that each meets many families."""
    others = CODECS[1:]
    return others[sorted(FAMILIES).index(family) % len(others)]
