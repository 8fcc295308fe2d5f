"""An embedding whose rows are decoded on demand: only the rows of the tokens at hand, never the table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from zipmoe.errors import UnsupportedOperationError
from zipmoe.hf.packed_module import PackedModule


@dataclass(frozen=True)
class _RowsAhead:
    """Rows of tokens that the next call probably asks for."""

    tokens: list[int]
    rows: torch.Tensor

    def are_of(self, input: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether they are what a call with ``input`` asks for, computing in ``dtype``."""
        same = input.numel() == len(self.tokens) and self.rows.dtype is dtype
        return same and input.reshape(-1).tolist() == self.tokens


class PackedEmbedding(PackedModule, nn.Embedding):  # type: ignore[misc]
    """``nn.Embedding`` with a packed weight, for inference (``padding_idx`` only concerns gradients)."""

    _zipmoe_ahead: _RowsAhead | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Token ids (...) int64 to rows (..., embedding_dim) in the computing dtype.

        Raises:
            IndexError: an id is outside the table.
            UnsupportedOperationError: the table renormalises its rows when they are looked up (``max_norm``).
        """
        if self.max_norm is not None:
            raise UnsupportedOperationError("an embedding with max_norm changes its weights and cannot be packed")
        ahead = self._zipmoe_ahead
        if ahead is not None:
            self._zipmoe_ahead = None
            if ahead.are_of(input, self._zipmoe_dtype):
                # A copy: the caller may write to it, also outside of the inference mode in which it was looked up.
                return ahead.rows.clone().view(*input.shape, self.embedding_dim)
        rows, position = input.reshape(-1), None
        if len(rows) != 1:  # a step of one sequence has nothing to sort
            rows, position = torch.unique(rows, return_inverse=True)
        if len(rows) and (int(rows[0]) < 0 or int(rows[-1]) >= self.num_embeddings):
            raise IndexError(f"token id outside the embedding of {self.num_embeddings} rows")
        table = self._zipmoe_slot.engine.dense_rows(self._zipmoe_parameter, rows.to(torch.int64))
        table = table.to(self._zipmoe_dtype)
        return (table if position is None else table[position]).view(*input.shape, self.embedding_dim)

    def look_up_ahead(self, tokens: list[int]) -> torch.Tensor:
        """Rows (len(tokens), embedding_dim) of few tokens, which are kept until the next call, whatever that asks for.

        They are as packed: what a family's own class makes of them (scaled embeddings) comes when it is called.

        Raises:
            IndexError: a token is outside the table.
        """
        table = self._zipmoe_slot.engine.dense_rows(self._zipmoe_parameter, torch.tensor(tokens))
        rows = table.to(self._zipmoe_dtype)
        self._zipmoe_ahead = _RowsAhead(tokens, rows)
        return rows
