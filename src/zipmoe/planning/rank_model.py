"""The rank-based workload model: how often the r-th most popular expert of a layer is activated.

Ranking and counting on the same short window overstates skew (with 19 decode steps, independent draws from nearly
uniform marginals already put most activations on "the top quarter"). So the ranking is always learnt on one part of a
trace and the activations of its ranks are counted on a following part, as a cache lives it. `in_sample_model` exists
to show the difference, not to plan with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zipmoe.errors import InvalidArgumentError

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

DEFAULT_LEARN_FRACTION = 0.5
DEFAULT_HALF_LIFE_STEPS = 16.0
"""Decay of the counts that rank experts at run time; half-lives of 8 to 32 steps are close to each other."""
_SUM_TOLERANCE = 1e-9


@dataclass(frozen=True)
class RankModel:
    """Popularity of the ranks of one layer, counted on steps that the ranking had not seen."""

    probabilities: FloatArray
    """f_r, [N]: probability that the expert of rank r is activated in a step. Not sorted: a rank learnt earlier may
    turn out less popular than the next one, and that is part of the truth."""
    distinct: FloatArray
    """P(K = k), [N + 1]: law of the number of distinct experts that a step activates."""
    steps: int
    """Steps counted."""

    def __post_init__(self) -> None:
        f, distinct = self.probabilities, self.distinct
        if f.ndim != 1 or distinct.shape != (len(f) + 1,):
            raise InvalidArgumentError("a rank model needs f of [N] and the law of distinct experts of [N + 1]")
        if not ((f >= 0) & (f <= 1)).all() or not (distinct >= 0).all() or abs(distinct.sum() - 1) > _SUM_TOLERANCE:
            raise InvalidArgumentError("a rank model consists of probabilities")
        if abs(f.sum() - self.mean_distinct) > _SUM_TOLERANCE * max(1.0, self.mean_distinct):
            raise InvalidArgumentError(
                f"f sums to {f.sum():.6g}, but a step activates {self.mean_distinct:.6g} distinct experts on average"
            )
        f.flags.writeable = False
        distinct.flags.writeable = False

    @property
    def experts(self) -> int:
        """N."""
        return len(self.probabilities)

    @property
    def mean_distinct(self) -> float:
        """Mean number of distinct experts per step."""
        return float(self.distinct @ np.arange(len(self.distinct)))

    def hit_rate(self, slots: int) -> float:
        """Share of activations that fall on the ``slots`` best ranks."""
        return float(self.probabilities[:slots].sum() / self.probabilities.sum())

    def shifted(self, amount: float) -> RankModel:
        """The model after a workload shift: f~ = (1 - a) f + a mean(f) (paper, appendix E.2)."""
        return RankModel(shifted(self.probabilities, amount), self.distinct, self.steps)


def shifted(probabilities: FloatArray, amount: float) -> FloatArray:
    """f~ = (1 - a) f + a mean(f) along the last axis: a = 0 is the workload as learnt, a = 1 a uniform one.

    Raises:
        InvalidArgumentError: ``amount`` is outside [0, 1].
    """
    if not 0 <= amount <= 1:
        raise InvalidArgumentError(f"a workload shift of {amount} is outside 0..1")
    f = np.asarray(probabilities, dtype=np.float64)
    # Rounding must not carry a value past 1.
    moved: FloatArray = (1 - amount) * f + amount * f.mean(axis=-1, keepdims=True)
    return np.clip(moved, 0.0, 1.0)


def ranking(counts: npt.NDArray[np.generic]) -> IntArray:
    """Expert ids by descending count, ties by id: int64 of the shape of ``counts``, ranked along the last axis."""
    return np.argsort(-np.asarray(counts, dtype=np.float64), axis=-1, kind="stable")


def held_out_model(activations: BoolArray, learn_fraction: float = DEFAULT_LEARN_FRACTION) -> RankModel:
    """Learn the ranking on the first part of a trace and count on the rest.

    Args:
        activations: bool [steps, N], whether an expert was activated in a step, in the order of time.
        learn_fraction: share of the steps to learn on.

    Raises:
        InvalidArgumentError: fewer than one step in one of the parts.
    """
    steps = len(activations)
    learn = round(steps * learn_fraction)
    if not 0 < learn < steps:
        raise InvalidArgumentError(
            f"{steps} steps cannot be split at {learn_fraction:.0%} into a part to learn on and a part to count on",
            hint="record a longer trace",
        )
    order = ranking(activations[:learn].sum(axis=0))
    return _counted(activations[learn:][:, order])


def running_model(
    activations: BoolArray, half_life_steps: float = DEFAULT_HALF_LIFE_STEPS, warm_up_steps: int | None = None
) -> RankModel:
    """Rank before every step by decayed counts of all earlier steps, as the run-time dispatch does, and count then.

    Args:
        activations: bool [steps, N], in the order of time.
        half_life_steps: steps after which an activation counts half.
        warm_up_steps: steps that are learnt from but not counted; None: one half-life, rounded up.

    Raises:
        InvalidArgumentError: not a positive half-life, or nothing left to count.
    """
    if not half_life_steps > 0:
        raise InvalidArgumentError(f"a half-life of {half_life_steps} steps is not positive")
    warm_up = int(np.ceil(half_life_steps)) if warm_up_steps is None else warm_up_steps
    if not 0 <= warm_up < len(activations):
        raise InvalidArgumentError(
            f"{len(activations)} steps leave nothing to count after {warm_up} steps of warm-up",
            hint="record a longer trace",
        )
    decay = 0.5 ** (1 / half_life_steps)
    counts = np.zeros(activations.shape[1])
    by_rank = np.zeros_like(activations)
    for step, active in enumerate(activations):
        by_rank[step] = active[ranking(counts)]
        counts = counts * decay + active
    return _counted(by_rank[warm_up:])


def in_sample_model(activations: BoolArray) -> RankModel:
    """Rank and count on the same steps: an overstatement of skew, for comparison only."""
    return _counted(activations[:, ranking(activations.sum(axis=0))])


def model_of_counts(
    learnt: npt.NDArray[np.generic], followed: npt.NDArray[np.generic], steps: IntArray, top_k: int
) -> RankModel:
    """Rank model of traces that kept only counts per prompt, at one token per step.

    Args:
        learnt: counts to rank by. [N]: one ranking for all prompts; [prompts, N]: one for each.
        followed: counts to measure with, [prompts, N].
        steps: decode steps of each prompt, [prompts].
        top_k: distinct experts per step.
    """
    order = np.broadcast_to(ranking(learnt), followed.shape)
    by_rank = np.take_along_axis(np.asarray(followed, dtype=np.float64), order, axis=1)
    total = int(steps.sum())
    if total <= 0:
        raise InvalidArgumentError("a trace without steps says nothing about popularity")
    distinct = np.zeros(followed.shape[1] + 1)
    distinct[top_k] = 1
    return RankModel(by_rank.sum(axis=0) / total, distinct, total)


def uniform_model(experts: int, top_k: int) -> RankModel:
    """Every expert as likely as any other: what to assume without a trace."""
    if not 0 < top_k <= experts:
        raise InvalidArgumentError(f"{top_k} of {experts} experts cannot be activated")
    distinct = np.zeros(experts + 1)
    distinct[top_k] = 1
    return RankModel(np.full(experts, top_k / experts), distinct, 0)


def _counted(by_rank: BoolArray) -> RankModel:
    steps, experts = by_rank.shape
    distinct = np.bincount(by_rank.sum(axis=1), minlength=experts + 1) / steps
    return RankModel(by_rank.mean(axis=0), distinct, steps)
