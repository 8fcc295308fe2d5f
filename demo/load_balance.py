"""The load-balancing loss of the routers, and the load that they really give to each expert."""

from __future__ import annotations

import torch


def expert_load(router_logits: torch.Tensor, experts_per_token: int) -> torch.Tensor:
    """Share of the token-expert pairs that each expert gets: (tokens, experts) logits to (experts,) float32."""
    chosen = router_logits.topk(experts_per_token, dim=-1).indices
    return torch.bincount(chosen.flatten(), minlength=router_logits.shape[-1]).float() / chosen.numel()


def load_balancing_loss(
    router_logits: tuple[torch.Tensor, ...], real: torch.Tensor, experts_per_token: int
) -> torch.Tensor:
    """Mean over the layers of ``experts * sum(load * mean probability)`` (Switch Transformer, equation 4).

    It is 1 when the load is even. Each layer is balanced by itself: the loss that comes with Transformers pools all
    layers, and lets one layer starve an expert as long as another layer feeds the expert of the same number.

    router_logits: one (tokens, experts) tensor a layer; real: (tokens,) bool, False for padding.
    """
    losses = []
    for layer_logits in router_logits:
        logits = layer_logits[real].float()
        load = expert_load(logits.detach(), experts_per_token)
        losses.append(logits.shape[-1] * (load * logits.softmax(dim=-1).mean(dim=0)).sum())
    return torch.stack(losses).mean()
