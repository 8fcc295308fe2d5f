from __future__ import annotations

from itertools import combinations, product

import numpy as np
import numpy.typing as npt
import pytest

from zipmoe.planning.hit_law import (
    hit_patterns,
    interval_laws,
    joint_hit_law,
    pattern_count,
    patterns_of_sets,
    poisson_binomial,
)
from zipmoe.planning.maximum_entropy import fit, fixed_size, sample_sets

FloatArray = npt.NDArray[np.float64]


def enumerated_joint_law(coins: FloatArray, slots: tuple[int, int, int, int], sizes: FloatArray) -> FloatArray:
    """Every set of every size, weighed by its coins and put where its hits are."""
    largest = len(sizes) - 1
    law = np.zeros((largest + 1,) * 4)
    pool = np.repeat(np.arange(5), [*slots, len(coins) - sum(slots)])
    for size in np.flatnonzero(sizes):
        part = np.zeros_like(law)
        for one in combinations(range(len(coins)), int(size)):
            inside = np.zeros(len(coins), dtype=bool)
            inside[list(one)] = True
            hits = np.bincount(pool[inside], minlength=5)
            part[tuple(hits[:4])] += np.prod(np.where(inside, coins, 1 - coins))
        law += sizes[size] * part / part.sum()
    return law


@pytest.mark.parametrize("ranks", [5, 8, 12])
@pytest.mark.parametrize("seed", range(4))
def test_joint_law_equals_enumeration(ranks: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    coins = generator.uniform(0.02, 0.98, ranks)
    slots = np.diff([0, *sorted(generator.integers(0, ranks + 1, 4))])
    size = int(generator.integers(1, min(ranks, 5)))
    partition = (int(slots[0]), int(slots[1]), int(slots[2]), int(slots[3]))
    exact = joint_hit_law(coins, partition, fixed_size(size))
    assert np.abs(exact - enumerated_joint_law(coins, partition, fixed_size(size))).max() < 1e-12
    assert exact.sum() == pytest.approx(1, abs=1e-12)


def test_joint_law_with_certain_ranks_and_several_sizes() -> None:
    coins = np.array([1.0, 0.9, 0.7, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0])
    sizes = np.array([0, 0.25, 0.25, 0.4, 0.1])
    exact = joint_hit_law(coins, (2, 1, 2, 1), sizes)
    assert np.abs(exact - enumerated_joint_law(coins, (2, 1, 2, 1), sizes)).max() < 1e-12
    assert exact[0].sum() == 0  # rank 0 is always active and lives in F


def test_mean_hits_are_the_popularity_of_the_pool() -> None:
    f = np.linspace(0.6, 0.0, 41)[:-1]
    f *= 6 / f.sum()
    law = joint_hit_law(fit(f, fixed_size(6)).coins[0], (5, 10, 3, 7), fixed_size(6))
    for axis, (begin, end) in enumerate([(0, 5), (5, 15), (15, 18), (18, 25)]):
        marginal = law.sum(axis=tuple(a for a in range(4) if a != axis))
        assert marginal @ np.arange(7) == pytest.approx(f[begin:end].sum(), abs=1e-9)


def test_joint_law_agrees_with_sampling() -> None:
    ranks, size, draws = 96, 6, 60_000
    f = np.arange(1, ranks + 1) ** -0.7
    f *= size / f.sum()
    coins = fit(f, fixed_size(size)).coins[0]
    slots = (8, 16, 10, 20)
    sets = sample_sets(coins, np.full(draws, size), np.random.default_rng(11))
    patterns = patterns_of_sets(sets, np.array([slots]))[0]
    seen = np.zeros((size + 1,) * 4)
    np.add.at(seen, tuple(patterns[:, :4].T), 1 / draws)
    law = joint_hit_law(coins, slots, fixed_size(size))
    frequent = law > 1e-3
    deviation = np.abs(seen - law)[frequent] / np.sqrt(law[frequent] * (1 - law[frequent]) / draws)
    assert deviation.max() < 5
    assert deviation.mean() < 1  # of a standard normal variable: 0.80


def test_poisson_binomial_by_enumeration() -> None:
    coins = np.array([0.1, 0.5, 0.0, 1.0, 0.73])
    expected = np.zeros(6)
    for faces in product((0, 1), repeat=5):
        expected[sum(faces)] += np.prod([q if face else 1 - q for q, face in zip(coins, faces, strict=True)])
    assert poisson_binomial(coins) == pytest.approx(expected, abs=1e-15)


def test_interval_laws_are_the_laws_of_intervals() -> None:
    coins = np.random.default_rng(3).uniform(0, 1, 9)
    laws = interval_laws(coins, 4)
    for begin in range(10):
        for end in range(begin, 10):
            expected = np.zeros(5)
            law = poisson_binomial(coins[begin:end])[:5]
            expected[: len(law)] = law
            assert laws[begin, end] == pytest.approx(expected, abs=1e-15)


def test_patterns_are_all_ways_to_spread_experts() -> None:
    patterns = hit_patterns(4)
    assert len(patterns) == pattern_count(4) == 70
    assert {tuple(row) for row in patterns.tolist()} == {p for p in product(range(5), repeat=5) if sum(p) == 4}
    assert pattern_count(8) == 495
    assert hit_patterns(3, classes=2).tolist() == [[0, 3], [1, 2], [2, 1], [3, 0]]


def test_patterns_of_given_sets() -> None:
    sets = np.array([[1, 1, 0, 1, 0, 1], [0, 0, 1, 0, 1, 1]], dtype=bool)
    patterns = patterns_of_sets(sets, np.array([[1, 2, 1, 0], [0, 0, 0, 0]]))
    assert patterns.tolist() == [[[1, 1, 1, 0, 1], [0, 1, 0, 0, 2]], [[0, 0, 0, 0, 4], [0, 0, 0, 0, 3]]]
