"""Tiny random models, one for each kind of experts that the plug-in treats differently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class TinyModel:
    architecture: str
    config: Callable[[], Any]
    encoder_decoder: bool = False
    interface: bool = True

    def build(self) -> Any:
        torch.manual_seed(0)
        model = getattr(transformers, self.architecture)._from_config(self.config(), dtype=torch.bfloat16)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Biases are initialised to zero, which would hide mistakes; some families initialise experts that way.
                is_bias = parameter.ndim == 1 and "norm" not in name
                if is_bias or any(part in name for part in ("experts", "_linear", ".w1", ".v1", ".w2")):
                    parameter.normal_(0, 0.1)
        return model.eval()


def _mixtral(**changes: Any) -> Any:
    settings = COMMON | {"intermediate_size": 96, "num_local_experts": 6, "num_experts_per_tok": 3} | changes
    return transformers.MixtralConfig(**settings)


def _qwen2_moe() -> Any:
    settings = {k: v for k, v in COMMON.items() if k != "head_dim"}
    return transformers.Qwen2MoeConfig(
        **settings,
        intermediate_size=96,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=4,
        use_sliding_window=False,
    )


def _qwen3_moe() -> Any:
    return transformers.Qwen3MoeConfig(
        **COMMON, intermediate_size=96, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=4
    )


def _ernie4_5_moe() -> Any:
    settings = {k: v for k, v in COMMON.items() if k != "head_dim"}
    return transformers.Ernie4_5_MoeConfig(
        **settings,
        intermediate_size=96,
        moe_intermediate_size=48,
        moe_num_experts=8,
        moe_k=3,
        moe_num_shared_experts=1,
        moe_layer_start_index=0,
    )


def _gpt_oss() -> Any:
    layers = ["sliding_attention", "full_attention"]
    return transformers.GptOssConfig(
        **COMMON, intermediate_size=64, num_local_experts=8, num_experts_per_tok=4, sliding_window=8, layer_types=layers
    )


def _deepseek_v3() -> Any:
    settings = COMMON | {"num_key_value_heads": 4, "head_dim": 8}
    return transformers.DeepseekV3Config(
        **settings,
        intermediate_size=96,
        moe_intermediate_size=48,
        n_routed_experts=8,
        num_experts_per_tok=4,
        n_group=2,
        topk_group=2,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )


def _jamba() -> Any:
    settings = {k: v for k, v in COMMON.items() if k not in ("head_dim", "max_position_embeddings")}
    return transformers.JambaConfig(
        **settings,
        intermediate_size=96,
        num_experts=4,
        num_experts_per_tok=2,
        expert_layer_period=1,
        expert_layer_offset=0,
        attn_layer_period=2,
        attn_layer_offset=1,
        use_mamba_kernels=False,
    )


def _switch() -> Any:
    return transformers.SwitchTransformersConfig(
        vocab_size=256,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=4,
        num_decoder_layers=4,
        num_sparse_encoder_layers=2,
        num_sparse_decoder_layers=2,
        num_heads=4,
        num_experts=6,
        expert_capacity=4,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
    )


def _dbrx() -> Any:
    return transformers.DbrxConfig(
        vocab_size=256,
        d_model=64,
        n_heads=4,
        n_layers=2,
        max_seq_len=128,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 3, "moe_normalize_expert_weights": 1.0},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def _llama4() -> Any:
    return transformers.Llama4TextConfig(
        **COMMON,
        intermediate_size=48,
        intermediate_size_mlp=96,
        num_local_experts=6,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
        attention_chunk_size=64,
    )


def _jetmoe() -> Any:
    return transformers.JetMoeConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_key_value_heads=2,
        kv_channels=16,
        intermediate_size=48,
        max_position_embeddings=128,
        num_local_experts=6,
        num_experts_per_tok=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def _longcat_flash() -> Any:
    settings = COMMON | {"num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 8}
    return transformers.LongcatFlashConfig(
        **settings,
        num_layers=2,
        ffn_hidden_size=96,
        expert_ffn_hidden_size=48,
        n_routed_experts=6,
        zero_expert_num=4,
        moe_topk=4,
        kv_lora_rank=16,
        q_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )


TINY_MODELS: dict[str, TinyModel] = {
    "mixtral": TinyModel("MixtralForCausalLM", _mixtral),
    "mixtral_tied": TinyModel("MixtralForCausalLM", lambda: _mixtral(tie_word_embeddings=True)),
    "qwen2_moe": TinyModel("Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3_moe": TinyModel("Qwen3MoeForCausalLM", _qwen3_moe),
    "ernie4_5_moe": TinyModel("Ernie4_5_MoeForCausalLM", _ernie4_5_moe),
    "gpt_oss": TinyModel("GptOssForCausalLM", _gpt_oss),
    "deepseek_v3": TinyModel("DeepseekV3ForCausalLM", _deepseek_v3),
    "jamba": TinyModel("JambaForCausalLM", _jamba),
    "switch": TinyModel("SwitchTransformersForConditionalGeneration", _switch, encoder_decoder=True, interface=False),
    "dbrx": TinyModel("DbrxForCausalLM", _dbrx, interface=False),
    "llama4": TinyModel("Llama4ForCausalLM", _llama4, interface=False),
    "jetmoe": TinyModel("JetMoeForCausalLM", _jetmoe, interface=False),
    "longcat_flash": TinyModel("LongcatFlashForCausalLM", _longcat_flash, interface=False),
}
