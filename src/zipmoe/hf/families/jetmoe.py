"""jetmoe: parallel experts of both the feed-forward and the attention block; rows arrive grouped by expert.

The family multiplies the rows of every expert, also when there are none, and concatenates. Empty groups contribute no
rows, so that skipping them changes nothing but the reads.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from zipmoe.checkpoint.expert_modules import ExpertModules
from zipmoe.hf.engine_slot import refuse_gradients
from zipmoe.hf.expert_parameter import ExpertSource
from zipmoe.hf.packed_experts import PackedExperts, become, replace_parameters


class PackedParallelExperts(PackedExperts):
    """``JetMoeParallelExperts`` with a packed weight."""

    output_size: int

    def forward(self, inputs: torch.Tensor, expert_size: list[int]) -> torch.Tensor:
        """``inputs`` (rows, in) grouped by ascending expert, ``expert_size`` rows each, to (rows, out)."""
        refuse_gradients(inputs)
        source = self._zipmoe_source
        groups = torch.split(inputs, expert_size, dim=0)
        begins = torch.tensor([0, *expert_size]).cumsum(0).tolist()
        output = inputs.new_empty((inputs.size(0), self.output_size))
        with source.request([e for e, rows in enumerate(expert_size) if rows]) as request:
            for expert in request:
                weight = source.resident_matrix(expert, "weight")
                output[begins[expert] : begins[expert + 1]] = functional.linear(groups[expert], weight)
        return output


def install(model: nn.Module, experts: ExpertModules, source: ExpertSource) -> None:
    """Replace the weight and the forward of one parallel experts module."""
    module = model.get_submodule(experts.path)
    replace_parameters(module, experts, source)
    become(module, PackedParallelExperts, source)
