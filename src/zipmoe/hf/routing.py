"""Which experts the tokens of a layer are routed to, sorted by expert."""

from __future__ import annotations

import torch


class Routing:
    """The router's ids, regrouped.

    Ids outside of 0 .. num_experts - 1 mean "no expert" (padding of expert parallelism): they belong to nobody.

    Args:
        top_k_index: ids (tokens, top_k), in the order that the combination of terms follows.
        num_experts: of the layer.
    """

    def __init__(self, top_k_index: torch.Tensor, num_experts: int) -> None:
        by_expert, self.positions = torch.sort(top_k_index.reshape(-1), stable=True)
        ids, counts = (values.tolist() for values in torch.unique_consecutive(by_expert, return_counts=True))
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
