"""Which modules of a model hold experts, and which slice of which parameter is one expert's matrix.

The packer and the Transformers plug-in both ask this file, so that the names in the manifest and the modules of the
loaded model cannot disagree. Only the module tree is looked at (meta tensors suffice); nothing is imported from
Transformers.

Modules of Transformers' experts interface are recognised by the attribute that its decorator sets. Families outside the
interface are listed in ``_FAMILIES`` by class name: a new one is an entry there and one in ``zipmoe.hf.families``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from zipmoe.errors import UnsupportedCheckpointError

if TYPE_CHECKING:
    import torch
    from torch import nn


class ExpertLayout(Enum):
    """How the matrices of all experts of a module are held by its parameters."""

    STACKED = "stacked"
    """One parameter of shape (experts, rows, columns)."""
    CONCATENATED = "concatenated"
    """One parameter of shape (experts * rows, columns); expert e owns rows ``e * rows`` up to ``(e + 1) * rows``."""
    MODULE_PER_EXPERT = "module_per_expert"
    """One sub-module per expert; each has parameters of shape (rows, columns)."""


@dataclass(frozen=True)
class ExpertModules:
    """The experts of one sparse layer: what becomes one ``ExpertGroup`` of the manifest."""

    path: str
    """Module path, e.g. ``model.layers.0.mlp.experts``."""
    parameters: tuple[str, ...]
    """Packed parameters relative to ``path``; with ``{expert}`` where each expert is a sub-module."""
    num_experts: int
    slice_shapes: tuple[tuple[int, int], ...]
    """(rows, columns) of one expert's slice of each parameter, in the order of ``parameters``."""
    layout: ExpertLayout

    def parameter_name(self, parameter: str, expert: int) -> str:
        """Full name, in the module tree, of the model parameter that holds ``expert``'s matrix."""
        return f"{self.path}.{parameter.format(expert=expert)}"

    def parameter_names(self) -> Iterator[str]:
        """Full names of all model parameters of this group, each once."""
        experts = range(self.num_experts) if self.layout is ExpertLayout.MODULE_PER_EXPERT else range(1)
        for expert in experts:
            for parameter in self.parameters:
                yield self.parameter_name(parameter, expert)

    def parameter_slice(self, tensor: torch.Tensor, parameter: str, expert: int) -> torch.Tensor:
        """The (rows, columns) view of ``expert`` in ``tensor``, the whole model parameter ``parameter_name(...)``."""
        rows, _ = self.slice_shapes[self.parameters.index(parameter)]
        return _SLICERS[self.layout](tensor, rows, expert)


_SLICERS: dict[ExpertLayout, Callable[[torch.Tensor, int, int], torch.Tensor]] = {
    ExpertLayout.STACKED: lambda tensor, rows, expert: tensor[expert],
    ExpertLayout.CONCATENATED: lambda tensor, rows, expert: tensor[expert * rows : (expert + 1) * rows],
    ExpertLayout.MODULE_PER_EXPERT: lambda tensor, rows, expert: tensor,
}


def find_expert_groups(model: nn.Module) -> list[ExpertModules]:
    """All expert modules of ``model``, in the order of its module tree.

    Raises:
        UnsupportedCheckpointError: the model belongs to a family that cannot be run bit for bit.
    """
    groups = []
    for path, module in model.named_modules():
        family = _family_of(module)
        group = family(path, module) if family is not None else None
        if group is not None and group.parameters:
            groups.append(group)
    return groups


def is_interface_module(module: nn.Module) -> bool:
    """Whether ``module`` computes its experts through Transformers' experts interface (its decorator marks it)."""
    return hasattr(module, "_is_expert_parallel")


_Family = Callable[[str, "nn.Module"], ExpertModules]


def _family_of(module: nn.Module) -> _Family | None:
    if is_interface_module(module):
        return _stacked("num_experts")
    return next((_FAMILIES[c.__name__] for c in type(module).__mro__ if c.__name__ in _FAMILIES), None)


def _stacked(experts_attribute: str) -> _Family:
    def describe(path: str, module: nn.Module) -> ExpertModules:
        experts = int(getattr(module, experts_attribute))
        # More rows of experts than experts: the tail belongs to experts that compute nothing (longcat_flash).
        held = {n: p for n, p in module.named_parameters(recurse=False) if p.ndim == 3 and p.shape[0] >= experts}
        shapes = tuple((int(p.shape[1]), int(p.shape[2])) for p in held.values())
        return ExpertModules(path, tuple(held), experts, shapes, ExpertLayout.STACKED)

    return describe


def _concatenated(path: str, module: nn.Module) -> ExpertModules:
    experts = int(module.moe_num_experts)  # type: ignore[arg-type]
    held = {n: p for n, p in module.named_parameters(recurse=False) if p.ndim == 2}
    shapes = tuple((int(p.shape[0]) // experts, int(p.shape[1])) for p in held.values())
    return ExpertModules(path, tuple(held), experts, shapes, ExpertLayout.CONCATENATED)


def _module_per_expert(path: str, module: nn.Module) -> ExpertModules:
    children = dict(module.named_children())
    held = {n: p for n, p in children["expert_0"].named_parameters() if p.ndim == 2}
    shapes = tuple((int(p.shape[0]), int(p.shape[1])) for p in held.values())
    names = tuple("expert_{expert}." + n for n in held)
    return ExpertModules(path, names, len(children), shapes, ExpertLayout.MODULE_PER_EXPERT)


def _refuse(reason: str) -> _Family:
    def refuse(path: str, module: nn.Module) -> ExpertModules:
        raise UnsupportedCheckpointError(f"{type(module).__name__} ({path}) is not supported: {reason}")

    return refuse


_FAMILIES: dict[str, _Family] = {
    "SwitchTransformersExperts": _module_per_expert,
    "DbrxExpertGLU": _concatenated,
    "Llama4TextExperts": _stacked("num_experts"),
    "JetMoeParallelExperts": _stacked("num_experts"),
    "LongcatFlashExperts": _stacked("num_routed_experts"),
    "Step3p7Experts": _stacked("num_experts"),
    "NllbMoeExperts": _refuse(
        "Transformers computes this family wrongly: it one-hot encodes the routing mask a second time, so that only "
        "expert_0 and expert_1 ever run and the output is meaningless for any real checkpoint"
    ),
    "DogeCDMoE": _refuse("its experts are rows of two embedding tables found by product keys, not matrices"),
}
