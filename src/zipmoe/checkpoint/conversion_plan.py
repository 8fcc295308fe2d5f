"""Which checkpoint tensors become which module parameter, by Transformers' own conversion rules.

Transformers maps checkpoints to modules with ``WeightRenaming`` and ``WeightConverter`` rules (its
``conversion_mapping``). The plan repeats the loader's bookkeeping (``core_model_loading``) without loading anything,
so that one expert at a time can be converted. No family has a table of its own here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from zipmoe.errors import DamagedCheckpointError

if TYPE_CHECKING:
    from zipmoe.checkpoint.source import SourceCheckpoint


@dataclass(frozen=True)
class LoadUnit:
    """A set of checkpoint tensors that is converted together, and the parameters that come out."""

    targets: tuple[str, ...]
    """Full parameter names; the first one is the loader's name for the unit."""
    converter: Any
    """``WeightConverter``, or None when the one tensor is only renamed."""
    sources: dict[str, tuple[str, ...]]
    """Checkpoint keys in the loader's order, by the converter's source pattern (by themselves when only renamed)."""

    @property
    def keys(self) -> tuple[str, ...]:
        """All checkpoint keys of the unit."""
        return tuple(key for keys in self.sources.values() for key in keys)

    @property
    def only_key(self) -> str:
        """The single checkpoint key of a unit that is only renamed."""
        (key,) = self.keys
        return key


@dataclass(frozen=True)
class ConversionPlan:
    """Every checkpoint key exactly once: in a unit, ignored by the model, or unexpected."""

    units: tuple[LoadUnit, ...]
    ignored_keys: tuple[str, ...]
    """Keys that match the model's own ``_keys_to_ignore_on_load_unexpected``."""
    unexpected_keys: tuple[str, ...]
    """Keys that Transformers would report as unexpected."""


def plan_conversion(model: Any, keys: Iterable[str]) -> ConversionPlan:
    """Plan how ``keys`` load into ``model`` (a ``PreTrainedModel``, usually on the meta device)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    converter_of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix, state = model.base_model_prefix, model.state_dict()
    ignored_patterns = [re.compile(p) for p in (model._keys_to_ignore_on_load_unexpected or ())]

    collected: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    ignored: list[str] = []
    unexpected: list[str] = []
    for key in sorted(keys, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if target not in state and key in state:
            target, pattern = rename_source_key(key, [], [], prefix, state)
        if target in state:
            rule = converter_of_pattern[pattern] if pattern is not None else None
            sources = collected.setdefault(target, (rule, {}))[1]
            sources.setdefault(pattern if pattern is not None else key, []).append(key)
        elif any(p.search(target) or p.search(key) for p in ignored_patterns):
            ignored.append(key)
        else:
            unexpected.append(key)
    units = tuple(
        LoadUnit(_targets_of(target, rule), rule, {p: tuple(k) for p, k in sources.items()})
        for target, (rule, sources) in collected.items()
    )
    return ConversionPlan(units, tuple(ignored), tuple(unexpected))


def _targets_of(first: str, converter: Any) -> tuple[str, ...]:
    if converter is None or len(converter.target_patterns) == 1:
        return (first,)
    patterns = converter.target_patterns
    anchor = next((p for p in patterns if p in first), patterns[0])
    others = [first.replace(anchor, p) for p in patterns if p != anchor]
    return (first, *others)


@contextmanager
def conversion_errors(unit: LoadUnit) -> Iterator[None]:
    """Turn what Transformers' operations raise about tensors that do not fit into an error of the checkpoint."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        raise DamagedCheckpointError(
            f"the checkpoint's tensors for {unit.targets[0]!r} do not fit together: {str(error).splitlines()[0]}",
            hint="config.json and the weights do not belong together, or the download is incomplete",
        ) from error


def convert_unit(unit: LoadUnit, source: SourceCheckpoint, model: Any) -> dict[str, torch.Tensor]:
    """Convert a whole unit exactly as the loader would.

    Returns:
        Full parameter name to tensor, in the checkpoint's dtype.
    """
    if unit.converter is None:
        return {unit.targets[0]: source.read(unit.only_key)}
    converter = deepcopy(unit.converter)
    for pattern, keys in unit.sources.items():
        for key in keys:
            converter.add_tensor(unit.targets[0], key, pattern, lambda key=key: source.read(key))
    with conversion_errors(unit):
        converted = converter.convert(unit.targets[0], model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}
