"""Layers and blocks that consist of empty modules of the native core, with code of all kinds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, as the families have it
from torch import nn

from zipmoe.hf.experts_forward import PackedInterfaceExperts
from zipmoe.hf.fused_attention import FusedAttention
from zipmoe.hf.fused_feed_forward import FusedFeedForward
from zipmoe.hf.fused_linear import FusedLinear
from zipmoe.hf.fused_norm import FusedNorm
from zipmoe.hf.fused_router import FusedRouter
from zipmoe.hf.layer_structure import BlockParts, LayerParts

WIDTH = 32


class Norm(FusedNorm):
    pass


class Attention(FusedAttention):
    pass


class Router(FusedRouter):
    def __init__(self, any_shape: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, WIDTH))
        self._zipmoe_native = SimpleNamespace(any_shape=any_shape)


class Experts(PackedInterfaceExperts):
    pass


class Shared(FusedFeedForward):
    pass


class Gate(FusedLinear):
    pass


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_in = Norm()
        self.attn = Attention()
        self.norm_out = Norm()
        self.mlp = nn.Identity()

    def forward(self, x, attention_mask=None, position_ids=None, cache=None, position_embeddings=None, **kwargs):
        residual = x
        x = self.norm_in(x)
        x, _ = self.attn(
            hidden_states=x,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        x = residual + x
        residual = x
        x = self.norm_out(x)
        x = self.mlp(x)
        return residual + x


class Block(nn.Module):
    """With all parts."""

    def __init__(self, any_shape: bool = False) -> None:
        super().__init__()
        self.gate = Router(any_shape)
        self.experts = Experts()
        self.shared_expert = Shared()
        self.shared_expert_gate = Gate()

    def forward(self, x):
        shape = x.shape
        x = x.view(-1, shape[-1])
        _, weights, ids = self.gate(x)
        out = self.experts(x, ids, weights)
        out += F.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return out.view(shape)


class RoutedOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Router()
        self.experts = Experts()

    def forward(self, x):
        b, s, d = x.shape
        x = x.view(-1, d)
        _, weights, ids = self.gate(x)
        return self.experts(x, ids, weights).reshape(b, s, d)


LAYER = LayerParts("norm_in", "attn", "norm_out", "mlp")
BLOCK = BlockParts("gate", "experts", "shared_expert", "shared_expert_gate")


def changed(base: type[nn.Module], source: str, *args: Any, **scope: Any) -> Any:
    """An object of ``base`` with this code in the place of its ``forward``'s."""
    scope = {"F": F, "torch": torch, **scope}
    exec(source, scope)
    return type("Changed", (base,), {"forward": scope["forward"]})(*args)


def of_family(kind: type[nn.Module], **children: Any) -> Any:
    """An object with a family's code."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, child in children.items():
        setattr(module, name, child)
    return module


def halved(values: torch.Tensor) -> torch.Tensor:
    return values / 2 if values.abs().max() > 100 else values
