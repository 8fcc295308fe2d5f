"""Real weights of the folder: a few matrices of its most common kind of expert, decoded once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zipmoe.errors import CorruptRecordError, ManifestError, TruncatedShardError
from zipmoe.store.manifest import Manifest, Record
from zipmoe.store.packed_folder import PackedFolder
from zipmoe.store.record_encoder import READABLE_TAIL_BYTES, bfloat16_bits, damaged_extent, decode_matrix

SAMPLE_WEIGHTS = 16 << 20
"""Weights in the sample, about: beyond the caches of most processors, and encoded quickly by every codec."""
LARGEST_MATRIX_WEIGHTS = 8 << 20
"""Matrices are cut to this many weights; the shards keep their length."""
_VERIFY_HINT = "copy or download the folder again; `zipmoe verify` finds all damage"


@dataclass(frozen=True)
class SampleMatrix:
    """One matrix of one expert, or its first rows."""

    name: str
    weights: npt.NDArray[np.uint16]
    """BF16 patterns [rows, columns]."""
    all_rows: int
    """Rows of the whole matrix."""

    def shards(self, shards: int) -> int:
        """Shards of the same length as those of the whole matrix when that is cut into ``shards``."""
        rows = int(self.weights.shape[0])
        return max(1, round(shards * rows / self.all_rows))


@dataclass(frozen=True)
class ExpertKind:
    """The experts that the folder has most of."""

    shapes: tuple[tuple[str, int, int], ...]
    """Name, rows and columns of each matrix."""
    records: tuple[Record, ...]

    @property
    def bfloat16_bytes(self) -> int:
        """Of one expert."""
        return 2 * sum(rows * columns for _, rows, columns in self.shapes)

    @property
    def record_bytes(self) -> int:
        """Median length of the records."""
        return sorted(record.length for record in self.records)[len(self.records) // 2]


def most_common_kind(manifest: Manifest) -> ExpertKind:
    """The largest set of experts with equal shapes (the first such, if several are equally large).

    Raises:
        ManifestError: the folder has no experts.
    """
    kinds: Counter[tuple[tuple[int, int], ...]] = Counter()
    names: dict[tuple[tuple[int, int], ...], tuple[str, ...]] = {}
    records: dict[tuple[tuple[int, int], ...], list[Record]] = {}
    for group in manifest.expert_groups:
        for record in group.records:
            kind = tuple((matrix.rows, matrix.columns) for matrix in record.matrices)
            kinds[kind] += 1
            names.setdefault(kind, group.parameters)
            records.setdefault(kind, []).append(record)
    if not kinds:
        raise ManifestError("the manifest lists no experts", hint="pack the model again")
    shapes = max(kinds, key=lambda kind: kinds[kind])
    named = tuple((name, rows, columns) for name, (rows, columns) in zip(names[shapes], shapes, strict=True))
    return ExpertKind(named, tuple(records[shapes]))


def read_sample(folder: PackedFolder, kind: ExpertKind, weights_wanted: int = SAMPLE_WEIGHTS) -> list[SampleMatrix]:
    """Matrices of experts from all over the folder, about ``weights_wanted`` weights, at least one whole expert's.

    Raises:
        TruncatedShardError, CorruptRecordError: a record is not what the manifest says.
    """
    per_expert = sum(min(rows * columns, LARGEST_MATRIX_WEIGHTS) for _, rows, columns in kind.shapes)
    count = min(len(kind.records), max(1, -(-weights_wanted // per_expert)))
    matrices = []
    for index in range(count):
        record = kind.records[index * len(kind.records) // count]
        data = read_record(folder, record)
        for (name, _, _), entry in zip(kind.shapes, record.matrices, strict=True):
            try:
                weights = bfloat16_bits(decode_matrix(data, entry, folder.manifest.codec.name))
            except ValueError as error:
                raise CorruptRecordError(f"{_where(folder, record)} is damaged: {error}", hint=_VERIFY_HINT) from error
            rows = min(entry.rows, max(1, LARGEST_MATRIX_WEIGHTS // entry.columns))
            matrices.append(SampleMatrix(name, np.ascontiguousarray(weights[:rows]), entry.rows))
    return matrices


def read_record(folder: PackedFolder, record: Record) -> npt.NDArray[np.uint8]:
    """Its bytes, checked, and ``READABLE_TAIL_BYTES`` more: uint8.

    Raises:
        TruncatedShardError, CorruptRecordError: it is not what the manifest says.
    """
    data = np.zeros(record.length + READABLE_TAIL_BYTES, dtype=np.uint8)
    found = np.fromfile(folder.path / record.file, dtype=np.uint8, count=record.length, offset=record.offset)
    if found.nbytes < record.length:
        raise TruncatedShardError(f"{_where(folder, record)} ends early", hint=_VERIFY_HINT)
    data[: record.length] = found
    damaged = damaged_extent(data, record)
    if damaged is not None:
        raise CorruptRecordError(
            f"{_where(folder, record)} is damaged: the checksum of its {damaged.kind} part does not match",
            hint=_VERIFY_HINT,
        )
    return data


def _where(folder: PackedFolder, record: Record) -> str:
    return f"{record.name!r} in {str(folder.path / record.file)!r}"
