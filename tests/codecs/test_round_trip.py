"""Every codec gives every bit back, on every instruction set of this machine, for matrices and for rows of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sample_weights import OPERATING_POINTS, SAMPLES, Encoded, OperatingPoint, gaussian

from zipmoe import _native
from zipmoe.codecs import bfloat16_fields, fx3

INSTRUCTION_SETS = _native.instruction_sets()


@pytest.mark.parametrize("point", OPERATING_POINTS, ids=str)
@pytest.mark.parametrize("name", SAMPLES)
def test_every_bit_comes_back(point: OperatingPoint, name: str) -> None:
    weights = SAMPLES[name]
    encoded = Encoded.of(point, weights)
    encoded.validate()
    random = np.random.default_rng(0)
    ranges = [sorted(random.integers(0, encoded.rows + 1, 2)) for _ in range(8)]
    for instruction_set in INSTRUCTION_SETS:
        np.testing.assert_array_equal(encoded.decode(instruction_set), weights)
        for begin, end in [*ranges, (0, 1), (encoded.rows - 1, encoded.rows), (0, 0)]:
            rows = encoded.decode(instruction_set, int(begin), int(end))
            np.testing.assert_array_equal(rows, weights[begin:end])


@pytest.mark.parametrize("name", SAMPLES)
def test_fx3_codes_come_back_even_where_the_encoder_prefers_raw(name: str) -> None:
    weights = SAMPLES[name]
    encoded = Encoded("fx3", *weights.shape, [fx3.encode(weights, raw_fallback=False)], [])
    encoded.validate()
    for instruction_set in INSTRUCTION_SETS:
        np.testing.assert_array_equal(encoded.decode(instruction_set), weights)


def test_single_rows() -> None:
    weights = gaussian(67, 4500)
    for point in OPERATING_POINTS:
        encoded = Encoded.of(point, weights)
        for instruction_set in INSTRUCTION_SETS:
            for row in range(67):
                np.testing.assert_array_equal(encoded.decode(instruction_set, row, row + 1)[0], weights[row])


def test_split_and_recombine_equal_the_reference() -> None:
    for count in (0, 1, 15, 31, 32, 33, 63, 64, 65, 1000, 65536):
        weights = np.arange(65536, dtype=np.uint16)[::-1][:count].copy()
        exponent, sign_mantissa = _native.split(weights)
        expected = bfloat16_fields.split(weights)
        np.testing.assert_array_equal(exponent, expected[0])
        np.testing.assert_array_equal(sign_mantissa, expected[1])
        np.testing.assert_array_equal(bfloat16_fields.recombine(exponent, sign_mantissa), weights)
        for instruction_set in INSTRUCTION_SETS:
            out = np.zeros(count, np.uint16)
            _native.recombine(exponent, sign_mantissa, out, instruction_set)
            np.testing.assert_array_equal(out, weights)


# Words from a few exponents, so that codes, escapes and the raw fallback all occur.
few_exponents = st.builds(
    lambda exponent, rest: ((exponent << 7) | (rest & 0x807F)) & 0xFFFF,
    st.sampled_from([0, 1, 118, 119, 120, 121, 122, 123, 124, 125, 254, 255]),
    st.integers(0, 0xFFFF),
)


@settings(max_examples=150, deadline=None)
@given(
    weights=hnp.arrays(
        np.uint16,
        hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=200),
        elements=few_exponents,
        fill=few_exponents,
    ),
    data=st.data(),
)
def test_any_matrix_comes_back(weights: np.ndarray, data: st.DataObject) -> None:
    rows = weights.shape[0]
    begin = data.draw(st.integers(0, rows))
    end = data.draw(st.integers(begin, rows))
    point = data.draw(st.sampled_from(OPERATING_POINTS))
    encoded = Encoded.of(point, weights)
    encoded.validate()
    codes = Encoded("fx3", *weights.shape, [fx3.encode(weights, raw_fallback=False)], [])
    codes.validate()
    for instruction_set in INSTRUCTION_SETS:
        np.testing.assert_array_equal(encoded.decode(instruction_set, begin, end), weights[begin:end])
        np.testing.assert_array_equal(codes.decode(instruction_set, begin, end), weights[begin:end])
