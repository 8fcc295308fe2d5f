"""Feed-forward networks with dense packed matrices (shared experts, dense layers) in one call of the native core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zipmoe import _native
from zipmoe.engine.fused_compute import FusedCompute
from zipmoe.hf.activation_recognition import recognise_activation
from zipmoe.hf.first_use import same_formula
from zipmoe.hf.fused_module import FusedModule, fuse
from zipmoe.hf.mentioned_names import mentioned_names
from zipmoe.hf.native_ingredients import NativeIngredients, up_to_date
from zipmoe.hf.packed_linear import PackedLinear
from zipmoe.hf.readable_rows import readable_rows

_CHILDREN = ("gate_proj", "up_proj", "down_proj")
_KNOWN_ATTRIBUTES = {"config", "hidden_size", "intermediate_size", "act_fn", "training"}


@dataclass
class _Native:
    """What a module's network is in the native core."""

    network: _native.DenseNetwork
    compute: FusedCompute
    columns: int
    """Of the inputs."""
    out_columns: int
    ingredients: NativeIngredients
    checked: bool = False
    """Whether a use has shown that it computes the same."""


class FusedFeedForward(FusedModule):
    """Placed before the family's class: down(act(gate(x)) * up(x))."""

    _zipmoe_native: _Native | None

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the family's module."""
        native: _Native | None = self._zipmoe_native
        if native is not None:
            fits = not kwargs and len(args) == 1 and readable_rows(args[0], native.columns, native.compute.rows_max)
            native = up_to_date(self, _native_network) if fits and self._zipmoe_stands_for_own() else None
        if native is None:
            output: torch.Tensor = super().forward(*args, **kwargs)
            return output
        x: torch.Tensor = args[0]
        rows = native.compute.feed_forward(native.network, x.view(-1, native.columns), native.out_columns)
        fused: torch.Tensor = rows.view(*x.shape[:-1], native.out_columns)
        if native.checked:
            return fused
        own: torch.Tensor = super().forward(x)
        verdict = same_formula(fused, own)
        if verdict is False:
            self._zipmoe_native = None
        elif verdict:
            native.checked = True
        return own

    def zipmoe_network(self, rows: int) -> _native.DenseNetwork | None:
        """The network for so many rows, if a use has shown that the native core computes the same."""
        native: _Native | None = self._zipmoe_native
        if native is None or not native.checked or rows > native.compute.rows_max:
            return None
        native = up_to_date(self, _native_network)
        return native.network if native is not None and native.checked else None


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
    """Let the native core compute ``module`` up to ``FusedCompute.rows_max`` rows, if it is such a network."""
    original = type(module)
    names = mentioned_names(original) if _has_known_parts(module) else None
    native = _native_network(module) if names is not None and {*names} == {*_CHILDREN, "act_fn"} else None
    if native is None:
        return False
    fuse(module, FusedFeedForward, _zipmoe_native=native)
    return True


def _has_known_parts(module: Any) -> bool:
    attributes = {name for name in vars(module) if not name.startswith("_")}
    return (
        {*_CHILDREN} <= {*module._modules} <= {*_CHILDREN, "act_fn"}
        and all(isinstance(module._modules[name], PackedLinear) for name in _CHILDREN)
        and not module._parameters
        and not module._buffers
        and attributes <= _KNOWN_ATTRIBUTES
    )


def _native_network(module: Any) -> _Native | None:
    """``module``, whose class has known code, for the native core; None if its parts are not what that computes."""
    if not _has_known_parts(module):
        return None
    parts: list[Any] = [module._modules[name] for name in _CHILDREN]
    gate, up, down = parts
    compute = gate._zipmoe_slot.engine.fused
    if (
        compute is None
        or any(part._parameters["bias"] is not None or part._zipmoe_dtype is not torch.bfloat16 for part in parts)
        or gate.in_features != up.in_features
        or not gate.out_features == up.out_features == down.in_features
        or not all(compute.is_one_record(part._zipmoe_parameter) for part in parts)
    ):
        return None
    formula = recognise_activation(_GatedUnit(module))
    if formula is None:
        return None
    first, second, last = (compute.projection(part._zipmoe_parameter, None) for part in parts)
    network = _native.DenseNetwork(first, second, last, formula.activation())
    ingredients = NativeIngredients(module, ("act_fn",), (*_CHILDREN, "act_fn"))
    return _Native(network, compute, gate.in_features, down.out_features, ingredients)
