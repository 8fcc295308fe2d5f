"""Reads sizes from a Transformers config of any family, whatever it calls them."""

from __future__ import annotations

from typing import Any

EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts", "moe_k")
HIDDEN_SIZE = ("hidden_size", "d_model", "n_embd")
_DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
_NESTED = ("attn_config", "ffn_config", "attention")


def text_config(config: Any) -> Any:
    """The part of a config that describes the (decoding) text model."""
    if hasattr(config, "get_text_config"):
        return config.get_text_config(decoder=True)
    return value(config, "text_config") or config


def value(config: Any, name: str) -> Any:
    """An attribute of a config, or an entry of a mapping; a list where it differs by layer; None if
    there is none.
    """
    if isinstance(config, dict):
        return config.get(name)
    if name in (getattr(config, "per_layer_attributes", None) or ()):  # asking for the one value raises
        return [getattr(layer, name, None) for layer in config.per_layer_config]
    return getattr(config, name, None)


def _numbers(config: Any, names: tuple[str, ...]) -> list[int]:
    """Values of the attributes that exist, also of a nested attention config; a list per layer counts with its
    largest.
    """
    found = []
    for holder in [config, *(value(config, name) for name in _NESTED)]:
        for name in names:
            entry = value(holder, name) if holder is not None else None
            if isinstance(entry, (list, tuple)):
                entry = max((number for number in entry if isinstance(number, int)), default=None)
            if isinstance(entry, int) and not isinstance(entry, bool) and entry > 0:
                found.append(entry)
    return found


def first(config: Any, names: tuple[str, ...]) -> int | None:
    """The first of the attributes that exists; of lists the largest entry."""
    return next(iter(_numbers(config, names)), None)


def largest(config: Any, names: tuple[str, ...]) -> int | None:
    """The largest of the attributes that exist."""
    return max(_numbers(config, names), default=None)


def dtype_bytes(config: Any) -> int:
    """Bytes of one value in the dtype that the model computes in (BF16 if the config does not say)."""
    dtype = value(config, "dtype") or value(config, "torch_dtype") or "bfloat16"
    return _DTYPE_BYTES.get(str(dtype).removeprefix("torch."), 4)
