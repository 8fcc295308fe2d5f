"""How many bytes of key-value cache a model needs per token, from its Transformers config, for any family.

The estimate is an upper bound for the caches that Transformers builds: sliding windows, layers without attention and
shared caches need less. Multi-head latent attention is counted as Transformers stores it: keys and values of all heads,
expanded.
"""

from __future__ import annotations

from typing import Any

_DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
_LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
_DECODER_LAYERS = ("num_decoder_layers", "decoder_layers")
_HIDDEN = ("hidden_size", "d_model", "n_embd")
_HEADS = ("num_attention_heads", "n_heads", "num_heads", "n_head", "decoder_attention_heads")
_KV_HEADS = (
    "num_key_value_heads",
    "kv_n_heads",
    "num_kv_heads",
    "num_global_key_value_heads",
    "swa_num_key_value_heads",
)
_HEAD_DIMS = ("head_dim", "d_kv", "kv_channels", "attention_head_dim", "global_head_dim", "swa_head_dim")
_NESTED = ("attn_config", "attention")
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
    config = _text_config(config)
    hidden = _first(config, _HIDDEN) or 0
    heads = _first(config, _HEADS) or 0
    kv_heads = _largest(config, _KV_HEADS) or heads
    head_dim = _largest(config, _HEAD_DIMS) or (-(-hidden // heads) if heads else 0)
    key_width = value_width = kv_heads * head_dim
    latent_key = (_get(config, "qk_nope_head_dim") or 0) + (_get(config, "qk_rope_head_dim") or 0)
    if latent_key:
        key_width = max(key_width, heads * latent_key)
        value_width = max(value_width, heads * (_get(config, "v_head_dim") or latent_key))
    if key_width == 0:  # nothing that we recognise: no attention is wider than full heads over the hidden size
        key_width = value_width = hidden
    layers = _first(config, _LAYERS) or 1
    if _get(config, "is_encoder_decoder"):
        layers = 2 * (_first(config, _DECODER_LAYERS) or layers)  # self-attention and cross-attention
    return layers * (key_width + value_width) * _dtype_bytes(config)


def _text_config(config: Any) -> Any:
    if hasattr(config, "get_text_config"):
        return config.get_text_config(decoder=True)
    return _get(config, "text_config") or config


def _get(config: Any, name: str) -> Any:
    if isinstance(config, dict):
        return config.get(name)
    return getattr(config, name, None)


def _numbers(config: Any, names: tuple[str, ...]) -> list[int]:
    """Values of the attributes that exist, also of a nested attention config; a list per layer counts with its
    largest.
    """
    found = []
    for holder in [config, *(_get(config, name) for name in _NESTED)]:
        for name in names:
            value = _get(holder, name) if holder is not None else None
            if isinstance(value, (list, tuple)):
                value = max((entry for entry in value if isinstance(entry, int)), default=None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                found.append(value)
    return found


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    return next(iter(_numbers(config, names)), None)


def _largest(config: Any, names: tuple[str, ...]) -> int | None:
    return max(_numbers(config, names), default=None)


def _dtype_bytes(config: Any) -> int:
    dtype = _get(config, "dtype") or _get(config, "torch_dtype") or "bfloat16"
    return _DTYPE_BYTES.get(str(dtype).removeprefix("torch."), 4)
