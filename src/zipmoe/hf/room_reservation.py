"""How much room behind cached tokens (``cache_room.py``) a forward pass will make, asked before it does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicLayer

from zipmoe.hf.cache_room import capacity_for, has_room, promise_room
from zipmoe.hf.fused_attention import FusedAttention, is_plain


@dataclass(frozen=True)
class MissingRoom:
    """Layers of a cache that will get new buffers in a pass for one token of each sequence."""

    layers: tuple[Any, ...]
    tokens: int
    """That they hold, at most."""
    token_bytes: int
    """Of one token of every sequence, in all of these layers."""
    held_bytes: int
    """Of what they hold now, which the buffers replace."""

    @property
    def fewest(self) -> int:
        """Tokens that there must be room for."""
        return self.tokens + 1

    @property
    def wanted(self) -> int:
        """Tokens that there is room for, so that the next tokens copy nothing."""
        return capacity_for(self.fewest)

    def promise(self, capacity: int) -> None:
        """Let the buffers be for so many tokens."""
        for layer in self.layers:
            promise_room(layer, capacity)


class RoomReservation:
    """Asks the attention of a model what it will do.

    Args:
        model: as it is now, its steps fused.
    """

    def __init__(self, model: nn.Module) -> None:
        self._attentions: dict[int, list[FusedAttention]] = {}
        for module in model.modules():
            if isinstance(module, FusedAttention):
                self._attentions.setdefault(module.layer_idx, []).append(module)

    def missing(self, caches: Iterable[Any], sequences: int, mask: Any) -> MissingRoom | None:
        """What a pass for one token of each sequence will make; None if it makes none.

        Args:
            caches: arguments of the call that are caches.
            sequences: number of sequences.
            mask: the call's ``attention_mask``.
        """
        plain = [cache for cache in caches if is_plain(cache)] if self._attentions else []
        lacking = [
            (number, layer) for cache in plain for number, layer in enumerate(cache.layers) if not has_room(layer)
        ]
        if not lacking or not _lets_all_pass(mask):
            return None
        layers = tuple(
            layer
            for number, layer in lacking
            if any(module.zipmoe_makes_room(layer, sequences) for module in self._attentions.get(number, ()))
        )
        if not layers:
            return None
        return MissingRoom(
            layers,
            max(layer.keys.shape[2] for layer in layers),
            sum(_bytes_of(layer) // layer.keys.shape[2] for layer in layers),
            sum(_storage_bytes(layer) for layer in layers),
        )


def spare_bytes(layers: Sequence[Any]) -> int:
    """Memory behind the tensors of ordinary cache layers, which ends when they get other tensors."""
    held = [layer for layer in layers if type(layer) is DynamicLayer and layer.is_initialized]
    return sum(_storage_bytes(layer) - _bytes_of(layer) for layer in held)


def _lets_all_pass(mask: Any) -> bool:
    """Whether a model makes no mask for attention of one token out of this one."""
    return mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool(mask.all()))


def _bytes_of(layer: Any) -> int:
    return int(layer.keys.nbytes + layer.values.nbytes)


def _storage_bytes(layer: Any) -> int:
    return int(layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes())
