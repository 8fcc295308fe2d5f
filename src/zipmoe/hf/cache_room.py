"""Room for coming tokens behind what a layer of Transformers' ``DynamicCache`` holds.

The stock layer makes new tensors of all keys and values at every token. Here its tensors are views of larger buffers,
and a token is written behind them. Whatever else is done to the cache (crop, reorder, an ordinary ``update``) gives it
other tensors, which is noticed by their identity; the next token then starts from those. The buffers are of no use any
more at that moment, and end with the views: otherwise their memory would be taken and in nobody's books.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from zipmoe.engine.bfloat16_words import bfloat16_words

_GROWTH = 64
"""Tokens by which buffers grow at least."""
_PROMISE = "_zipmoe_promised_tokens"
"""Attribute of a cache layer: for how many tokens there is memory, as the budget's watch has found out."""


@dataclass(frozen=True, slots=True)
class KeyValueBuffers:
    """BF16 [sequences, heads, capacity, head dimension], and the same memory as uint16."""

    keys: torch.Tensor
    values: torch.Tensor
    key_words: npt.NDArray[np.uint16]
    value_words: npt.NDArray[np.uint16]

    @classmethod
    def empty(cls, sequences: int, heads: int, capacity: int, dimension: int) -> Self:
        """Not yet written."""
        keys, values = (
            torch.empty((sequences, heads, capacity, dimension), dtype=torch.bfloat16, device="cpu") for _ in range(2)
        )
        return cls(keys, values, bfloat16_words(keys), bfloat16_words(values))


class CacheRoom:
    """Buffers of one cache layer; the layer's tensors are their first tokens.

    Args:
        keys: BF16 [sequences, heads, tokens, head dimension], and ``values`` alike; copied.
        values: as ``keys``.
        capacity: tokens for which there shall be memory, more than there are.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, capacity: int) -> None:
        sequences, heads, tokens, dimension = keys.shape
        self.capacity = capacity
        made = KeyValueBuffers.empty(sequences, heads, capacity, dimension)
        made.keys[:, :, :tokens] = keys
        made.values[:, :, :tokens] = values
        # In a list of its own, so that dropping them needs no reference to the room and makes no cycle.
        self._held = held = [made]
        self._drop: Callable[[Any], None] = lambda _: held.clear()
        self._given: tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]] | None = None

    @classmethod
    def behind(cls, layer: Any) -> Self:
        """The room behind the tensors of ``layer``, a ``DynamicLayer`` that holds BF16; made where there is none."""
        room: Self
        if has_room(layer):
            room = layer._zipmoe_room
            return room
        layer._zipmoe_room = None  # before there is another one
        tokens = layer.keys.shape[2]
        promised = vars(layer).pop(_PROMISE, 0)
        room = cls(layer.keys, layer.values, promised if promised > tokens else capacity_for(tokens + 1))
        layer._zipmoe_room = room
        return room

    @property
    def key_words(self) -> npt.NDArray[np.uint16]:
        """The keys' buffer as uint16 array."""
        return self._held[0].key_words

    @property
    def value_words(self) -> npt.NDArray[np.uint16]:
        """The values' buffer as uint16 array."""
        return self._held[0].value_words

    def is_behind(self, keys: Any, values: Any) -> bool:
        """Whether these are the tensors that were given out last, and another token has room."""
        given = self._given
        return given is not None and given[0]() is keys and given[1]() is values and self._has_token(keys)

    def _has_token(self, keys: Any) -> bool:
        return keys is not None and keys.shape[2] < self.capacity

    def first(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first ``tokens`` tokens: views of the buffers."""
        buffers = self._held[0]
        return buffers.keys.narrow(2, 0, tokens), buffers.values.narrow(2, 0, tokens)

    def give(self, layer: Any, tokens: int) -> None:
        """Let ``layer`` hold the first ``tokens`` tokens of the buffers, which live as long as it does."""
        keys, values = self.first(tokens)
        self._given = (weakref.ref(keys, self._drop), weakref.ref(values, self._drop))  # before the last ones end
        layer.keys, layer.values = keys, values

    def leave(self, layer: Any) -> None:
        """End, if ``layer`` has never held these buffers' tokens."""
        if self._given is None and vars(layer).get("_zipmoe_room") is self:
            layer._zipmoe_room = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied cache starts without room."""
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def has_room(layer: Any) -> bool:
    """Whether another token has room behind the tensors of a cache layer."""
    room: CacheRoom | None = getattr(layer, "_zipmoe_room", None)
    return room is not None and room.is_behind(layer.keys, layer.values)


def promise_room(layer: Any, tokens: int) -> None:
    """Let the next room of a cache layer be for so many tokens, as far as they are more than it holds then."""
    setattr(layer, _PROMISE, tokens)


def capacity_for(tokens: int) -> int:
    """Tokens for which a layer has memory that holds ``tokens`` of them: an eighth more, in whole steps of growth.

    Where a budget is kept and has less, a room is smaller (``room_reservation.py``).
    """
    return -(-(tokens + tokens // 8) // _GROWTH) * _GROWTH
