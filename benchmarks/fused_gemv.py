"""Compare y = W x on packed weights (fused FX3) with raw BF16 of our own and with torch (docs/results/fused_gemv.json).

More weights than any cache holds (``--megabytes`` of BF16) go by in turn, on one core and on all, for 1 to 3 tokens. In
every round each method sees every matrix once, and ratios are taken within a round, so that a machine that speeds up
or slows down meanwhile does not favour anyone. Before a timed pass a few untimed calls wake the method's threads, and
the other methods' threads have time to fall asleep. The rate at which the same memory can be read at all is measured in
the same rounds.

Run: python benchmarks/fused_gemv.py [--json docs/results/fused_gemv.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from zipmoe import _native
from zipmoe.codecs.fx3_gemv import round_to_bfloat16
from zipmoe.profiling.touched_memory import TouchedMemory

SHAPES = ((1408, 2048), (2816, 2048), (2048, 1408), (2048, 2048))
"""Qwen1.5-MoE-A2.7B: gate or up, gate and up, down of an expert; an attention projection."""
METHODS = ("fused", "raw", "torch")
PAUSE_SECONDS = 0.004
WARM_UP_CALLS = 3
DISTINCT = 4
TAIL_BYTES = 4096
MIB = 1 << 20

Call = Callable[[int], object]


@dataclass
class Measured:
    """One shape, number of tokens and number of threads; seconds per matrix of every round."""

    rows: int
    columns: int
    tokens: int
    threads: int
    matrices: int
    bfloat16_bytes: int
    packed_bytes: float
    seconds: dict[str, list[float]] = field(default_factory=lambda: {method: [] for method in METHODS})
    read_gigabytes_per_second: list[float] = field(default_factory=list)

    def faster_than(self, method: str) -> float:
        """Median over the rounds of the method's time divided by the fused kernel's."""
        return statistics.median(
            other / own for other, own in zip(self.seconds[method], self.seconds["fused"], strict=True)
        )

    def rate(self, method: str) -> float:
        """GB/s of the bytes that the method reads."""
        read_bytes = self.packed_bytes if method == "fused" else self.bfloat16_bytes
        return read_bytes / statistics.median(self.seconds[method]) / 1e9


@dataclass(frozen=True)
class Weights:
    """The same matrices in both forms."""

    rows: int
    columns: int
    sections: list[np.ndarray]
    raw: list[np.ndarray]
    tensors: list[torch.Tensor]

    @classmethod
    def lay_out(cls, rows: int, columns: int, megabytes: int, memory: TouchedMemory) -> Weights:
        """Encode some Gaussian matrices and copy them until the BF16 form fills ``megabytes``."""
        memory.clear()
        count = -(-megabytes * 10**6 // (2 * rows * columns))
        sections, raw = [], []
        distinct = []
        for seed in range(min(DISTINCT, count)):
            values = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)
            words = round_to_bfloat16(values * np.float32(0.02))
            distinct.append((words, _native.encode("fx3", words)[0][0][1]))
        for i in range(count):
            words, section = distinct[i % len(distinct)]
            raw.append(memory.copy(words.view(np.uint8).ravel()).view(np.uint16).reshape(rows, columns))
            sections.append(memory.copy(section, tail_bytes=TAIL_BYTES))
        return cls(rows, columns, sections, raw, [torch.from_numpy(words).view(torch.bfloat16) for words in raw])


def seconds_per_matrix(call: Call, count: int) -> float:
    """Call it for every matrix, threads awake; seconds per call."""
    time.sleep(PAUSE_SECONDS)
    for i in range(WARM_UP_CALLS):
        call(i % count)
    begin = time.perf_counter()
    for i in range(count):
        call(i)
    return (time.perf_counter() - begin) / count


def calls_of(weights: Weights, tokens: int, threads: _native.ComputeThreads) -> dict[str, Call]:
    """Every method on the same inputs; results are BF16."""
    rows, columns = weights.rows, weights.columns
    x = round_to_bfloat16(np.random.default_rng(7).standard_normal((tokens, columns), dtype=np.float32))
    x_tensor = torch.from_numpy(x).view(torch.bfloat16)
    out = np.empty((tokens, rows), np.uint16)
    calls: dict[str, Call] = {
        "fused": lambda i: _native.fx3_gemv(weights.sections[i], rows, columns, x, out, threads),
        "raw": lambda i: _native.bfloat16_gemv(weights.raw[i], x, out, threads),
        "torch": lambda i: torch.nn.functional.linear(x_tensor, weights.tensors[i]),
    }
    calls["fused"](0)
    fused = out.copy()
    calls["raw"](0)
    if not np.array_equal(fused, out):
        raise SystemExit("fused and raw results differ")
    return calls


def read_rate(work: _native.TimedWork, memory: np.ndarray) -> float:
    """GB/s of reading, nothing else."""
    units = memory.nbytes // MIB
    return units * MIB / work.read_memory(memory[: units * MIB], units) / 1e9


def measure(weights: Weights, memory: np.ndarray, rounds: int, thread_counts: list[int]) -> list[Measured]:
    """All numbers of tokens and threads of one shape, interleaved."""
    count = len(weights.raw)
    results, calls, works = [], [], []
    for threads in thread_counts:
        pool, work = _native.ComputeThreads(threads), _native.TimedWork(threads)
        for tokens in range(1, _native.GEMV_TOKENS_MAX + 1):
            packed_bytes = sum(section.nbytes for section in weights.sections) / count
            shape = (weights.rows, weights.columns)
            results.append(Measured(*shape, tokens, threads, count, 2 * shape[0] * shape[1], packed_bytes))
            calls.append(calls_of(weights, tokens, pool))
            works.append(work)
    for _ in range(rounds):
        for result, methods, work in zip(results, calls, works, strict=True):
            torch.set_num_threads(result.threads)
            for method, call in methods.items():
                result.seconds[method].append(seconds_per_matrix(call, count))
            result.read_gigabytes_per_second.append(read_rate(work, memory))
    return results


def processor() -> str:
    """The processor's name as the kernel states it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def show(result: Measured) -> None:
    """One line of the table."""
    read = statistics.median(result.read_gigabytes_per_second)
    times = "  ".join(
        f"{method} {statistics.median(result.seconds[method]) * 1e6:7.1f} us {result.rate(method):5.1f} GB/s"
        for method in METHODS
    )
    where = f"{result.rows:>6} x {result.columns}  {result.tokens} tokens  {result.threads} threads"
    faster = f"raw {result.faster_than('raw'):4.2f}x  torch {result.faster_than('torch'):4.2f}x"
    print(f"{where}  {times}  read {read:5.1f} GB/s  fused is faster than {faster}", flush=True)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Fused FX3 against raw BF16 against torch.")
    parser.add_argument("--megabytes", type=int, default=420, help="BF16 weights that go by in turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shapes", nargs="*", help="ROWSxCOLUMNS, instead of Qwen1.5-MoE's")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    shapes = [tuple(map(int, text.split("x"))) for text in arguments.shapes] if arguments.shapes else list(SHAPES)
    thread_counts = sorted({1, len(os.sched_getaffinity(0))})

    largest = max(2 * rows * columns for rows, columns in shapes)
    memory = TouchedMemory(int(1.8 * (arguments.megabytes * 10**6 + largest)))
    everything = memory.take(memory.capacity_bytes)
    print(f"processor {processor()}, kernels {_native.gemv_instruction_set()}, torch {torch.__version__}")
    print(f"{arguments.megabytes} MB of BF16 weights in turn, {arguments.rounds} rounds, medians\n", flush=True)
    results = []
    for rows, columns in shapes:
        weights = Weights.lay_out(rows, columns, arguments.megabytes, memory)
        part = measure(
            weights, everything[: weights.rows * columns * 2 * len(weights.raw)], arguments.rounds, thread_counts
        )
        for result in part:
            show(result)
        results += part
    if arguments.json:
        report = {
            "processor": processor(),
            "kernels": _native.gemv_instruction_set(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "megabytes": arguments.megabytes,
            "rounds": arguments.rounds,
            "results": [
                asdict(result)
                | {
                    "fused_faster_than_raw": result.faster_than("raw"),
                    "fused_faster_than_torch": result.faster_than("torch"),
                }
                for result in results
            ],
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {arguments.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
