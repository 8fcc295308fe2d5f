"""The typed face of the scheduler."""

from __future__ import annotations

import numpy as np
import pytest

from zipmoe.schedule import LayerModel, Residency, TensorCosts


def test_residencies_have_the_letters_of_the_paper() -> None:
    assert "".join(residency.letter for residency in Residency) == "FCSEM"
    assert [Residency.from_letter(letter) for letter in "FCSEM"] == list(Residency)
    for letter in ("", "f", "FC", "X"):
        with pytest.raises(ValueError, match="one of F, C, S, E and M"):
            Residency.from_letter(letter)


def test_residency_of_chunks() -> None:
    found = [Residency.of_chunks(holds_exponent=e, holds_sign_mantissa=s).letter for e in (1, 0) for s in (1, 0)]
    assert found == ["C", "E", "S", "M"]


def test_makespan_of_one_expert_in_every_state() -> None:
    # u = 10, a shard is read in 2 and decompressed in 3, K = 2, L = 1; recombination 1, execution 5.
    model = LayerModel((TensorCosts(10.0, 2.0, 3.0, 1.0),), shards=2, workers=1)
    expected = {"F": 5.0, "C": 2 * 3 + 1 + 5.0, "S": 2 + 2 * 3 + 1 + 5.0, "E": 10 + 1 + 5.0, "M": 2 * 2 + 10 + 1 + 5.0}
    for letter, seconds in expected.items():
        assert model.makespan_seconds([Residency.from_letter(letter)], [5.0]) == seconds
    assert model.makespan_seconds(np.array([0, 0], np.uint8), np.array([5.0, 6.0]), order="fifo") == 11.0


def test_makespan_with_a_fused_codec() -> None:
    model = LayerModel((TensorCosts(4.0), TensorCosts(3.0)), shards=0, workers=1)
    assert model.makespan_seconds([Residency.MISS], [5.0]) == 12.0
    assert model.makespan_seconds([Residency.BOTH_CHUNKS], [5.0]) == 5.0
    with pytest.raises(ValueError, match="no chunks that could be held apart"):
        model.makespan_seconds([Residency.EXPONENT], [5.0])


def test_refuses_lengths_that_differ() -> None:
    model = LayerModel((TensorCosts(4.0),), shards=1, workers=1)
    with pytest.raises(ValueError, match="execute_seconds has 1 values, expected 2"):
        model.makespan_seconds([Residency.MISS, Residency.MISS], [5.0])
    with pytest.raises(ValueError, match="at least one tensor"):
        LayerModel((), shards=1, workers=1).makespan_seconds([Residency.MISS], [5.0])
    with pytest.raises(ValueError, match="a state is 0"):
        model.makespan_seconds(np.array([7], np.uint8), [5.0])
