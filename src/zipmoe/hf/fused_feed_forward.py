"""Feed-forward networks with dense packed matrices (shared experts, dense layers) in one call of the native core."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zipmoe import _native
from zipmoe.engine.fused_compute import STEP_ROWS_MAX, FusedCompute
from zipmoe.hf.activation_recognition import recognise_activation
from zipmoe.hf.dynamic_class import dynamic_class
from zipmoe.hf.first_use import agrees
from zipmoe.hf.packed_linear import PackedLinear
from zipmoe.hf.quiet_modules import is_quiet

_CHILDREN = ("gate_proj", "up_proj", "down_proj")
_KNOWN_ATTRIBUTES = {"config", "hidden_size", "intermediate_size", "act_fn", "training"}


class FusedFeedForward(nn.Module):
    """Placed before the family's class: down(act(gate(x)) * up(x))."""

    _zipmoe_network: _native.DenseNetwork | None
    _zipmoe_checked: bool
    _zipmoe_parts: tuple[Any, ...]
    """gate, up, down"""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the family's module."""
        fused = None if kwargs or len(args) != 1 else self._fused(args[0])
        if fused is not None and self._zipmoe_checked:
            return fused
        output: torch.Tensor = super().forward(*args, **kwargs)
        if fused is not None:
            self._zipmoe_checked = True
            if not agrees(fused, output):
                self._zipmoe_network = None
        return output

    def _fused(self, x: torch.Tensor) -> torch.Tensor | None:
        network = self._zipmoe_network
        if network is None or x.dtype is not torch.bfloat16 or not x.is_contiguous():
            return None
        gate, up, down = self._zipmoe_parts
        modules: dict[str, Any] = self._modules
        if not (
            0 < x.numel() <= STEP_ROWS_MAX * gate.in_features
            and x.shape[-1] == gate.in_features
            and modules["gate_proj"] is gate
            and modules["up_proj"] is up
            and modules["down_proj"] is down
            and gate._zipmoe_dtype is torch.bfloat16
            and is_quiet(gate)
            and is_quiet(up)
            and is_quiet(down)
            and not (x.requires_grad and torch.is_grad_enabled())
        ):
            return None
        fused: FusedCompute | None = gate._zipmoe_slot.engine.fused
        if fused is None:
            return None
        output = fused.feed_forward(network, x.view(-1, gate.in_features), down.out_features)
        return output.view(*x.shape[:-1], down.out_features)


class _GatedUnit(nn.Module):
    """What lies between the matrices, in the form in which experts modules show it."""

    has_gate = True

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._function = module.act_fn

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        product: torch.Tensor = self._function(gate) * up
        return product


def fuse_feed_forward(module: Any) -> bool:
    """Let the native core compute few rows of ``module``, if it is such a network."""
    parts: tuple[Any, ...] = tuple(module._modules.get(name) for name in _CHILDREN)
    others = set(module._modules) - {*_CHILDREN, "act_fn"}
    attributes = {name for name in vars(module) if not name.startswith("_")}
    if others or module._parameters or module._buffers or not attributes <= _KNOWN_ATTRIBUTES:
        return False
    if not all(isinstance(part, PackedLinear) and part.bias is None for part in parts):
        return False
    formula = recognise_activation(_GatedUnit(module))
    if formula is None:
        return False
    gate, up, down = (part._zipmoe_slot.engine.fused.projection(part._zipmoe_parameter, None) for part in parts)
    original = type(module)
    module.__class__ = dynamic_class(original.__name__, (FusedFeedForward, original), original)
    module._zipmoe_network = _native.DenseNetwork(gate, up, down, formula.activation())
    module._zipmoe_parts = parts
    module._zipmoe_checked = False
    return True
