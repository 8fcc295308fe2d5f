"""Embedding tables that need not be resident: the rows of the tokens at hand are read from disk.

A matrix qualifies when every module of the model that uses it only looks rows up. That takes the module tree, of which
the manifest knows nothing; a tree on the meta device, before or after packed modules have replaced its own, is enough.
"""

from __future__ import annotations

import copy
import mmap
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zipmoe.checkpoint.module_names import ModuleNames
from zipmoe.engine.record_catalogue import RecordCatalogue
from zipmoe.store.manifest import DenseMatrix, Manifest

EMBEDDING_PLACES = ("auto", "on-demand", "resident")
"""Where tables that are only looked up may be kept: on disk, or in memory as all dense matrices; ``"auto"``: in memory
where everything else has room beside them, because looking a row up on disk takes longer than multiplying with a small
matrix."""
SMALLEST_TABLE_BYTES = 16 << 20
"""Packed bytes. Smaller tables stay in memory: reading rows takes up to 8 MiB itself, and time."""
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

    @classmethod
    def of(cls, catalogue: RecordCatalogue, parameters: Collection[str]) -> RowsOnDemand:
        """``parameters``: of dense matrices; InvalidArgumentError if one is not."""
        handles = {id(handle): handle for handle in map(catalogue.dense_matrix, parameters)}
        records = tuple(number for handle in handles.values() for number in handle.blocks)
        length = sum(catalogue.records[number].length for number in records)
        return cls(records, length, catalogue.table.rows_on_demand_bytes(records) if records else 0)

    @classmethod
    def of_manifest(cls, manifest: Manifest, parameters: Collection[str]) -> RowsOnDemand:
        """The same before anything of the folder is opened."""
        return cls.of(RecordCatalogue(Path(), manifest), parameters) if parameters else cls()

    @property
    def saved_bytes(self) -> int:
        """Memory that is free for experts instead."""
        return self.record_bytes - self.reservation_bytes
