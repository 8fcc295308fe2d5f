"""Steps drawn from traces that kept only how often each expert was activated per prompt.

The order of a prompt's steps is lost and cannot be had back. What is drawn here agrees exactly with what is known:
every step activates top_k distinct experts of each layer, and over a prompt each expert is activated as often as it was
counted.
Beyond that nothing is assumed but chance: steps of a prompt are exchangeable (no expert is more likely because the last
token used it) and layers are independent of each other. Real routing repeats itself from token to token, so hit rates
within a prompt are understated; what a cache keeps from prompt to prompt is real.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.published_traces import PromptCounts
from zipmoe.planning.trace import RoutingTrace, TraceError, TraceHeader, TraceStep

IntArray = npt.NDArray[np.int64]


def draw_steps(prompts: PromptCounts, seed: int, limit: int | None = None) -> RoutingTrace:
    """A trace of one-token steps, prompt after prompt in the order of the file.

    Prompts whose layers were recorded for different numbers of steps are left out.

    Args:
        prompts: counts per prompt.
        seed: the same one draws the same steps.
        limit: use only so many prompts; None: all.

    Raises:
        TraceError: an expert was counted more often than there are steps, or no prompt is complete.
        InvalidArgumentError: a limit below 1.
    """
    if limit is not None and limit < 1:
        raise InvalidArgumentError(f"{limit} prompts are nothing to replay")
    lengths = prompts.steps
    complete = np.flatnonzero((lengths == lengths[:, :1]).all(axis=1) & (lengths[:, 0] > 0))[:limit]
    if not len(complete):
        raise TraceError(f"the counts of {prompts.model} have no prompt with equally many steps in all layers")
    random = np.random.default_rng(seed)
    steps: list[TraceStep] = []
    for prompt in complete:
        count = int(lengths[prompt, 0])
        layers = [draw_sets(counts, count, prompts.top_k, random) for counts in prompts.counts[prompt]]
        for number in range(count):
            ids = tuple(tuple(int(expert) for expert in sets[number]) for sets in layers)
            steps.append(TraceStep(len(steps), 1, ids))
    layer_count, experts = prompts.counts.shape[1:]
    return RoutingTrace(TraceHeader(prompts.model, (experts,) * layer_count, prompts.top_k), tuple(steps))


def draw_sets(counts: IntArray, steps: int, size: int, random: np.random.Generator) -> IntArray:
    """Sets of ``size`` distinct experts, one per step, in which expert e occurs exactly counts[e] times.

    Step by step: an expert that must be in all remaining steps is taken; the others of the set are drawn without
    replacement with probabilities in proportion to the occurrences that they have left. This never gets stuck: with r
    steps left r * size occurrences are left, so at most ``size`` experts must be taken and at least ``size`` can be.

    Args:
        counts: occurrences of each expert, int64 [N]; sums to steps * size.
        steps: number of sets.
        size: experts per set.
        random: source of chance.

    Returns:
        int64 [steps, size], ascending in each row; the order of the rows is random.

    Raises:
        TraceError: the counts allow no such sets.
    """
    if counts.sum() != steps * size or counts.max(initial=0) > steps or counts.min(initial=0) < 0:
        raise TraceError(f"counts with sum {counts.sum()} and maximum {counts.max()} are not {steps} sets of {size}")
    left = counts.copy()
    sets = np.empty((steps, size), dtype=np.int64)
    for row in range(steps):
        remaining = steps - row
        forced = np.flatnonzero(left == remaining)
        weights = np.where(left < remaining, left, 0).astype(np.float64)
        free = size - len(forced)
        drawn = random.choice(len(left), size=free, replace=False, p=weights / weights.sum()) if free else forced[:0]
        chosen = np.concatenate([forced, drawn])
        left[chosen] -= 1
        sets[row] = np.sort(chosen)
    return sets[random.permutation(steps)]
