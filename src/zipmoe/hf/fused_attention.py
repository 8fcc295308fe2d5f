"""Attention of one new token of each sequence in one call of the native core.

For modules of the widespread shape: projections of queries, keys, values and output, norms of the heads or none, rotary
positions, scaled dot products with a ``DynamicCache``. Which module is one is told by its parts and attributes, none of
which may be unknown, and then by its first use, where its own result is compared with the native core's. Everything
else (masks, windows, other caches, hooks) goes through the family's own code, call by call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from zipmoe import _native
from zipmoe.engine.fused_compute import STEP_ROWS_MAX
from zipmoe.hf.cache_room import CacheRoom
from zipmoe.hf.dynamic_class import dynamic_class
from zipmoe.hf.first_use import agrees
from zipmoe.hf.fused_norm import norm_epsilon
from zipmoe.hf.implementation_choice import attention_implementation
from zipmoe.hf.packed_linear import PackedLinear
from zipmoe.hf.quiet_modules import is_quiet

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("q_norm", "k_norm")
_KNOWN_ATTRIBUTES = {
    "attention_dropout",
    "config",
    "head_dim",
    "hidden_size",
    "is_causal",
    "is_sliding",
    "layer_idx",
    "layer_type",
    "num_attention_heads",
    "num_heads",
    "num_key_value_groups",
    "num_key_value_heads",
    "rope_parameters",
    "scaling",
    "sliding_window",
    "training",
    "use_qk_norm",
}
_HARMLESS_OPTIONS = {"position_ids", "use_cache", "cache_position", "logits_to_keep", "num_logits_to_keep"}
_CACHE_NAMES = ("cache", "past_key_values", "past_key_value")


@dataclass(frozen=True)
class _Call:
    """What a call of attention for one new token is given."""

    hidden_states: torch.Tensor
    cosines: torch.Tensor
    sines: torch.Tensor
    cache_layer: Any


class FusedAttention(nn.Module):
    """Placed before the family's class."""

    _zipmoe_layer: _native.AttentionLayer | None
    _zipmoe_parts: tuple[Any, ...]
    _zipmoe_biases: tuple[Any, ...]
    _zipmoe_checked: bool
    config: Any
    layer_idx: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the family's attention: (output, weights or None)."""
        call = None if args or self._zipmoe_layer is None else self._call(kwargs)
        if call is None:
            return super().forward(*args, **kwargs)
        if self._zipmoe_checked:
            return self._attend(call), None
        room = CacheRoom(call.cache_layer.keys, call.cache_layer.values)
        fused = self._attend(call, room)
        keys, values = room.first(call.cache_layer.keys.shape[2] + 1)
        output = super().forward(**kwargs)
        held = call.cache_layer
        self._zipmoe_checked = True
        if not (agrees(fused, output[0]) and agrees(keys, held.keys) and agrees(values, held.values)):
            self._zipmoe_layer = None
        return output

    def _attend(self, call: _Call, room: CacheRoom | None = None) -> torch.Tensor:
        """The output; the cache grows by a token, or, for a room of its own, is left alone."""
        layer = call.cache_layer
        tokens = layer.keys.shape[2]
        buffers = CacheRoom.behind(layer) if room is None else room
        fused = self._zipmoe_parts[0]._zipmoe_slot.engine.fused
        output: torch.Tensor = fused.attention(
            self._zipmoe_layer, call.hidden_states, call.cosines, call.sines, buffers, tokens
        )
        if room is None:
            buffers.give(layer, tokens + 1)
        return output

    def _call(self, options: dict[str, Any]) -> _Call | None:
        """The call, if it is one for the native core."""
        hidden = options.get("hidden_states")
        positions = options.get("position_embeddings")
        cache: Any = next((options[name] for name in _CACHE_NAMES if options.get(name) is not None), None)
        if (
            not isinstance(hidden, torch.Tensor)
            or hidden.dim() != 3
            or hidden.shape[1] != 1
            or not 0 < hidden.shape[0] <= STEP_ROWS_MAX
            or hidden.dtype is not torch.bfloat16
            or not hidden.is_contiguous()
            or self.training
            or options.get("attention_mask") is not None
            or type(cache) is not DynamicCache
            or type(positions) is not tuple
            or not self._unchanged()
            or (hidden.requires_grad and torch.is_grad_enabled())
        ):
            return None
        for name, value in options.items():
            if value is not None and value is not False and name not in _GIVEN and name not in _HARMLESS_OPTIONS:
                return None
        cosines, sines = positions
        layers = cache.layers
        layer: Any = layers[self.layer_idx] if self.layer_idx < len(layers) else None
        if type(layer) is not DynamicLayer or not layer.is_initialized or not _usable(layer, hidden.shape[0]):
            return None
        window = vars(self).get("sliding_window")
        if window is not None and layer.keys.shape[2] + 1 > window:
            return None
        rows = hidden.shape[0]
        if not (_angles(cosines, rows) and _angles(sines, rows)) or cosines.shape != sines.shape:
            return None
        return _Call(hidden, cosines, sines, layer)

    def _unchanged(self) -> bool:
        """Whether the parts are those of the beginning, without hooks, and the engine serves them."""
        modules: dict[str, Any] = self._modules
        for name, part, bias in zip(_PROJECTIONS, self._zipmoe_parts, self._zipmoe_biases, strict=True):
            if modules[name] is not part or part._parameters["bias"] is not bias or not is_quiet(part):
                return False
        first = self._zipmoe_parts[0]
        return (
            attention_implementation(self.config) == "sdpa"
            and first._zipmoe_dtype is torch.bfloat16
            and all(is_quiet(modules[name]) for name in _NORMS if name in modules)
            and first._zipmoe_slot.engine.fused is not None
        )


_GIVEN = {"hidden_states", "position_embeddings", "attention_mask", *_CACHE_NAMES}


def _usable(layer: Any, rows: int) -> bool:
    keys, values = layer.keys, layer.values
    return (
        keys.dtype is torch.bfloat16
        and values.dtype is torch.bfloat16
        and keys.dim() == 4
        and keys.shape == values.shape
        and keys.shape[0] == rows
        and keys.shape[2] > 0
    )


def _angles(angles: Any, rows: int) -> bool:
    return (
        isinstance(angles, torch.Tensor)
        and angles.dtype is torch.bfloat16
        and angles.dim() == 3
        and angles.shape[0] in (1, rows)
        and angles.shape[1] == 1
        and angles.is_contiguous()
    )


def fuse_attention(module: Any) -> bool:
    """Let the native core compute single tokens of ``module`` from now on, if it is attention of the known shape.

    Its weights must be there.
    """
    parts: tuple[Any, ...] = tuple(module._modules.get(name) for name in _PROJECTIONS)
    norms = [name for name in _NORMS if module._modules.get(name) is not None]
    attributes = {name for name in vars(module) if not name.startswith("_")}
    if (
        not all(isinstance(part, PackedLinear) for part in parts)
        or module._parameters
        or module._buffers
        or {name for name, child in module._modules.items() if child is not None} != {*_PROJECTIONS, *norms}
        or not {"config", "head_dim", "layer_idx", "scaling"} <= attributes <= _KNOWN_ATTRIBUTES
    ):
        return False
    heads = _heads(module, parts)
    query_norm, key_norm = (_head_norm(module._modules.get(name), module.head_dim) for name in _NORMS)
    biases = tuple(part._parameters["bias"] for part in parts)
    if any(bias is not None and (bias.dtype is not torch.bfloat16 or not bias.is_contiguous()) for bias in biases):
        return False
    query, key, value, output = (
        part._zipmoe_slot.engine.fused.projection(part._zipmoe_parameter, bias)
        for part, bias in zip(parts, biases, strict=True)
    )
    if heads is None or query_norm is None or key_norm is None:
        return False
    original = type(module)
    module.__class__ = dynamic_class(original.__name__, (FusedAttention, original), original)
    module._zipmoe_layer = _native.AttentionLayer(
        query, key, value, output, heads, module.scaling, query_norm, key_norm
    )
    module._zipmoe_parts = parts
    module._zipmoe_biases = biases
    module._zipmoe_checked = False
    return True


def _heads(module: Any, parts: tuple[Any, ...]) -> list[int] | None:
    """Of queries, of keys and values, and their dimensions, if the matrices' shapes are those of such heads."""
    query, key, value, output = parts
    dimension = module.head_dim
    if dimension % 16 or query.out_features % dimension or key.out_features % dimension:
        return None
    heads, shared = query.out_features // dimension, key.out_features // dimension
    fits = (
        heads % shared == 0
        and value.out_features == key.out_features
        and output.in_features == query.out_features
        and query.in_features == key.in_features == value.in_features
    )
    return [heads, shared, dimension] if fits else None


def _head_norm(module: Any, dimension: int) -> _native.HeadNorm | None:
    """The norm of a head, also where there is none; None for one that the native core does not compute."""
    if module is None:
        return _native.HeadNorm()
    epsilon = norm_epsilon(module)
    if epsilon is None or tuple(module.weight.shape) != (dimension,):
        return None
    return _native.HeadNorm(module.weight.detach().view(torch.uint16).numpy(), epsilon)
