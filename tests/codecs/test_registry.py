"""Which codecs there are, what they can do, and which settings they take."""

from __future__ import annotations

import types

import numpy as np
import pytest

from zipmoe import _native
from zipmoe.codecs import registry
from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.errors import CodecUnavailableError, InvalidArgumentError


def test_codecs_and_capabilities() -> None:
    assert [codec.name for codec in _native.codecs()] == ["fx3", "zstd", "lz4", "lz4hc"]
    assert registry.get_codec("fx3") == registry.CodecInfo("fx3", False, True, ("packed",))
    for name in registry.codec_names():
        if name != "fx3":
            assert registry.get_codec(name) == registry.CodecInfo(name, True, False, ("E", "SM"))


def test_unknown_codec() -> None:
    with pytest.raises(CodecUnavailableError, match="no codec 'zip'") as raised:
        registry.get_codec("zip")
    assert "fx3" in str(raised.value.hint)


def test_codec_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = types.SimpleNamespace(name="zstd", unavailable_reason="built without the zstd library")
    monkeypatch.setattr(_native, "codecs", lambda: [missing])
    assert registry.codec_names() == ()
    with pytest.raises(CodecUnavailableError, match="built without the zstd library"):
        registry.get_codec("zstd")


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (("fx3", None, None), CodecSettings("fx3", None, 1)),
        (("fx3", None, 1), CodecSettings("fx3", None, 1)),
        (("zstd", None, None), CodecSettings("zstd", 3, 4)),
        (("zstd", 22, 1), CodecSettings("zstd", 22, 1)),
        (("zstd", -100, 2), CodecSettings("zstd", -100, 2)),
        (("zstd", "19", 2), CodecSettings("zstd", 19, 2)),
        (("zstd", "huf", None), CodecSettings("zstd", "huf", 4)),
        (("lz4", None, 3), CodecSettings("lz4", None, 3)),
        (("lz4hc", None, None), CodecSettings("lz4hc", 9, 4)),
        (("lz4hc", 12, None), CodecSettings("lz4hc", 12, 4)),
    ],
)
def test_settings(options: tuple, settings: CodecSettings) -> None:
    assert registry.settings_from_options(*options) == settings
    level, huffman_only = registry.encode_level(settings)
    sections, shard_bytes = _native.encode(
        settings.name, np.zeros((8, 8), np.uint16), level, huffman_only, settings.shards
    )
    assert len(sections) == len(registry.get_codec(settings.name).section_kinds)
    assert len(shard_bytes) == (0 if settings.name == "fx3" else settings.shards)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("fx3", 3, None), "has no levels"),
        (("fx3", None, 2), "has no shards"),
        (("lz4", 1, None), "has no levels"),
        (("zstd", 23, None), "out of range"),
        (("zstd", 0, None), "out of range"),
        (("zstd", "fast", None), "not a level"),
        (("lz4hc", "huf", None), "not a level"),
        (("lz4hc", 13, None), "out of range"),
        (("zstd", None, 0), "out of range"),
        (("zstd", None, 1025), "out of range"),
    ],
)
def test_refused_settings(options: tuple, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as raised:
        registry.settings_from_options(*options)
    assert raised.value.hint


def test_large_matrices_get_more_shards() -> None:
    settings = CodecSettings("zstd", 3, 4)
    assert registry.dense_shards(settings, 1000, 2048) == 4
    assert registry.dense_shards(settings, 2816, 2048) == 6
    shards = registry.dense_shards(settings, 151936, 2048)
    assert shards == 297  # 512 rows of 2048 in a shard of 1 MiB
    assert registry.dense_shards(settings, 3, 2**30) == 4
    assert registry.dense_shards(CodecSettings("zstd", 3, 500), 151936, 2048) == 500
    assert registry.dense_shards(CodecSettings("fx3", None, 1), 151936, 2048) == 1


def test_checksum_equals_the_reference_implementation() -> None:
    assert _native.xxh3_64(np.zeros(0, np.uint8)) == 0x2D06800538D394C2
    assert _native.xxh3_64(np.frombuffer(b"abc", np.uint8)) == 0x78AF5F94892F3950
    data = np.random.default_rng(0).integers(0, 256, 3_000_001, dtype=np.uint8)
    xxhash = pytest.importorskip("xxhash")
    for begin, length in ((0, 240), (1, 4096), (0, 65_535), (0, 65_536), (3, 65_537), (7, 100_000), (1, 3_000_000)):
        part = data[begin : begin + length]
        assert _native.xxh3_64(part) == xxhash.xxh3_64_intdigest(part.tobytes()), (begin, length)


def test_instruction_sets() -> None:
    assert _native.instruction_sets()[0] == "scalar"
    assert _native.best_instruction_set() == _native.instruction_sets()[-1]
