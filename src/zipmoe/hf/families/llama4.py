"""llama4: a batched product over all experts, whose unrouted rows are zero because the score multiplies the input.

A zero row stays zero through both products and the gate, so that an expert without any non-zero row is skipped and its
rows are set to zero. The others run through the same batched product on all their rows, as in the family (same M).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from zipmoe.checkpoint.expert_modules import ExpertModules
from zipmoe.hf.engine_slot import refuse_gradients
from zipmoe.hf.expert_parameter import ExpertSource
from zipmoe.hf.packed_experts import PackedExperts, become, replace_parameters


class PackedLlama4Experts(PackedExperts):
    """``Llama4TextExperts`` with packed weights."""

    num_experts: int
    hidden_size: int
    act_fn: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(experts * tokens, hidden), grouped by expert, to the same shape."""
        refuse_gradients(hidden_states)
        source = self._zipmoe_source
        by_expert = hidden_states.view(self.num_experts, -1, self.hidden_size)
        routed = (by_expert != 0).any(dim=-1).any(dim=-1).nonzero().flatten().tolist()
        output = torch.zeros_like(by_expert)
        with source.request(routed) as request:
            for expert in request:
                rows = by_expert[expert : expert + 1]
                gate_up = torch.bmm(rows, source.resident_matrix(expert, "gate_up_proj")[None])
                gate, up = gate_up.chunk(2, dim=-1)
                down = source.resident_matrix(expert, "down_proj")[None]
                output[expert] = torch.bmm(up * self.act_fn(gate), down)[0]
        return output.view(-1, self.hidden_size)


def install(model: nn.Module, experts: ExpertModules, source: ExpertSource) -> None:
    """Replace the parameters and the forward of one experts module."""
    module = model.get_submodule(experts.path)
    replace_parameters(module, experts, source)
    become(module, PackedLlama4Experts, source)
