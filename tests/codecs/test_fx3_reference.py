"""The native FX3 encoder and the NumPy reference agree on every byte; the format is what docs/format.md says."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sample_weights import SAMPLES, gaussian, random_words

from zipmoe import _native
from zipmoe.codecs import fx3


def native_blob(weights: np.ndarray) -> np.ndarray:
    sections, shard_bytes = _native.encode("fx3", weights)
    assert [kind for kind, _ in sections] == ["packed"]
    assert shard_bytes == []
    return sections[0][1]


@pytest.mark.parametrize("name", SAMPLES)
def test_same_bytes(name: str) -> None:
    weights = SAMPLES[name]
    blob = native_blob(weights)
    np.testing.assert_array_equal(blob, fx3.encode(weights))
    np.testing.assert_array_equal(fx3.decode(blob, *weights.shape), weights)
    codes = fx3.encode(weights, raw_fallback=False)
    np.testing.assert_array_equal(fx3.decode(codes, *weights.shape), weights)


@settings(max_examples=100, deadline=None)
@given(
    hnp.arrays(
        np.uint16,
        st.tuples(st.integers(1, 40), st.integers(1, 300)),
        elements=st.integers(0x3B00, 0x3E00),
        fill=st.integers(0x3B00, 0x3E00),
    )
)
def test_same_bytes_for_any_matrix(weights: np.ndarray) -> None:
    np.testing.assert_array_equal(native_blob(weights), fx3.encode(weights))


def test_layout_of_a_small_matrix_by_hand() -> None:
    """One group of one block: every field where the document says."""
    weights = np.full((4, 64), 0x3F80, np.uint16)  # 1.0: exponent 127, sign and mantissa 0
    weights[0, 1] = 0xC000  # -2.0: exponent 128, sm 1
    weights[2, 32] = 0x7F81  # NaN: exponent 255, sm 2: the only escape
    blob = fx3.encode(weights, raw_fallback=False)
    assert blob.size == 64 + 64 + 384 + 64 + 64
    header = struct.unpack_from("<4s5IB8s7xQ16x", blob)
    assert header == (b"FX3\x01", 0, 4, 64, 64, 64, 4, bytes([127, 128, *[127] * 5, 255]), 1)
    assert struct.unpack_from("<2I", blob, 64) == (0, 1)
    first_row = blob[128 : 128 + 88]
    assert first_row[1] == 1  # weight 1 is at position 1
    assert (first_row[64 + 1], first_row[80 + 1]) == (1, 0)  # code 1 there, 0 elsewhere
    assert first_row.sum() == 2
    third_row = blob[128 + 2 * 88 : 128 + 3 * 88]
    assert third_row[8] == 2  # weight 32 is at position 8
    assert (third_row[64 + 8], third_row[80 + 0]) == (3, 2)  # code 7: bits 0 and 1 in A[8], bit 2 at bit 1 of B[0]
    assert blob[128 + 384] == 255


def test_panels() -> None:
    assert [fx3.Layout(1, k).panel_columns for k in (1, 64, 4096, 4097, 8192, 8256, 64 * 67, 11008)] == [
        *(64, 64, 4096, 832, 4096, 2752, 64, 2752),
    ]


def test_ties_go_to_the_smaller_exponent_and_padding_counts() -> None:
    weights = (np.arange(8 * 64, dtype=np.uint16).reshape(8, 64) % 8 + 100) << 7  # exponents 100..107, equally often
    exponents = fx3.HEADER.unpack_from(fx3.encode(weights, raw_fallback=False))[7]
    assert exponents == bytes([100, 101, 102, 103, 104, 105, 106, 255])
    exponents = fx3.HEADER.unpack_from(fx3.encode(weights[:5], raw_fallback=False))[7]
    assert exponents == bytes([0, 100, 101, 102, 103, 104, 105, 255])  # three rows of zeros


def test_raw_fallback_beyond_95_percent() -> None:
    gauss, noise = gaussian(64, 1024), random_words(64, 1024)
    assert native_blob(gauss).size / gauss.nbytes < 0.72
    blob = native_blob(noise)
    assert blob.size == 64 + noise.nbytes
    assert blob[4] == fx3.RAW_FLAG
    np.testing.assert_array_equal(blob[64:].view(np.uint16).reshape(noise.shape), noise)


def test_size_of_a_real_shape() -> None:
    weights = SAMPLES["real shape"]
    assert native_blob(weights).size / weights.nbytes < 0.705


def test_the_reference_refuses_another_shape() -> None:
    blob = fx3.encode(gaussian(64, 128))
    with pytest.raises(ValueError, match="does not fit the shape"):
        fx3.decode(blob, 128, 64)
