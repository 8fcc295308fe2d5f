"""One expert's slice of a parameter, built from the checkpoint without building the other experts.

A conversion unit can be run on one expert when each of its operations treats every expert alike: stacking per-expert
tensors (``MergeModulelist(dim=0)``), joining or reordering along another dimension, transposing two others. Units
with any other operation are converted whole, once, and kept until the next layer's are asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch

from zipmoe.checkpoint.conversion_plan import LoadUnit, conversion_errors, convert_unit
from zipmoe.checkpoint.expert_modules import ExpertLayout, ExpertModules
from zipmoe.checkpoint.source import SourceCheckpoint
from zipmoe.errors import DamagedCheckpointError

WHOLE_UNITS_KEPT = 2
"""An expert's matrices (gate and up, down) come from up to two units, and its neighbours from the same ones."""

_ACTS_ON_EACH_EXPERT: dict[str, Callable[[Any], bool]] = {
    "MergeModulelist": lambda op: op.dim == 0,
    "Concatenate": lambda op: op.dim not in (0, -3),
    "Interleave": lambda op: op.dim not in (0, -3),
    "Transpose": lambda op: 0 not in (op.dim0, op.dim1) and -3 not in (op.dim0, op.dim1),
    "ErnieFuseAndSplitTextVisionExperts": lambda op: op.stack_dim == 0 and op.concat_dim != 0,
}


def acts_on_each_expert(unit: LoadUnit) -> bool:
    """Whether all operations of the unit's converter treat every expert alike."""
    operations = unit.converter.operations
    checks = [_ACTS_ON_EACH_EXPERT.get(type(operation).__name__) for operation in operations]
    return all(check is not None and check(op) for check, op in zip(checks, operations, strict=True))


def check_parameter_shape(model: Any, name: str, shape: tuple[int, ...]) -> None:
    """Transformers loads no tensor into a parameter of another shape, so nothing may be cut out of one either.

    Raises:
        DamagedCheckpointError: the checkpoint's tensor for ``name`` has another shape than the model's parameter.
    """
    wanted = tuple(model.get_parameter(name).shape)
    if shape != wanted:
        raise DamagedCheckpointError(
            f"the checkpoint gives {name!r} the shape {shape}, the model wants {wanted}",
            hint="config.json and the weights do not belong together",
        )


class _OneExpertModel:
    """Stands in for the model in operations that compare a slice with the parameter's shape."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def get_parameter(self, name: str) -> torch.Tensor:
        shape = self._model.get_parameter(name).shape
        return torch.empty((1, *shape[1:]), device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class ExpertReader:
    """Reads expert slices of the parameters of one model. Thread-safe.

    Args:
        model: the model on the meta device.
        source: the checkpoint.
        units: conversion unit of each expert parameter, by full parameter name.
    """

    def __init__(self, model: Any, source: SourceCheckpoint, units: dict[str, LoadUnit]) -> None:
        self._model = model
        self._source = source
        self._units = units
        self._whole_lock = threading.Lock()
        self._whole: dict[int, dict[str, torch.Tensor]] = {}

    def read(self, group: ExpertModules, parameter: str, expert: int) -> torch.Tensor:
        """The matrix of ``expert`` in ``parameter`` (one of ``group.parameters``), in the checkpoint's dtype.

        Returns:
            Contiguous tensor of shape (rows, columns) as ``group.slice_shapes`` says.

        Raises:
            DamagedCheckpointError: the checkpoint's tensor has another shape.
        """
        name = group.parameter_name(parameter, expert)
        unit = self._units[name]
        shape = group.slice_shapes[group.parameters.index(parameter)]
        if group.layout is ExpertLayout.MODULE_PER_EXPERT:
            matrix = self._source.read(unit.only_key) if unit.converter is None else self._convert_whole(unit)[name]
        elif unit.converter is None and group.layout is ExpertLayout.CONCATENATED:
            matrix = self._source.read_rows(unit.only_key, expert * shape[0], (expert + 1) * shape[0])
        elif unit.converter is None:
            matrix = self._source.read_rows(unit.only_key, expert, expert + 1)[0]
        elif group.layout is ExpertLayout.STACKED and self._runs_on_one_expert(unit, group.num_experts):
            matrix = self._convert_one(unit, name, expert, group.num_experts)
        else:
            matrix = group.parameter_slice(self._convert_whole(unit)[name], parameter, expert)
        return self._checked(matrix, name, shape)

    @staticmethod
    def _checked(matrix: torch.Tensor, parameter: str, shape: tuple[int, int]) -> torch.Tensor:
        if tuple(matrix.shape) != shape:
            raise DamagedCheckpointError(
                f"the checkpoint gives {parameter!r} the shape {tuple(matrix.shape)} per expert, "
                f"the model wants {shape}",
                hint="config.json and the weights do not belong together",
            )
        return matrix.contiguous()

    @staticmethod
    def _runs_on_one_expert(unit: LoadUnit, num_experts: int) -> bool:
        if not acts_on_each_expert(unit):
            return False
        allowed = {1, num_experts * len(unit.targets)}
        return all(len(keys) in allowed for keys in unit.sources.values())

    def _convert_one(self, unit: LoadUnit, parameter: str, expert: int, num_experts: int) -> torch.Tensor:
        collected: dict[str, Any] = {}
        for pattern, keys in unit.sources.items():
            if len(keys) == 1 and num_experts * len(unit.targets) > 1:
                collected[pattern] = [self._source.read_rows(keys[0], expert, expert + 1)]
            else:
                collected[pattern] = [
                    self._source.read(keys[t * num_experts + expert]) for t in range(len(unit.targets))
                ]
        converter = deepcopy(unit.converter)
        with conversion_errors(unit):
            for operation in converter.operations:
                collected = operation.convert(
                    collected,
                    source_patterns=converter.source_patterns,
                    target_patterns=converter.target_patterns,
                    full_layer_name=unit.targets[0],
                    model=_OneExpertModel(self._model),
                    config=self._model.config,
                    missing_keys=None,
                )
        for pattern, value in collected.items():
            if len(collected) == 1 or pattern in parameter:
                tensor: torch.Tensor = value[0] if isinstance(value, list) else value
                return tensor[0]
        raise AssertionError(f"the conversion of {unit.targets[0]!r} does not produce {parameter!r}")

    def _convert_whole(self, unit: LoadUnit) -> dict[str, torch.Tensor]:
        with self._whole_lock:
            if id(unit) not in self._whole:
                while len(self._whole) >= WHOLE_UNITS_KEPT:
                    del self._whole[next(iter(self._whole))]
                converted = convert_unit(unit, self._source, self._model)
                for name, tensor in converted.items():
                    check_parameter_shape(self._model, name, tuple(tensor.shape))
                self._whole[id(unit)] = converted
            return self._whole[id(unit)]
