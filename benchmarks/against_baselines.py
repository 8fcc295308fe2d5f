"""Our engine against llama.cpp, Accelerate and plain Transformers, each under the same memory limit: the targets.

    python benchmarks/against_baselines.py --tools FOLDER_OF_THE_TOOLS --work FOLDER_WITH_25_GB \
        --python PYTHON_WITH_LLAMA_CPP --llama-source VENDOR_LLAMA_CPP

The model has the shape of Qwen1.5-MoE-A2.7B cut to six layers (``make-model``). All contenders run in turn through
``zipmoe.bench``, page cache included in every limit; numbers are medians over three prompts that stay on one topic
each. Prints one line per target with what was measured and whether it holds, writes docs/results/against_baselines.json
with everything raw, and exits with 1 if a target is missed. Needs root (control groups, read-ahead of the disk).

Mapped contenders and Accelerate are tried in all settings by short runs, and measured in their best one. ``--quick``
tries settings at 50 % only and uses what is best there at 25 and 75 %, too, and leaves out plain Transformers where it
is known to be killed. DeepSpeed and AirLLM, which take seconds per token, are measured with one prompt and four tokens
if their interpreters are named. How long it will take is said at the start, judged by the last result.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zipmoe.bench.benchmark import Benchmark, BenchmarkPlan
from zipmoe.bench.comparison import Row
from zipmoe.bench.contenders import Contender, Models, WorkerCommands
from zipmoe.bench.control_group import GroupParent, find_parent
from zipmoe.bench.ended_by_signals import ended_by_signals
from zipmoe.bench.expected_duration import expected_seconds
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
_DOMINANT = 2
"""Misses dominate where the disk needs so many times as long for them as memory for all active weights."""
LEVELS = "25%,50%,75%,fits"
SHORT, LONG, BATCHES = "prompts of 64 tokens", "prompts of 512 tokens", "batches"


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
    llama, accelerate = Contender.LLAMA_CPP, Contender.ACCELERATE
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
        _over_plain(rows, 0.3),
        at_most("fits: peak memory over llama.cpp's", rows.under(llama, "fits", "peak_bytes"), 0.75),
    ]
    return found + [_within_limit(rows, level) for level in rows.levels] + _disk_verdicts(rows)


def _over_plain(rows: Rows, wanted: float) -> Verdict:
    """What reading the weights alone would take is told beside it: where the cores share one way to memory, that is as
    much as is wanted (docs/results/when_all_fits.md).
    """
    plain = Contender.TRANSFORMERS
    found = at_most("fits: TPOT over plain Transformers'", rows.under(plain, "fits", "tpot_seconds"), wanted)
    floor = rows.value(Contender.ZIPMOE, "fits", "roofline")
    alone = ratio(None if floor is None else floor.memory_seconds, rows.value(plain, "fits", "tpot_seconds"))
    measured = found.measured if alone is None else f"{found.measured} (weights at the rate of memory: {alone:.2f}x)"
    return replace(found, measured=measured)


def _within_limit(rows: Rows, level: str) -> Verdict:
    peak = rows.value(Contender.ZIPMOE, level, "peak_bytes")
    limit = rows.value(Contender.ZIPMOE, level, "limit_bytes")
    reason = rows.value(Contender.ZIPMOE, level, "reason")
    holds = peak is not None and limit is not None and peak <= limit and reason is None
    measured = reason or ("not measured" if peak is None else f"{peak / 1e9:.3f} of {limit / 1e9:.3f} GB")
    return Verdict(f"{level}: peak memory within the limit, page cache included, nothing killed", measured, holds)


def _disk_verdicts(rows: Rows) -> list[Verdict]:
    """Where misses dominate, time is bounded by the disk's rate."""
    found = []
    for level in rows.levels:
        floor = rows.value(Contender.ZIPMOE, level, "roofline")
        if floor is not None and floor.disk_seconds >= _DOMINANT * floor.memory_seconds:
            value = floor.achieved_seconds / floor.disk_seconds
            found.append(at_most(f"{level}: time per token over missed bytes / direct read rate", value, 1.25))
    return found or [Verdict("misses dominate somewhere", "the disk bounds no level", False)]


def first_token_verdicts(rows: Rows, tokens: int) -> list[Verdict]:
    """TTFT at 50 %."""
    value = rows.over(Contender.LLAMA_CPP, "50%", "best_ttft_seconds")
    floor = rows.value(Contender.ZIPMOE, "50%", "prefill")
    over_floor = at_most(
        f"50%: first token after {tokens} tokens over max(compressed bytes read / disk rate, FLOPs / GEMM rate)",
        None if floor is None else floor.achieved_over_floor,
        1.3,
    )
    if floor is not None:
        strict = f"without what the last layer need not compute: {_factor(floor.achieved_over_strict_floor)}"
        over_floor = replace(over_floor, measured=f"{over_floor.measured} ({strict})")
    return [at_least(f"50%: first token after {tokens} tokens faster than llama.cpp's", value, 2.5), over_floor]


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

    def __init__(self, options: argparse.Namespace, models: Models) -> None:
        self._options = options
        self._models = models
        self._folder = PackedFolder.open(models.packed)
        pythons = {
            Contender.LLAMA_CPP: options.python,
            Contender.DEEPSPEED: options.deepspeed_python,
            Contender.AIRLLM: options.airllm_python,
        }
        self._interpreters = {name: str(path) for name, path in pythons.items() if path is not None}
        self._commands = WorkerCommands({name.value: path for name, path in self._interpreters.items()})

    def plans(self) -> dict[str, BenchmarkPlan]:
        """The three benchmarks by name."""
        everybody = [Contender.ZIPMOE, Contender.TRANSFORMERS, Contender.ACCELERATE, Contender.LLAMA_CPP]
        everybody += [contender for contender in self._interpreters if contender.slow]
        return {
            SHORT: self._plan(LEVELS, everybody),
            LONG: self._plan("50%", (Contender.ZIPMOE, Contender.LLAMA_CPP), prompt_tokens=512),
            BATCHES: self._plan("50%,fits", (Contender.ZIPMOE,), batches=(1, 4, 16)),
        }

    def _plan(
        self,
        levels: str,
        contenders: Sequence[Contender],
        *,
        prompt_tokens: int = 64,
        batches: tuple[int, ...] = (1,),
    ) -> BenchmarkPlan:
        options = self._options
        return BenchmarkPlan(
            self._models,
            memory_levels(levels, self._folder.manifest.source_bytes),
            topic_prompts(TOPICS, max(batches), prompt_tokens, VOCABULARY),
            tuple(contenders),
            new_tokens=options.new_tokens,
            batches=batches,
            rounds=options.rounds,
            read_aheads=tuple(int(part) for part in options.read_ahead_kib.split(",") if part),
            cpu_shares=tuple(float(part) for part in options.accelerate_share.split(",")),
            work_folder=options.work,
            trial_tokens=options.trial_tokens,
            trial_levels=("50%",) if options.quick else None,
            only_where_it_fits=(Contender.TRANSFORMERS,) if options.quick else (),
        )

    def measure(self, plan: BenchmarkPlan, parent: GroupParent, rates: RateProbe) -> BenchmarkResult:
        """One benchmark."""
        load = LoadBesideWorkers()
        told = lambda line: print(f"       {line}", flush=True)  # noqa: E731
        measured = tuple(Benchmark(plan, parent, commands=self._commands, rate_probe=rates, tell=told).run())
        return BenchmarkResult(plan, measured, True, read_ahead_kib(self._models.packed), load.cores())

    def rate_probe(self) -> RateProbe:
        """Measures the machine between the runs."""
        return RateProbe(self._folder)


def minutes(plans: Mapping[str, BenchmarkPlan], earlier: Path) -> float:
    """Expected for everything, by what an earlier run left."""
    known: dict[str, Any] = json.loads(earlier.read_text())["benchmarks"] if earlier.is_file() else {}
    return sum(expected_seconds(plan, known.get(name, {}).get("rows", [])) for name, plan in plans.items()) / 60


def wanted(plans: Mapping[str, BenchmarkPlan], only: str | None) -> dict[str, BenchmarkPlan]:
    """Those that were asked for, all by default."""
    names = {"short": SHORT, "long": LONG, "batches": BATCHES}
    if only is None:
        return dict(plans)
    unknown = [part for part in only.split(",") if part not in names]
    if unknown:
        raise SystemExit(f"--only {unknown[0]!r} is none of {', '.join(names)}")
    return {names[part]: plans[names[part]] for part in only.split(",")}


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


def verdicts_of(name: str, rows: Rows) -> list[Verdict]:
    """The targets that a benchmark decides about."""
    if name == SHORT:
        return latency_verdicts(rows) + first_token_verdicts(rows, 64)
    return first_token_verdicts(rows, 512) if name == LONG else batch_verdicts(rows)


def run(options: argparse.Namespace) -> int:
    """Measure and judge; 0 if all targets hold."""
    bench = Bench(options, prepare(options))
    plans = wanted(bench.plans(), options.only)
    print(f"about {minutes(plans, options.earlier):.0f} minutes", flush=True)
    verdicts: list[Verdict] = []
    results: dict[str, BenchmarkResult] = {}
    with ended_by_signals(), find_parent() as parent:
        rates = bench.rate_probe()
        for name, plan in plans.items():
            results[name] = bench.measure(plan, parent, rates)
            found = verdicts_of(name, Rows(results[name].rows))
            verdicts += found
            for verdict in found:
                print(verdict.line(), flush=True)
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
    parser.add_argument(
        "--accelerate-share", default="0.5,0.6,0.7,0.8", help="shares of the limit that Accelerate is tried with"
    )
    parser.add_argument("--trial-tokens", type=int, default=8, help="of the short runs that find the best settings")
    parser.add_argument("--new-tokens", type=int, default=32, help="the targets are stated for 32")
    parser.add_argument("--deepspeed-python", type=Path, help="interpreter that has deepspeed: measures it, too")
    parser.add_argument("--airllm-python", type=Path, help="interpreter that has airllm: measures it, too")
    parser.add_argument("--quick", action="store_true", help="settings are tried at 50 %% only; see the docstring")
    parser.add_argument("--only", help="of short,long,batches: prompts of 64 tokens, of 512, batches")
    parser.add_argument(
        "--earlier", type=Path, default=RESULTS / "against_baselines.json", help="result to judge the duration by"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS / "against_baselines.json")
    parser.add_argument("--markdown", type=Path, default=RESULTS / "against_baselines.md")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
