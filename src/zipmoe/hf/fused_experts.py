"""Experts computed from their packed form, for the mode ``fast``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zipmoe import _native
from zipmoe.engine.fused_compute import FusedCompute
from zipmoe.hf.expert_network import native_network
from zipmoe.hf.expert_parameter import ExpertSource
from zipmoe.hf.routing import Routing


class FusedExperts:
    """The experts of one module, computed by the native core."""

    def __init__(self, module: Any, compute: FusedCompute, network: _native.ExpertNetwork) -> None:
        self._module = module
        self._compute = compute
        self._network = network

    def takes(self, rows: int) -> bool:
        """Whether the native core is the faster way for an expert with so many rows."""
        return self._compute.takes(rows)

    def all(self, experts: Sequence[int], tokens: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
        """Outputs of a whole request, before the routing weights.

        Args:
            experts: distinct ids.
            tokens: rows of each.
            rows: BF16 [sum of tokens, hidden], expert after expert.

        Returns:
            BF16, the shape of ``rows``.
        """
        source: ExpertSource = self._module._zipmoe_source
        return self._normed(self._compute.experts(source.group, experts, tokens, self._network, rows))

    def combined(self, routing: Routing, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
        """Outputs of a whole request, weighted and summed for every token.

        Args:
            routing: where every position has an expert.
            rows: BF16 [tokens, hidden].
            weights: BF16 or FP32 [tokens, top_k].

        Returns:
            BF16 [tokens, hidden]; None if the family does something to the outputs before they are summed.
        """
        if self._module.has_post_expert_norm or weights.dtype not in (torch.bfloat16, torch.float32):
            return None
        source: ExpertSource = self._module._zipmoe_source
        return self._compute.sparse_layer(
            source.group,
            routing.experts,
            routing.tokens,
            self._network,
            rows.contiguous(),
            routing.positions,
            weights.to(torch.float32).contiguous(),
        )

    def one(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """Outputs of the expert that the open request handed out last; ``rows``: BF16 [n, hidden]."""
        source: ExpertSource = self._module._zipmoe_source
        return self._normed(self._compute.expert(source.group, expert, self._network, rows))

    def _normed(self, outputs: torch.Tensor) -> torch.Tensor:
        if not self._module.has_post_expert_norm:
            return outputs
        normed: torch.Tensor = self._module.post_expert_norm(outputs)
        return normed


def fused_experts(module: Any, hidden_states: torch.Tensor) -> FusedExperts | None:
    """The module's experts for the native core; None if it cannot compute them, or not with these inputs."""
    source: ExpertSource = module._zipmoe_source
    compute = source.slot.engine.fused
    if compute is None or hidden_states.dtype != torch.bfloat16 or source.dtype != torch.bfloat16:
        return None
    network = network_of(module)
    return None if network is None else FusedExperts(module, compute, network)


def network_of(module: Any) -> _native.ExpertNetwork | None:
    """The network of packed experts, as it was when it was asked for first; None if the native core has none."""
    if "_zipmoe_network" not in vars(module):
        found = native_network(module, module._zipmoe_source.group.parameters)
        module._zipmoe_network = None if isinstance(found, str) else found
    network: _native.ExpertNetwork | None = module._zipmoe_network
    return network
