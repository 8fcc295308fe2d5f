"""A decoder layer of one new token of each sequence in one call of the native core: attention, norms, sums, and its
feed-forward network or sparse block. Between the parts of a layer Python and torch take longer than some of the parts.

Layers of the shape of ``layer_structure.py``, whose parts the native core computes each by itself: the bits are the
same. Where the second half is not to be had so (other routers, hooks on the block), the first half is one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zipmoe import _native
from zipmoe.hf.compiled_calls import is_compiled_call
from zipmoe.hf.fused_attention import FusedAttention
from zipmoe.hf.fused_block import FusedBlock
from zipmoe.hf.fused_feed_forward import FusedFeedForward
from zipmoe.hf.fused_module import FusedModule, fuse
from zipmoe.hf.fused_norm import FusedNorm
from zipmoe.hf.layer_stack import LayersAhead, LayerStack, PreparedLayer
from zipmoe.hf.layer_structure import LayerParts, layer_parts
from zipmoe.hf.module_parts import has_known_code
from zipmoe.hf.native_ingredients import NativeIngredients, up_to_date
from zipmoe.hf.packed_experts import PackedExperts


class _DenseNetwork:
    """A layer's feed-forward network of dense matrices."""

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
    _zipmoe_stack: LayerStack

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the family's layer."""
        hidden: Any = args[0] if len(args) == 1 else None
        if (
            not isinstance(hidden, torch.Tensor)
            or hidden.dtype is not torch.bfloat16  # before anything is made anew for weights of another dtype
            or hidden.dim() != 3
            or hidden.shape[1] != 1
            or not self.zipmoe_is_ready()
        ):
            return super().forward(*args, **kwargs)
        known = self._zipmoe_stack.take(self, hidden, kwargs)
        if known is not None:
            return known
        prepared = self.zipmoe_prepared(hidden, kwargs)
        if prepared is None:
            return super().forward(*args, **kwargs)
        if prepared.feed_forward is not None:
            return self._zipmoe_stack.run(prepared, kwargs)
        call = prepared.call
        summed, normed = call.native.compute.attention_in_layer(
            prepared.norms,
            call.native.layer,
            hidden,
            call.cosines,
            call.sines,
            prepared.room,
            prepared.tokens,
        )
        prepared.grow_cache()
        fed: torch.Tensor = self._modules[self._zipmoe_parts.feed_forward](normed)  # type: ignore[misc]
        return summed + fed

    def zipmoe_is_ready(self) -> bool:
        """Whether the layer may be computed natively, whatever it is given."""
        return (
            self._zipmoe_native is not None
            and not self.training
            and not torch.is_grad_enabled()
            and not is_compiled_call()
            and self._zipmoe_stands_for_own()
        )

    def zipmoe_prepared(self, hidden: torch.Tensor, options: dict[str, Any]) -> PreparedLayer | None:
        """What the layer, which is ready, computes with if it is called with ``hidden``, BF16 (sequences, 1, width),
        and these keyword arguments; None if the native core does not compute it so.
        """
        native: _Native | None = up_to_date(self, _native_layer)
        if native is None:
            return None
        attention: Any = self._modules[self._zipmoe_parts.attention]
        call = attention.zipmoe_step({"hidden_states": hidden, **options})
        if call is None:
            return None
        feed_forward = None if native.feed_forward is None else native.feed_forward.native(hidden.shape[0])
        return PreparedLayer(self, native.norms, call, feed_forward)

    def zipmoe_is_whole(self) -> bool:
        """Whether the layer has the known shape as a whole, and not only in its first half, and known attention."""
        native = self._zipmoe_native
        attention: Any = self._modules.get(self._zipmoe_parts.attention)
        return (
            native is not None
            and native.feed_forward is not None
            and isinstance(attention, FusedAttention)
            and attention._zipmoe_native is not None
        )


def fuse_layer(module: Any) -> bool:
    """Let the native core compute single tokens of ``module``, whose parts it computes already, if it is such a one."""
    if not any(isinstance(child, FusedAttention) for child in module.children()):
        return False
    parts = layer_parts(module)
    native = None if parts is None else _native_layer_of(module, parts)
    if native is None:
        return False
    fuse(module, FusedLayer, _zipmoe_native=native, _zipmoe_parts=parts)
    module._zipmoe_stack = LayerStack([module])
    return True


def stack_layers(model: Any) -> None:
    """Let the layers of ``model`` that the native core computes be computed ahead, along its lists of layers."""
    for module in model.modules():
        if not has_known_code(module):
            continue
        stacks = []
        for child in module.children():
            layers = [layer for layer in child if isinstance(layer, FusedLayer)] if type(child) is nn.ModuleList else []
            if len({id(layer) for layer in layers}) == len(layers) > 0:
                stack = LayerStack(layers)
                for layer in layers:
                    layer._zipmoe_stack = stack
                stacks.append(stack)
        if stacks:
            module._zipmoe_layers_ahead = LayersAhead(module, stacks)


def _native_layer(layer: Any) -> _Native | None:
    return _native_layer_of(layer, layer._zipmoe_parts)


def _native_layer_of(layer: Any, parts: LayerParts) -> _Native | None:
    """``layer`` for the native core; None if its parts are not what that computes."""
    modules = layer._modules
    norms: list[Any] = [modules.get(parts.attention_norm), modules.get(parts.feed_forward_norm)]
    feed_forward: Any = modules.get(parts.feed_forward)
    if not isinstance(modules.get(parts.attention), FusedAttention) or feed_forward is None:
        return None
    first, second = (norm.zipmoe_norm() if isinstance(norm, FusedNorm) else None for norm in norms)
    if first is None or second is None:
        return None
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
