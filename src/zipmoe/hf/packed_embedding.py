"""An embedding whose rows are decoded on demand: only the rows of the tokens at hand, never the table."""

from __future__ import annotations

import torch
from torch import nn

from zipmoe.errors import UnsupportedOperationError
from zipmoe.hf.packed_module import PackedModule


class PackedEmbedding(PackedModule, nn.Embedding):  # type: ignore[misc]
    """``nn.Embedding`` with a packed weight, for inference (``padding_idx`` only concerns gradients)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Token ids (...) int64 to rows (..., embedding_dim) in the computing dtype.

        Raises:
            IndexError: an id is outside the table.
            UnsupportedOperationError: the table renormalises its rows when they are looked up (``max_norm``).
        """
        if self.max_norm is not None:
            raise UnsupportedOperationError("an embedding with max_norm changes its weights and cannot be packed")
        if input.numel() and (int(input.min()) < 0 or int(input.max()) >= self.num_embeddings):
            raise IndexError(f"token id outside the embedding of {self.num_embeddings} rows")
        rows, position = torch.unique(input.reshape(-1), return_inverse=True)
        table = self._zipmoe_slot.engine.dense_rows(self._zipmoe_parameter, rows.to(torch.int64))
        return table.to(self._zipmoe_dtype)[position].view(*input.shape, self.embedding_dim)
