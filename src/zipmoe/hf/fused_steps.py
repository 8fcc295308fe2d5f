"""Parts of a model that take few rows through the native core as one call, for the mode ``fast``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zipmoe.hf.fused_attention import fuse_attention
from zipmoe.hf.fused_feed_forward import fuse_feed_forward
from zipmoe.hf.fused_norm import fuse_norm


@dataclass(frozen=True)
class FusedSteps:
    """How many modules of a model are computed so."""

    attentions: int
    feed_forwards: int
    norms: int


def fuse_steps(model: Any) -> FusedSteps:
    """Let the native core compute what it can of ``model``, whose weights are there and whose engine computes."""
    modules = list(model.modules())
    attentions = sum(fuse_attention(module) for module in modules)
    feed_forwards = sum(fuse_feed_forward(module) for module in modules)
    return FusedSteps(attentions, feed_forwards, norms=sum(fuse_norm(module) for module in modules))
