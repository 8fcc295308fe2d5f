"""Parts of a model that are one call of the native core each, for the mode ``fast``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zipmoe.engine.fused_compute import FusedCompute
from zipmoe.hf.fused_attention import FusedAttention, fuse_attention
from zipmoe.hf.fused_feed_forward import FusedFeedForward, fuse_feed_forward
from zipmoe.hf.fused_layer import FusedLayer, fuse_layer, stack_layers
from zipmoe.hf.fused_linear import FusedLinear, fuse_linear
from zipmoe.hf.fused_norm import FusedNorm, fuse_norm
from zipmoe.hf.fused_router import FusedRouter, fuse_router
from zipmoe.hf.packed_experts import PackedExperts


@dataclass(frozen=True)
class FusedSteps:
    """How many modules of a model are computed so."""

    attentions: int = 0
    feed_forwards: int = 0
    norms: int = 0
    routers: int = 0
    linears: int = 0
    layers: int = 0
    """Whole ones, in steps of one token of each sequence."""

    def any(self) -> bool:
        """Whether there is one at all."""
        return any((self.attentions, self.feed_forwards, self.norms, self.routers, self.linears, self.layers))

    def __str__(self) -> str:
        """For the mode line: ``"6 attentions, 1 feed-forward network, 13 norms, 5 routers, 5 small matrices, 5 whole
        layers"``.
        """
        parts = [
            (self.attentions, "attention", "attentions"),
            (self.feed_forwards, "feed-forward network", "feed-forward networks"),
            (self.norms, "norm", "norms"),
            (self.routers, "router", "routers"),
            (self.linears, "small matrix", "small matrices"),
            (self.layers, "whole layer", "whole layers"),
        ]
        return ", ".join(f"{count} {one if count == 1 else more}" for count, one, more in parts if count)


def fuse_steps(model: Any, compute: FusedCompute) -> None:
    """Let the native core compute what it can of ``model``, whose weights are there and whose engine computes so."""
    modules = list(model.modules())
    blocks = [module for module in modules if any(isinstance(child, PackedExperts) for child in module.children())]
    for module in modules:
        # Attention compares its norms with the native core's: with the family's code, not with what takes its place.
        fuse_attention(module)
        fuse_feed_forward(module)
    for module in modules:
        fuse_norm(module, compute)
        fuse_linear(module)
    for block in blocks:
        for child in block.children():
            fuse_router(child)
    for module in modules:
        fuse_layer(module)
    stack_layers(model)


def count_fused_steps(model: Any) -> FusedSteps:
    """What the native core computes of ``model`` as it is now: modules that another result or other parts have taken
    out are not counted, nor is anything that only some calls find impossible.
    """
    modules = list(model.modules())

    def native(kind: Any) -> int:
        return sum(isinstance(module, kind) and module._zipmoe_native is not None for module in modules)

    return FusedSteps(
        attentions=native(FusedAttention),
        feed_forwards=native(FusedFeedForward),
        norms=sum(isinstance(module, FusedNorm) for module in modules),
        routers=native(FusedRouter),
        linears=sum(isinstance(module, FusedLinear) for module in modules),
        layers=sum(isinstance(module, FusedLayer) and module.zipmoe_is_whole() for module in modules),
    )
