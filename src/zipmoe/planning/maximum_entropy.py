"""The maximum-entropy law of the set of activated experts: conditional Bernoulli sampling.

Of all laws of a random set A of ranks with inclusion probabilities ``f_r = P(r in A)`` and a given law of its size,
the one of largest entropy is ``P(A) = P(|A|) * prod_{r in A} w_r / e_{|A|}(w)``, e_m being the elementary symmetric
polynomials. For a fixed size k this is conditional Bernoulli sampling (Chen, Dempster & Liu, "Weighted finite
population sampling to maximize entropy", Biometrika 81:457, 1994; ZipMoE paper, section 3.4 and appendix D).

Weights are kept as ``q_r = w_r / (1 + w_r)``: independent coins of these probabilities, conditioned on their number of
heads, are this law. Every table then holds probabilities (each row of a table sums to at most 1), so that nothing
overflows; and ranks that are always (q = 1) or never (q = 0) activated need no special treatment in the tables.

All functions work on several layers at once: the leading axis L.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zipmoe.errors import InvalidArgumentError

FloatArray = npt.NDArray[np.float64]

TOLERANCE = 1e-11
"""Largest deviation of a reproduced inclusion probability at which the fit is finished."""
MAXIMUM_ROUNDS = 1000
_PATIENCE_ROUNDS = 20
"""A fit that does not at least halve its residual in so many rounds has no solution to go to: near the edge of the
possible, residuals shrink like 1 / rounds, elsewhere geometrically."""
_SUM_TOLERANCE = 1e-9
_NOTHING = 1e-150
"""Probabilities below this are 0: their products would be denormal numbers, which are slow and mean nothing."""
_STEP = 2 / 3
_SMALLEST_STEP = 1 / 64
_LARGEST_SCALE = 1e3
_SCALE_ROUNDS = frozenset({3, 6, 12, 25, 50, 100, 200, 400})
"""When to look again at how much of each rank's variance is left once the size is known (`_within_size_scale`)."""


class NoMaximumEntropyLawError(InvalidArgumentError):
    """No weights reproduce these inclusion probabilities: they lie outside, or on the edge, of what sizes allow."""

    def __init__(self, message: str, *, layers: tuple[int, ...] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.layers = layers
        """Layers (rows) that are concerned, where known."""


@dataclass(frozen=True)
class ConditionalBernoulli:
    """A fitted law of the activated set of every layer."""

    coins: FloatArray
    """q, [L, N]: coin of each rank; of any scale of the weights, the one whose coins sum to the mean size."""
    sizes: FloatArray
    """P(|A| = m), [L, M + 1] for m = 0..M."""
    residual: float
    """max |reproduced - given| over all inclusion probabilities."""
    rounds: int
    """Rounds of the fixed point until then."""

    def inclusion(self) -> FloatArray:
        """Inclusion probabilities that the law has, [L, N]."""
        return inclusion_probabilities(self.coins, self.sizes)

    def sample(self, layer: int, draws: int, generator: np.random.Generator) -> npt.NDArray[np.bool_]:
        """Independent sets of one layer, bool [draws, N]; sizes are drawn first."""
        size_law = self.sizes[layer]
        sizes = generator.choice(len(size_law), size=draws, p=size_law / size_law.sum())
        return sample_sets(self.coins[layer], sizes, generator)


def fixed_size(size: int) -> FloatArray:
    """The law of a size that is always ``size``: [size + 1]."""
    law = np.zeros(size + 1)
    law[size] = 1.0
    return law


def fit(
    probabilities: FloatArray,
    sizes: FloatArray,
    *,
    tolerance: float = TOLERANCE,
    maximum_rounds: int = MAXIMUM_ROUNDS,
) -> ConditionalBernoulli:
    """Find the coins that reproduce inclusion probabilities.

    The fixed point of Chen, Dempster & Liu, ``w <- w * f / pi(w)``, has the same solution as
    ``w <- w * (odds(f) / odds(pi(w)))**s``. With s = 2/3 each round shrinks the error of every direction by about 3
    (pairwise negative correlation bounds the eigenvalues of the iteration within [1 - 2s, 1)), also for
    probabilities close to 1, where the original takes ``1/(1 - f)`` rounds.

    Args:
        probabilities: f, [L, N] (or [N]: one layer), each row summing to the mean size.
        sizes: P(|A| = m), [L, M + 1] (or [M + 1]: the same for all layers).
        tolerance: largest deviation to accept.
        maximum_rounds: when to give up.

    Raises:
        InvalidArgumentError: not probabilities, or rows that do not sum to the mean size.
        NoMaximumEntropyLawError: no such law (possible only if sizes vary, or if a size is impossible).
    """
    f = np.atleast_2d(np.asarray(probabilities, dtype=np.float64))
    size_law = np.broadcast_to(np.atleast_2d(np.asarray(sizes, dtype=np.float64)), (len(f), np.shape(sizes)[-1]))
    _check(f, size_law)
    mean_size = size_law @ np.arange(size_law.shape[1])
    inner = (f > 0) & (f < 1)
    target = np.where(inner, np.log(np.where(inner, f, 0.5)) - np.log1p(-np.where(inner, f, 0.5)), 0.0)
    theta = target.copy()
    coins = _scaled_coins(theta, f, inner, mean_size)
    step = np.full((len(f), 1), _STEP)
    history: list[FloatArray] = []
    mixed = bool(((size_law > 0).sum(axis=1) > 1).any())
    scale = np.ones_like(f)
    for rounds in range(1, maximum_rounds + 1):
        inside, outside = _inclusion(coins, size_law)
        residuals = np.abs(inside - f).max(axis=1)
        open_layers = residuals >= tolerance
        if not open_layers.any():
            return ConditionalBernoulli(coins, size_law, float(residuals.max()), rounds)
        if history:
            step[(residuals > history[-1]) & (step[:, 0] > _SMALLEST_STEP)] /= 2
        history.append(residuals)
        if rounds > 2 * _PATIENCE_ROUNDS:
            open_layers &= residuals > history[-1 - _PATIENCE_ROUNDS] / 2
            if open_layers.any():
                break
        with np.errstate(divide="ignore"):
            reproduced = np.log(inside) - np.log(outside)
        if rounds in _SCALE_ROUNDS and mixed:
            scale = _within_size_scale(coins, size_law, f)
        change = np.where(inner, scale * (target - reproduced), 0.0)
        lost = ~np.isfinite(change).all(axis=1)
        if lost.any():
            open_layers = lost
            break
        theta += step * change
        coins = _scaled_coins(theta, f, inner, mean_size)
    raise NoMaximumEntropyLawError(
        f"no weights reproduce the inclusion probabilities: still off by {residuals[open_layers].max():.1e} "
        f"after {rounds} rounds",
        layers=tuple(int(layer) for layer in np.flatnonzero(open_layers)),
        hint="move them towards their mean a little (zipmoe.planning.rank_model.shifted)",
    )


def _check(f: FloatArray, size_law: FloatArray) -> None:
    if f.ndim != 2 or size_law.ndim != 2 or not f.size:
        raise InvalidArgumentError("inclusion probabilities must be [layers, ranks]")
    if not (np.isfinite(f).all() and (f >= 0).all() and (f <= 1).all()):
        raise InvalidArgumentError("inclusion probabilities must lie in [0, 1]")
    if not ((size_law >= 0).all() and np.allclose(size_law.sum(axis=1), 1, atol=_SUM_TOLERANCE, rtol=0)):
        raise InvalidArgumentError("the probabilities of the sizes must sum to 1")
    numbers = np.arange(size_law.shape[1])
    least = (f == 1).sum(axis=1, keepdims=True)
    most = (f > 0).sum(axis=1, keepdims=True)
    impossible = ((size_law > 0) & ((numbers < least) | (numbers > most))).any(axis=1)
    if impossible.any():
        raise NoMaximumEntropyLawError(
            "a size is smaller than the number of experts that are always active, or larger than of those ever active",
            layers=tuple(int(layer) for layer in np.flatnonzero(impossible)),
        )
    deviation = np.abs(f.sum(axis=1) - size_law @ numbers)
    if (deviation > _SUM_TOLERANCE * np.maximum(1, size_law @ numbers)).any():
        raise InvalidArgumentError(
            f"inclusion probabilities must sum to the mean size (off by {deviation.max():.1e})",
            hint="count activations and sizes on the same steps",
        )


def _scaled_coins(theta: FloatArray, f: FloatArray, inner: npt.NDArray[np.bool_], mean_size: FloatArray) -> FloatArray:
    """Coins of log weights ``theta`` times the scale that makes each row sum to the mean size; f = 0 and 1 stay.

    ``theta`` is moved in place to that scale. The sum grows with the scale, so that bisection cannot fail; Newton's
    method is tried first.
    """
    wanted = mean_size - (f == 1).sum(axis=1)
    low = np.full(len(f), -800.0)
    high = np.full(len(f), 800.0)
    shift = np.zeros(len(f))
    for _ in range(200):
        q = np.where(inner, _logistic(theta + shift[:, None]), 0.0)
        excess = q.sum(axis=1) - wanted
        if (np.abs(excess) <= 1e-12 * np.maximum(wanted, 1)).all():
            break
        high = np.where(excess > 0, np.minimum(high, shift), high)
        low = np.where(excess < 0, np.maximum(low, shift), low)
        slope = (q * (1 - q)).sum(axis=1)
        newton = shift - excess / np.where(slope > 0, slope, np.inf)
        shift = np.where((slope > 0) & (newton > low) & (newton < high), newton, (low + high) / 2)
    theta += np.where(inner, shift[:, None], 0.0)
    return np.where(inner, _logistic(theta), f)


def _logistic(x: FloatArray) -> FloatArray:
    positive = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1.0, positive) / (1.0 + positive), dtype=np.float64)


def coin_tables(coins: FloatArray, largest: int) -> tuple[FloatArray, FloatArray]:
    """Laws of the number of heads among the first and among the last coins.

    Args:
        coins: q, [L, N].
        largest: M, largest number of heads to tabulate.

    Returns:
        ``forward`` and ``backward``, [N + 1, L, M + 1]: ``forward[r]`` is the Poisson-binomial law of coins 0..r-1,
        ``backward[r]`` that of coins r..N-1, both cut off behind M heads.
    """
    layers, ranks = coins.shape
    forward = np.zeros((ranks + 1, layers, largest + 1))
    backward = np.zeros((ranks + 1, layers, largest + 1))
    forward[0, :, 0] = 1
    backward[ranks, :, 0] = 1
    heads = np.ascontiguousarray(coins.T)[:, :, None]
    tails = 1 - heads
    for r in range(ranks):
        np.multiply(forward[r], tails[r], out=forward[r + 1])
        forward[r + 1, :, 1:] += forward[r, :, :-1] * heads[r]
        forward[r + 1][forward[r + 1] < _NOTHING] = 0
        s = ranks - 1 - r
        np.multiply(backward[s + 1], tails[s], out=backward[s])
        backward[s, :, 1:] += backward[s + 1, :, :-1] * heads[s]
        backward[s][backward[s] < _NOTHING] = 0
    return forward, backward


def _inclusion(coins: FloatArray, size_law: FloatArray) -> tuple[FloatArray, FloatArray]:
    """P(r in A) and P(r not in A), [L, N] each, both free of cancellation."""
    largest = size_law.shape[1] - 1
    forward, backward = coin_tables(coins, largest)
    heads = forward[-1]
    improbable = ((size_law > 0) & (heads <= 0)).any(axis=1)
    if improbable.any():
        raise NoMaximumEntropyLawError(
            "a size of the activated set is too improbable under the weights to condition on",
            layers=tuple(int(layer) for layer in np.flatnonzero(improbable)),
        )
    ratio = np.divide(size_law, heads, out=np.zeros_like(heads), where=size_law > 0)  # [L, M + 1]
    # others[l, r, m]: law of the heads without coin r = sum_j forward[r, l, j] backward[r + 1, l, m - j]. Summed with
    # the ratio of m + 1 (coin r is heads) or of m (tails), for all m at once: a Hankel matrix between the two tables.
    index = np.add.outer(np.arange(largest + 1), np.arange(largest + 1))
    padded = np.concatenate([ratio, np.zeros((len(ratio), largest + 2))], axis=1)
    before, behind = forward[:-1].transpose(1, 0, 2), backward[1:].transpose(1, 0, 2)  # [L, N, M + 1]
    with_coin = coins * np.einsum("lrm,lrm->lr", before @ padded[:, index + 1], behind)
    without_coin = (1 - coins) * np.einsum("lrm,lrm->lr", before @ padded[:, index], behind)
    return with_coin, without_coin


def _within_size_scale(coins: FloatArray, size_law: FloatArray, f: FloatArray) -> FloatArray:
    """f (1 - f) over the variance of membership that is left when the size is known, [L, N]; 1 for one size.

    Only that part of the variance answers to the weights: what sizes vary is given.
    """
    largest = size_law.shape[1] - 1
    forward, backward = coin_tables(coins, largest)
    heads = forward[-1]
    variance = np.zeros_like(f)
    for size in np.flatnonzero(size_law.any(axis=0)):
        if size == 0:
            continue
        before = forward[:-1, :, :size]
        behind = backward[1:, :, size - 1 :: -1]
        others = np.einsum("rlm,rlm->lr", before, behind)
        inside = coins * np.divide(
            others, heads[:, size, None], where=heads[:, size, None] > 0, out=np.zeros_like(others)
        )
        inside = np.clip(inside, 0.0, 1.0)
        variance += size_law[:, size, None] * inside * (1 - inside)
    spread = f * (1 - f)
    return np.clip(np.divide(spread, variance, out=np.ones_like(f), where=variance > 0), 1.0, _LARGEST_SCALE)


def inclusion_probabilities(coins: FloatArray, sizes: FloatArray) -> FloatArray:
    """P(r in A) of coins conditioned on their number of heads, mixed over sizes: [L, N].

    Args:
        coins: q, [L, N].
        sizes: P(|A| = m), [L, M + 1].
    """
    return _inclusion(coins, sizes)[0]


def sample_sets(
    coins: FloatArray, sizes: npt.NDArray[np.int64], generator: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Exact draws of coins conditioned on their number of heads: rank after rank, given how many heads are left.

    Args:
        coins: q, [N].
        sizes: heads of each draw, [draws].
        generator: source of randomness.

    Returns:
        bool [draws, N].
    """
    ranks, largest = len(coins), int(sizes.max(initial=0))
    _, backward = coin_tables(coins[None, :], largest)
    table = backward[:, 0]  # [N + 1, M + 1]
    sets = np.zeros((len(sizes), ranks), dtype=np.bool_)
    left = sizes.copy()
    for r in range(ranks):
        heads = np.where(left > 0, coins[r] * table[r + 1, np.maximum(left - 1, 0)], 0.0)
        tails = (1 - coins[r]) * table[r + 1, left]
        chosen = generator.random(len(sizes)) * (heads + tails) < heads
        sets[:, r] = chosen
        left = left - chosen
    return sets
