"""Planar sections have the documented layout, and independent implementations of zstd and LZ4 read and write them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from sample_weights import Encoded, OperatingPoint, gaussian

from zipmoe import _native
from zipmoe.codecs import planar
from zipmoe.codecs.bfloat16_fields import split


def zstd() -> tuple[Callable[[bytes], bytes], Callable[[bytes, int], bytes]]:
    zstandard = pytest.importorskip("zstandard")
    return zstandard.ZstdCompressor(level=1).compress, lambda data, size: zstandard.ZstdDecompressor().decompress(data)


def lz4() -> tuple[Callable[[bytes], bytes], Callable[[bytes, int], bytes]]:
    block = pytest.importorskip("lz4.block")
    return (
        lambda data: block.compress(data, store_size=False),
        lambda data, size: block.decompress(data, uncompressed_size=size),
    )


POINTS = [
    (OperatingPoint("zstd", level=3, shards=3), zstd),
    (OperatingPoint("zstd", huffman_only=True, shards=2), zstd),
    (OperatingPoint("lz4", shards=5), lz4),
    (OperatingPoint("lz4hc", level=9, shards=90), lz4),
]


@pytest.mark.parametrize(("point", "library"), POINTS, ids=["zstd", "zstd huf", "lz4", "lz4hc"])
def test_reference_reads_native_and_native_reads_reference(point: OperatingPoint, library: Callable) -> None:
    compress, decompress = library()
    weights = gaussian(71, 300)
    encoded = Encoded.of(point, weights)
    assert len(encoded.shard_bytes) == point.shards
    sections = planar.PlanarSections(*encoded.sections, tuple(encoded.shard_bytes))
    np.testing.assert_array_equal(sections.sign_mantissa, split(weights)[1].ravel())
    np.testing.assert_array_equal(planar.decode(sections, *weights.shape, decompress), weights)

    reference = planar.encode(weights, point.shards, compress)
    other = Encoded(
        point.codec, *weights.shape, [reference.exponent, reference.sign_mantissa], list(reference.shard_bytes)
    )
    other.validate()
    np.testing.assert_array_equal(other.decode(), weights)


def test_shards_are_cut_as_documented() -> None:
    assert [list(planar.shard_rows(7, 3, s)) for s in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [len(planar.shard_rows(2, 5, s)) for s in range(5)] == [0, 0, 1, 0, 1]


def test_only_the_needed_shards_are_decompressed() -> None:
    """Rows of an intact shard decode although the other one is destroyed."""
    encoded = Encoded.of(OperatingPoint("zstd", level=3, shards=2), gaussian(64, 256))
    encoded.sections[0] = encoded.sections[0].copy()
    encoded.sections[0][encoded.shard_bytes[0] :] = 0
    assert encoded.decode(begin=0, end=32).shape == (32, 256)
    with pytest.raises(ValueError, match="zstd"):
        encoded.decode(begin=31, end=33)


def test_huffman_only_beats_levels_on_gaussian_weights() -> None:
    weights = gaussian(512, 1024)

    def ratio(point: OperatingPoint) -> float:
        return sum(section.nbytes for section in Encoded.of(point, weights).sections) / weights.nbytes

    assert ratio(OperatingPoint("zstd", huffman_only=True)) < 0.667
    assert ratio(OperatingPoint("zstd", huffman_only=True)) < ratio(OperatingPoint("zstd", level=3)) < 0.72


def test_section_names() -> None:
    sections, shard_bytes = _native.encode("lz4", gaussian(4, 4), shards=2)
    assert [kind for kind, _ in sections] == ["E", "SM"]
    assert sections[0][1].size == sum(shard_bytes)
