"""Sparse blocks for whole layers in one call of the native core: router, experts, and the expert of all tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zipmoe import _native
from zipmoe.engine.bfloat16_words import bfloat16_words
from zipmoe.hf.combine_order import CombineOrder, combine_order
from zipmoe.hf.early_routing import EarlyRouting
from zipmoe.hf.expert_parameter import ExpertSource
from zipmoe.hf.fused_experts import network_of
from zipmoe.hf.implementation_choice import experts_implementation
from zipmoe.hf.last_positions import LastPositions
from zipmoe.hf.layer_structure import BlockParts, block_parts
from zipmoe.hf.native_ingredients import NativeIngredients
from zipmoe.hf.quiet_modules import HOOKS
from zipmoe.hf.readable_rows import readable_weight

_NEEDLESS_HOOKS = (EarlyRouting, LastPositions)
"""Whose hooks on a block do what a layer in one call does anyway, or nothing in steps of one token."""

_Formula = tuple[_native.RouterFormula, torch.dtype]


@dataclass(frozen=True)
class _Known:
    """A block of the known shape, and what it was when that was found out."""

    parts: BlockParts
    forward: Callable[..., Any]
    ingredients: NativeIngredients


class FusedBlock:
    """A sparse block of the known shape, as its layer needs it.

    Args:
        block: with packed experts; a child of the layer that holds this.
    """

    def __init__(self, block: Any) -> None:
        self.module = block
        self._known = _known(block)
        self._native: _native.SparseBlock | None = None
        self._made_of: tuple[_Formula | None, _native.DenseNetwork | None] = (None, None)
        """The router's formula and the shared expert's network in it."""

    @property
    def is_known(self) -> bool:
        """Whether it has the known shape, and experts that the native core computes."""
        known = self._known
        return known is not None and network_of(self.module._modules[known.parts.experts]) is not None

    def native(self, rows: int) -> _native.SparseBlock | None:
        """The block for so many rows, if they can be computed so now: nothing that is left out would be noticed."""
        known = self._known
        if known is not None and (type(self.module).forward is not known.forward or not known.ingredients.unchanged()):
            known, self._native = _known(self.module), None
            self._known = known
        if known is None or not _is_quiet(self.module, known):
            return None
        parts = known.parts
        modules = self.module._modules
        experts: Any = modules[parts.experts]
        source: ExpertSource = experts._zipmoe_source
        engine = source.slot.engine
        if (
            engine.fused is None
            or source.dtype is not torch.bfloat16
            or not engine.fused.takes(rows)
            or engine.request_observer is not None
            or combine_order(experts_implementation(experts.config)) is not CombineOrder.GROUPED_MM
        ):
            return None
        shared = None
        if parts.shared is not None:
            shared = modules[parts.shared].zipmoe_network(rows)
            if shared is None:
                return None
        made_of = (modules[parts.router].zipmoe_formula(), shared)
        if self._native is None or made_of != self._made_of:
            self._made_of = made_of
            self._native = _native_block(modules, parts, *made_of)
        return self._native


def _known(block: Any) -> _Known | None:
    parts = block_parts(block)
    if parts is None:
        return None
    children = [parts.router, parts.experts, *(name for name in (parts.shared, parts.gate) if name is not None)]
    return _Known(parts, type(block).forward, NativeIngredients(block, (), children))


def _is_quiet(block: Any, known: _Known) -> bool:
    """Whether leaving out the calls of the block and its children is not noticed by anybody."""
    held = vars(block)
    return (
        not block.training
        and "forward" not in held
        and not any(held[name] and not all(map(_is_needless, held[name].values())) for name in HOOKS)
        and known.ingredients.are_quiet()
    )


def _is_needless(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), _NEEDLESS_HOOKS)


def _native_block(
    modules: dict[str, Any], parts: BlockParts, formula: _Formula | None, shared_network: _native.DenseNetwork | None
) -> _native.SparseBlock | None:
    """None if the experts, the router or the gate are not what the native core computes."""
    router, experts = modules[parts.router], modules[parts.experts]
    source: ExpertSource = experts._zipmoe_source
    expert_network = network_of(experts)
    if (
        expert_network is None
        or formula is None
        or experts.has_post_expert_norm
        or router.weight.shape[0] != len(source.group.records)
    ):
        return None
    shared = None
    if shared_network is not None:
        gate: Any = None if parts.gate is None else modules[parts.gate]
        if gate is None:
            shared = _native.SharedExpert(shared_network)
        else:
            weight = gate._parameters.get("weight")
            if not readable_weight(weight, 2) or weight.shape[0] != 1 or gate.bias is not None:
                return None
            shared = _native.SharedExpert(shared_network, bfloat16_words(weight.detach().view(-1)), _sigmoids())
    return _native.SparseBlock(
        formula[0],
        bfloat16_words(router.weight.detach()),
        formula[1] is torch.bfloat16,
        source.group.records,
        expert_network,
        shared,
    )


@functools.cache
def _sigmoids() -> npt.NDArray[np.uint16]:
    """torch's sigmoid of all BF16 values, by pattern."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    return bfloat16_words(torch.sigmoid(patterns.view(torch.bfloat16)))
