"""How many bytes of key-value cache a model needs per token, from its Transformers config, for any family.

The estimate is an upper bound for the caches that Transformers builds: sliding windows, layers without attention and
shared caches need less. Multi-head latent attention is counted as Transformers stores it: keys and values of all heads,
expanded.
"""

from __future__ import annotations

from typing import Any

from zipmoe.engine.model_shape import HIDDEN_SIZE, dtype_bytes, first, largest, text_config, value

_LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
_DECODER_LAYERS = ("num_decoder_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_heads", "num_heads", "n_head", "decoder_attention_heads")
_KV_HEADS = (
    "num_key_value_heads",
    "kv_n_heads",
    "num_kv_heads",
    "num_global_key_value_heads",
    "swa_num_key_value_heads",
)
_HEAD_DIMS = ("head_dim", "d_kv", "kv_channels", "attention_head_dim", "global_head_dim", "swa_head_dim")
_SHORTEST_CONTEXT_TOKENS = 256
"""Recurrent states (Mamba, linear attention) have a fixed size; a context of at least this length covers them."""


def kv_cache_bytes(config: Any, tokens: int) -> int:
    """Bytes of key-value cache for ``tokens`` tokens, summed over the sequences of a batch (each beam counts).

    Args:
        config: a Transformers ``PreTrainedConfig`` (of the whole model; the text part is found), or any object or
            mapping with its attributes.
        tokens: cached tokens.
    """
    return kv_cache_bytes_per_token(config) * max(tokens, _SHORTEST_CONTEXT_TOKENS)


def kv_cache_bytes_per_token(config: Any) -> int:
    """Upper bound of the cache bytes that one token adds over all layers."""
    config = text_config(config)
    hidden = first(config, HIDDEN_SIZE) or 0
    heads = first(config, _HEADS) or 0
    kv_heads = largest(config, _KV_HEADS) or heads
    head_dim = largest(config, _HEAD_DIMS) or (-(-hidden // heads) if heads else 0)
    key_width = value_width = kv_heads * head_dim
    latent_key = (value(config, "qk_nope_head_dim") or 0) + (value(config, "qk_rope_head_dim") or 0)
    if latent_key:
        key_width = max(key_width, heads * latent_key)
        value_width = max(value_width, heads * (value(config, "v_head_dim") or latent_key))
    if key_width == 0:  # nothing that we recognise: no attention is wider than full heads over the hidden size
        key_width = value_width = hidden
    layers = first(config, _LAYERS) or 1
    if value(config, "is_encoder_decoder"):
        layers = 2 * (first(config, _DECODER_LAYERS) or layers)  # self-attention and cross-attention
    return layers * (key_width + value_width) * dtype_bytes(config)
