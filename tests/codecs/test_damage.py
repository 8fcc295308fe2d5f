"""Damaged bytes: validation names what is wrong, decoding raises or stays inside its buffers, and never crashes.

native/tests/codec_test.cpp does the same under the address sanitizer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
from sample_weights import OPERATING_POINTS, Encoded, OperatingPoint, gaussian, random_words

from zipmoe import _native
from zipmoe.codecs import fx3

ROWS, COLUMNS = 10, 200
INDEX = 64


def codes() -> Encoded:
    return Encoded("fx3", ROWS, COLUMNS, [fx3.encode(gaussian(ROWS, COLUMNS), raw_fallback=False)], [])


def raw() -> Encoded:
    encoded = Encoded.of(OperatingPoint("fx3"), random_words(ROWS, COLUMNS))
    assert encoded.sections[0][4] == fx3.RAW_FLAG
    return encoded


def put(format_: str, offset: int, value: int) -> Callable[[Encoded], None]:
    return lambda encoded: struct.pack_into(format_, encoded.sections[0], offset, value)


def resize(change: int) -> Callable[[Encoded], None]:
    def apply(encoded: Encoded) -> None:
        encoded.sections[0] = np.resize(encoded.sections[0], encoded.sections[0].size + change)

    return apply


def escape_instead_of_code(encoded: Encoded) -> None:
    encoded.sections[0][
        fx3.Layout(ROWS, COLUMNS).records_offset + 64 : fx3.Layout(ROWS, COLUMNS).records_offset + 88
    ] = 255


FX3_DAMAGE = {
    "magic": (put("<I", 0, 0x12345678), "magic"),
    "version": (put("<B", 3, 2), "magic"),
    "unknown flag": (put("<I", 4, 2), "flags"),
    "raw flag": (put("<I", 4, 1), "raw matrix has no codes"),
    "rows": (put("<I", 8, ROWS + 1), "number of rows is 11 instead of 10"),
    "columns": (put("<I", 12, COLUMNS - 1), "number of columns"),
    "padded columns": (put("<I", 16, 192), "padded number of columns"),
    "panel width": (put("<I", 20, 64), "panel width"),
    "group": (put("<B", 24, 8), "row group"),
    "infinity among the codes": (put("<B", 25, 255), "exponent 255"),
    "no escape": (put("<B", 32, 254), "exponent 255"),
    "reserved": (put("<B", 33, 1), "reserved"),
    "more reserved": (put("<B", 63, 1), "reserved"),
    "exceptions": (put("<Q", 40, 100000), "bytes instead of"),
    "huge exceptions": (put("<Q", 40, 2**64 - 1), "too many exceptions"),
    "index start": (put("<I", INDEX, 1), "start"),
    "index order": (put("<I", INDEX + 4, 2**31), "escape codes|decreases"),
    "index padding": (put("<B", INDEX + 16, 1), "padding behind the index"),
    "escapes": (escape_instead_of_code, "escape codes but"),
    "tail": (put("<B", -1, 1), "padding behind the exceptions"),
    "one byte short": (resize(-1), "bytes instead of"),
    "one byte long": (resize(1), "bytes instead of"),
    "nearly nothing": (
        lambda encoded: encoded.sections.__setitem__(0, encoded.sections[0][:63]),
        "shorter than a header",
    ),
    "nothing": (lambda encoded: encoded.sections.__setitem__(0, encoded.sections[0][:0]), "shorter than a header"),
}


@pytest.mark.parametrize("damage", FX3_DAMAGE)
def test_fx3_validation_says_what_is_wrong(damage: str) -> None:
    apply, message = FX3_DAMAGE[damage]
    encoded = codes()
    encoded.validate()
    apply(encoded)
    with pytest.raises(ValueError, match=message):
        encoded.validate()


def test_raw_fallback_validation() -> None:
    raw().validate()
    for offset in (25, 40):
        encoded = raw()
        encoded.sections[0][offset] = 1
        with pytest.raises(ValueError, match="raw matrix has no codes"):
            encoded.validate()
    encoded = raw()
    encoded.sections[0][-1] ^= 1
    with pytest.raises(ValueError, match="padding behind the matrix"):
        encoded.validate()
    encoded = raw()
    encoded.sections[0] = encoded.sections[0][:-64]
    with pytest.raises(ValueError, match="bytes instead of"):
        encoded.decode()


@pytest.mark.parametrize("name", ["zstd", "lz4", "lz4hc"])
def test_planar_validation_says_what_is_wrong(name: str) -> None:
    point = OperatingPoint(name, level=1, shards=2)
    intact = Encoded.of(point, gaussian(ROWS, COLUMNS))
    intact.validate()

    def expect(message: str, **changes: object) -> None:
        damaged = intact.copy()
        for field, value in changes.items():
            setattr(damaged, field, value)
        with pytest.raises(ValueError, match=message):
            damaged.validate()
        if damaged.rows * damaged.columns < 1 << 20:
            with pytest.raises(ValueError, match=message):
                damaged.decode()

    exponent, sign_mantissa = intact.sections
    expect("E section has", sections=[exponent[:-1], sign_mantissa])
    expect("SM section has", sections=[exponent, sign_mantissa[1:]])
    expect("E section has", shard_bytes=intact.shard_bytes[:1])
    expect("no shards", shard_bytes=[])
    expect("SM section has", rows=ROWS + 1)
    expect("impossible shape", rows=0)
    expect("impossible shape", rows=2**31, columns=2**33)


def test_zstd_frames_are_checked() -> None:
    zstandard = pytest.importorskip("zstandard")
    sign_mantissa = np.zeros(64, np.uint8)

    def stored(frame: bytes) -> Encoded:
        return Encoded("zstd", 1, 64, [np.frombuffer(frame, np.uint8), sign_mantissa], [len(frame)])

    good = zstandard.ZstdCompressor().compress(bytes(64))
    stored(good).validate()
    for frame, message in {
        zstandard.ZstdCompressor().compress(bytes(65)): "holds 65 bytes instead of 64",
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64)): "does not state its size",
        good + good: "not exactly one frame",
        good[:-1]: "not exactly one frame",
        b"not a frame at all": "not a zstd frame",
    }.items():
        with pytest.raises(ValueError, match=message):
            stored(frame).validate()


def test_lz4_blocks_are_checked_when_decoded() -> None:
    block = pytest.importorskip("lz4.block")
    sign_mantissa = np.zeros(64, np.uint8)
    for data, message in {
        block.compress(bytes(63), store_size=False): "holds 63 bytes instead of 64",
        block.compress(bytes(65), store_size=False): "malformed",
        bytes([0x10, 0, 255, 255, 0]): "malformed",  # a match from before the start
    }.items():
        encoded = Encoded("lz4", 1, 64, [np.frombuffer(data, np.uint8), sign_mantissa], [len(data)])
        with pytest.raises(ValueError, match=message):
            encoded.decode()


def mutate(encoded: Encoded, random: np.random.Generator) -> None:
    """A few changed bytes, mostly in headers and indexes, and sometimes another length, shape or shard table."""
    which = int(random.integers(len(encoded.sections)))
    section = encoded.sections[which]
    for _ in range(int(random.integers(1, 5))):
        limit = min(section.size, 160) if random.random() < 0.75 else section.size
        section[int(random.integers(limit))] = random.choice([0, 1, 0x7F, 0x80, 0xFF, int(random.integers(256))])
    action = int(random.integers(8))
    if action == 0:
        encoded.sections[which] = section[: int(random.integers(section.size))].copy()
    elif action == 1:
        encoded.sections[which] = np.resize(section, section.size + int(random.integers(1, 130)))
    elif action == 2:
        encoded.rows += int(random.integers(-4, 5))
    elif action == 3:
        encoded.columns += int(random.integers(-4, 5))
    elif action == 4 and encoded.shard_bytes:
        encoded.shard_bytes[int(random.integers(len(encoded.shard_bytes)))] = int(random.integers(3000))


@pytest.mark.parametrize(
    "original",
    [codes(), raw(), *(Encoded.of(point, gaussian(ROWS, COLUMNS)) for point in OPERATING_POINTS if point.shards < 10)],
    ids=lambda encoded: f"{encoded.codec}-{len(encoded.shard_bytes)}-{encoded.sections[0].size}",
)
def test_random_mutations_raise_or_decode(original: Encoded) -> None:
    random = np.random.default_rng(7)
    rejected = 0
    for _ in range(2000):
        damaged = original.copy()
        mutate(damaged, random)
        try:
            damaged.validate()
        except ValueError:
            rejected += 1
        for instruction_set in _native.instruction_sets():
            try:
                decoded = damaged.decode(instruction_set)
            except ValueError:
                continue
            assert decoded.shape == (damaged.rows, damaged.columns)
    assert rejected > 200


def test_a_hostile_shape_is_refused_before_anything_is_allocated() -> None:
    for codec in ("fx3", "zstd", "lz4"):
        sections = [np.zeros(64, np.uint8)] * (1 if codec == "fx3" else 2)
        for rows, columns in ((2**32, 1), (1, 2**40), (2**63, 2**63), (2**32 - 1, 2**32 - 1), (0, 5), (5, 0)):
            with pytest.raises(ValueError, match=r"."):
                _native.validate(codec, rows, columns, sections, [] if codec == "fx3" else [64])


def test_bad_arguments() -> None:
    encoded = codes()
    blob = encoded.sections[0]
    out = np.zeros((ROWS, COLUMNS), np.uint16)
    with pytest.raises(ValueError, match="unknown codec 'zip'"):
        _native.encode("zip", out)
    with pytest.raises(ValueError, match="do not lie in a matrix of 10 rows"):
        _native.decode("fx3", ROWS, COLUMNS, [blob], [], 5, 11, out)
    with pytest.raises(ValueError, match="output array must have shape"):
        _native.decode("fx3", ROWS, COLUMNS, [blob], [], 0, 5, out)
    with pytest.raises(ValueError, match="has 1 sections, not 2"):
        _native.validate("fx3", ROWS, COLUMNS, [blob, blob], [])
    with pytest.raises(ValueError, match="unknown instruction set"):
        encoded.decode("mmx")
    with pytest.raises(ValueError, match="at least one row"):
        _native.encode("fx3", np.zeros((0, 5), np.uint16))
    with pytest.raises(ValueError, match="no shards"):
        _native.encode("fx3", out, shards=2)
    with pytest.raises(ValueError, match="level 23 is not in"):
        _native.encode("zstd", out, level=23)
    with pytest.raises(ValueError, match="level 0 is not in"):
        _native.encode("lz4hc", out)
    with pytest.raises(TypeError):
        _native.encode("fx3", np.zeros((4, 4), np.float32))
