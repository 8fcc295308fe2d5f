"""Families whose own forward loops over the chosen experts in ascending order: it runs unchanged inside a walk."""

from __future__ import annotations

import torch

from zipmoe.hf.engine_slot import refuse_gradients
from zipmoe.hf.experts_forward import eager_forward
from zipmoe.hf.packed_experts import PackedExperts


class PackedTopKLoop(PackedExperts):
    """Experts module with the usual arguments and an ascending loop of its own."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As the family's forward; ids without packed weights (identity experts, padding) are left to it."""
        refuse_gradients(hidden_states)
        packed = self._zipmoe_source.experts
        chosen = [expert for expert in torch.unique(top_k_index).tolist() if 0 <= expert < packed]
        with self._zipmoe_source.walk(chosen):
            return eager_forward(self)(self, hidden_states, top_k_index, top_k_weights)
