"""From the manifest's names to the native engine's record numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zipmoe import _native
from zipmoe.errors import CodecUnavailableError, InvalidArgumentError, ManifestError
from zipmoe.store.manifest import DenseMatrix, ExpertGroup, Manifest, MatrixEntry, Record


@dataclass(frozen=True)
class GroupHandle:
    """The experts of one sparse layer, resolved once; opaque to callers."""

    path: str
    records: tuple[int, ...]
    """Record number of each expert."""
    parameters: dict[str, int]
    """Position of each matrix in a record."""
    matrices: tuple[tuple[MatrixEntry, ...], ...]
    """By expert."""

    def matrix(self, expert_id: int, name: str) -> tuple[int, MatrixEntry]:
        """Position and entry of the matrix ``name`` of an expert; ``{expert}`` in names may be filled in.

        Raises:
            InvalidArgumentError: there is no such expert or matrix.
        """
        if not 0 <= expert_id < len(self.records):
            raise InvalidArgumentError(f"{self.path} has experts 0 to {len(self.records) - 1}, not {expert_id}")
        position = self.parameters.get(name)
        if position is None:
            filled = {pattern.replace("{expert}", str(expert_id)): at for pattern, at in self.parameters.items()}
            position = filled.get(name)
        if position is None:
            raise InvalidArgumentError(
                f"{self.path} has no packed parameter {name!r}, only {', '.join(self.parameters)}"
            )
        return position, self.matrices[expert_id][position]


@dataclass(frozen=True)
class DenseHandle:
    """A dense matrix, resolved once."""

    parameter: str
    rows: int
    columns: int
    blocks: tuple[int, ...]
    """Record numbers of the consecutive blocks of rows."""
    row_begins: tuple[int, ...]
    """First row of each block, and the number of rows at the end."""


class RecordCatalogue:
    """All records of a folder, numbered as in the native table."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Raises CodecUnavailableError and ManifestError."""
        _require_codec(manifest.codec.name)
        self.table = _native.RecordTable(manifest.codec.name)
        self.records: list[Record] = []
        self._folder = folder
        self._files: dict[str, int] = {}
        self.groups: dict[str, GroupHandle] = {}
        self.group_numbers: list[tuple[int, ...]] = []
        """Record numbers of each group, in the manifest's order."""
        self.dense: dict[str, DenseHandle] = {}
        for group in manifest.expert_groups:
            self._add_group(group)
        for matrix in manifest.dense:
            self._add_dense(matrix)

    def file_path(self, number: int) -> Path:
        """The file that holds a record."""
        return self._folder / self.records[number].file

    def group(self, path: str) -> GroupHandle:
        """The group of a module path; InvalidArgumentError if there is none."""
        handle = self.groups.get(path)
        if handle is None:
            raise InvalidArgumentError(f"no experts are packed under {path!r}")
        return handle

    def dense_matrix(self, parameter: str) -> DenseHandle:
        """The dense matrix of a parameter, or of one that is tied to it; InvalidArgumentError if there is none."""
        handle = self.dense.get(parameter)
        if handle is None:
            raise InvalidArgumentError(f"{parameter!r} is not a packed dense matrix")
        return handle

    def _add_group(self, group: ExpertGroup) -> None:
        numbers = tuple(self._add_record(record) for record in group.records)
        for record in group.records:
            if len(record.matrices) != len(group.parameters):
                raise ManifestError(
                    f"{record.name} has {len(record.matrices)} matrices for {len(group.parameters)} parameters"
                )
        parameters = {name: position for position, name in enumerate(group.parameters)}
        matrices = tuple(record.matrices for record in group.records)
        self.groups[group.path] = GroupHandle(group.path, numbers, parameters, matrices)
        self.group_numbers.append(numbers)

    def _add_dense(self, matrix: DenseMatrix) -> None:
        begins = [0]
        for block in matrix.blocks:
            if len(block.matrices) != 1 or block.matrices[0].columns != matrix.columns:
                raise ManifestError(f"{block.name} is not a block of rows of {matrix.parameter}")
            begins.append(begins[-1] + block.matrices[0].rows)
        if begins[-1] != matrix.rows:
            raise ManifestError(f"the blocks of {matrix.parameter} have {begins[-1]} rows instead of {matrix.rows}")
        numbers = tuple(self._add_record(block) for block in matrix.blocks)
        handle = DenseHandle(matrix.parameter, matrix.rows, matrix.columns, numbers, tuple(begins))
        for name in (matrix.parameter, *matrix.tied_parameters):
            self.dense[name] = handle

    def _add_record(self, record: Record) -> int:
        if record.file not in self._files:
            self._files[record.file] = self.table.add_file(str(self._folder / record.file))
        self.records.append(record)
        try:
            return int(
                self.table.add_record(
                    record.name,
                    self._files[record.file],
                    record.offset,
                    record.length,
                    [(extent.offset, extent.length, extent.xxh3_64) for extent in record.extents],
                    [_matrix_geometry(matrix) for matrix in record.matrices],
                )
            )
        except (ValueError, TypeError) as error:  # TypeError: a number that is negative or too large for the format
            raise ManifestError(f"the manifest contradicts itself about {record.name}: {error}") from error


def _matrix_geometry(matrix: MatrixEntry) -> tuple[int, int, list[tuple[int, int]], Sequence[int]]:
    sections = [(section.offset, section.length) for section in matrix.sections]
    return matrix.rows, matrix.columns, sections, list(matrix.shard_bytes)


def _require_codec(name: str) -> None:
    codecs = {codec.name: codec for codec in _native.codecs()}
    if name not in codecs:
        raise CodecUnavailableError(
            f"the folder is packed with the codec {name!r}, which this ZipMoE does not know",
            hint=f"known codecs: {', '.join(codecs)}",
        )
    if codecs[name].unavailable_reason:
        raise CodecUnavailableError(
            f"the folder is packed with the codec {name!r}, which is not available: {codecs[name].unavailable_reason}",
            hint="install the library and build ZipMoE again",
        )
