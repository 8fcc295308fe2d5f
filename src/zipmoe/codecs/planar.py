"""Planar codecs in NumPy: the reference of the layout of their sections (docs/format.md, "Planar codecs").

The compressor is a parameter, so that the reference depends neither on a compression library nor on the native core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from zipmoe.codecs.bfloat16_fields import Bytes, Words, recombine, split


@dataclass(frozen=True)
class PlanarSections:
    """One matrix as a planar codec stores it."""

    exponent: Bytes
    """Section ``E``: the compressed shards, one after the other (uint8 [sum of shard_bytes])."""
    sign_mantissa: Bytes
    """Section ``SM``: uint8 [rows * columns], row-major."""
    shard_bytes: tuple[int, ...]
    """Compressed bytes of each shard."""


def shard_rows(rows: int, shards: int, shard: int) -> range:
    """Rows that shard number ``shard`` of ``shards`` holds; empty for some when there are more shards than rows."""
    return range(rows * shard // shards, rows * (shard + 1) // shards)


def encode(weights: Words, shards: int, compress: Callable[[bytes], bytes]) -> PlanarSections:
    """Encode BF16 patterns (uint16 [rows, columns]); ``compress`` is called with the exponents of each shard."""
    rows = weights.shape[0]
    exponent, sign_mantissa = split(weights)
    compressed = []
    for shard in range(shards):
        held = shard_rows(rows, shards, shard)
        compressed.append(compress(exponent[held.start : held.stop].tobytes()) if held else b"")
    return PlanarSections(
        np.frombuffer(b"".join(compressed), np.uint8),
        np.ascontiguousarray(sign_mantissa).ravel(),
        tuple(len(shard) for shard in compressed),
    )


def decode(sections: PlanarSections, rows: int, columns: int, decompress: Callable[[bytes, int], bytes]) -> Words:
    """Decode to BF16 patterns (uint16 [rows, columns]).

    ``decompress`` is called with the bytes of each shard that is not empty and the number of bytes that it holds.
    Raises ValueError when lengths contradict the shape.
    """
    if sum(sections.shard_bytes) != sections.exponent.size or sections.sign_mantissa.size != rows * columns:
        raise ValueError("the sections do not have the lengths that shape and shards ask for")
    exponent = np.empty((rows, columns), np.uint8)
    offset = 0
    for shard, length in enumerate(sections.shard_bytes):
        held = shard_rows(rows, len(sections.shard_bytes), shard)
        if held:
            raw = decompress(sections.exponent[offset : offset + length].tobytes(), len(held) * columns)
            exponent[held.start : held.stop] = np.frombuffer(raw, np.uint8).reshape(len(held), columns)
        offset += length
    return recombine(exponent, sections.sign_mantissa.reshape(rows, columns))
