"""The key-value cache inside the memory budget: an estimate to reserve at start, and a watch over its growth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zipmoe.errors import BudgetExceededError

if TYPE_CHECKING:
    from zipmoe.engine.engine import Engine

DEFAULT_CONTEXT_TOKENS = 4096
GROWTH_TOKENS = 256
"""Growth beyond the reserved context is accounted in steps of this many tokens where they fit."""


def context_tokens(config: Any, requested: int | None) -> int:
    """Tokens to reserve cache for: as requested, else the model's context length, at most ``DEFAULT_CONTEXT_TOKENS``."""
    if requested is not None:
        return requested
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return min(longest, DEFAULT_CONTEXT_TOKENS) if isinstance(longest, int) else DEFAULT_CONTEXT_TOKENS


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes of key-value cache for one token of one sequence, over all layers.

    An upper estimate from the configuration: every layer is counted as full attention. Once a cache exists, its real size
    is what counts.
    """
    text = config.get_text_config(decoder=True)
    layers = _largest(text, "num_hidden_layers", "num_layers", "n_layers") or 1
    heads = _largest(text, "num_attention_heads", "n_heads", "num_heads") or 1
    hidden = _largest(text, "hidden_size", "d_model") or 0
    head_width = _largest(text, "head_dim", "d_kv", "kv_channels") or hidden // heads
    key_value_heads = _largest(text, "num_key_value_heads") or heads
    widths = 2 * key_value_heads * head_width
    if (rope := _largest(text, "qk_rope_head_dim")) and (nope := _largest(text, "qk_nope_head_dim")):  # latent attention
        widths = heads * (rope + nope + (_largest(text, "v_head_dim") or nope))
    attentions = 2 if getattr(config, "is_encoder_decoder", False) else 1  # self- and cross-attention
    return layers * widths * attentions * dtype.itemsize


def cache_bytes(cache: Any) -> int:
    """Bytes of all tensors that a Transformers cache object holds."""
    tensors: dict[int, int] = {}
    pending, seen = [cache], set()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            tensors[id(item)] = item.nbytes
        elif isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)
        elif type(item).__module__.startswith("transformers.") and not isinstance(item, nn.Module):
            pending.extend(value for name, value in vars(item).items() if "config" not in name)
    return sum(tensors.values())


def watch_cache_growth(model: nn.Module, engine: Engine, reserved_bytes: int, token_bytes: int) -> None:
    """Account with ``engine`` for cache beyond ``reserved_bytes``, before each forward pass that would need it.

    A pass that does not fit raises BudgetExceededError before it allocates anything.

    Args:
        model: the model that is called with ``input_ids`` (or ``inputs_embeds``) and ``past_key_values``.
        engine: whose budget is charged.
        reserved_bytes: what the budget holds for the cache already.
        token_bytes: estimate of the cache's bytes per token (``bytes_per_token``).
    """
    accounted = reserved_bytes

    def before_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal accounted
        if kwargs.get("use_cache") is False:
            return
        cache = kwargs.get("past_key_values")
        new_tokens = _new_tokens(args, kwargs)
        held = cache_bytes(cache) if cache is not None else 0
        needed = held + new_tokens * token_bytes
        missing = needed - accounted
        if missing <= 0:
            return
        grown = max(missing, GROWTH_TOKENS * token_bytes)
        try:
            engine.account("key-value cache", grown)
        except BudgetExceededError:
            engine.account("key-value cache", grown := missing)
        accounted += grown

    model.register_forward_pre_hook(before_forward, with_kwargs=True)


def _new_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    names = ("decoder_input_ids", "input_ids", "inputs_embeds", "decoder_inputs_embeds")
    given = next((kwargs[name] for name in names if kwargs.get(name) is not None), args[0] if args else None)
    if not isinstance(given, torch.Tensor) or given.dim() < 2:
        return 0
    return given.shape[0] * given.shape[1]


def _largest(config: Any, *names: str) -> int:
    """The first of ``names`` that the configuration has; of a list (one entry per layer) its largest entry; else 0."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, list | tuple) and value:
            value = max((entry for entry in value if isinstance(entry, int)), default=None)
        if isinstance(value, int):
            return value
    return 0
