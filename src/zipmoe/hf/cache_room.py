"""Room for coming tokens behind what a layer of Transformers' ``DynamicCache`` holds.

The stock layer makes new tensors of all keys and values at every token. Here its tensors are views of larger buffers,
and a token is written behind them. Whatever else is done to the cache (crop, reorder, an ordinary ``update``) gives it
other tensors, which is noticed by their identity; the next token then starts from those.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

_GROWTH = 64
"""Tokens by which buffers grow at least."""


class CacheRoom:
    """Buffers of one cache layer; the layer's tensors are their first tokens.

    Args:
        keys: BF16 [sequences, heads, tokens, head dimension], and ``values`` alike; copied.
        values: as ``keys``.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        sequences, heads, tokens, dimension = keys.shape
        capacity = capacity_for(tokens + 1)
        self._keys = keys.new_empty((sequences, heads, capacity, dimension))
        self._values = values.new_empty((sequences, heads, capacity, dimension))
        self._keys[:, :, :tokens] = keys
        self._values[:, :, :tokens] = values
        self.key_words = _words(self._keys)
        """The keys' buffer as uint16 array."""
        self.value_words = _words(self._values)
        self.capacity = capacity
        self._given: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def behind(cls, layer: Any) -> Self:
        """The room behind the tensors of ``layer``, a ``DynamicLayer`` that holds BF16; made where there is none."""
        room = getattr(layer, "_zipmoe_room", None)
        if room is None or not room.is_behind(layer.keys, layer.values):
            room = layer._zipmoe_room = cls(layer.keys, layer.values)
        made: Self = room
        return made

    def is_behind(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether these are the tensors that were given out last, and another token has room."""
        given = self._given
        return given is not None and given[0] is keys and given[1] is values and keys.shape[2] < self.capacity

    def first(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first ``tokens`` tokens: views of the buffers."""
        return self._keys.narrow(2, 0, tokens), self._values.narrow(2, 0, tokens)

    def give(self, layer: Any, tokens: int) -> None:
        """Let ``layer`` hold the first ``tokens`` tokens of the buffers."""
        self._given = self.first(tokens)
        layer.keys, layer.values = self._given

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied cache starts without room."""
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def capacity_for(tokens: int) -> int:
    """Tokens for which a layer has memory that holds ``tokens`` of them: an eighth more, in whole steps of growth."""
    return -(-(tokens + tokens // 8) // _GROWTH) * _GROWTH


def _words(tensor: torch.Tensor) -> npt.NDArray[np.uint16]:
    words: npt.NDArray[np.uint16] = tensor.view(torch.uint16).numpy()
    return words
