"""The codec of a packed folder and its parameters, as ``pack`` is told and the manifest keeps them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CodecSettings:
    """The codec of a folder and the parameters that it was run with."""

    name: str
    level: int | str | None
    """Compression level; ``"huf"`` is zstd's Huffman-only operating point; None for codecs without levels."""
    shards: int
    """K: number of E-chunk shards of each expert matrix (1 for codecs without shards)."""
