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
    return PackedProducts(experts=not why_experts_are_decoded(model, manifest), dense=True)


def why_experts_are_decoded(model: Any, manifest: Manifest) -> str:
    """Why kernels do not compute the experts, in the mode ``fast`` with a codec that has them; empty if they do."""
    modules = [module for module in model.modules() if is_interface_module(module)]
    if not modules:
        return "their family computes them in its own loop"
    positions = {name: position for position, name in enumerate(manifest.expert_groups[0].parameters)}
    for module in modules:
        order = resolve_experts_implementation(model, module.config._experts_implementation)
        if order != CombineOrder.GROUPED_MM.value:
            return "their outputs are combined in eager order"
        with torch.device("cpu"):  # activations are tried on numbers; models are made where the default is "meta"
            network = native_network(module, positions)
        if isinstance(network, str):
            return network
    return ""
