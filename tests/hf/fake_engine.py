"""An engine without a cache: decodes every matrix from the folder's files when it is asked for.

Slow and simple. It records what is requested, so that tests can state how the plug-in uses an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import numpy as np
import torch

from zipmoe.engine.budget import MemoryBudget
from zipmoe.errors import UnsupportedOperationError
from zipmoe.store.manifest import DenseMatrix, ExpertGroup, MatrixEntry, Record
from zipmoe.store.packed_folder import PackedFolder
from zipmoe.store.record_encoder import decode_matrix


class FakeEarlyRequest:
    """Refuses every request that is begun early."""

    def begin(
        self, group: ExpertGroup, expert_ids: Sequence[int], *, ascending: bool = False, tokens: Sequence[int] = ()
    ) -> bool:
        assert len(set(expert_ids)) == len(expert_ids)
        assert not (ascending and tokens)
        return False


class FakeEngine:
    fused = None
    early = FakeEarlyRequest()
    _pools = "by residency"  # no single pool, for which experts could be predicted

    def __init__(self, folder: PackedFolder, *, shuffle: bool = True) -> None:
        self.folder = folder
        self.budget = MemoryBudget(1 << 40)
        self.requests: list[tuple[str, list[int], bool]] = []
        self.fetched: list[tuple[str, int, str]] = []
        self.tiles: list[str] = []
        self.whole: list[str] = []
        self.rows: list[int] = []
        self._shuffle = np.random.default_rng(0) if shuffle else None
        self._pinned: tuple[str, int] | None = None
        self._open = False
        self._scratch: dict[str, torch.Tensor] = {}

    def group(self, path: str) -> ExpertGroup:
        return next(group for group in self.folder.manifest.expert_groups if group.path == path)

    @contextmanager
    def request(
        self,
        group: ExpertGroup,
        expert_ids: list[int],
        *,
        ascending: bool = False,
        tokens: Sequence[int] | None = None,
    ) -> Iterator[Iterator[int]]:
        assert tokens is None or (len(tokens) == len(expert_ids) and min(tokens, default=1) > 0)
        assert not self._open, "one request at a time"
        assert len(set(expert_ids)) == len(expert_ids)
        self.requests.append((group.path, list(expert_ids), ascending))
        order = sorted(expert_ids)
        if self._shuffle is not None and not ascending:
            self._shuffle.shuffle(order)
        self._open = True
        try:
            yield self._pin(group.path, order)
        finally:
            self._open, self._pinned = False, None

    def _pin(self, path: str, order: list[int]) -> Iterator[int]:
        for expert in order:
            self._pinned = (path, expert)
            yield expert

    def matrix(self, group: ExpertGroup, expert_id: int, name: str) -> torch.Tensor:
        assert self._pinned == (group.path, expert_id)
        decoded = self._expert(group, expert_id, name)
        # Scratch is reused: whoever keeps a matrix longer than allowed sees other numbers.
        scratch = self._scratch.get(name)
        if scratch is None or scratch.shape != decoded.shape:
            scratch = self._scratch[name] = torch.empty_like(decoded)
        return scratch.copy_(decoded)

    def expert_matrix(self, group: ExpertGroup, expert_id: int, name: str) -> torch.Tensor:
        self.fetched.append((group.path, expert_id, name))
        return self._expert(group, expert_id, name)

    def dense_tiles(self, parameter: str) -> Iterator[tuple[int, int, torch.Tensor]]:
        self.tiles.append(parameter)
        begin = 0
        scratch: torch.Tensor | None = None
        for block in self._dense(parameter).blocks:
            tile = self._decode(block, block.matrices[0])
            if scratch is None:
                scratch = torch.empty_like(tile)
            scratch = scratch if len(scratch) >= len(tile) else torch.empty_like(tile)
            scratch[: len(tile)] = tile
            yield begin, begin + len(tile), scratch[: len(tile)]
            begin += len(tile)

    def dense_matrix(self, parameter: str) -> torch.Tensor:
        self.whole.append(parameter)
        return torch.cat([self._decode(block, block.matrices[0]) for block in self._dense(parameter).blocks])

    def dense_rows(self, parameter: str, rows: torch.Tensor) -> torch.Tensor:
        assert rows.dtype == torch.int64
        self.rows.append(rows.numel())
        return torch.cat([self._decode(block, block.matrices[0]) for block in self._dense(parameter).blocks])[rows]

    def account(self, what: str, count: int) -> None:
        self.budget.set_reservation(what, count)

    def mode_line(self, mode: str, combine: str) -> str:
        return f"mode={mode} combine={combine}"

    def close(self) -> None:
        pass

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise UnsupportedOperationError("an engine cannot be copied")

    def __reduce__(self) -> NoReturn:
        raise UnsupportedOperationError("an engine cannot be pickled")

    def _dense(self, parameter: str) -> DenseMatrix:
        return next(matrix for matrix in self.folder.manifest.dense if matrix.parameter == parameter)

    def _expert(self, group: ExpertGroup, expert: int, name: str) -> torch.Tensor:
        record = group.records[expert]
        return self._decode(record, record.matrices[group.parameters.index(name)])

    def _decode(self, record: Record, entry: MatrixEntry) -> torch.Tensor:
        with (self.folder.path / record.file).open("rb") as file:
            file.seek(record.offset)
            data = np.frombuffer(file.read(record.length) + bytes(64), dtype=np.uint8)
        return decode_matrix(data, entry, self.folder.manifest.codec.name)
