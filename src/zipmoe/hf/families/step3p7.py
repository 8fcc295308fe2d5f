"""step3p7: the standard loop, with a clamp of its own in each layer."""

from __future__ import annotations

from torch import nn

from zipmoe.checkpoint.expert_modules import ExpertModules
from zipmoe.hf.expert_parameter import ExpertSource
from zipmoe.hf.families.top_k_loop import PackedTopKLoop
from zipmoe.hf.packed_experts import become, replace_parameters


def install(model: nn.Module, experts: ExpertModules, source: ExpertSource) -> None:
    """Keep the family's forward and let it walk the packed experts."""
    module = model.get_submodule(experts.path)
    replace_parameters(module, experts, source)
    become(module, PackedTopKLoop, source)
