"""A dense matrix, block by block through one scratch buffer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from zipmoe.engine.record_errors import named_record_errors
from zipmoe.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from zipmoe.engine.engine import Engine


class DenseTiles:
    """Iterator over the tiles of a dense matrix; see ``Engine.dense_tiles``. Holds the engine from the first step to
    the last.
    """

    def __init__(self, engine: Engine, parameter: str) -> None:
        self._holding = False
        self._iteration = 0
        self._next_block = 0
        self._engine = engine
        self._handle = engine._catalogue.dense_matrix(parameter)

    def __iter__(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[int, int, torch.Tensor]:
        engine, handle, block = self._engine, self._handle, self._next_block
        if block == len(handle.blocks):
            self.close()
            raise StopIteration
        if not self._holding:
            engine._access.acquire()
            self._holding = True
            engine._tile_iterations += 1
            self._iteration = engine._tile_iterations
        try:
            engine._require_usable()
            if engine._tile_iterations != self._iteration:
                raise UnsupportedOperationError("another iteration over tiles has taken the scratch buffer")
            begin, end = handle.row_begins[block], handle.row_begins[block + 1]
            scratch = len(engine._scratch) - 1
            with named_record_errors(engine._catalogue):
                engine._native.decode_to_scratch(handle.blocks[block], 0, 0, end - begin, scratch)
        except BaseException:
            self.close()
            raise
        self._next_block = block + 1
        return begin, end, engine._scratch_view(scratch, end - begin, handle.columns)

    def close(self) -> None:
        """End the iteration early; idempotent."""
        if self._holding:
            self._holding = False
            self._next_block = len(self._handle.blocks)
            self._engine._access.release()

    def __del__(self) -> None:
        self.close()
