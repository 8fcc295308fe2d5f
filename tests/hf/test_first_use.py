"""When two results count as one formula's."""

from __future__ import annotations

import torch
from native_steps import gaussian

from zipmoe.hf.first_use import all_agree, same_formula


def test_roundings_and_other_formulas():
    expected = gaussian(3, 64)
    rounded = (expected.float() * (1 + 2.0**-8 * torch.randn(3, 64))).bfloat16()
    assert same_formula(rounded, expected) is True
    assert same_formula((expected.float() * 1.05).bfloat16(), expected) is False
    assert same_formula(expected.flip(-1), expected) is False
    one_row = expected.clone()
    one_row[2] = 0
    assert same_formula(one_row, expected) is False


def test_another_shape_or_dtype():
    expected = gaussian(3, 64)
    assert same_formula(expected[:2], expected) is False
    assert same_formula(expected.float(), expected) is False


def test_what_says_nothing_decides_nothing():
    zeros, broken = torch.zeros(3, 8, dtype=torch.bfloat16), gaussian(3, 8)
    broken[1, 2] = torch.nan
    assert same_formula(zeros, zeros) is None
    assert same_formula(zeros, zeros + 1e-38) is None  # flushed
    assert same_formula(gaussian(3, 8), broken) is None
    assert same_formula(broken, broken) is None
    broken[1, 2] = torch.inf
    assert same_formula(gaussian(3, 8), broken) is None


def test_nonsense_is_not_the_same():
    expected = gaussian(3, 8)
    for nonsense in (torch.nan, torch.inf, 0.0, 1e30):
        assert same_formula(torch.full_like(expected, nonsense), expected) is False
    assert same_formula(expected, torch.zeros_like(expected)) is False
    some_zeros = expected.clone()
    some_zeros[1] = 0
    assert same_formula(some_zeros, some_zeros) is True


def test_verdicts_together():
    assert all_agree(True, True) is True
    assert all_agree(True, None) is None
    assert all_agree(None, False, True) is False
