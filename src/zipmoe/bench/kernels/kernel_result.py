"""A run of all kernel benchmarks, and what came of it, raw."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch

from zipmoe import _native
from zipmoe._version import __version__
from zipmoe.bench.kernels.decode_rates import DecodeRates, measure_decoding
from zipmoe.bench.kernels.product_methods import Form, default_tokens, instruction_sets
from zipmoe.bench.kernels.product_rates import ProductRates, ProductTimes, measure_products
from zipmoe.bench.kernels.rotating_weights import memory_bytes
from zipmoe.bench.other_load import LoadBesideWorkers
from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.device import host_fingerprint
from zipmoe.profiling.touched_memory import TouchedMemory

RESULT_VERSION = 1
SHAPES = ((1408, 2048), (2816, 2048), (2048, 1408), (2048, 2048))
"""Qwen1.5-MoE-A2.7B: gate or up, gate and up, down of an expert; an attention projection."""


@dataclass(frozen=True)
class KernelPlan:
    """What is measured."""

    shapes: tuple[tuple[int, int], ...] = SHAPES
    """Rows (outputs) and columns (inputs)."""
    tokens: tuple[int, ...] = field(default_factory=default_tokens)
    megabytes: int = 420
    rounds: int = 7
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """"All cores"."""
    codecs: bool = True
    """Whether decoding is measured, too."""

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        for name, value in (("--rounds", self.rounds), ("--threads", self.threads), ("--megabytes", self.megabytes)):
            if value < 1:
                raise InvalidArgumentError(f"{name} {value} is not a positive number")
        if not self.shapes or not all(rows > 0 and columns > 0 for rows, columns in self.shapes):
            raise InvalidArgumentError("a shape is ROWSxCOLUMNS, such as 1408x2048")
        if not self.tokens or min(self.tokens) < 1:
            raise InvalidArgumentError("numbers of tokens are positive")


@dataclass(frozen=True)
class KernelResult:
    """What was found."""

    plan: KernelPlan
    names: tuple[str, ...]
    """Instruction sets, the best one first."""
    products: tuple[ProductRates, ...]
    decoding: tuple[DecodeRates, ...]
    other_cores_busy: float

    def heading(self) -> list[str]:
        """What stands on top of every report."""
        plan = self.plan
        return [
            f"machine   {host_fingerprint().describe()}, kernels {', '.join(self.names)}; torch {torch.__version__}",
            f"memory    gave {self._read_rates()} GB/s in the same rounds: the best rate of each",
            f"products  {plan.megabytes} MB of BF16 weights in turn, interleaved rounds ({plan.rounds}), medians; "
            "ratios within a round",
            f"others    kept {self.other_cores_busy:.1f} cores busy meanwhile",
        ]

    def _read_rates(self) -> str:
        threads = sorted({rates.threads for rates in self.products})
        return ", ".join(f"{self.memory_bytes_per_second(count) / 1e9:.1f} ({_cores(count)})" for count in threads)

    def memory_bytes_per_second(self, threads: int) -> float:
        """Best rate of each round with so many threads: median over all rounds."""
        rates = [rate for each in self.products if each.threads == threads for rate in each.memory_bytes_per_second]
        return statistics.median(rates)

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        plan = self.plan
        return {
            "zipmoe_bench_kernels": RESULT_VERSION,
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "zipmoe_version": __version__,
            "machine": {
                **asdict(host_fingerprint()),
                "kernel": os.uname().release,
                "python": platform.python_version(),
                "torch": str(torch.__version__),
            },
            "settings": asdict(plan),
            "instruction_sets": list(self.names),
            "other_cores_busy": self.other_cores_busy,
            "products": [_product(rates) for rates in self.products],
            "decoding": [_decoding(rates) for rates in self.decoding],
        }


def run_kernels(plan: KernelPlan, tell: Callable[[str], None] = lambda line: None) -> KernelResult:
    """Measure everything; ``tell`` hears what is done."""
    names = instruction_sets()
    load = LoadBesideWorkers()
    memory = TouchedMemory(memory_bytes(list(plan.shapes), plan.megabytes))
    products = measure_products(
        plan.shapes,
        memory,
        megabytes=plan.megabytes,
        tokens=plan.tokens,
        thread_counts=sorted({1, plan.threads}),
        names=names,
        rounds=plan.rounds,
        tell=lambda rates: tell(f"products of {rates[0].rows} x {rates[0].columns}: done"),
    )
    decoding: list[DecodeRates] = []
    if plan.codecs:
        decoding = measure_decoding(_native.instruction_sets(), plan.threads, plan.rounds)
        tell("decoding: done")
    return KernelResult(plan, names, tuple(products), tuple(decoding), load.cores())


def _cores(count: int) -> str:
    return "one core" if count == 1 else f"{count} cores"


def _product(rates: ProductRates) -> dict[str, Any]:
    return {
        "rows": rates.rows,
        "columns": rates.columns,
        "tokens": rates.tokens,
        "threads": rates.threads,
        "matrices": rates.matrices,
        "read_bytes_per_second": rates.read_bytes_per_second,
        "memory_bytes_per_second": rates.memory_bytes_per_second,
        "methods": [_method(rates, times) for times in rates.times],
    }


def _method(rates: ProductRates, times: ProductTimes) -> dict[str, Any]:
    raw = rates.of(Form.RAW, times.method.instruction_set)
    torch_times = rates.of(Form.TORCH)
    return {
        "form": times.method.form.value,
        "instruction_set": times.method.instruction_set,
        "read_bytes": times.read_bytes,
        "seconds": times.seconds,
        "median_seconds": times.median_seconds,
        "bytes_per_second": times.bytes_per_second,
        "achieved_over_floor": rates.achieved_over_floor(times),
        "faster_than_raw": None if raw is None else times.faster_than(raw),
        "faster_than_torch": None if torch_times is None else times.faster_than(torch_times),
    }


def _decoding(rates: DecodeRates) -> dict[str, Any]:
    return {
        "key": rates.key,
        **asdict(rates.settings),
        "ratio": rates.ratio,
        "bfloat16_bytes": rates.bfloat16_bytes,
        "one_core_seconds": rates.one_core_seconds,
        "one_core_bytes_per_second": {name: rates.one_core_bytes_per_second(name) for name in rates.one_core_seconds},
        "all_cores": rates.all_cores,
        "all_cores_seconds": rates.all_cores_seconds,
        "all_cores_bytes_per_second": rates.all_cores_bytes_per_second,
    }
