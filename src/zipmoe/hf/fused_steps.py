"""Parts of a model that take few rows through the native core as one call, for the mode ``fast``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zipmoe.hf.fused_attention import fuse_attention
from zipmoe.hf.fused_feed_forward import fuse_feed_forward
from zipmoe.hf.fused_linear import fuse_linear
from zipmoe.hf.fused_norm import fuse_norm
from zipmoe.hf.fused_router import fuse_router
from zipmoe.hf.packed_experts import PackedExperts


@dataclass(frozen=True)
class FusedSteps:
    """How many modules of a model are computed so."""

    attentions: int
    feed_forwards: int
    norms: int
    routers: int
    linears: int


def fuse_steps(model: Any) -> FusedSteps:
    """Let the native core compute what it can of ``model``, whose weights are there and whose engine computes."""
    modules = list(model.modules())
    blocks = [module for module in modules if any(isinstance(child, PackedExperts) for child in module.children())]
    return FusedSteps(
        attentions=sum(fuse_attention(module) for module in modules),
        feed_forwards=sum(fuse_feed_forward(module) for module in modules),
        norms=sum(fuse_norm(module) for module in modules),
        routers=sum(fuse_router(child) for block in blocks for child in block.children()),
        linears=sum(fuse_linear(module) for module in modules),
    )
