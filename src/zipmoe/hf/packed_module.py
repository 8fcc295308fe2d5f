"""What packed linear layers and packed embeddings share: a ``weight`` that lives in the engine.

A module becomes packed by changing its class to a dynamic one with the method resolution order (dynamic, original
class, packed class, ``nn.Linear`` or ``nn.Embedding``). Classes of model families that call ``super().forward`` (scaled
embeddings) or read ``self.weight`` go on working without an entry in any table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from zipmoe.errors import UnsupportedOperationError
from zipmoe.hf.dynamic_class import dynamic_class
from zipmoe.hf.engine_slot import EXACT_DTYPES, EngineSlot, refuse_copy
from zipmoe.hf.lazy_weight import LazyWeight


class PackedModule(nn.Module):
    """A module whose ``weight`` (rows, columns) is a dense matrix of the packed folder."""

    _zipmoe_slot: EngineSlot
    _zipmoe_parameter: str
    _zipmoe_shape: tuple[int, int]
    _zipmoe_dtype: torch.dtype

    @property
    def weight(self) -> LazyWeight:
        """The weight in the computing dtype; decoded into a fresh tensor when it is used."""
        slot, parameter, dtype = self._zipmoe_slot, self._zipmoe_parameter, self._zipmoe_dtype
        return LazyWeight(self._zipmoe_shape, dtype, parameter, lambda: slot.engine.dense_matrix(parameter).to(dtype))

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight":
            super().__setattr__(name, value)
        elif not (isinstance(value, LazyWeight) and value.zipmoe_parameter == self._zipmoe_parameter):
            raise UnsupportedOperationError(
                f"the packed weight {self._zipmoe_parameter} cannot be replaced",
                hint="change the original checkpoint and pack it again",
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        self._zipmoe_dtype = require_exact_conversion(fn, self._zipmoe_dtype)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def pack_module(module: nn.Module, packed_class: type[PackedModule], slot: EngineSlot, parameter: str) -> None:
    """Turn ``module`` into a packed one: drop its (meta) weight, nothing is allocated.

    Args:
        module: instance of the class that ``packed_class`` derives from.
        packed_class: PackedLinear or PackedEmbedding.
        slot: the model's engine slot.
        parameter: name of the matrix in the manifest.
    """
    weight = module._parameters.pop("weight")
    assert weight is not None
    original = type(module)
    bases = (packed_class,) if issubclass(packed_class, original) else (original, packed_class)
    module.__class__ = dynamic_class(f"Packed{original.__name__}", bases, original)
    module._zipmoe_slot = slot  # type: ignore[assignment]
    module._zipmoe_parameter = parameter  # type: ignore[assignment]
    module._zipmoe_shape = tuple(weight.shape)  # type: ignore[assignment]
    module._zipmoe_dtype = weight.dtype  # type: ignore[assignment]


def require_exact_conversion(fn: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> torch.dtype:
    """The dtype into which ``fn`` turns ``dtype``; ``fn`` is what ``Module.to`` and its kin hand to ``Module._apply``.

    Raises:
        UnsupportedOperationError: ``fn`` leaves the CPU, or the target dtype does not hold BF16 exactly.
    """
    try:
        probe = fn(torch.empty(0, dtype=dtype))
    except Exception as error:
        raise UnsupportedOperationError(f"a packed model computes on the CPU: {error}") from error
    if probe.device.type != "cpu":
        raise UnsupportedOperationError(
            f"a packed model computes on the CPU and cannot be moved to {probe.device}",
            hint="its weights live compressed in main memory; leave device_map and .to(device) out",
        )
    if probe.dtype not in EXACT_DTYPES:
        raise UnsupportedOperationError(
            f"a packed model cannot be converted to {probe.dtype}: not every BF16 weight fits into it unchanged",
            hint="use torch.bfloat16, or torch.float32 (an exact widening)",
        )
    return probe.dtype
