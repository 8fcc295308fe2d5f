"""Our engine against llama.cpp, Accelerate and plain Transformers, each under the same memory limit: the targets.

    python benchmarks/against_baselines.py --tools FOLDER_OF_THE_TOOLS --work FOLDER_WITH_25_GB \
        --python PYTHON_WITH_LLAMA_CPP --llama-source VENDOR_LLAMA_CPP

The model has the shape of Qwen1.5-MoE-A2.7B cut to six layers (``make-model``). All contenders run in turn through
``zipmoe.bench``, page cache included in every limit; numbers are medians over three prompts that stay on one topic
each. Prints one line per target with what was measured and whether it holds, writes docs/results/against_baselines.json
with everything raw, and exits with 1 if a target is missed. Needs root (control groups, read-ahead of the disk).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zipmoe.bench.benchmark import Benchmark, BenchmarkPlan
from zipmoe.bench.comparison import Row
from zipmoe.bench.contenders import Contender, Models, WorkerCommands
from zipmoe.bench.control_group import GroupParent, find_parent
from zipmoe.bench.machine_rates import RateProbe
from zipmoe.bench.markdown_report import markdown
from zipmoe.bench.memory_levels import memory_levels
from zipmoe.bench.other_load import LoadBesideWorkers
from zipmoe.bench.prompts import topic_prompts
from zipmoe.bench.read_ahead import read_ahead_kib
from zipmoe.bench.result_file import BenchmarkResult
from zipmoe.store.packed_folder import PackedFolder

RESULTS = Path(__file__).parent.parent / "docs" / "results"
TOPICS, VOCABULARY = (7, 11, 23), 151936
LEVELS = "25%,50%,75%,fits"


@dataclass(frozen=True)
class Verdict:
    """One target and what became of it."""

    target: str
    measured: str
    holds: bool

    def line(self) -> str:
        """For people."""
        return f"{'ok    ' if self.holds else 'MISSED'} {self.target}: {self.measured}"


def at_least(target: str, value: float | None, wanted: float) -> Verdict:
    """A factor that must be reached; what could not be measured does not hold."""
    return Verdict(f"{target} >= {wanted:g}x", _factor(value), value is not None and value >= wanted)


def at_most(target: str, value: float | None, wanted: float) -> Verdict:
    """A factor that must not be exceeded."""
    return Verdict(f"{target} <= {wanted:g}x", _factor(value), value is not None and value <= wanted)


def _factor(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}x"


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """None if one of the two is missing."""
    return numerator / denominator if numerator is not None and denominator else None


class Rows:
    """Rows by contender, level and batch."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {(row.contender, row.level, row.batch): row for row in rows}
        self.levels = list(dict.fromkeys(row.level for row in rows))

    def value(self, contender: Contender, level: str, field: str, batch: int = 1) -> Any:
        """A field of a row; None if there is no such row."""
        row = self._rows.get((contender.value, level, batch))
        return None if row is None else getattr(row, field)

    def over(self, other: Contender, level: str, field: str) -> float | None:
        """Another contender's value over ours."""
        return ratio(self.value(other, level, field), self.value(Contender.ZIPMOE, level, field))

    def under(self, other: Contender, level: str, field: str) -> float | None:
        """Our value over another contender's."""
        return ratio(self.value(Contender.ZIPMOE, level, field), self.value(other, level, field))


def latency_verdicts(rows: Rows) -> list[Verdict]:
    """Single prompts of 64 tokens at all levels."""
    llama, accelerate, plain = Contender.LLAMA_CPP, Contender.ACCELERATE, Contender.TRANSFORMERS
    found = [
        at_least(f"{level}: tokens faster than llama.cpp's", rows.over(llama, level, "tpot_seconds"), wanted)
        for level, wanted in (("25%", 6), ("50%", 5), ("75%", 4))
    ]
    found += [
        at_least(f"{level}: tokens faster than Accelerate's", rows.over(accelerate, level, "tpot_seconds"), 7)
        for level in ("50%", "75%")
    ]
    found += [
        at_most("fits: TPOT over llama.cpp's", rows.under(llama, "fits", "tpot_seconds"), 0.8),
        at_most("fits: TPOT over plain Transformers'", rows.under(plain, "fits", "tpot_seconds"), 0.3),
        at_most("fits: peak memory over llama.cpp's", rows.under(llama, "fits", "peak_bytes"), 0.75),
    ]
    return found + [_within_limit(rows, level) for level in rows.levels] + _disk_verdicts(rows)


def _within_limit(rows: Rows, level: str) -> Verdict:
    peak = rows.value(Contender.ZIPMOE, level, "peak_bytes")
    limit = rows.value(Contender.ZIPMOE, level, "limit_bytes")
    reason = rows.value(Contender.ZIPMOE, level, "reason")
    holds = peak is not None and limit is not None and peak <= limit and reason is None
    measured = reason or ("not measured" if peak is None else f"{peak / 1e9:.3f} of {limit / 1e9:.3f} GB")
    return Verdict(f"{level}: peak memory within the limit, page cache included, nothing killed", measured, holds)


def _disk_verdicts(rows: Rows) -> list[Verdict]:
    """Where misses dominate, which the disk's part of the floor shows, time is bounded by the disk's rate."""
    found = []
    for level in rows.levels:
        floor = rows.value(Contender.ZIPMOE, level, "roofline")
        if floor is not None and floor.bound_by == "disk":
            value = floor.achieved_seconds / floor.disk_seconds
            found.append(at_most(f"{level}: time per token over missed bytes / direct read rate", value, 1.25))
    return found or [Verdict("misses dominate somewhere", "the disk bounds no level", False)]


def first_token_verdicts(rows: Rows, tokens: int) -> list[Verdict]:
    """TTFT at 50 %."""
    value = rows.over(Contender.LLAMA_CPP, "50%", "best_ttft_seconds")
    floor = rows.value(Contender.ZIPMOE, "50%", "prefill")
    return [
        at_least(f"50%: first token after {tokens} tokens faster than llama.cpp's", value, 2.5),
        at_most(
            f"50%: first token after {tokens} tokens over max(compressed bytes read / disk rate, FLOPs / GEMM rate)",
            None if floor is None else floor.achieved_over_floor,
            1.3,
        ),
    ]


def batch_verdicts(rows: Rows) -> list[Verdict]:
    """Throughput at batch 16 over batch 1."""
    found = []
    for level, wanted in (("50%", 1.8), ("fits", 3.5)):
        many = rows.value(Contender.ZIPMOE, level, "tokens_per_second", 16)
        one = rows.value(Contender.ZIPMOE, level, "tokens_per_second", 1)
        found.append(at_least(f"{level}: throughput of batch 16 over batch 1", ratio(many, one), wanted))
    return found


class Bench:
    """The models, and the machine that everything is measured on."""

    def __init__(self, options: argparse.Namespace, models: Models, parent: GroupParent) -> None:
        self._options = options
        self._models = models
        self._parent = parent
        folder = PackedFolder.open(models.packed)
        self._source_bytes = folder.manifest.source_bytes
        self._rates = RateProbe(folder)
        python = options.python
        self._commands = WorkerCommands({} if python is None else {Contender.LLAMA_CPP.value: str(python)})

    def measure(
        self,
        levels: str,
        contenders: Sequence[Contender],
        *,
        prompt_tokens: int = 64,
        batches: tuple[int, ...] = (1,),
    ) -> BenchmarkResult:
        """One benchmark."""
        options = self._options
        plan = BenchmarkPlan(
            self._models,
            memory_levels(levels, self._source_bytes),
            topic_prompts(TOPICS, max(batches), prompt_tokens, VOCABULARY),
            tuple(contenders),
            new_tokens=32,
            batches=batches,
            rounds=options.rounds,
            read_aheads=tuple(int(part) for part in options.read_ahead_kib.split(",") if part),
            cpu_shares=tuple(float(part) for part in options.accelerate_share.split(",")),
            work_folder=options.work,
        )
        load = LoadBesideWorkers()
        told = lambda line: print(f"       {line}", flush=True)  # noqa: E731
        benchmark = Benchmark(plan, self._parent, commands=self._commands, rate_probe=self._rates, tell=told)
        measured = tuple(benchmark.run())
        return BenchmarkResult(plan, measured, True, read_ahead_kib(self._models.packed), load.cores())


def prepare(options: argparse.Namespace) -> Models:
    """Make what is not there yet: the model, its packed form, its GGUF."""
    source = options.model or options.work / "qwen-moe-6-layers"
    packed = options.packed or options.work / "packed-fx3"
    gguf = options.gguf or options.work / "qwen-moe-6-layers.gguf"
    python = str(options.python or sys.executable)
    if not (source / "config.json").exists():
        _step("making the model", sys.executable, options.tools / "make-model", "--layers", 6, "--out", source)
    if not (packed / "zipmoe.json").exists():
        _step("packing", sys.executable, "-m", "zipmoe", "pack", source, packed)
    if not gguf.exists():
        if options.llama_source is None:
            raise SystemExit(f"there is no {gguf.name}: give --gguf, or --llama-source to convert the model")
        converter = options.converter_python or python
        _step("converting to GGUF", converter, options.tools / "to_gguf.py", options.llama_source, source, gguf)
    return Models(packed, source, gguf)


def _step(what: str, *command: Any) -> None:
    print(f"{what} ...", flush=True)
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{what} failed:\n{done.stderr[-2000:]}")


def run(options: argparse.Namespace) -> int:
    """Measure and judge; 0 if all targets hold."""
    models = prepare(options)
    everybody = (Contender.ZIPMOE, Contender.TRANSFORMERS, Contender.ACCELERATE, Contender.LLAMA_CPP)
    verdicts: list[Verdict] = []
    results: dict[str, BenchmarkResult] = {}

    def judge(name: str, result: BenchmarkResult, found: list[Verdict]) -> None:
        results[name] = result
        verdicts.extend(found)
        for verdict in found:
            print(verdict.line(), flush=True)

    with find_parent() as parent:
        bench = Bench(options, models, parent)
        single = bench.measure(LEVELS, everybody)
        rows = Rows(single.rows)
        judge("prompts of 64 tokens", single, latency_verdicts(rows) + first_token_verdicts(rows, 64))
        long = bench.measure("50%", (Contender.ZIPMOE, Contender.LLAMA_CPP), prompt_tokens=512)
        judge("prompts of 512 tokens", long, first_token_verdicts(Rows(long.rows), 512))
        many = bench.measure("50%,fits", (Contender.ZIPMOE,), batches=(1, 4, 16))
        judge("batches", many, batch_verdicts(Rows(many.rows)))
    raw = {
        "targets": [vars(verdict) for verdict in verdicts],
        "benchmarks": {name: result.to_json() for name, result in results.items()},
    }
    options.json.write_text(json.dumps(raw, indent=1) + "\n")
    texts = [markdown(result).replace("# zipmoe bench", f"# {name}", 1) for name, result in results.items()]
    targets = "# Targets\n\n" + "\n".join(f"- {verdict.line()}" for verdict in verdicts) + "\n"
    options.markdown.write_text("\n".join([targets, *texts]))
    return 0 if all(verdict.holds for verdict in verdicts) else 1


def main() -> int:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=Path, required=True, help="folder of make-model and to_gguf.py")
    parser.add_argument("--work", type=Path, required=True, help="folder for models, on the disk that is measured")
    parser.add_argument("--model", type=Path, help="the checkpoint, if make-model has run already")
    parser.add_argument("--packed", type=Path, help="its packed form, if there is one already")
    parser.add_argument("--gguf", type=Path, help="its GGUF, if there is one already")
    parser.add_argument("--python", type=Path, help="interpreter that has llama_cpp")
    parser.add_argument("--llama-source", type=Path, help="llama.cpp's source (vendor/llama.cpp of llama-cpp-python)")
    parser.add_argument("--converter-python", type=Path, help="interpreter for the conversion [default: --python]")
    parser.add_argument("--read-ahead-kib", default="128,8192", help="settings that mapped contenders are tried in")
    parser.add_argument("--accelerate-share", default="0.3", help="shares of the limit that Accelerate is tried with")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS / "against_baselines.json")
    parser.add_argument("--markdown", type=Path, default=RESULTS / "against_baselines.md")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
