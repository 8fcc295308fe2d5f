"""FX3 in NumPy: the reference of the bit layout (docs/format.md, "FX3") and the oracle of the native kernels.

:func:`encode` gives the same bytes as the native encoder. Both functions are written for clarity, not speed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zipmoe.codecs.bfloat16_fields import Bytes, Words, recombine, split

MAGIC = b"FX3\x01"
RAW_FLAG = 1
ALIGNMENT_BYTES = 64
HEADER = struct.Struct("<4sIIIIIB8s7xQ16x")
"""magic, flags, N, K, Kpad, KC, rows per group, exponents of the codes, 7 zeros, number of exceptions, 16 zeros"""
TAIL_BYTES = 64
GROUP_ROWS = 4
BLOCK_WEIGHTS = 64
PANEL_COLUMNS_MAX = 4096
CODES = 7
ESCAPE_CODE = 7
ESCAPE_EXPONENT = 255
EXCEPTION_BYTES_MAX = 2**32 - 1

POSITIONS = np.arange(BLOCK_WEIGHTS)
WEIGHT_OF_POSITION = 32 * ((POSITIONS >> 3) & 1) + 8 * (POSITIONS >> 4) + (POSITIONS & 7)
"""Which weight of its block each storage position holds."""

RECORD = np.dtype([("sm", np.uint8, 64), ("A", np.uint8, 16), ("B", np.uint8, 8)])
"""64 weights of one row: sign-mantissa bytes, code bits 0 and 1, code bit 2; all in storage order."""


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Layout:
    """Where everything lies in the blob of a ``rows`` x ``columns`` matrix; offsets and lengths in bytes."""

    rows: int
    columns: int

    @property
    def padded_rows(self) -> int:
        """Rows including padding: a multiple of 4."""
        return _round_up(self.rows, GROUP_ROWS)

    @property
    def padded_columns(self) -> int:
        """Columns including padding: a multiple of 64 (``Kpad``)."""
        return _round_up(self.columns, BLOCK_WEIGHTS)

    @property
    def groups(self) -> int:
        """Row groups of four rows."""
        return self.padded_rows // GROUP_ROWS

    @property
    def panels(self) -> int:
        """The smallest number of equal panels of whole blocks and at most 4096 columns."""
        blocks = self.padded_columns // BLOCK_WEIGHTS
        return next(
            p for p in range(1, blocks + 1) if blocks % p == 0 and self.padded_columns // p <= PANEL_COLUMNS_MAX
        )

    @property
    def panel_columns(self) -> int:
        """Columns of a panel (``KC``)."""
        return self.padded_columns // self.panels

    @property
    def records(self) -> int:
        """Number of records."""
        return self.padded_rows * self.padded_columns // BLOCK_WEIGHTS

    @property
    def index_entries(self) -> int:
        """One per row group and panel, and the end."""
        return self.panels * self.groups + 1

    @property
    def records_offset(self) -> int:
        """Offset of the first record."""
        return HEADER.size + _round_up(4 * self.index_entries, ALIGNMENT_BYTES)

    @property
    def exceptions_offset(self) -> int:
        """Offset of the first exception."""
        return _round_up(self.records_offset + self.records * RECORD.itemsize, ALIGNMENT_BYTES)

    def coded_blob_bytes(self, exception_bytes: int) -> int:
        """Length of a blob with codes."""
        return self.exceptions_offset + _round_up(exception_bytes, ALIGNMENT_BYTES) + TAIL_BYTES

    def raw_blob_bytes(self) -> int:
        """Length of a blob with the raw fallback."""
        return HEADER.size + _round_up(2 * self.rows * self.columns, ALIGNMENT_BYTES)

    def prefers_raw(self, exception_bytes: int) -> bool:
        """Whether codes would take more than .95 of BF16, or more exceptions than the index can count."""
        bfloat16_bytes = 2 * self.rows * self.columns
        return (
            exception_bytes > EXCEPTION_BYTES_MAX or 20 * self.coded_blob_bytes(exception_bytes) > 19 * bfloat16_bytes
        )


def choose_exponents(histogram: npt.NDArray[np.int64]) -> Bytes:
    """Return the exponents (uint8 [8]) of the codes for a histogram of exponents (int64 [256]).

    The seven most frequent ones other than 255, the smaller first among equals; entries that are not needed repeat the
    first one, and the eighth is 255.
    """
    order = [e for e in np.argsort(-histogram, kind="stable") if histogram[e] > 0 and e != ESCAPE_EXPONENT][:CODES]
    first = order[0] if order else 0
    return np.array(order + [first] * (CODES - len(order)) + [ESCAPE_EXPONENT], np.uint8)


def encode(weights: Words, *, raw_fallback: bool = True) -> Bytes:
    """Encode BF16 patterns (uint16 [rows, columns], both at least 1) to a blob (uint8 [bytes]).

    With ``raw_fallback=False`` codes are used even where they are larger than the weights, for tests of small shapes.
    """
    rows, columns = weights.shape
    layout = Layout(rows, columns)
    padded = np.zeros((layout.padded_rows, layout.padded_columns), np.uint16)
    padded[:rows, :columns] = weights
    # To the order of the records: panel, row group, block, row of the group, storage position.
    blocks = layout.panel_columns // BLOCK_WEIGHTS
    ordered = padded.reshape(layout.groups, GROUP_ROWS, layout.panels, blocks, BLOCK_WEIGHTS)
    ordered = ordered.transpose(2, 0, 3, 1, 4)[..., WEIGHT_OF_POSITION]
    exponent, sign_mantissa = split(ordered)

    exponents = choose_exponents(np.bincount(exponent.ravel(), minlength=256))
    code_of_exponent = np.full(256, ESCAPE_CODE, np.uint8)
    for code in reversed(range(CODES)):  # the first of repeated entries wins
        code_of_exponent[exponents[code]] = code
    codes = code_of_exponent[exponent]
    escapes = codes == ESCAPE_CODE
    exceptions = exponent[escapes]
    if raw_fallback and layout.prefers_raw(exceptions.size):
        header = HEADER.pack(
            MAGIC, RAW_FLAG, rows, columns, layout.padded_columns, layout.panel_columns, 4, bytes(8), 0
        )
        blob = np.zeros(layout.raw_blob_bytes(), np.uint8)
        blob[: HEADER.size] = np.frombuffer(header, np.uint8)
        blob[HEADER.size : HEADER.size + 2 * weights.size] = np.ascontiguousarray(weights, "<u2").view(np.uint8).ravel()
        return blob

    records = np.zeros(ordered.shape[:-1], RECORD)
    records["sm"] = sign_mantissa
    quarters = codes.reshape(*codes.shape[:-1], 4, 16) & 3
    records["A"] = np.bitwise_or.reduce(quarters << np.array([[0], [2], [4], [6]], np.uint8), axis=-2)
    octets = codes.reshape(*codes.shape[:-1], 8, 8) >> 2
    records["B"] = np.bitwise_or.reduce(octets << np.arange(8, dtype=np.uint8)[:, None], axis=-2)
    index = np.zeros(layout.index_entries, "<u4")
    index[1:] = np.cumsum(np.count_nonzero(escapes, axis=(2, 3, 4)).ravel())

    header = HEADER.pack(
        MAGIC, 0, rows, columns, layout.padded_columns, layout.panel_columns, 4, exponents.tobytes(), exceptions.size
    )
    blob = np.zeros(layout.coded_blob_bytes(exceptions.size), np.uint8)
    for offset, part in (
        (0, np.frombuffer(header, np.uint8)),
        (HEADER.size, index.view(np.uint8)),
        (layout.records_offset, records.ravel().view(np.uint8)),
        (layout.exceptions_offset, exceptions),
    ):
        blob[offset : offset + part.size] = part
    return blob


def decode(blob: Bytes, rows: int, columns: int) -> Words:
    """Decode a blob (uint8 [bytes]) to BF16 patterns (uint16 [rows, columns]).

    Raises ValueError when the blob is not an encoding of this shape; the native validation checks more.
    """
    layout = Layout(rows, columns)
    magic, flags, n, k, padded, panel, group_rows, exponents, exception_bytes = HEADER.unpack_from(blob.tobytes()[:64])
    if (magic, n, k, padded, panel, group_rows) != (
        *(MAGIC, rows, columns),
        *(layout.padded_columns, layout.panel_columns, GROUP_ROWS),
    ):
        raise ValueError("the FX3 header does not fit the shape")
    if flags & RAW_FLAG:
        return blob[HEADER.size : HEADER.size + 2 * rows * columns].view("<u2").astype(np.uint16).reshape(rows, columns)

    blocks = layout.panel_columns // BLOCK_WEIGHTS
    records = blob[layout.records_offset : layout.records_offset + layout.records * RECORD.itemsize].view(RECORD)
    records = records.reshape(layout.panels, layout.groups, blocks, GROUP_ROWS)
    low = (records["A"][..., POSITIONS & 15] >> (2 * (POSITIONS >> 4))) & 3
    high = (records["B"][..., POSITIONS & 7] >> (POSITIONS >> 3)) & 1
    codes = low | (high << 2)
    exponent = np.frombuffer(exponents, np.uint8)[codes]
    escapes = codes == ESCAPE_CODE
    if np.count_nonzero(escapes) != exception_bytes:
        raise ValueError("the FX3 header does not count the escapes")
    exponent[escapes] = blob[layout.exceptions_offset : layout.exceptions_offset + exception_bytes]

    natural = np.empty(codes.shape, np.uint16)
    natural[..., WEIGHT_OF_POSITION] = recombine(exponent, records["sm"])
    matrix = natural.transpose(1, 3, 0, 2, 4).reshape(layout.padded_rows, layout.padded_columns)
    return np.ascontiguousarray(matrix[:rows, :columns])
