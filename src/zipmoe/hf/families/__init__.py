"""Families outside Transformers' experts interface, one file each, and the registry that finds them by class name.

Most of them loop over their experts in ascending order in their own forward; they keep it and only walk the packed
experts. Two compute all experts whether routed or not (llama4, jetmoe) and get a forward that skips the idle ones.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from zipmoe.checkpoint.expert_modules import ExpertModules, is_interface_module
from zipmoe.hf.expert_parameter import ExpertSource
from zipmoe.hf.experts_forward import PackedInterfaceExperts
from zipmoe.hf.families import dbrx, jetmoe, llama4, longcat_flash, step3p7, switch_transformers
from zipmoe.hf.packed_experts import become, replace_parameters

Install = Callable[[nn.Module, ExpertModules, ExpertSource], None]
"""Given the model, the group's description and the source of its matrices: make the group's module compute from it."""


def _install_interface(model: nn.Module, experts: ExpertModules, source: ExpertSource) -> None:
    module = model.get_submodule(experts.path)
    replace_parameters(module, experts, source)
    become(module, PackedInterfaceExperts, source)


_FAMILIES: dict[str, Install] = {
    "DbrxExpertGLU": dbrx.install,
    "JetMoeParallelExperts": jetmoe.install,
    "Llama4TextExperts": llama4.install,
    "LongcatFlashExperts": longcat_flash.install,
    "Step3p7Experts": step3p7.install,
    "SwitchTransformersExperts": switch_transformers.install,
}


def install(model: nn.Module, experts: ExpertModules, source: ExpertSource) -> None:
    """Replace the experts of one group by packed ones. The model is on the meta device; nothing is allocated."""
    module = model.get_submodule(experts.path)
    if is_interface_module(module):
        _install_interface(model, experts, source)
        return
    family = next(_FAMILIES[c.__name__] for c in type(module).__mro__ if c.__name__ in _FAMILIES)
    family(model, experts, source)
