"""Cache pools of one sparse layer: what an expert costs in each, how many each holds, the grid of partitions.

Pools are ordered F, C, S, E and own contiguous intervals of popularity ranks in that order; what is ranked behind them
is a miss (ZipMoE paper, sections 3.2 and 3.4, appendix C).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from zipmoe.errors import InvalidArgumentError
from zipmoe.store.manifest import Record

FULL_BYTES_PER_WEIGHT = 2
DEFAULT_STEP = 0.05
"""Grid of partitions: shares of the budget are multiples of this."""


class ExpertState(IntEnum):
    """What is in memory of an expert; the codes of the whole project."""

    FULL = 0
    """F: BF16."""
    COMPRESSED = 1
    """C: both chunks (or the packed record of a codec that is not separable)."""
    SIGN_MANTISSA = 2
    """S: the SM-chunk only."""
    EXPONENT = 3
    """E: the compressed E-chunk only."""
    MISS = 4
    """M: nothing."""

    @property
    def letter(self) -> str:
        """F, C, S, E or M."""
        return "FCSEM"[self]


POOLS = (ExpertState.FULL, ExpertState.COMPRESSED, ExpertState.SIGN_MANTISSA, ExpertState.EXPONENT)
"""The four pools in the order of their rank intervals."""


def parse_pools(letters: str) -> tuple[ExpertState, ...]:
    """Pools named by letters such as ``"FCSE"`` (any order, either case), in rank order.

    Raises:
        InvalidArgumentError: an unknown or repeated letter, or none.
    """
    by_letter = {pool.letter: pool for pool in POOLS}
    named = letters.upper()
    if not named or len(set(named)) != len(named) or not set(named) <= by_letter.keys():
        raise InvalidArgumentError(f"{letters!r} is not a set of pools", hint="name some of F, C, S and E, each once")
    return tuple(sorted(by_letter[letter] for letter in named))


@dataclass(frozen=True)
class CodecCapabilities:
    """The two flags that decide which states exist."""

    separable: bool
    """E and SM can be held apart: pools S and E exist."""
    fused: bool
    """Kernels compute from the compressed form: no decompression and no recombination."""

    @property
    def whole(self) -> bool:
        """A packed expert is in memory as a whole or not at all, and nothing has to be reconstructed."""
        return self.fused or not self.separable

    @property
    def pools(self) -> tuple[ExpertState, ...]:
        """Pools that such a codec has."""
        return POOLS[:2] if self.whole else POOLS

    def allowed(self, wanted: Sequence[ExpertState] | None = None) -> tuple[ExpertState, ...]:
        """The pools to plan with: those asked for (None: all), if the codec has them.

        Raises:
            InvalidArgumentError: a pool that this codec does not have, or none at all.
        """
        if wanted is None:
            return self.pools
        pools = tuple(sorted(set(wanted)))
        if not pools or not set(pools) <= set(self.pools):
            have = ", ".join(pool.letter for pool in self.pools)
            asked = ", ".join(pool.letter for pool in pools) or "none"
            raise InvalidArgumentError(
                f"pools {asked} were asked for, but the codec has {have}", hint="drop the others"
            )
        return pools


@dataclass(frozen=True)
class ExpertBytes:
    """Bytes of one expert (all its tensors) in each form; the same numbers serve memory and reading.

    A separable codec has two chunks, any other has one: then ``sign_mantissa`` is 0 and ``exponent`` is all of it.
    """

    full: int
    """BF16: 2 bytes per weight."""
    exponent: int
    """Compressed E-chunk (rho bytes per weight), or the whole packed record."""
    sign_mantissa: int
    """SM-chunk: 1 byte per weight; 0 if the codec is not separable."""

    def __post_init__(self) -> None:
        if self.full <= 0 or self.exponent <= 0 or self.sign_mantissa < 0:
            raise InvalidArgumentError(f"{self} does not describe an expert: bytes must be positive")

    @classmethod
    def from_ratio(cls, weights: int, exponent_ratio: float, *, separable: bool = True) -> ExpertBytes:
        """Bytes per weight of 2 (F), 1 + rho (C), 1 (S), rho (E), rounded up to whole bytes.

        Args:
            weights: number of weights of an expert.
            exponent_ratio: rho, compressed exponent bytes over raw exponent bytes.
            separable: whether the chunks can be held apart.
        """
        exponent = int(np.ceil(weights * exponent_ratio))
        if separable:
            return cls(FULL_BYTES_PER_WEIGHT * weights, exponent, weights)
        return cls(FULL_BYTES_PER_WEIGHT * weights, exponent + weights, 0)

    @classmethod
    def from_records(cls, records: Sequence[Record]) -> ExpertBytes:
        """The largest of these records in each form: slots are of one length, so the largest must fit.

        Raises:
            InvalidArgumentError: no records, or extents of an unknown kind.
        """
        if not records:
            raise InvalidArgumentError("a layer without records has no experts to plan for")
        full = exponent = sign_mantissa = 0
        for record in records:
            weights = sum(matrix.rows * matrix.columns for matrix in record.matrices)
            full = max(full, FULL_BYTES_PER_WEIGHT * weights)
            for extent in record.extents:
                if extent.kind in ("E", "packed"):
                    exponent = max(exponent, extent.length)
                elif extent.kind == "SM":
                    sign_mantissa = max(sign_mantissa, extent.length)
                else:
                    raise InvalidArgumentError(f"record {record.name!r} has an extent of unknown kind {extent.kind!r}")
        return cls(full, exponent, sign_mantissa)

    @property
    def compressed(self) -> int:
        """Both chunks."""
        return self.exponent + self.sign_mantissa

    def held(self, state: ExpertState) -> int:
        """Memory that an expert in this state occupies."""
        return (self.full, self.compressed, self.sign_mantissa, self.exponent, 0)[state]

    def read(self, state: ExpertState) -> int:
        """Bytes that must be read before an expert in this state can be computed."""
        return (0, 0, self.exponent, self.sign_mantissa, self.compressed)[state]


@dataclass(frozen=True)
class PoolPlan:
    """Slots of each pool of one layer. Ranks 0..full-1 live in F, the next ``compressed`` ones in C, and so on."""

    full: int = 0
    compressed: int = 0
    sign_mantissa: int = 0
    exponent: int = 0

    def __post_init__(self) -> None:
        if min(self.slots) < 0:
            raise InvalidArgumentError(f"{self}: a pool cannot have fewer than no slots")

    @property
    def slots(self) -> tuple[int, int, int, int]:
        """Experts that F, C, S and E hold."""
        return self.full, self.compressed, self.sign_mantissa, self.exponent

    @property
    def total_slots(self) -> int:
        """Experts of which anything is held."""
        return sum(self.slots)

    def held_bytes(self, expert: ExpertBytes) -> int:
        """Memory of all four pools."""
        return sum(slots * expert.held(pool) for pool, slots in zip(POOLS, self.slots, strict=True))

    def state_of_rank(self, rank: int) -> ExpertState:
        """Where the model expects the expert of this popularity rank (0 = most popular)."""
        for pool, end in zip(POOLS, np.cumsum(self.slots), strict=True):
            if rank < end:
                return pool
        return ExpertState.MISS

    def thresholds(self, tolerance: int = 0) -> tuple[int, int, int, int]:
        """tau of each pool, the run-time dispatch's rank limits: slots of all pools up to it plus ``tolerance``."""
        full, compressed, sign_mantissa, exponent = (int(end) + tolerance for end in np.cumsum(self.slots))
        return full, compressed, sign_mantissa, exponent

    def describe(self) -> str:
        """For people: ``F 3 + C 12``."""
        parts = [f"{pool.letter} {slots}" for pool, slots in zip(POOLS, self.slots, strict=True) if slots]
        return " + ".join(parts) or "no pool"


def partition_grid(
    budget_bytes: int,
    expert: ExpertBytes,
    experts: int,
    pools: Sequence[ExpertState],
    step: float = DEFAULT_STEP,
) -> npt.NDArray[np.int64]:
    """All distinct feasible partitions of a layer's budget on the grid, among them the pure ones and the empty one.

    Each active pool gets a multiple of ``step`` of the budget, rounded down to whole slots; the last active pool gets
    all that the others leave, so that rounding wastes less than one of its slots. No more slots than experts.

    Returns:
        int64 [plans, 4], slots of F, C, S, E; rows are unique and sorted.

    Raises:
        InvalidArgumentError: a negative budget, or a step outside (0, 1].
    """
    if budget_bytes < 0:
        raise InvalidArgumentError(f"a pool budget of {budget_bytes} bytes is negative")
    if not 0 < step <= 1:
        raise InvalidArgumentError(f"a grid step of {step} is not a share of the budget", hint="use 0 < step <= 1")
    parts = round(1 / step)
    plans = {(0, 0, 0, 0)}
    for shares in _compositions(parts, len(pools)):
        slots = [0, 0, 0, 0]
        left_bytes, left_experts = budget_bytes, experts
        last = max(index for index, share in enumerate(shares) if share)
        for index, (pool, share) in enumerate(zip(pools, shares, strict=True)):
            if not share:
                continue
            room = left_bytes if index == last else budget_bytes * share // parts
            slots[pool] = min(room // expert.held(pool), left_experts)
            left_bytes -= slots[pool] * expert.held(pool)
            left_experts -= slots[pool]
        plans.add((slots[0], slots[1], slots[2], slots[3]))
    return np.array(sorted(plans), dtype=np.int64)


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All tuples of ``parts`` non-negative integers that sum to ``total``."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)
