"""The quantizer: how a packed folder becomes a Transformers model (docs/architecture.md, a request step by step).

Transformers calls it around its own loading. Before, packed parameters are taken out of the module tree, so that
nothing is allocated for them and the stock code loads the rest, and the engine opens within the budget. After, the
loaded model gets its engine and its guards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.base import HfQuantizer
from transformers.utils.hub import cached_file

from zipmoe.errors import InvalidArgumentError, NotAPackedFolderError, UnsupportedOperationError
from zipmoe.hf.budget_watch import watch_budget
from zipmoe.hf.combine_order import resolve_all_experts_implementations
from zipmoe.hf.configuration import ZipMoEConfig
from zipmoe.hf.engine_opening import open_engine
from zipmoe.hf.engine_slot import EXACT_DTYPES, EngineSlot
from zipmoe.hf.fused_steps import fuse_steps
from zipmoe.hf.last_positions import leave_out_positions
from zipmoe.hf.look_ahead import LookAheadChain, may_look_ahead
from zipmoe.hf.model_guards import guard_model
from zipmoe.hf.next_token_look_ahead import look_ahead_to_next_token
from zipmoe.hf.packed_tree import replace_packed_parameters
from zipmoe.hf.router_discovery import discover_routers
from zipmoe.store.manifest import MANIFEST_NAME, RECORD_PREFIX
from zipmoe.store.packed_folder import PackedFolder

_AUTOMATIC_DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
_CPU = torch.device("cpu")


class ZipMoEQuantizer(HfQuantizer):  # type: ignore[misc]
    """Loads packed folders; registered under ``quant_method`` "zipmoe"."""

    quantization_config: ZipMoEConfig

    def __init__(self, quantization_config: ZipMoEConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            raise NotAPackedFolderError(
                "a ZipMoEConfig was given for a folder that is not packed", hint="pack it first: zipmoe pack SRC DST"
            )
        self._slot = EngineSlot()
        self._folder: PackedFolder | None = None

    def update_device_map(self, device_map: Any) -> dict[str, Any] | None:
        """Everything runs on the CPU: accept that, or leave it to us; refuse other devices (InvalidArgumentError)."""
        if device_map is None:
            return None
        if isinstance(device_map, str) and device_map in _AUTOMATIC_DEVICE_MAPS:
            return {"": _CPU}
        others = {str(device) for device in device_map.values()} - {"cpu"}
        if others:
            raise InvalidArgumentError(
                f"device_map names {', '.join(sorted(others))}: a packed model computes on the CPU",
                hint='leave device_map out, or pass "cpu"',
            )
        return {"": _CPU}

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """BF16 as packed, or its exact widening to float32; UnsupportedOperationError for anything else."""
        if dtype not in EXACT_DTYPES:
            raise UnsupportedOperationError(
                f"a packed model cannot be loaded as {dtype}: not every BF16 weight fits into it unchanged",
                hint="use dtype=torch.bfloat16 (or leave it out), or torch.float32",
            )
        return dtype

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        if not checkpoint_files:
            raise NotAPackedFolderError("a packed model can only be loaded from its folder, not from a state dict")
        resolve_all_experts_implementations(model)
        folder = _folder_with_manifest(Path(checkpoint_files[0]).parent, model)
        self._folder = self.quantization_config.open_folder(folder)
        packed = replace_packed_parameters(model, self._folder.manifest, self._slot)
        # Pairs of packed parameters are one matrix of the folder already.
        model.all_tied_weights_keys = {
            target: source
            for target, source in model.all_tied_weights_keys.items()
            if target not in packed and source not in packed
        }
        self._slot.open(open_engine(model, self._folder, self.quantization_config))

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Changes no conversion; learns from them under which names our own tensors will be found unexpected."""
        conversions: list[Any] = super().update_weight_conversions(weight_conversions, model)
        assert self._folder is not None
        guard = {
            f"^{re.escape(name)}$" for name in _loaded_names(self._folder.manifest.guard_tensor, conversions, model)
        }
        records = rf"(^|\.){re.escape(RECORD_PREFIX)}"  # some families put a prefix before every name
        known = model._keys_to_ignore_on_load_unexpected or set()
        model._keys_to_ignore_on_load_unexpected = set(known) | guard | {records}
        return conversions

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        assert self._folder is not None
        for module in model.modules():
            # Packed weights are the weights: no model may take its numeric detours for quantised ones (jamba has one).
            if hasattr(module, "config") and hasattr(module.config, "_is_quantized"):
                del module.config._is_quantized
        guard_model(model, self._folder, self._slot.engine, self.quantization_config)
        compute = self._slot.engine.fused if model.dtype == torch.bfloat16 else None
        if compute is not None and self.quantization_config.fused_steps:
            fuse_steps(model, compute)
        watch_budget(model, self._slot.engine)
        if may_look_ahead(self._slot.engine, self.quantization_config.look_ahead):
            model.zipmoe_look_ahead = LookAheadChain(self._slot.engine)
            model.zipmoe_next_token = look_ahead_to_next_token(model, model.zipmoe_look_ahead)
            model.zipmoe_look_ahead.watch_passes(model)
        early, chain = self.quantization_config.early_routing, model.zipmoe_look_ahead
        if early or chain is not None:
            discover_routers(model, early=early, chain=chain)
        if compute is not None and self.quantization_config.last_positions:
            last_positions = leave_out_positions(model)
            if last_positions is not None and chain is not None:
                chain.last_positions = last_positions
        return model

    def is_serializable(self) -> bool:
        """The stock code cannot write packed weights; ``model.save_pretrained`` copies the folder instead."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Packed weights have no gradients."""
        return False


def _loaded_names(key: str, conversions: list[Any], model: Any) -> set[str]:
    """The names under which the loader of Transformers will look for the checkpoint's tensor ``key``."""
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, model.state_dict())
    converter = next((c for c in converters if pattern in c.source_patterns), None)
    targets = converter.target_patterns if converter is not None else [""]
    return {name, *(name.replace(targets[0], target) for target in targets)}


def _folder_with_manifest(folder: Path, model: Any) -> Path:
    """``folder``, after fetching the manifest if a hub download brought only the files of the tensor index."""
    is_snapshot = folder.parent.name == "snapshots"
    if is_snapshot and not (folder / MANIFEST_NAME).exists():
        cached_file(
            model.config.name_or_path,
            MANIFEST_NAME,
            cache_dir=folder.parents[2],
            revision=folder.name,
            _raise_exceptions_for_missing_entries=False,
        )
    return folder
