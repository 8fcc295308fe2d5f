"""A tiny random Qwen2-MoE checkpoint, made with Transformers and saved in the hub's layout (one tensor per expert)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

LAYERS, EXPERTS, TOP_K, HIDDEN, EXPERT_HIDDEN, VOCABULARY = 2, 6, 3, 48, 40, 160


def tiny_model(seed: int = 0, **overrides: Any) -> Qwen2MoeForCausalLM:
    """A BF16 model with weights of realistic spread."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": EXPERT_HIDDEN,
        "shared_expert_intermediate_size": 56,
        "decoder_sparse_step": 1,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        **overrides,
    }
    torch.manual_seed(seed)
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**settings)).to(torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.05)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
    return model


def save_tiny_checkpoint(folder: Path, seed: int = 0, max_shard_size: str = "60KB", **overrides: Any) -> Path:
    """Save ``tiny_model`` into ``folder``, split into several shards."""
    model = tiny_model(seed, **overrides)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "notes.txt").write_text("a side file\n")
    return folder
