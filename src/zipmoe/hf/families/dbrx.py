"""dbrx: ``experts.mlp`` holds w1, v1, w2 as (experts * rows, columns); ``experts`` loops over views of them."""

from __future__ import annotations

from torch import nn

from zipmoe.checkpoint.expert_modules import ExpertModules
from zipmoe.hf.expert_parameter import ExpertSource
from zipmoe.hf.families.top_k_loop import PackedTopKLoop
from zipmoe.hf.packed_experts import become, replace_parameters


def install(model: nn.Module, experts: ExpertModules, source: ExpertSource) -> None:
    """Make the parent of the parameters' module walk the packed experts."""
    replace_parameters(model.get_submodule(experts.path), experts, source)
    become(model.get_submodule(experts.path.rpartition(".")[0]), PackedTopKLoop, source)
