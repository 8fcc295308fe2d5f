from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.maximum_entropy import (
    NoMaximumEntropyLawError,
    fit,
    fixed_size,
    inclusion_probabilities,
    sample_sets,
)

FloatArray = npt.NDArray[np.float64]


def zipf(ranks: int, size: int, exponent: float, cap: float = 0.999) -> FloatArray:
    """Inclusion probabilities proportional to rank**-exponent, capped, of the given sum."""
    shape = np.arange(1, ranks + 1, dtype=np.float64) ** -exponent
    low, high = 0.0, 1e9
    for _ in range(300):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(cap, middle * shape).sum() < size else (low, middle)
    f = np.minimum(cap, low * shape)
    f[-1] += size - f.sum()
    return f


def enumerated(coins: FloatArray, size_law: FloatArray) -> dict[tuple[int, ...], float]:
    """The law by its definition: every set's weight product, normalised within each size."""
    law = {}
    for size, probability in enumerate(size_law):
        sets = list(combinations(range(len(coins)), size))
        weights = [np.prod([coins[r] if r in s else 1 - coins[r] for r in range(len(coins))]) for s in sets]
        for one, weight in zip(sets, weights, strict=True):
            if probability:
                law[one] = probability * weight / sum(weights)
    return law


def inclusion_of(law: dict[tuple[int, ...], float], ranks: int) -> FloatArray:
    f = np.zeros(ranks)
    for one, probability in law.items():
        f[list(one)] += probability
    return f


@pytest.mark.parametrize(
    ("ranks", "size", "exponent"),
    [(256, 8, 1.0), (256, 8, 0.3), (256, 8, 2.5), (512, 32, 1.2), (60, 4, 0.5), (128, 1, 1)],
)
def test_inclusion_probabilities_are_reproduced(ranks: int, size: int, exponent: float) -> None:
    f = zipf(ranks, size, exponent)
    law = fit(f, fixed_size(size))
    assert np.abs(inclusion_probabilities(law.coins, law.sizes)[0] - f).max() < 1e-10
    assert law.residual < 1e-11
    assert law.coins.sum() == pytest.approx(size, abs=1e-9)


def test_layers_are_fitted_together() -> None:
    f = np.array([zipf(64, 6, exponent) for exponent in (0.2, 0.9, 1.7)])
    law = fit(f, fixed_size(6))
    assert law.coins.shape == (3, 64)
    assert np.abs(law.inclusion() - f).max() < 1e-10
    alone = fit(f[1], fixed_size(6))
    assert np.abs(law.coins[1] - alone.coins[0]).max() < 1e-9


def test_law_is_the_one_defined_by_weights() -> None:
    f = np.array([0.9, 0.75, 0.5, 0.4, 0.25, 0.15, 0.05])
    law = fit(f, fixed_size(3))
    assert inclusion_of(enumerated(law.coins[0], fixed_size(3)), 7) == pytest.approx(f, abs=1e-10)


def test_one_expert_per_token_needs_weights_proportional_to_popularity() -> None:
    f = np.array([0.5, 0.3, 0.2])
    coins = fit(f, fixed_size(1)).coins[0]
    weights = coins / (1 - coins)
    assert weights / weights.sum() == pytest.approx(f, abs=1e-10)


def test_uniform_popularity_needs_equal_coins() -> None:
    assert fit(np.full(10, 0.3), fixed_size(3)).coins[0] == pytest.approx(np.full(10, 0.3), abs=1e-12)


def test_never_and_always_active_experts_stay_so() -> None:
    f = np.array([1.0, 0.7, 0.2, 0.1, 0.0, 1.0])
    law = fit(f, fixed_size(3))
    assert law.coins[0, [0, 5]].tolist() == [1, 1]
    assert law.coins[0, 4] == 0
    assert law.inclusion()[0] == pytest.approx(f, abs=1e-10)


def test_no_randomness_at_all() -> None:
    law = fit(np.array([1.0, 0.0, 1.0]), fixed_size(2))
    assert law.coins[0].tolist() == [1, 0, 1]
    assert law.rounds == 1


def test_entropy_is_larger_than_that_of_other_laws_with_these_probabilities() -> None:
    law = enumerated(fit(np.array([0.8, 0.6, 0.4, 0.2]), fixed_size(2)).coins[0], fixed_size(2))

    def entropy(shift: float) -> float:
        moved = dict(law)
        for one, sign in (((0, 1), 1), ((2, 3), 1), ((0, 2), -1), ((1, 3), -1)):  # keeps all inclusion probabilities
            moved[one] += sign * shift
        assert inclusion_of(moved, 4) == pytest.approx([0.8, 0.6, 0.4, 0.2], abs=1e-9)
        return -sum(p * np.log(p) for p in moved.values())

    assert entropy(0) > max(entropy(1e-3), entropy(-1e-3))
    assert entropy(1e-4) - entropy(-1e-4) == pytest.approx(0, abs=1e-9)  # a maximum: no slope


def test_sizes_are_mixed() -> None:
    sizes = np.array([0, 0, 0.5, 0.2, 0.3])
    f = np.array([0.9, 0.7, 0.5, 0.3, 0.2, 0.2])
    law = fit(f, sizes)
    assert law.inclusion()[0] == pytest.approx(f, abs=1e-10)
    by_definition = enumerated(law.coins[0], sizes)
    assert inclusion_of(by_definition, 6) == pytest.approx(f, abs=1e-10)
    assert sum(p for one, p in by_definition.items() if len(one) == 3) == pytest.approx(0.2)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_weights_are_recovered(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(2, 12))
    size = data.draw(st.integers(1, ranks - 1))
    logits = np.array(data.draw(st.lists(st.floats(-6, 6), min_size=ranks, max_size=ranks)))
    f = inclusion_probabilities(1 / (1 + np.exp(-logits))[None], fixed_size(size)[None])[0]
    coins = fit(f, fixed_size(size)).coins[0]
    assert np.abs(inclusion_of(enumerated(coins, fixed_size(size)), ranks) - f).max() < 1e-9


def test_draws_have_the_law() -> None:
    f = zipf(64, 6, 0.8)
    law = fit(f, fixed_size(6))
    draws = 40_000
    sets = law.sample(0, draws, np.random.default_rng(5))
    assert (sets.sum(axis=1) == 6).all()
    deviation = np.abs(sets.mean(axis=0) - f) / np.sqrt(f * (1 - f) / draws)
    assert deviation.max() < 4.5


def test_draws_of_several_sizes() -> None:
    coins = np.array([1.0, 0.6, 0.3, 0.1, 0.0])
    sizes = np.array([1, 2, 3, 4] * 50)
    sets = sample_sets(coins, sizes, np.random.default_rng(1))
    assert (sets.sum(axis=1) == sizes).all()
    assert sets[:, 0].all()
    assert not sets[:, 4].any()


def test_probabilities_that_contradict_the_sizes_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="sum to the mean size"):
        fit(np.array([0.5, 0.5, 0.5]), fixed_size(2))
    with pytest.raises(InvalidArgumentError, match=r"\[0, 1\]"):
        fit(np.array([1.5, 0.5]), fixed_size(2))
    with pytest.raises(InvalidArgumentError, match="sizes must sum to 1"):
        fit(np.array([0.5, 0.5]), np.array([0.0, 0.5]))
    with pytest.raises(NoMaximumEntropyLawError, match="always active"):
        fit(np.array([1.0, 1.0, 0.0]), np.array([0, 0.5, 0, 0.5]))


def test_edge_of_the_possible_is_an_error() -> None:
    # Sizes 1 and 3, half each; one of the first two is in every set of one, both in every set of three.
    f = np.array([0.75, 0.75, 0.25, 0.25])
    with pytest.raises(NoMaximumEntropyLawError, match="no weights reproduce"):
        fit(f, np.array([0, 0.5, 0, 0.5]))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_widely_spread_sizes(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(3, 16))
    logits = np.array(data.draw(st.lists(st.floats(-2, 2), min_size=ranks, max_size=ranks)))
    shares = np.array(data.draw(st.lists(st.floats(0.05, 1), min_size=ranks, max_size=ranks)))
    sizes = np.concatenate([[0.0], shares / shares.sum()])
    f = inclusion_probabilities(1 / (1 + np.exp(-logits))[None], sizes[None])[0]
    law = fit(f, sizes)
    assert law.residual < 1e-11
    assert law.rounds < 200


def test_error_names_the_layers() -> None:
    good, edge = np.array([0.5, 0.5, 0.5, 0.5]), np.array([0.75, 0.75, 0.25, 0.25])
    with pytest.raises(NoMaximumEntropyLawError) as caught:
        fit(np.array([good, edge, good, edge]), np.array([0, 0.5, 0, 0.5]))
    assert caught.value.layers == (1, 3)
