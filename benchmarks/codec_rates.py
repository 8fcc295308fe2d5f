"""Compare the codecs on one core: size, decode rate to BF16, encode rate (docs/results/codec_rates.json).

All codecs run in turn in one process on the same weights (Gaussian, of the shape of an expert's matrix). Compressed
matrices lie in memory beyond the caches, as in the engine's pool, and are decoded into one scratch buffer that is used
again and again. Every round decodes everything with every codec, and ratios are taken within a round, so that a machine
that speeds up or slows down meanwhile does not favour anyone. Times are CPU time of the one thread that works.

Run: python benchmarks/codec_rates.py [--json docs/results/codec_rates.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from zipmoe import _native

REFERENCE = "fx3"


@dataclass(frozen=True)
class OperatingPoint:
    """A codec with parameters."""

    label: str
    codec: str
    level: int = 0
    huffman_only: bool = False
    shards: int = 1


OPERATING_POINTS = (
    OperatingPoint("fx3", "fx3"),
    OperatingPoint("zstd 3", "zstd", level=3),
    OperatingPoint("zstd huf", "zstd", huffman_only=True),
    OperatingPoint("lz4hc 9", "lz4hc", level=9),
    OperatingPoint("lz4", "lz4"),
)


@dataclass
class Encoded:
    """One operating point's copies of the weights, and what was measured with them."""

    point: OperatingPoint
    sections: list[list[np.ndarray]] = field(default_factory=list)
    shard_bytes: list[list[int]] = field(default_factory=list)
    encode_seconds: list[float] = field(default_factory=list)
    decode_seconds: dict[str, list[float]] = field(default_factory=dict)
    validate_seconds: list[float] = field(default_factory=list)

    def compressed_bytes(self) -> int:
        """Bytes of all sections of all matrices."""
        return sum(section.nbytes for sections in self.sections for section in sections)


def gaussian_bfloat16(rows: int, columns: int, seed: int) -> np.ndarray:
    """Weights of standard deviation .02, rounded to nearest even: uint16 [rows, columns]."""
    values = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32) * np.float32(0.02)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Arena:
    """One large allocation (the kernel gives it huge pages where it can), handed out in 64-byte aligned pieces."""

    def __init__(self, capacity_bytes: int) -> None:
        self._buffer = np.zeros(capacity_bytes, np.uint8)
        self._buffer[:] = 1  # touch it
        self._next = -self._buffer.ctypes.data % 64

    def allocate(self, byte_count: int) -> np.ndarray:
        """Return uint8 [byte_count], aligned to 64 bytes, with 64 more readable bytes behind it."""
        begin = self._next
        self._next = begin + (byte_count + 64 + 63) // 64 * 64
        if self._next > self._buffer.size:
            raise MemoryError("the arena is too small")
        return self._buffer[begin : begin + byte_count]

    def copy(self, array: np.ndarray) -> np.ndarray:
        """Return a copy of a uint8 array."""
        piece = self.allocate(array.size)
        piece[:] = array
        return piece


def processor() -> str:
    """The processor's name as the kernel states it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def encode_all(point: OperatingPoint, weights: list[np.ndarray], copies: int, arena: Arena) -> Encoded:
    """Encode every distinct matrix once and lay `copies` copies of the result out in memory."""
    encoded = Encoded(point)
    for matrix in weights:
        begin = time.thread_time()
        sections, shard_bytes = _native.encode(point.codec, matrix, point.level, point.huffman_only, point.shards)
        encoded.encode_seconds.append(time.thread_time() - begin)
        for _ in range(copies):
            encoded.sections.append([arena.copy(data) for _, data in sections])
            encoded.shard_bytes.append(shard_bytes)
    return encoded


def decode_all(encoded: Encoded, weights: list[np.ndarray], out: np.ndarray, instruction_set: str) -> float:
    """Decode all copies into `out`; returns CPU seconds. The last result is compared with the weights."""
    rows, columns = out.shape
    begin = time.thread_time()
    for sections, shard_bytes in zip(encoded.sections, encoded.shard_bytes, strict=True):
        _native.decode(encoded.point.codec, rows, columns, sections, shard_bytes, 0, rows, out, instruction_set)
    seconds = time.thread_time() - begin
    if not np.array_equal(out, weights[-1]):
        raise SystemExit(f"{encoded.point.label} on {instruction_set} does not give the weights back")
    return seconds


def validate_all(encoded: Encoded, rows: int, columns: int) -> float:
    """Validate all copies; returns CPU seconds."""
    begin = time.thread_time()
    for sections, shard_bytes in zip(encoded.sections, encoded.shard_bytes, strict=True):
        _native.validate(encoded.point.codec, rows, columns, sections, shard_bytes)
    return time.thread_time() - begin


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Compare the codecs on one core.")
    parser.add_argument("--rows", type=int, default=1408)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--matrices", type=int, default=4, help="distinct matrices")
    parser.add_argument("--copies", type=int, default=6, help="copies of each in memory")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    rows, columns = arguments.rows, arguments.columns

    available = {codec.name for codec in _native.codecs() if not codec.unavailable_reason}
    points = [point for point in OPERATING_POINTS if point.codec in available]
    weights = [gaussian_bfloat16(rows, columns, seed) for seed in range(arguments.matrices)]
    matrix_bytes = rows * columns * 2
    round_bytes = matrix_bytes * arguments.matrices * arguments.copies

    arena = Arena((len(points) + 1) * (round_bytes + (1 << 21)))
    out = arena.allocate(matrix_bytes).view(np.uint16).reshape(rows, columns)
    everything = [encode_all(point, weights, arguments.copies, arena) for point in points]
    for _ in range(arguments.rounds):
        for instruction_set in _native.instruction_sets():
            for encoded in everything:
                seconds = decode_all(encoded, weights, out, instruction_set)
                encoded.decode_seconds.setdefault(instruction_set, []).append(seconds)
        for encoded in everything:
            encoded.validate_seconds.append(validate_all(encoded, rows, columns))

    reference = next(encoded for encoded in everything if encoded.point.label == REFERENCE)
    best = _native.best_instruction_set()
    results = []
    for encoded in everything:
        result = {
            **asdict(encoded.point),
            "total_compression_ratio": encoded.compressed_bytes() / round_bytes,
            "encode_megabytes_per_second": matrix_bytes / statistics.median(encoded.encode_seconds) / 1e6,
            "validate_gigabytes_per_second": round_bytes / statistics.median(encoded.validate_seconds) / 1e9,
            "decode_gigabytes_per_second": {
                name: round_bytes / statistics.median(seconds) / 1e9 for name, seconds in encoded.decode_seconds.items()
            },
            "fx3_decodes_faster_by": {
                name: statistics.median(
                    other / own for other, own in zip(seconds, reference.decode_seconds[name], strict=True)
                )
                for name, seconds in encoded.decode_seconds.items()
            },
        }
        results.append(result)

    print(f"processor        {processor()}, one core")
    print(f"instruction sets {', '.join(_native.instruction_sets())}; columns below are for {best}")
    print(f"python, numpy    {platform.python_version()}, {np.__version__}")
    print(
        f"weights          {arguments.matrices} Gaussian BF16 matrices of {rows} x {columns}, {arguments.copies} copies"
    )
    print(
        f"rounds           {arguments.rounds}, interleaved; medians; CPU time of one thread; all rates in BF16 bytes\n"
    )
    print("codec     size/BF16  encode MB/s  validate GB/s  decode GB/s  FX3 is faster by")
    for result in results:
        print(
            f"{result['label']:<9} {result['total_compression_ratio']:>9.4f}"
            f" {result['encode_megabytes_per_second']:>12.0f} {result['validate_gigabytes_per_second']:>14.1f}"
            f" {result['decode_gigabytes_per_second'][best]:>12.2f} {result['fx3_decodes_faster_by'][best]:>16.2f}x"
        )
    print("\ndecode GB/s (FX3 is faster by) on each instruction set")
    for result in results:
        rates = result["decode_gigabytes_per_second"]
        print(
            f"{result['label']:<9} "
            + "  ".join(f"{name} {rates[name]:6.2f} ({result['fx3_decodes_faster_by'][name]:5.2f}x)" for name in rates)
        )
    if arguments.json:
        report = {
            "processor": processor(),
            "instruction_sets": _native.instruction_sets(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "rows": rows,
            "columns": columns,
            "matrices": arguments.matrices,
            "copies": arguments.copies,
            "rounds": arguments.rounds,
            "results": results,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {arguments.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
