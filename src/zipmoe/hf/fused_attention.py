"""Attention of one new token of each sequence, or of whole prompts, in one call of the native core.

For modules of the widespread shape: projections of queries, keys, values and output, norms of the heads or none, rotary
positions, scaled dot products with a ``DynamicCache``. Which module is one is told by its parts, its attributes and
what its code mentions, none of which may be unknown, and then by its first use, where its own result is compared with
the native core's. Everything else (masks, windows, other caches, hooks) goes through the family's own code, call by
call (docs/compute.md).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from zipmoe import _native
from zipmoe.engine.bfloat16_words import bfloat16_words
from zipmoe.engine.fused_compute import STEP_ROWS_MAX, FusedCompute
from zipmoe.hf.cache_room import CacheRoom
from zipmoe.hf.first_use import all_agree, same_formula
from zipmoe.hf.fused_module import FusedModule, fuse
from zipmoe.hf.fused_norm import norm_epsilon
from zipmoe.hf.implementation_choice import attention_implementation, sdpa_is_transformers_own
from zipmoe.hf.last_positions import LastPositions
from zipmoe.hf.mentioned_names import mentioned_names
from zipmoe.hf.native_ingredients import NativeIngredients, up_to_date
from zipmoe.hf.packed_linear import PackedLinear
from zipmoe.hf.prompt_attention import PromptAttention, hold, takes_prompt
from zipmoe.hf.readable_rows import readable_rows, records_gradients

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
_KNOWN_NAMES = {
    *_PROJECTIONS,
    *_NORMS,
    "ALL_ATTENTION_FUNCTIONS",
    "_attn_implementation",
    "apply_rotary_pos_emb",
    "attention_dropout",
    "config",
    "contiguous",
    "eager_attention_forward",
    "get_interface",
    "getattr",
    "head_dim",
    "is_sliding",
    "layer_idx",
    "reshape",
    "scaling",
    "shape",
    "sliding_window",
    "training",
    "transpose",
    "update",
    "use_qk_norm",
    "view",
}
"""What the forward of attention of the known shape mentions."""
_BUILT_IN = ("head_dim", "scaling", "layer_idx", "use_qk_norm", "is_sliding")
_INFORMATIVE_SINE = 0.25
"""The first use tells how positions are rotated if they are rotated by this much."""
_HARMLESS_OPTIONS = {
    *("position_ids", "use_cache", "cache_position", "logits_to_keep", "num_logits_to_keep", "return_dict"),
    *("output_hidden_states", "output_router_logits"),
}
CACHE_NAMES = ("cache", "past_key_values", "past_key_value")
"""Under which attention is given its cache, by version and family."""


@dataclass
class _Native:
    """What a module's attention is in the native core."""

    layer: _native.AttentionLayer
    heads: tuple[int, int, int]
    """Of queries, of keys and values, and their dimensions."""
    columns: int
    """Of the inputs."""
    compute: FusedCompute
    ingredients: NativeIngredients
    prompts: PromptAttention
    checked: bool = False
    """Whether a step has shown that it computes the same. Prompts have a check of their own."""


@dataclass(slots=True)
class AttentionCall:
    """What a call of attention is given."""

    native: _Native
    hidden_states: torch.Tensor
    cosines: torch.Tensor
    sines: torch.Tensor
    cache: Any
    cache_layer: Any
    """None for a prompt, which starts one."""


class FusedAttention(FusedModule):
    """Placed before the family's class."""

    _zipmoe_native: _Native | None
    _zipmoe_last_positions: LastPositions | None = None
    """Of the last layer: which positions' output is asked for."""
    config: Any
    layer_idx: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the family's attention: (output, weights or None)."""
        call = None if args or self._zipmoe_native is None else self._call(self._zipmoe_native, kwargs)
        if call is None:
            return super().forward(*args, **kwargs)
        if call.cache_layer is None:
            return self._prompt(call, kwargs)
        if call.native.checked:
            return self._attend(call), None
        held = call.cache_layer
        tokens = held.keys.shape[2]
        room = CacheRoom(held.keys, held.values, tokens + 1)
        fused = self._attend(call, room)
        keys, values = room.first(tokens + 1)
        output = super().forward(**kwargs)
        verdict = all_agree(
            same_formula(fused, output[0]),
            same_formula(keys[:, :, tokens:], held.keys[:, :, tokens:]),
            same_formula(values[:, :, tokens:], held.values[:, :, tokens:]),
        )
        if verdict is False:
            self._zipmoe_native = None
        elif verdict and call.sines.abs().max().item() >= _INFORMATIVE_SINE:
            call.native.checked = True
        return output

    def _prompt(self, call: AttentionCall, kwargs: dict[str, Any]) -> Any:
        """Attention of a prompt, which the cache holds afterwards."""
        prompts, given = call.native.prompts, (call.hidden_states, call.cosines, call.sines)
        if prompts.checked:
            last_positions = self._zipmoe_last_positions
            asked = 0 if last_positions is None else last_positions.attention_positions(self, call.hidden_states)
            output, entries = prompts.attend(*given, asked)
            hold(call.cache, self.layer_idx, entries)
            if asked and last_positions is not None:
                output = last_positions.spread(output, call.hidden_states.shape[1])
            return output, None
        own = super().forward(**kwargs)
        layer = call.cache.layers[self.layer_idx]
        verdict = prompts.agrees(*given, (own[0], layer.keys, layer.values), _INFORMATIVE_SINE)
        if verdict is False:
            self._zipmoe_native = None
        elif verdict:
            prompts.checked = True
        return own

    def _attend(self, call: AttentionCall, room: CacheRoom | None = None) -> torch.Tensor:
        """The output; the cache grows by a token, or, for a room of its own, is left alone."""
        layer = call.cache_layer
        tokens = layer.keys.shape[2]
        buffers = CacheRoom.behind(layer) if room is None else room
        output = call.native.compute.attention(
            call.native.layer, call.hidden_states, call.cosines, call.sines, buffers, tokens
        )
        if room is None:
            buffers.give(layer, tokens + 1)
        return output

    def _call(self, native: _Native, options: dict[str, Any]) -> AttentionCall | None:
        """The call, if it is one for the native core."""
        hidden: Any = options.get("hidden_states")
        positions = options.get("position_embeddings")
        cache: Any = next((options[name] for name in CACHE_NAMES if options.get(name) is not None), None)
        if (
            not readable_rows(hidden, native.columns, sys.maxsize)
            or hidden.dim() != 3
            or not self._is_ready()
            or options.get("attention_mask") is not None
            or not is_plain(cache)
            or type(positions) is not tuple
            or len(positions) != 2
        ):
            return None
        for name, value in options.items():
            if value is not None and value is not False and name not in _GIVEN and name not in _HARMLESS_OPTIONS:
                return None
        cosines, sines = positions
        rows, tokens = hidden.shape[:2]
        layer: Any = None
        if tokens > 1:
            if options.get("is_causal") is not None or not self._takes_prompt(native, cache, tokens):
                return None
        else:
            layers = cache.layers
            layer = layers[self.layer_idx] if self.layer_idx < len(layers) else None
            if rows > STEP_ROWS_MAX or not self._takes(layer, rows, native.heads):
                return None
        if not all(_angles(angles, rows, tokens, native.heads[2]) for angles in positions):
            return None
        if cosines.shape != sines.shape:
            return None
        current: _Native | None = up_to_date(self, _native_attention)
        if current is None:
            return None
        return AttentionCall(current, hidden, cosines, sines, cache, layer)

    def zipmoe_step(self, options: dict[str, Any]) -> AttentionCall | None:
        """A call with these keyword arguments, if it is one of a token of each sequence, for which the native core has
        shown that it computes the same.
        """
        native = self._zipmoe_native
        if native is None or not native.checked:
            return None
        call = self._call(native, options)
        return call if call is not None and call.cache_layer is not None and call.native.checked else None

    def zipmoe_makes_room(self, layer: Any, sequences: int) -> bool:
        """Whether a token of each of ``sequences`` would be written behind what a cache's layer holds, if it comes
        without a mask and with nothing that is asked for beside.
        """
        native = self._zipmoe_native
        return (
            native is not None
            and native.checked
            and 0 < sequences <= STEP_ROWS_MAX
            and self._is_ready()
            and self._takes(layer, sequences, native.heads)
            and up_to_date(self, _native_attention) is not None
        )

    def _is_ready(self) -> bool:
        """Whether the module is to compute, whatever it is given, what the native core computes."""
        return (
            not self.training
            and self._zipmoe_stands_for_own()
            and attention_implementation(self.config) == "sdpa"
            and sdpa_is_transformers_own()
        )

    def _takes(self, layer: Any, rows: int, heads: tuple[int, int, int]) -> bool:
        """Whether a cache's layer holds what the native core reads, all of which a token attends to."""
        window = vars(self).get("sliding_window")
        return _usable(layer, rows, heads) and (window is None or layer.keys.shape[2] + 1 <= window)

    def _takes_prompt(self, native: _Native, cache: Any, tokens: int) -> bool:
        """Whether several new tokens attend to themselves and those before them, and to nothing else."""
        window = vars(self).get("sliding_window")
        return (
            native.compute.attends_prompts
            and getattr(self, "is_causal", True) is True
            and (window is None or tokens <= window)
            and takes_prompt(cache, self.layer_idx)
        )


def is_plain(cache: Any) -> bool:
    """Whether a cache is the ordinary one, whose layers stay where they are."""
    return type(cache) is DynamicCache and not cache.offloading


_GIVEN = {"hidden_states", "position_embeddings", "attention_mask", *CACHE_NAMES}


def _usable(layer: Any, rows: int, heads: tuple[int, int, int]) -> bool:
    """Whether a cache's layer is the ordinary one and holds what the native core reads."""
    if type(layer) is not DynamicLayer or not layer.is_initialized:
        return False
    keys, values = layer.keys, layer.values
    return (
        keys.dtype is torch.bfloat16
        and values.dtype is torch.bfloat16
        and keys.dim() == 4
        and keys.shape == values.shape
        and keys.shape[0] == rows
        and keys.shape[1] == heads[1]
        and keys.shape[2] > 0
        and keys.shape[3] == heads[2]
        and keys.is_cpu
        and not records_gradients(keys)
        and not records_gradients(values)
    )


def _angles(angles: Any, rows: int, tokens: int, head_dimension: int) -> bool:
    return (
        isinstance(angles, torch.Tensor)
        and angles.dtype is torch.bfloat16
        and angles.dim() == 3
        and angles.shape[0] in (1, rows)
        and angles.shape[1] == tokens
        and 0 < angles.shape[2] <= head_dimension
        and angles.shape[2] % 2 == 0
        and angles.is_contiguous()
    )


def fuse_attention(module: Any) -> bool:
    """Let the native core compute single tokens and prompts of ``module`` from now on.

    That is, if it is attention of the known shape. Its weights must be there.
    """
    original = type(module)
    if not _has_known_parts(module) or not _known_code(original):
        return False
    native = _native_attention(module)
    if native is None:
        return False
    fuse(module, FusedAttention, _zipmoe_native=native)
    return True


def _has_known_parts(module: Any) -> bool:
    children = {name for name, child in module._modules.items() if child is not None}
    attributes = {name for name in vars(module) if not name.startswith("_")}
    return (
        {*_PROJECTIONS} <= children <= {*_PROJECTIONS, *_NORMS}
        and all(isinstance(module._modules[name], PackedLinear) for name in _PROJECTIONS)
        and not module._parameters
        and not module._buffers
        and {"config", "head_dim", "layer_idx", "scaling"} <= attributes <= _KNOWN_ATTRIBUTES
    )


def _known_code(original: Any) -> bool:
    """Whether nothing is mentioned that is unknown, and heads are normed before they are rotated."""
    names = mentioned_names(original)
    if names is None or not {*names} <= _KNOWN_NAMES or "apply_rotary_pos_emb" not in names:
        return False
    rotated = names.index("apply_rotary_pos_emb")
    return all(names.index(norm) < rotated for norm in _NORMS if norm in names)


def _native_attention(module: Any) -> _Native | None:
    """``module``, whose class has known code, for the native core; None if its parts are not what that computes."""
    if not _has_known_parts(module):
        return None
    parts: list[Any] = [module._modules[name] for name in _PROJECTIONS]
    heads = _heads(module, parts)
    if heads is None or not isinstance(module.scaling, int | float):
        return None
    query_norm, key_norm = (_head_norm(module._modules.get(name), heads[2]) for name in _NORMS)
    if query_norm is None or key_norm is None:
        return None
    biases = [part._parameters["bias"] for part in parts]
    if any(bias is not None and (bias.dtype is not torch.bfloat16 or not bias.is_contiguous()) for bias in biases):
        return None
    compute = parts[0]._zipmoe_slot.engine.fused
    if compute is None or any(part._zipmoe_dtype is not torch.bfloat16 for part in parts):
        return None
    query, key, value, output = (
        compute.projection(part._zipmoe_parameter, bias) for part, bias in zip(parts, biases, strict=True)
    )
    layer = _native.AttentionLayer(query, key, value, output, heads, module.scaling, query_norm, key_norm)
    ingredients = NativeIngredients(module, _BUILT_IN, (*_PROJECTIONS, *_NORMS))
    prompts = PromptAttention(compute, layer, heads)
    return _Native(layer, heads, parts[0].in_features, compute, ingredients, prompts)


def _heads(module: Any, parts: list[Any]) -> tuple[int, int, int] | None:
    """Of queries, of keys and values, and their dimensions, if the matrices' shapes are those of such heads."""
    query, key, value, output = parts
    dimension = module.head_dim
    if type(dimension) is not int or dimension <= 0 or dimension % 16:
        return None
    if query.out_features % dimension or key.out_features % dimension:
        return None
    heads, shared = query.out_features // dimension, key.out_features // dimension
    fits = (
        heads % shared == 0
        and value.out_features == key.out_features
        and output.in_features == query.out_features
        and output.out_features == query.in_features
        and query.in_features == key.in_features == value.in_features
    )
    return (heads, shared, dimension) if fits else None


def _head_norm(module: Any, dimension: int) -> _native.RmsNorm | None:
    """The norm of a head, also where there is none; None for one that the native core does not compute.

    Where attention is made anew, the norm is the native core's by then: its formula was compared when it was fused, and
    epsilon and weight are those of the moment.
    """
    if module is None:
        return _native.RmsNorm()
    epsilon = norm_epsilon(module)
    if epsilon is None or tuple(module.weight.shape) != (dimension,) or not module.weight.is_contiguous():
        return None
    return _native.RmsNorm(bfloat16_words(module.weight.detach()), epsilon)
