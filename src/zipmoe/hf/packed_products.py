"""Which products of a run will read packed weights, told by its model on the meta device: for planning."""

from __future__ import annotations

from typing import Any

import torch

from zipmoe.checkpoint.expert_modules import is_interface_module
from zipmoe.codecs.registry import get_codec
from zipmoe.hf.combine_order import CombineOrder, resolve_experts_implementation
from zipmoe.hf.expert_network import native_network
from zipmoe.planning.packed_products import NO_PRODUCTS, PackedProducts
from zipmoe.store.manifest import Manifest


def packed_products(model: Any, manifest: Manifest, mode: str) -> PackedProducts:
    """What a run does for few tokens.

    Args:
        model: a PreTrainedModel, with packed parameters replaced or not.
        manifest: of its folder.
        mode: ``"fast"`` or ``"exact"``.
    """
    if mode != "fast" or not get_codec(manifest.codec.name).fused or model.config.dtype == torch.float32:
        return NO_PRODUCTS
    modules = [module for module in model.modules() if is_interface_module(module)]
    positions = {name: position for position, name in enumerate(manifest.expert_groups[0].parameters)}
    return PackedProducts(
        experts=bool(modules) and all(_computes(model, module, positions) for module in modules), dense=True
    )


def _computes(model: Any, module: Any, positions: dict[str, int]) -> bool:
    order = resolve_experts_implementation(model, module.config._experts_implementation)
    with torch.device("cpu"):  # models are made where the default device is "meta"; the activation is tried on numbers
        return order == CombineOrder.GROUPED_MM.value and native_network(module, positions) is not None
