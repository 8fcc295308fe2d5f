"""How many bytes of key-value cache a model needs, from its Transformers config, for any family.

The estimates are upper bounds for the caches that Transformers builds: sliding windows, layers without attention and
shared caches need less. Multi-head latent attention caches the latent vector and the rotary key of each token, as
Transformers does. Linear attention and state-space layers hold a state of fixed size per sequence, counted for every
layer.
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
_LATENT_RANK = ("kv_lora_rank",)
_ROTARY_DIM = ("qk_rope_head_dim",)
_INDEX_DIM = ("index_head_dim",)
_LINEAR_HEADS = ("linear_num_value_heads", "linear_num_heads", "linear_num_key_heads")
_LINEAR_KEY_DIM = ("linear_key_head_dim", "linear_head_dim")
_LINEAR_VALUE_DIM = ("linear_value_head_dim", "linear_head_dim")
_STATE_DIM = ("mamba_d_state", "ssm_state_size", "state_size")
_STATE_WIDTHS = (
    (("mamba_num_heads",), ("mamba_head_dim",)),
    (("mamba_n_heads",), ("mamba_d_head",)),
    (("mamba_expand", "expand"), HIDDEN_SIZE),
)
_STATE_BYTES = 4  # states are kept in FP32
_SHORTEST_CONTEXT_TOKENS = 256
"""Caches are counted for at least this many tokens: it covers the small fixed parts, such as the states of
convolutions.
"""


def kv_cache_bytes(config: Any, tokens: int, sequences: int = 1) -> int:
    """Bytes of the cache for ``tokens`` tokens in all.

    Args:
        config: a Transformers ``PreTrainedConfig`` (of the whole model; the text part is found), or any object or
            mapping with its attributes.
        tokens: cached tokens, summed over the sequences of a batch (each beam counts).
        sequences: number of sequences.
    """
    per_token = kv_cache_bytes_per_token(config)
    return per_token * max(tokens, _SHORTEST_CONTEXT_TOKENS * sequences) + sequences * recurrent_state_bytes(config)


def kv_cache_bytes_per_token(config: Any) -> int:
    """Upper bound of the cache bytes that one token adds over all layers."""
    config = text_config(config)
    hidden = first(config, HIDDEN_SIZE) or 0
    heads = first(config, _HEADS) or 0
    kv_heads = largest(config, _KV_HEADS) or heads
    width = 2 * kv_heads * _head_dim(config)
    latent = largest(config, _LATENT_RANK)
    if latent is not None:
        width = latent + (largest(config, _ROTARY_DIM) or 0)
    if width == 0:  # nothing that we recognise: no attention is wider than full heads over the hidden size
        width = 2 * hidden
    width += largest(config, _INDEX_DIM) or 0  # keys of the indexer of sparse attention
    return _layers(config) * width * dtype_bytes(config)


def recurrent_state_bytes(config: Any) -> int:
    """Upper bound of the state that linear attention and state-space layers keep for one sequence; 0 without them."""
    config = text_config(config)
    linear = largest(config, _LINEAR_HEADS) or 0
    linear *= (first(config, _LINEAR_KEY_DIM) or 0) * (first(config, _LINEAR_VALUE_DIM) or 0)
    inner = max((first(config, count) or 0) * (first(config, width) or 0) for count, width in _STATE_WIDTHS)
    state_space = inner * (first(config, _STATE_DIM) or 0)
    if linear == state_space == 0 and "linear_attention" in (value(config, "layer_types") or ()):
        linear = (first(config, _HEADS) or 0) * _head_dim(config) ** 2
    return _layers(config) * max(linear, state_space) * _STATE_BYTES


def _head_dim(config: Any) -> int:
    hidden, heads = first(config, HIDDEN_SIZE) or 0, first(config, _HEADS) or 0
    return largest(config, _HEAD_DIMS) or (-(-hidden // heads) if heads else 0)


def _layers(config: Any) -> int:
    layers = first(config, _LAYERS) or 1
    if value(config, "is_encoder_decoder"):
        return 2 * (first(config, _DECODER_LAYERS) or layers)  # self-attention and cross-attention
    return layers
