"""A decoder layer of one new token of each sequence in one call of the native core: attention, norms, sums, and its
feed-forward network or sparse block. Between the parts of a layer Python and torch take longer than some of the parts.

Layers of the shape of ``layer_structure.py``, whose parts the native core computes each by itself: the bits are the
same. Where the second half is not to be had so (other routers, hooks on the block), the first half is one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zipmoe import _native
from zipmoe.engine.bfloat16_words import bfloat16_words
from zipmoe.hf.cache_room import CacheRoom
from zipmoe.hf.fused_attention import AttentionCall, FusedAttention
from zipmoe.hf.fused_block import FusedBlock
from zipmoe.hf.fused_feed_forward import FusedFeedForward
from zipmoe.hf.fused_module import FusedModule, fuse
from zipmoe.hf.fused_norm import FusedNorm
from zipmoe.hf.layer_structure import LayerParts, layer_parts
from zipmoe.hf.native_ingredients import NativeIngredients, up_to_date
from zipmoe.hf.packed_experts import PackedExperts
from zipmoe.hf.readable_rows import readable_weight


class _DenseNetwork:
    """A layer's feed-forward network of dense matrices."""

    is_known = True

    def __init__(self, layer: Any, name: str) -> None:
        self._module = layer._modules[name]
        self._ingredients = NativeIngredients(layer, (), (name,))

    def native(self, rows: int) -> _native.DenseNetwork | None:
        """The network for so many rows, if it is to be computed so now."""
        network: _native.DenseNetwork | None = self._module.zipmoe_network(rows)
        return network if network is not None and self._ingredients.are_quiet() else None


@dataclass
class _Native:
    """What a layer is in the native core."""

    norms: _native.LayerNorms
    feed_forward: _DenseNetwork | FusedBlock | None
    """None: one that is called as ever."""
    ingredients: NativeIngredients


class FusedLayer(FusedModule):
    """Placed before the family's class."""

    _zipmoe_native: _Native | None
    _zipmoe_parts: LayerParts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the family's layer."""
        hidden: Any = args[0] if len(args) == 1 else None
        if (
            not isinstance(hidden, torch.Tensor)
            or hidden.dim() != 3
            or hidden.shape[1] != 1
            or self._zipmoe_native is None
            or self.training
            or torch.is_grad_enabled()
            or not self._zipmoe_stands_for_own()
        ):
            return super().forward(*args, **kwargs)
        native: _Native | None = up_to_date(self, _native_layer)
        attention: Any = self._modules[self._zipmoe_parts.attention]
        call = None if native is None else attention.zipmoe_step({"hidden_states": hidden, **kwargs})
        if native is None or call is None:
            return super().forward(*args, **kwargs)
        feed_forward = None if native.feed_forward is None else native.feed_forward.native(hidden.shape[0])
        return self._step(native, call, feed_forward)

    def _step(
        self, native: _Native, call: AttentionCall, feed_forward: _native.DenseNetwork | _native.SparseBlock | None
    ) -> torch.Tensor:
        cached, compute = call.cache_layer, call.native.compute
        tokens = cached.keys.shape[2]
        room = CacheRoom.behind(cached)
        given = (native.norms, call.native.layer, call.hidden_states, call.cosines, call.sines, room, tokens)
        if feed_forward is not None:
            output = compute.layer(*given, feed_forward)
            room.give(cached, tokens + 1)
            return output
        summed, normed = compute.attention_in_layer(*given)
        room.give(cached, tokens + 1)
        fed: torch.Tensor = self._modules[self._zipmoe_parts.feed_forward](normed)  # type: ignore[misc]
        return summed + fed

    def zipmoe_is_whole(self) -> bool:
        """Whether the layer has the known shape as a whole, and not only in its first half."""
        native = self._zipmoe_native
        return native is not None and native.feed_forward is not None


def fuse_layer(module: Any) -> bool:
    """Let the native core compute single tokens of ``module``, whose parts it computes already, if it is such a one."""
    if not any(isinstance(child, FusedAttention) for child in module.children()):
        return False
    parts = layer_parts(module)
    native = None if parts is None else _native_layer_of(module, parts)
    if native is None:
        return False
    fuse(module, FusedLayer, _zipmoe_native=native, _zipmoe_parts=parts)
    return True


def _native_layer(layer: Any) -> _Native | None:
    return _native_layer_of(layer, layer._zipmoe_parts)


def _native_layer_of(layer: Any, parts: LayerParts) -> _Native | None:
    """``layer`` for the native core; None if its parts are not what that computes."""
    modules = layer._modules
    norms: list[Any] = [modules.get(parts.attention_norm), modules.get(parts.feed_forward_norm)]
    feed_forward: Any = modules.get(parts.feed_forward)
    if not isinstance(modules.get(parts.attention), FusedAttention) or feed_forward is None:
        return None
    if not all(isinstance(norm, FusedNorm) for norm in norms):
        return None
    if not all(readable_weight(norm.weight.detach(), 1) for norm in norms):
        return None
    first, second = (_native.RmsNorm(bfloat16_words(norm.weight.detach()), norm.zipmoe_epsilon) for norm in norms)
    quiet = (parts.attention_norm, parts.attention, parts.feed_forward_norm)
    return _Native(
        _native.LayerNorms(first, second),
        _second_half(layer, parts.feed_forward),
        NativeIngredients(layer, (), quiet, called=(parts.feed_forward,)),
    )


def _second_half(layer: Any, name: str) -> _DenseNetwork | FusedBlock | None:
    module = layer._modules[name]
    if isinstance(module, FusedFeedForward):
        return _DenseNetwork(layer, name)
    if any(isinstance(child, PackedExperts) for child in module.children()):
        block = FusedBlock(module)
        return block if block.is_known else None
    return None
