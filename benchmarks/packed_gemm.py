"""Compare y = W x on packed weights, for one to hundreds of rows of inputs, with what else could be done with them.

``packed``: the native product on FX3 as it lies in memory. ``raw``: the native product on BF16. ``decoded``: FX3 is
decoded to a buffer and multiplied there by ``F.linear``, as the mode ``exact`` does it. ``torch``: ``F.linear`` on BF16
weights, which need more memory. The inputs are the same, and more weights than any cache holds go by in turn. In every
round each method sees some matrices, the methods in turn, and ratios are taken within a round, so that a machine that
speeds up or slows down meanwhile does not favour anyone.

Run: python benchmarks/packed_gemm.py [--instruction-set avx2] [--threads 2]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from result_document import add_result_options, earlier_results, table, this_machine, write_results

from zipmoe import _native
from zipmoe.bench.kernels.kernel_result import SHAPES
from zipmoe.bench.kernels.rotating_weights import RotatingWeights, lay_out, memory_bytes
from zipmoe.codecs.fx3_gemv import round_to_bfloat16
from zipmoe.profiling.touched_memory import TouchedMemory

INPUT_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 34, 64, 128, 256, 512)
METHODS = ("packed", "raw", "decoded", "torch")
LEAST_SECONDS = 0.02
"""Of one method in one round: that many matrices go by."""

_PAUSE_SECONDS = 0.004
_WARM_UP_CALLS = 3

Call = Callable[[int], object]


@dataclass
class Measured:
    """One shape and number of rows of inputs; seconds per product of every round."""

    rows: int
    columns: int
    input_rows: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {method: [] for method in METHODS})

    def faster_than(self, method: str) -> float:
        """Median over the rounds of the method's time divided by the packed product's."""
        pairs = zip(self.seconds[method], self.seconds["packed"], strict=True)
        return statistics.median(other / own for other, own in pairs)

    def gigaflops(self, method: str) -> float:
        """10^9 operations a second, a multiplication and an addition counting as two."""
        operations = 2 * self.rows * self.columns * self.input_rows
        return operations / statistics.median(self.seconds[method]) / 1e9


def seconds_per_matrix(call: Call, count: int) -> float:
    """Call it for ``count`` matrices, threads awake; seconds per call."""
    time.sleep(_PAUSE_SECONDS)
    for i in range(_WARM_UP_CALLS):
        call(i % count)
    begin = time.perf_counter()
    for i in range(count):
        call(i)
    return (time.perf_counter() - begin) / count


def calls_of(
    weights: RotatingWeights, input_rows: int, threads: _native.ComputeThreads, decoder: Any, instruction_set: str
) -> dict[str, Call]:
    """Every method on the same inputs; results are BF16. The packed and the raw result must be the same bits."""
    rows, columns = weights.rows, weights.columns
    x = round_to_bfloat16(np.random.default_rng(7).standard_normal((input_rows, columns), dtype=np.float32))
    x_tensor = torch.from_numpy(x).view(torch.bfloat16)
    out = np.empty((input_rows, rows), np.uint16)
    scratch = np.empty(rows * columns, np.uint16)
    scratch_tensor = torch.from_numpy(scratch).view(torch.bfloat16).view(rows, columns)

    def packed(i: int) -> None:
        _native.fx3_gemv(weights.sections[i], rows, columns, x, out, threads, instruction_set=instruction_set)

    def raw(i: int) -> None:
        _native.bfloat16_gemv(weights.raw[i], x, out, threads, instruction_set=instruction_set)

    def decoded(i: int) -> torch.Tensor:
        decoder.decode([(rows, columns, [weights.sections[i]], [])], 1, scratch)
        return torch.nn.functional.linear(x_tensor, scratch_tensor)

    packed(0)
    own = out.copy()
    raw(0)
    if not np.array_equal(own, out):
        raise SystemExit("packed and raw results differ")
    difference = torch.from_numpy(own).view(torch.bfloat16).float() - decoded(0).float()
    if difference.abs().max().item() > 0.05:
        raise SystemExit("the native product and F.linear differ")
    return {
        "packed": packed,
        "raw": raw,
        "decoded": decoded,
        "torch": lambda i: torch.nn.functional.linear(x_tensor, weights.tensors[i]),
    }


def measure(
    weights: RotatingWeights, input_rows: list[int], rounds: int, threads: int, instruction_set: str
) -> list[Measured]:
    """All numbers of rows of one shape, interleaved."""
    pool, decoder = _native.ComputeThreads(threads), _native.TimedDecoder("fx3", threads)
    torch.set_num_threads(threads)
    results = [Measured(weights.rows, weights.columns, number) for number in input_rows]
    calls = [calls_of(weights, number, pool, decoder, instruction_set) for number in input_rows]
    begin = 0
    for _ in range(rounds):
        for result, methods in zip(results, calls, strict=True):
            for method in METHODS:
                call = methods[method]
                count = len(weights.raw)
                if result.seconds[method]:
                    count = min(count, int(LEAST_SECONDS / result.seconds[method][-1]) + 1)
                elif result.input_rows > 16:
                    count = min(count, 4)
                first = begin
                result.seconds[method].append(
                    seconds_per_matrix(lambda i, call=call, first=first: call((first + i) % len(weights.raw)), count)
                )
                begin += count  # the next one sees matrices that no cache holds
    return results


def tables(runs: dict[str, Any]) -> str:
    """The generated part of the document: one section for each run that the JSON holds."""
    parts = []
    for name, run in runs.items():
        rows = [
            [
                f"{result['rows']} x {result['columns']}",
                result["input_rows"],
                *(f"{result['microseconds'][method]:.0f}" for method in METHODS),
                f"{result['gigaflops']:.0f}",
                *(f"{result['faster_than'][method]:.2f}" for method in METHODS[1:]),
            ]
            for result in run["results"]
        ]
        header = ["shape", "rows of inputs", *(f"{method} us" for method in METHODS), "packed GFLOP/s"]
        header += [f"packed faster than {method}" for method in METHODS[1:]]
        machine = run["machine"]
        parts.append(
            f"## {name}\n{machine['processor']}, {machine['cores']} cores; {run['rounds']} rounds, medians; "
            f"{run['megabytes']} MB of BF16 in turn.\n\n{table(header, rows)}"
        )
    return "\n".join(parts)


def main() -> None:
    """Measure, print, write the JSON and the document's tables."""
    parser = argparse.ArgumentParser(description="Packed products for many rows against decoding and F.linear.")
    parser.add_argument("--megabytes", type=int, default=420, help="BF16 weights that go by in turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--instruction-set", default="", help="of the native products; by default the best")
    parser.add_argument("--input-rows", type=int, nargs="*", default=list(INPUT_ROWS))
    parser.add_argument("--shapes", nargs="*", help="ROWSxCOLUMNS, instead of Qwen1.5-MoE's")
    parser.add_argument("--dry", action="store_true", help="print only, write nothing")
    add_result_options(parser, "packed_gemm")
    arguments = parser.parse_args()
    shapes = [tuple(map(int, text.split("x"))) for text in arguments.shapes] if arguments.shapes else list(SHAPES)
    kernels = _native.gemv_instruction_set(arguments.instruction_set)

    memory = TouchedMemory(memory_bytes(shapes, arguments.megabytes))
    results: list[Measured] = []
    print(
        f"{this_machine()['processor']}, {kernels}, {arguments.threads} threads, torch {torch.__version__}", flush=True
    )
    for rows, columns in shapes:
        weights = lay_out(rows, columns, arguments.megabytes, memory)
        part = measure(weights, arguments.input_rows, arguments.rounds, arguments.threads, arguments.instruction_set)
        for result in part:
            times = "  ".join(f"{method} {statistics.median(result.seconds[method]) * 1e6:8.1f}" for method in METHODS)
            faster = "  ".join(f"{method} {result.faster_than(method):4.2f}x" for method in METHODS[1:])
            print(
                f"{rows:>5} x {columns}  {result.input_rows:>3} rows  us: {times}"
                f"  {result.gigaflops('packed'):6.0f} GFLOP/s  packed is faster than {faster}",
                flush=True,
            )
        results += part
    if arguments.dry:
        return
    runs = earlier_results(arguments.json, "runs")
    runs[f"{kernels}, {arguments.threads} threads"] = {
        "machine": this_machine(),
        "torch": torch.__version__,
        "megabytes": arguments.megabytes,
        "rounds": arguments.rounds,
        "results": [
            asdict(result)
            | {
                "microseconds": {m: statistics.median(result.seconds[m]) * 1e6 for m in METHODS},
                "gigaflops": result.gigaflops("packed"),
                "faster_than": {m: result.faster_than(m) for m in METHODS[1:]},
            }
            for result in results
        ],
    }
    title = "Products with packed weights for many rows of inputs"
    write_results(arguments.json, arguments.document, title, {"runs": runs}, tables(runs))


if __name__ == "__main__":
    main()
