"""Which experts the tokens of a layer are routed to, sorted by expert."""

from __future__ import annotations

from collections import Counter

import torch

_FEW = 64
"""Up to this many ids are sorted faster as a list than by three operations of torch."""


class Routing:
    """The router's ids, regrouped.

    Ids outside of 0 .. num_experts - 1 mean "no expert" (padding of expert parallelism): they belong to nobody.

    Args:
        top_k_index: ids (tokens, top_k), in the order that the combination of terms follows.
        num_experts: of the layer.
    """

    def __init__(self, top_k_index: torch.Tensor, num_experts: int) -> None:
        ids, counts, self.positions = _by_expert(top_k_index.reshape(-1))
        # Sorted: those outside of the range come first and last.
        inside = [number for number, expert in enumerate(ids) if 0 <= expert < num_experts]
        self._begin = sum(counts[: inside[0]]) if inside else 0
        self.experts: list[int] = [ids[number] for number in inside]
        """Distinct ids, ascending."""
        self.tokens: list[int] = [counts[number] for number in inside]
        """How many positions each of them has."""
        self.complete = len(inside) == len(ids) > 0
        """Whether every position has an expert; then ``positions`` are theirs, expert after expert."""

    def rows(self) -> dict[int, torch.Tensor]:
        """Positions in the flattened ids, by expert."""
        positions = self.positions[self._begin : self._begin + sum(self.tokens)]
        return dict(zip(self.experts, torch.split(positions, self.tokens), strict=True))


def _by_expert(ids: torch.Tensor) -> tuple[list[int], list[int], torch.Tensor]:
    """Distinct ids, ascending; how often each occurs; where they occur (int64), id after id, in order."""
    if len(ids) > _FEW:
        in_order, positions = torch.sort(ids, stable=True)
        distinct, counts = (values.tolist() for values in torch.unique_consecutive(in_order, return_counts=True))
        return distinct, counts, positions
    values = ids.tolist()
    order = sorted(range(len(values)), key=values.__getitem__)
    occurrences = Counter(values)
    distinct = sorted(occurrences)
    return distinct, [occurrences[i] for i in distinct], torch.tensor(order, dtype=torch.int64)
