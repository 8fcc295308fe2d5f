"""Embedding tables that need not be resident: the rows of the tokens at hand are read from disk.

A matrix qualifies when every module of the model that uses it only looks rows up. That takes the module tree, of which
the manifest knows nothing; a tree on the meta device, before or after packed modules have replaced its own, is enough.
"""

from __future__ import annotations

import copy
import mmap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zipmoe.checkpoint.module_names import ModuleNames
from zipmoe.engine.budget import ROWS_ON_DEMAND
from zipmoe.engine.record_catalogue import RecordCatalogue
from zipmoe.store.manifest import DenseMatrix, Manifest

EMBEDDING_PLACES = ("auto", "on-demand", "resident")
"""Where tables that are only looked up may be kept: on disk, or in memory as all dense matrices; ``"auto"``: in memory
where everything else has room beside them, because looking a row up on disk takes longer than multiplying with a small
matrix."""
SMALLEST_TABLE_BYTES = 16 << 20
"""Packed bytes. Smaller tables stay in memory: reading rows takes up to 8 MiB itself, and time."""
LARGEST_DETAILS_SHARE = 0.01
"""Of what the expert pool could have: with more, the experts that are missed take longer than the second reads of rows
that are saved."""
_READ_PAGE_BYTES = 4096
"""What is read and given back at once."""


def looked_up_matrices(model: Any, manifest: Manifest) -> tuple[str, ...]:
    """Parameters of the manifest's dense matrices that ``model`` only looks rows up in.

    Args:
        model: PreTrainedModel, on the meta device or with packed modules.
        manifest: of the folder that it is loaded from.

    Returns:
        Names as in ``DenseMatrix.parameter``. None where memory pages of the system are larger than what is read.
    """
    if mmap.PAGESIZE > _READ_PAGE_BYTES:
        return ()
    names = ModuleNames(model)
    return tuple(
        matrix.parameter
        for matrix in manifest.dense
        if sum(block.length for block in matrix.blocks) >= SMALLEST_TABLE_BYTES and _is_looked_up(model, matrix, names)
    )


def _is_looked_up(model: Any, matrix: DenseMatrix, names: ModuleNames) -> bool:
    paths = [names.resolve(name.removesuffix(".weight")) for name in (matrix.parameter, *matrix.tied_parameters)]
    modules = [model.get_submodule(path) for path in paths if path is not None]
    return bool(modules) and all(isinstance(module, nn.Embedding) for module in modules)


def model_on_meta(config: Any, architecture: str) -> Any:
    """The module tree of a packed folder's model, without memory for weights.

    Args:
        config: Transformers config; is not changed.
        architecture: name of the model's class.
    """
    import transformers

    model_class = getattr(transformers, architecture)
    with torch.device("meta"):
        return model_class._from_config(copy.deepcopy(config), dtype=torch.bfloat16)


@dataclass(frozen=True)
class RowsOnDemand:
    """The matrices whose rows are read on demand, resolved for the native engine."""

    records: tuple[int, ...] = ()
    """Record numbers of all their blocks."""
    record_bytes: int = 0
    """Bytes that they would take in memory."""
    reservation_bytes: int = 0
    """Bytes that they take instead: a checksum and a page-table entry for each page, what tells where rows lie, and
    the pages of the rows at hand."""
    details_bytes: int = 0
    """What nearly every row needs a little of (FX3: the exceptions). Kept in memory, it takes so many bytes more, and a
    row is one read instead of two; 0 where there is nothing that is worth it."""
    keeps_details: bool = False
    """Whether it is kept."""

    @classmethod
    def of(cls, catalogue: RecordCatalogue, parameters: Collection[str]) -> RowsOnDemand:
        """``parameters``: of dense matrices; InvalidArgumentError if one is not."""
        handles = {id(handle): handle for handle in map(catalogue.dense_matrix, parameters)}
        records = tuple(number for handle in handles.values() for number in handle.blocks)
        length = sum(catalogue.records[number].length for number in records)
        if not records:
            return cls()
        table = catalogue.table
        return cls(records, length, table.rows_on_demand_bytes(records), table.row_details_bytes(records))

    @classmethod
    def of_manifest(cls, manifest: Manifest, parameters: Collection[str]) -> RowsOnDemand:
        """The same before anything of the folder is opened."""
        return cls.of(RecordCatalogue(Path(), manifest), parameters) if parameters else cls()

    def within(self, free_bytes: int, pool_bytes: int) -> RowsOnDemand:
        """The same with details, if there is memory for them.

        Args:
            free_bytes: of the budget, with everything reserved but the details and the expert pool.
            pool_bytes: what must be left for the expert pool.
        """
        fits = self.details_bytes <= min(free_bytes - pool_bytes, int(free_bytes * LARGEST_DETAILS_SHARE))
        return replace(self, keeps_details=self.details_bytes > 0 and fits)

    def reserved(self, ledger: Mapping[str, int]) -> RowsOnDemand:
        """The same with details if the ledger of a budget has them."""
        return replace(self, keeps_details=ledger.get(ROWS_ON_DEMAND, 0) > self.reservation_bytes)

    @property
    def memory_bytes(self) -> int:
        """All that they take."""
        return self.reservation_bytes + (self.details_bytes if self.keeps_details else 0)

    @property
    def saved_bytes(self) -> int:
        """Memory that is free for experts instead."""
        return self.record_bytes - self.memory_bytes
