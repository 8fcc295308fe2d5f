"""What of an expert is in memory."""

from __future__ import annotations

from enum import IntEnum


class Residency(IntEnum):
    """Residency of an expert's tensor; the values are the state codes of ``zipmoe._native``."""

    FULL = 0
    BOTH_CHUNKS = 1
    SIGN_MANTISSA = 2
    EXPONENT = 3
    MISS = 4

    @property
    def letter(self) -> str:
        """The paper's name: F, C, S, E or M."""
        return "FCSEM"[self]

    @classmethod
    def from_letter(cls, letter: str) -> Residency:
        """Return the residency that the paper calls `letter`; raises ValueError for other letters."""
        if len(letter) != 1 or letter not in "FCSEM":
            raise ValueError(f"a residency is one of F, C, S, E and M, not {letter!r}")
        return cls("FCSEM".index(letter))

    @classmethod
    def of_chunks(cls, *, holds_exponent: bool, holds_sign_mantissa: bool) -> Residency:
        """Return the residency of chunks that are held apart."""
        if holds_exponent:
            return cls.BOTH_CHUNKS if holds_sign_mantissa else cls.EXPONENT
        return cls.SIGN_MANTISSA if holds_sign_mantissa else cls.MISS
