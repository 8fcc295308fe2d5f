"""How many experts of each sparse layer the pools F, C, S and E hold, and how they are managed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from zipmoe.engine.cache_policy import PolicyChoice
from zipmoe.engine.option_checks import one_of
from zipmoe.errors import InvalidArgumentError

POOL_LETTERS = "FCSE"
"""The pools in the order of the work that is left: decoded, both parts, SM-chunks only, E-chunks only."""
READ_ORDERS = ("cache_affinity", "fifo")
DEFAULT_STAGING = 4
"""Experts that can be read or executed beside those in the pools: enough reads in flight for the disk's queue."""
DEFAULT_DECOMPRESS_AHEAD = 0
"""Experts whose exponents are decompressed before they are asked for. It pays where the model waits for the disk or
executes on another device (docs/pools.md)."""

_ENTRY = re.compile(r"\s*([A-Za-z])\s*=\s*([0-9]+)\s*")
_HINT = 'write for example "F=0,C=12,S=8,E=0": experts per sparse layer'


@dataclass(frozen=True)
class PoolSlots:
    """Experts per pool, of one sparse layer."""

    full: int = 0
    """F: decoded BF16 matrices."""
    compressed: int = 0
    """C: the whole record."""
    sign_mantissa: int = 0
    """S: the SM-chunks only."""
    exponent: int = 0
    """E: the E-chunks only."""

    def __post_init__(self) -> None:
        for letter, experts in zip(POOL_LETTERS, self.experts, strict=True):
            if isinstance(experts, bool) or not isinstance(experts, int) or experts < 0:
                raise InvalidArgumentError(f"pool {letter} cannot hold {experts!r} experts", hint=_HINT)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Slots from text such as ``"F=0,C=12,S=8,E=0"``; pools that are not named get none.

        Raises:
            InvalidArgumentError: malformed, or a pool is unknown or named twice.
        """
        experts: dict[str, int] = {}
        for entry in text.split(","):
            match = _ENTRY.fullmatch(entry)
            letter = match[1].upper() if match else ""
            if match is None or letter not in POOL_LETTERS or letter in experts:
                raise InvalidArgumentError(f"{text!r} does not say how many experts the pools hold", hint=_HINT)
            experts[letter] = int(match[2])
        return cls(*(experts.get(letter, 0) for letter in POOL_LETTERS))

    @classmethod
    def from_shares(cls, pool_bytes: int, shares: Mapping[str, float], expert_bytes: Sequence[int]) -> Self:
        """The most experts that fit into each pool's share of a layer's bytes.

        Args:
            pool_bytes: bytes of all pools of the layer together.
            shares: share of each pool (a letter of ``FCSE``), 0 to 1, together at most 1.
            expert_bytes: bytes of one expert in F, C, S and E (see ``PoolClass.expert_bytes``).

        Raises:
            InvalidArgumentError: an unknown pool, or shares that are negative or exceed the whole.
        """
        unknown = set(shares) - set(POOL_LETTERS)
        if unknown or any(share < 0 for share in shares.values()) or sum(shares.values()) > 1 + 1e-9:
            raise InvalidArgumentError(
                f"{dict(shares)} does not divide a layer's memory", hint="give shares of F, C, S, E"
            )
        by_letter = dict(zip(POOL_LETTERS, expert_bytes, strict=True))
        return cls(
            *(
                int(pool_bytes * shares.get(letter, 0.0) / by_letter[letter] + 1e-9) if by_letter[letter] else 0
                for letter in POOL_LETTERS
            )
        )

    @property
    def experts(self) -> tuple[int, int, int, int]:
        """Experts in F, C, S and E."""
        return (self.full, self.compressed, self.sign_mantissa, self.exponent)

    def within(self, experts: int) -> PoolSlots:
        """No more slots than a layer has experts, the first pools served first."""
        limited = []
        for slots in self.experts:
            limited.append(min(slots, experts))
            experts -= limited[-1]
        return PoolSlots(*limited)

    def scaled(self, fraction: float) -> PoolSlots:
        """This fraction of every pool, rounded down."""
        return PoolSlots(*(int(slots * fraction) for slots in self.experts))

    def __str__(self) -> str:
        return ", ".join(f"{letter} {slots}" for letter, slots in zip(POOL_LETTERS, self.experts, strict=True))


@dataclass(frozen=True)
class PoolSettings:
    """Pools of an engine."""

    slots: PoolSlots | tuple[PoolSlots, ...]
    """Of every sparse layer, or of each in the manifest's order."""
    staging: int = DEFAULT_STAGING
    """Experts that can be read or executed beside those in the pools."""
    tolerance: float | None = None
    """For the policy ``"zipmoe"``: ranks that an expert may be behind a pool's last slot and still enter it (delta of
    the paper); default: a tenth of the layer's experts."""
    policy: str | None = None
    """Who makes room, and who goes where: a name of ``policy_names()``; None: the default."""
    half_life_steps: float | None = None
    """For the policy ``"zipmoe"``: steps of the model (requests of a layer) after which an activation counts half;
    None: the default."""
    order: str = "cache_affinity"
    """Order of the reads and decompressions of a request: ``"cache_affinity"`` (the paper's scheduler) or
    ``"fifo"``."""
    decompress_ahead: int = DEFAULT_DECOMPRESS_AHEAD
    """Experts whose exponents can be decompressed, by as many workers as there are decoding threads, before they are
    asked for; each takes one byte per weight. 0: all is decompressed when a matrix is asked for. Of no effect with
    codecs whose exponents are not held apart."""
    origin: str = ""
    """Where the slots come from, for the mode line; empty: a person chose them."""

    def __post_init__(self) -> None:
        if self.staging < 1:
            raise InvalidArgumentError(f"at least 1 expert must be staged, not {self.staging}")
        if isinstance(self.decompress_ahead, bool) or self.decompress_ahead < 0:
            raise InvalidArgumentError(
                f"the exponents of {self.decompress_ahead} experts cannot be decompressed ahead",
                hint="give 0 to decompress when a matrix is asked for",
            )
        if self.tolerance is not None and not self.tolerance >= 0:
            raise InvalidArgumentError(f"the tolerance of ranks must not be negative: {self.tolerance}")
        PolicyChoice.of(self.policy, self.half_life_steps)  # refuses what is wrong with them
        one_of("order", self.order, READ_ORDERS)

    def of_groups(self, experts: Sequence[int]) -> tuple[PoolSlots, ...]:
        """Slots of each layer; ``experts``: how many it has.

        Raises:
            InvalidArgumentError: slots are given for another number of layers.
        """
        slots = self.slots if isinstance(self.slots, tuple) else (self.slots,) * len(experts)
        if len(slots) != len(experts):
            raise InvalidArgumentError(
                f"pools are given for {len(slots)} sparse layers, but the model has {len(experts)}"
            )
        return tuple(group.within(count) for group, count in zip(slots, experts, strict=True))
