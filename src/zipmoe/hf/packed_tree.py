"""Replaces the packed parameters of a model on the meta device, and checks that manifest and model agree."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from zipmoe.checkpoint.expert_modules import ExpertModules, find_expert_groups
from zipmoe.checkpoint.module_names import ModuleNames
from zipmoe.errors import ManifestError, UnsupportedOperationError
from zipmoe.hf.engine_slot import EXACT_DTYPES, EngineSlot
from zipmoe.hf.expert_parameter import ExpertSource
from zipmoe.hf.families import install
from zipmoe.hf.packed_embedding import PackedEmbedding
from zipmoe.hf.packed_linear import PackedLinear
from zipmoe.hf.packed_module import PackedModule, pack_module
from zipmoe.store.manifest import DenseMatrix, ExpertGroup, Manifest

_PACKED_CLASSES: dict[type[nn.Module], type[PackedModule]] = {nn.Linear: PackedLinear, nn.Embedding: PackedEmbedding}


def replace_packed_parameters(model: Any, manifest: Manifest, slot: EngineSlot) -> set[str]:
    """Replace every parameter of ``model`` (a PreTrainedModel on the meta device) that ``manifest`` holds.

    A model of another class than the packed one (a base model, another head) takes the parts that it has.

    Returns:
        Full names, in this model's tree, of the parameters that were replaced.

    Raises:
        ManifestError: the manifest describes another model.
    """
    names = ModuleNames(model)
    complete = type(model).__name__ == manifest.architecture
    described = {experts.path: experts for experts in find_expert_groups(model)}
    replaced: set[str] = set()
    for group in manifest.expert_groups:
        for held in (group.path, *group.tied_paths):
            path = names.resolve(held)
            if path in described:
                experts = described[path]
                _check_group(model, experts, group)
                dtype = _computing_dtype(next(iter(experts.parameter_names())), model)
                install(model, experts, ExpertSource(slot, group.path, experts.num_experts, dtype))
                replaced.update(experts.parameter_names())
            elif complete:
                _mismatch(model, f"it has no experts at {held}")
    if not replaced:
        _mismatch(model, "it has none of the packed experts")
    for matrix in manifest.dense:
        for parameter in (matrix.parameter, *matrix.tied_parameters):
            name = _replace_dense(model, matrix, parameter, names, slot, complete)
            if name is not None:
                replaced.add(name)
    return replaced


def _replace_dense(
    model: Any, matrix: DenseMatrix, parameter: str, names: ModuleNames, slot: EngineSlot, complete: bool
) -> str | None:
    path = names.resolve(parameter.removesuffix(".weight"))
    if path is None:
        if complete:
            _mismatch(model, f"it has no parameter {parameter}")
        return None
    name = f"{path}.weight"
    module = model.get_submodule(path)
    if isinstance(module, PackedModule):  # the same module under a second name
        return name
    packed = next((packed for base, packed in _PACKED_CLASSES.items() if isinstance(module, base)), None)
    weight = module._parameters.get("weight")
    if packed is None or weight is None:
        _mismatch(model, f"{path} is a {type(module).__name__}, not a linear layer or an embedding")
    if tuple(weight.shape) != (matrix.rows, matrix.columns):
        _mismatch(model, f"{name} has the shape {tuple(weight.shape)}, the folder's is {(matrix.rows, matrix.columns)}")
    _computing_dtype(name, model)
    pack_module(module, packed, slot, matrix.parameter)
    return name


def _check_group(model: Any, experts: ExpertModules, group: ExpertGroup) -> None:
    if len(group.records) != experts.num_experts:
        _mismatch(model, f"{experts.path} has {experts.num_experts} experts, the folder has {len(group.records)}")
    shapes = tuple((matrix.rows, matrix.columns) for matrix in group.records[0].matrices)
    if group.parameters != experts.parameters or shapes != experts.slice_shapes:
        _mismatch(
            model,
            f"experts of {experts.path} have {dict(zip(experts.parameters, experts.slice_shapes, strict=True))}, the "
            f"folder's have {dict(zip(group.parameters, shapes, strict=False))}",
        )


def _computing_dtype(name: str, model: Any) -> torch.dtype:
    dtype: torch.dtype = model.get_parameter(name).dtype
    if dtype not in EXACT_DTYPES:
        raise UnsupportedOperationError(
            f"{name} would be computed in {dtype}, which does not hold every BF16 weight unchanged",
            hint="load with dtype=torch.bfloat16 or dtype=torch.float32",
        )
    return dtype


def _mismatch(model: Any, what: str) -> NoReturn:
    raise ManifestError(
        f"the folder's manifest does not describe this {type(model).__name__}: {what}",
        hint="config.json, zipmoe.json and the shards must come from one pack; pack the checkpoint again",
    )
