"""What all packed experts modules share, whatever their family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from zipmoe.checkpoint.expert_modules import ExpertModules
from zipmoe.hf.dynamic_class import dynamic_class
from zipmoe.hf.engine_slot import refuse_copy
from zipmoe.hf.expert_parameter import ExpertParameter, ExpertSource
from zipmoe.hf.packed_module import require_exact_conversion


class PackedExperts(nn.Module):
    """A module that computes with the experts of one group; placed before the family's class by ``become``."""

    _zipmoe_source: ExpertSource

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        self._zipmoe_source.dtype = require_exact_conversion(fn, self._zipmoe_source.dtype)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def become(module: nn.Module, packed: type[PackedExperts], source: ExpertSource) -> None:
    """Give ``module`` the behaviour of ``packed``, before that of its own class."""
    original = type(module)
    module.__class__ = dynamic_class(f"Packed{original.__name__}", (packed, original), original)
    module._zipmoe_source = source  # type: ignore[assignment]


def replace_parameters(module: nn.Module, experts: ExpertModules, source: ExpertSource) -> None:
    """Replace the fused expert parameters of ``module`` by stand-ins; nothing is allocated."""
    for name in experts.parameters:
        parameter = module._parameters.pop(name)
        assert parameter is not None
        setattr(module, name, ExpertParameter(source, name, parameter.shape))
