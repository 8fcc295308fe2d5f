"""Makes Transformers know ZipMoE: quantisation method, its configuration, and the experts implementation's name."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward
from transformers.quantizers import auto

from zipmoe.errors import UnsupportedOperationError
from zipmoe.hf.combine_order import EXPERTS_IMPLEMENTATION
from zipmoe.hf.configuration import QUANT_METHOD, ZipMoEConfig
from zipmoe.hf.packed_tree import UNPACKED_MARK
from zipmoe.hf.quantizer import ZipMoEQuantizer


def register() -> None:
    """Register the plug-in with Transformers; does nothing the second time."""
    if QUANT_METHOD in auto.AUTO_QUANTIZER_MAPPING:
        return
    auto.register_quantization_config(QUANT_METHOD)(ZipMoEConfig)
    auto.register_quantizer(QUANT_METHOD)(ZipMoEQuantizer)
    # Only configurations of these types pass their loading attributes on to the folder's own configuration.
    auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*auto.LOADING_ATTRIBUTES_CONFIG_TYPES, ZipMoEConfig)
    ExpertsInterface.register(EXPERTS_IMPLEMENTATION, _unpacked_experts_forward)


def _unpacked_experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts that are not packed: computed as Transformers does by default, inside a packed model only."""
    if not getattr(self, UNPACKED_MARK, False):
        raise UnsupportedOperationError(
            f'experts_implementation="{EXPERTS_IMPLEMENTATION}" needs a packed folder; these experts are not packed',
            hint="pack the checkpoint (zipmoe pack SRC DST) and load DST",
        )
    output: torch.Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    return output
