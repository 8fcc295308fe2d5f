"""How many of the activated experts each pool holds: the joint law of hits (ZipMoE paper, section 3.4, appendix D).

Given the coins q of the maximum-entropy law (`maximum_entropy`) and pools that own contiguous intervals of ranks, the
number of heads in each pool is Poisson-binomial and independent of the other pools' until the total is fixed. Hence,
for an activated set of size k,

    P(h_F, h_C, h_S, h_E | k) = Phi_F(h_F) Phi_C(h_C) Phi_S(h_S) Phi_E(h_E) Phi_M(k - h_F - h_C - h_S - h_E) / Phi_N(k)

with Phi_p the Poisson-binomial law of pool p, M the ranks that no pool holds and N all of them. Every Phi comes from
the dynamic program of adding one coin at a time; the laws of all intervals of ranks are tabulated once and serve all
partitions.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def poisson_binomial(coins: FloatArray) -> FloatArray:
    """Law of the number of heads of independent coins: [n + 1] for q of [n]."""
    law = np.zeros(len(coins) + 1)
    law[0] = 1
    for count, q in enumerate(coins, start=1):
        law[1 : count + 1] = law[1 : count + 1] * (1 - q) + law[:count] * q
        law[0] *= 1 - q
    return law


def interval_laws(coins: FloatArray, largest: int) -> FloatArray:
    """Poisson-binomial laws of all intervals of ranks.

    Args:
        coins: q by rank, [N].
        largest: largest number of heads to tabulate.

    Returns:
        [N + 1, N + 1, largest + 1]; entry [a, b] is the law of coins a..b-1, zero where a > b.
    """
    ranks = len(coins)
    laws = np.zeros((ranks + 1, ranks + 1, largest + 1))
    laws[np.arange(ranks + 1), np.arange(ranks + 1), 0] = 1
    for end, q in enumerate(coins, start=1):
        grown = laws[:end, end - 1] * (1 - q)
        grown[:, 1:] += laws[:end, end - 1, :-1] * q
        laws[:end, end] = grown
    return laws


def pattern_count(size: int, classes: int = 5) -> int:
    """Number of ways in which ``size`` experts can be spread over ``classes`` states."""
    count = 1
    for index in range(1, classes):
        count = count * (size + index) // index
    return count


@cache
def hit_patterns(size: int, classes: int = 5) -> IntArray:
    """All ways to spread ``size`` activated experts over the states F, C, S, E, M: int64 [patterns, classes]."""
    bars = np.array(list(combinations(range(size + classes - 1), classes - 1)), dtype=np.int64)
    bars = bars.reshape(-1, classes - 1)
    edges = np.concatenate(
        [np.full((len(bars), 1), -1), bars, np.full((len(bars), 1), size + classes - 1)], axis=1, dtype=np.int64
    )
    patterns: IntArray = np.diff(edges, axis=1) - 1
    patterns.flags.writeable = False
    return patterns


def pattern_probabilities(laws: FloatArray, plans: IntArray, patterns: IntArray) -> FloatArray:
    """Probability of every hit pattern under every partition, given the size of the activated set.

    Args:
        laws: interval laws of one layer, [N + 1, N + 1, M + 1].
        plans: slots of F, C, S, E, [plans, 4], at most N in sum.
        patterns: hits in F, C, S, E and misses, [patterns, 5], all of one sum k <= M with Phi_N(k) > 0.

    Returns:
        [plans, patterns]; rows sum to 1.
    """
    ranks, size = laws.shape[0] - 1, int(patterns[0].sum())
    ends = np.concatenate([np.zeros((len(plans), 1), np.int64), np.cumsum(plans, axis=1)], axis=1)
    joint = laws[ends[:, 4], ranks][:, patterns[:, 4]] / laws[0, ranks, size]
    for pool in range(4):
        joint *= laws[ends[:, pool], ends[:, pool + 1]][:, patterns[:, pool]]
    return np.asarray(joint, dtype=np.float64)


def joint_hit_law(coins: FloatArray, slots: tuple[int, int, int, int], sizes: FloatArray) -> FloatArray:
    """Joint law of hits, mixed over the sizes of the activated set.

    Args:
        coins: q by rank, [N].
        slots: experts that F, C, S, E hold; they own the ranks in this order.
        sizes: P(|A| = m), [M + 1].

    Returns:
        [M + 1, M + 1, M + 1, M + 1]: entry [h_F, h_C, h_S, h_E].
    """
    largest = len(sizes) - 1
    law = np.zeros((largest + 1,) * 4)
    laws = interval_laws(coins, largest)
    for size in np.flatnonzero(sizes):
        patterns = hit_patterns(int(size))
        probabilities = pattern_probabilities(laws, np.array([slots], dtype=np.int64), patterns)[0]
        np.add.at(law, tuple(patterns[:, :4].T), sizes[size] * probabilities)
    return law


def patterns_of_sets(sets: npt.NDArray[np.bool_], plans: IntArray) -> IntArray:
    """Hit patterns of given activated sets, for sizes whose patterns are too many to enumerate.

    Args:
        sets: bool [draws, N] by rank.
        plans: slots of F, C, S, E, [plans, 4].

    Returns:
        int64 [plans, draws, 5].
    """
    heads = np.zeros((sets.shape[1] + 1, len(sets)), dtype=np.int64)
    np.cumsum(sets.T, axis=0, out=heads[1:])
    ends = np.concatenate(
        [np.zeros((1, len(plans)), np.int64), np.cumsum(plans.T, axis=0), np.full((1, len(plans)), sets.shape[1])]
    )
    # States first in memory, so that a state's counts are contiguous.
    return np.moveaxis(np.diff(heads[ends], axis=0), 0, 2)
