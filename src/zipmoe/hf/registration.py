"""Makes Transformers know ZipMoE: quantisation method, its configuration, and the experts implementation's name."""

from __future__ import annotations

from typing import Any, NoReturn

from transformers.integrations.moe import ExpertsInterface
from transformers.quantizers import auto

from zipmoe.checkpoint.source import QUANT_METHOD
from zipmoe.errors import UnsupportedOperationError
from zipmoe.hf.configuration import ZipMoEConfig
from zipmoe.hf.quantizer import ZipMoEQuantizer
from zipmoe.store.guard_tensor import EXPERTS_IMPLEMENTATION


def register() -> None:
    """Register the plug-in with Transformers; does nothing the second time."""
    if QUANT_METHOD in auto.AUTO_QUANTIZER_MAPPING:
        return
    auto.register_quantization_config(QUANT_METHOD)(ZipMoEConfig)
    auto.register_quantizer(QUANT_METHOD)(ZipMoEQuantizer)
    # Only configurations of these types pass their loading attributes on to the folder's own configuration.
    auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*auto.LOADING_ATTRIBUTES_CONFIG_TYPES, ZipMoEConfig)
    # The name must be known for config.json to be accepted. Packed models resolve it while they are loaded.
    ExpertsInterface.register(EXPERTS_IMPLEMENTATION, _refuse_unpacked_experts)


def _refuse_unpacked_experts(self: Any, *args: Any) -> NoReturn:
    raise UnsupportedOperationError(
        f'experts_implementation="{EXPERTS_IMPLEMENTATION}" needs a packed folder; these experts are not packed',
        hint="pack the checkpoint (zipmoe pack SRC DST) and load DST",
    )
