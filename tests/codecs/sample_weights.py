"""Matrices of BF16 patterns that the codec tests share, and how to run a codec over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zipmoe import _native


def gaussian(rows: int, columns: int, seed: int = 0, deviation: float = 0.02) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32) * np.float32(deviation)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def sprinkled(rows: int, columns: int) -> np.ndarray:
    """Gaussian weights with NaNs, infinities, denormals and zeros of both signs among them."""
    special = [0, 0x8000, 1, 0x8001, 0x7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81, 0x7F7F, 0xFF7F]
    weights = gaussian(rows, columns, seed=5)
    random = np.random.default_rng(6)
    chosen = random.random(weights.shape) < 0.03
    weights[chosen] = random.choice(np.array(special, np.uint16), np.count_nonzero(chosen))
    return weights


def random_words(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 16, (rows, columns), dtype=np.uint16)


SAMPLES = {
    "all patterns": np.arange(1 << 16, dtype=np.uint16).reshape(256, 256),
    "all patterns in one row": np.arange(1 << 16, dtype=np.uint16).reshape(1, -1),
    "random words": random_words(130, 1000),
    "constant": np.full((64, 640), 0x3C21, np.uint16),
    "zeros": np.zeros((33, 500), np.uint16),
    "1x1": np.array([[0xBF80]], np.uint16),
    "1xN": gaussian(1, 5000),
    "Nx1": gaussian(3000, 1),
    "3x65": gaussian(3, 65),
    "odd shape": gaussian(129, 1001),
    "two panels": gaussian(18, 8256),
    "prime number of blocks": gaussian(6, 64 * 67 - 5),
    "real shape": gaussian(1408, 2048),
    "all NaN": np.full((20, 200), 0x7FC1, np.uint16),
    "all infinite": np.where(np.arange(20 * 320).reshape(20, 320) % 2, 0x7F80, 0xFF80).astype(np.uint16),
    "denormals": (random_words(50, 300) & 0x807F).astype(np.uint16),
    "special values": sprinkled(100, 700),
    "many escapes": gaussian(64, 512, deviation=1.0) ^ (random_words(64, 512, seed=1) & 0x0380),
}


@dataclass(frozen=True)
class OperatingPoint:
    codec: str
    level: int = 0
    huffman_only: bool = False
    shards: int = 1

    def __str__(self) -> str:
        return f"{self.codec}-{'huf' if self.huffman_only else self.level}-{self.shards}"


OPERATING_POINTS = [
    OperatingPoint("fx3"),
    OperatingPoint("zstd", level=3, shards=4),
    OperatingPoint("zstd", level=-5),
    OperatingPoint("zstd", level=19, shards=2),
    OperatingPoint("zstd", huffman_only=True, shards=3),
    OperatingPoint("lz4", shards=7),
    OperatingPoint("lz4hc", level=9, shards=2),
    OperatingPoint("lz4hc", level=1, shards=5000),
]


@dataclass
class Encoded:
    """An encoded matrix whose sections may be changed."""

    codec: str
    rows: int
    columns: int
    sections: list[np.ndarray]
    shard_bytes: list[int]

    @classmethod
    def of(cls, point: OperatingPoint, weights: np.ndarray) -> Encoded:
        sections, shards = _native.encode(point.codec, weights, point.level, point.huffman_only, point.shards)
        return cls(point.codec, *weights.shape, [data for _, data in sections], shards)

    def copy(self) -> Encoded:
        return Encoded(
            self.codec, self.rows, self.columns, [section.copy() for section in self.sections], list(self.shard_bytes)
        )

    def validate(self) -> None:
        _native.validate(self.codec, self.rows, self.columns, self.sections, self.shard_bytes)

    def decode(self, instruction_set: str = "", begin: int = 0, end: int | None = None) -> np.ndarray:
        end = self.rows if end is None else end
        out = np.full((end - begin, self.columns), 0xABCD, np.uint16)
        _native.decode(
            self.codec, self.rows, self.columns, self.sections, self.shard_bytes, begin, end, out, instruction_set
        )
        return out
