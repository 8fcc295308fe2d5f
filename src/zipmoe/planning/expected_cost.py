"""Expected makespan of a layer under many partitions: sum over hit patterns of P(pattern) * makespan(pattern)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from zipmoe.planning.hit_law import hit_patterns, interval_laws, pattern_count, pattern_probabilities, patterns_of_sets
from zipmoe.planning.layer_costs import Makespan, MakespanBound, states_of_pattern
from zipmoe.planning.maximum_entropy import ConditionalBernoulli
from zipmoe.planning.partition import ExpertState

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MOST_SCHEDULED_PATTERNS = 50_000
"""More hit patterns than this are not scheduled one by one but bounded."""
MOST_EXACT_TERMS = 150_000_000
"""More (layer, partition, pattern) triples than this are not summed but sampled."""
SAMPLED_SETS = 4096
"""Activated sets to draw, over all layers; every partition is costed on the same ones."""
LEAST_SETS_PER_LAYER = 128
_SEED = 0x5A4D
_CHUNK_TERMS = 500_000
_KEPT_LAWS_BYTES = 256 << 20


class ExpectedCost:
    """Costs partitions on the law of activated sets of some layers."""

    def __init__(
        self,
        law: ConditionalBernoulli,
        pools: tuple[ExpertState, ...],
        makespan: Makespan,
        bound: MakespanBound,
        plans: int,
    ) -> None:
        """Choose between exact and sampled law, and between schedule and bound, by the amount of work.

        Args:
            law: activated sets of each layer.
            pools: those that partitions use; patterns with hits in others are left out.
            makespan: cost of a hit pattern; called once for each.
            bound: what replaces it when patterns are too many.
            plans: number of partitions that will be costed.
        """
        self._law = law
        self._bound = bound
        classes = [*pools, ExpertState.MISS]
        self._sizes = np.flatnonzero(law.sizes.any(axis=0))
        counts = {int(size): pattern_count(int(size), len(classes)) for size in self._sizes}
        terms = plans * sum(counts[int(m)] for row in law.sizes for m in np.flatnonzero(row))
        self.exact = terms <= MOST_EXACT_TERMS
        self.scheduled = self.exact and sum(counts.values()) <= MOST_SCHEDULED_PATTERNS
        self._patterns: dict[int, IntArray] = {}
        self._pattern_seconds: dict[int, FloatArray] = {}
        self._kept_laws: dict[int, FloatArray] = {}
        self._kept_sets: dict[int, npt.NDArray[np.bool_]] = {}
        if self.exact:
            for size, count in counts.items():
                patterns = np.zeros((count, 5), dtype=np.int64)
                patterns[:, classes] = hit_patterns(size, len(classes))
                self._patterns[size] = patterns
                self._pattern_seconds[size] = (
                    np.array([makespan(states_of_pattern(pattern)) for pattern in patterns])
                    if self.scheduled
                    else bound.of_patterns(patterns)
                )

    def seconds(self, plans: IntArray, layers: Sequence[int] | None = None) -> FloatArray:
        """Expected makespan of layers under every partition.

        Args:
            plans: slots of F, C, S, E, int64 [plans, 4].
            layers: which ones; None: all.

        Returns:
            [layers, plans].
        """
        each = self._exact_seconds if self.exact else self._sampled_seconds
        return np.array([each(layer, plans) for layer in (range(len(self._law.coins)) if layers is None else layers)])

    def _exact_seconds(self, layer: int, plans: IntArray) -> FloatArray:
        seconds = np.zeros(len(plans))
        laws = self._laws(layer)
        for size in self._sizes:
            weight = self._law.sizes[layer, size]
            if weight == 0:
                continue
            patterns, pattern_seconds = self._patterns[int(size)], self._pattern_seconds[int(size)]
            for part in _chunks(len(plans), len(patterns)):
                seconds[part] += weight * (pattern_probabilities(laws, plans[part], patterns) @ pattern_seconds)
        return seconds

    def _sampled_seconds(self, layer: int, plans: IntArray) -> FloatArray:
        sets = self._sets(layer)
        seconds = np.empty(len(plans))
        for part in _chunks(len(plans), 5 * len(sets)):
            seconds[part] = self._bound.of_patterns(patterns_of_sets(sets, plans[part])).mean(axis=1)
        return seconds

    def _laws(self, layer: int) -> FloatArray:
        if layer in self._kept_laws:
            return self._kept_laws[layer]
        laws = interval_laws(self._law.coins[layer], self._law.sizes.shape[1] - 1)
        if laws.nbytes * len(self._law.coins) <= _KEPT_LAWS_BYTES:
            self._kept_laws[layer] = laws
        return laws

    def _sets(self, layer: int) -> npt.NDArray[np.bool_]:
        if layer not in self._kept_sets:
            draws = max(LEAST_SETS_PER_LAYER, SAMPLED_SETS // len(self._law.coins))
            self._kept_sets[layer] = self._law.sample(layer, draws, np.random.default_rng([_SEED, layer]))
        return self._kept_sets[layer]


def _chunks(plans: int, terms_per_plan: int) -> Iterator[slice]:
    """Slices of plans whose terms fit into a cache-friendly amount of memory."""
    length = max(1, _CHUNK_TERMS // max(terms_per_plan, 1))
    for start in range(0, plans, length):
        yield slice(start, start + length)
