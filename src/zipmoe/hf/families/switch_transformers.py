"""switch_transformers: one small module per expert; tokens over an expert's capacity reach no expert at all."""

from __future__ import annotations

import torch
from torch import nn

from zipmoe.checkpoint.expert_modules import ExpertModules
from zipmoe.hf.engine_slot import refuse_gradients
from zipmoe.hf.expert_parameter import ExpertSource
from zipmoe.hf.experts_forward import eager_forward
from zipmoe.hf.lazy_weight import LazyWeight
from zipmoe.hf.packed_experts import PackedExperts, become


class PackedSwitchExperts(PackedExperts):
    """``SwitchTransformersExperts`` with packed linear layers; the family's own loop runs inside a walk."""

    def forward(
        self, hidden_states: torch.Tensor, selected_experts: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        """(tokens, hidden), one-hot choices (tokens, 1, experts) and weights (tokens, 1) to (tokens, hidden)."""
        refuse_gradients(hidden_states)
        chosen = selected_experts.flatten(0, -2).any(dim=0).nonzero().flatten().tolist()
        with self._zipmoe_source.walk(chosen):
            return eager_forward(self)(self, hidden_states, selected_experts, routing_weights)


class ExpertLinear(PackedExperts, nn.Linear):
    """A linear layer of one expert; its weight is that expert's matrix in the group's record."""

    _zipmoe_expert: int
    _zipmoe_name: str

    @property
    def weight(self) -> LazyWeight:  # type: ignore[override]
        """(out_features, in_features); decoded when it is used, and valid as ``ExpertSource.matrix`` says."""
        source, expert, name = self._zipmoe_source, self._zipmoe_expert, self._zipmoe_name
        label = f"{source.path}.{name.format(expert=expert)}"
        shape = (self.out_features, self.in_features)
        return LazyWeight(shape, source.dtype, label, lambda: source.matrix(expert, name))


def install(model: nn.Module, experts: ExpertModules, source: ExpertSource) -> None:
    """Replace the linear layers of all experts, and the loop over them."""
    module = model.get_submodule(experts.path)
    for expert in range(experts.num_experts):
        for name in experts.parameters:
            linear = module.get_submodule(name.format(expert=expert).removesuffix(".weight"))
            linear._parameters.pop("weight")
            linear.__class__ = ExpertLinear
            linear._zipmoe_source = source  # type: ignore[assignment]
            linear._zipmoe_expert = expert  # type: ignore[assignment]
            linear._zipmoe_name = name  # type: ignore[assignment]
    become(module, PackedSwitchExperts, source)
