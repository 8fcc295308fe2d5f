"""Experts modules of Transformers' experts interface, computed from packed experts.

In the mode ``fast``, rows go through the native core (``fused_experts.py``) unless they are very many. All else is bit
for bit what plain Transformers computes. What must not change for that (docs/architecture.md): all rows of an expert go
through one matrix product (same M), gate and up stay fused, weights keep their layout, and the outputs are combined in
the order that Transformers uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zipmoe.hf.combine_order import CombineOrder, combine_order
from zipmoe.hf.early_routing import EarlyRouting
from zipmoe.hf.engine_slot import refuse_gradients
from zipmoe.hf.expert_parameter import ExpertSource
from zipmoe.hf.fused_experts import fused_experts
from zipmoe.hf.implementation_choice import experts_implementation
from zipmoe.hf.packed_experts import PackedExperts
from zipmoe.hf.routing import Routing


class PackedInterfaceExperts(PackedExperts):
    """An experts module of the interface whose expert parameters are packed."""

    config: Any
    num_experts: int
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    act_fn: Callable[[torch.Tensor], torch.Tensor]
    _zipmoe_early: EarlyRouting | None = None

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """(tokens, hidden) with expert ids and weights (tokens, top_k) to (tokens, hidden).

        Raises:
            UnsupportedOperationError: the configured experts implementation is none of ours, or gradients are asked
            for.
        """
        refuse_gradients(hidden_states)
        refuse_gradients(top_k_weights)
        order = combine_order(experts_implementation(self.config))
        return _FORWARDS[order](self, hidden_states, top_k_index, top_k_weights)


def _forward_grouped(
    self: PackedInterfaceExperts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    tokens = hidden_states.size(0)
    top_k = top_k_index.size(-1)
    weights = top_k_weights.reshape(-1)
    routing = _routing(self, top_k_index)
    fused = fused_experts(self, hidden_states)
    if fused is not None and routing.complete and fused.takes(max(routing.tokens)):
        combined = fused.combined(routing, hidden_states, top_k_weights)
        if combined is not None:
            return combined
        positions = routing.positions
        outputs = fused.all(routing.experts, routing.tokens, hidden_states[positions // top_k])
        outputs = outputs * weights[positions].unsqueeze(-1)
        in_order = torch.empty_like(outputs)
        in_order[positions] = outputs
        return in_order.view(tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)
    allocate = torch.empty if routing.complete else torch.zeros
    terms: torch.Tensor | None = None
    source = self._zipmoe_source
    rows = routing.rows()
    with source.request(routing.experts, routing.tokens) as request:
        for expert in request:
            at = rows[expert]
            inputs = hidden_states[at // top_k]
            if fused is not None and fused.takes(len(inputs)):
                output = fused.one(expert, inputs)
            else:
                output = _expert_output(self, source, expert, inputs)
            output = output * weights[at].unsqueeze(-1)
            if terms is None:
                terms = allocate((tokens * top_k, output.size(-1)), dtype=output.dtype)
            terms[at] = output
    if terms is None:
        return torch.zeros_like(hidden_states)
    return terms.view(tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)


def _expert_output(self: Any, source: ExpertSource, expert: int, rows: torch.Tensor) -> torch.Tensor:
    """Gated feed-forward network of one resident expert on ``rows`` (m, hidden), before the routing weight."""
    up = _project(self, source, expert, "gate_up_proj" if self.has_gate else "up_proj", rows)
    activated = self._apply_gate(up) if self.has_gate else self.act_fn(up)
    down = _project(self, source, expert, "down_proj", activated)
    return self.post_expert_norm(down) if self.has_post_expert_norm else down


def _project(self: Any, source: ExpertSource, expert: int, name: str, rows: torch.Tensor) -> torch.Tensor:
    weight = source.resident_matrix(expert, name)
    output = functional.linear(rows.to(weight.dtype), weight.T if self.is_transposed else weight)
    if self.has_bias:
        output.add_(getattr(self, f"{name}_bias")[expert])  # rounded before the bias is added, as grouped_mm does
    return output


def _routing(self: PackedInterfaceExperts, top_k_index: torch.Tensor) -> Routing:
    """What ``top_k_index`` says, which may be known from early routing."""
    early = None if self._zipmoe_early is None else self._zipmoe_early.take_routing(top_k_index)
    return early if early is not None else Routing(top_k_index, self.num_experts)


def _forward_eager(
    self: PackedInterfaceExperts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    with self._zipmoe_source.walk(_routing(self, top_k_index).experts):
        return eager_forward(self)(self, hidden_states, top_k_index, top_k_weights)


def eager_forward(module: nn.Module) -> Callable[..., torch.Tensor]:
    """The family's own forward, as written in its modelling file (the interface's decorator wraps it)."""
    original: Any = next(c for c in type(module).__mro__ if not issubclass(c, PackedExperts) and "forward" in vars(c))
    forward: Callable[..., torch.Tensor] = original.forward
    return getattr(forward, "__wrapped__", forward)


_FORWARDS: dict[CombineOrder, Callable[..., torch.Tensor]] = {
    CombineOrder.GROUPED_MM: _forward_grouped,
    CombineOrder.EAGER: _forward_eager,
}
