"""The best setting is found with few runs, and only that one is measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bench.worker_scripts import DONE, LOADED, generation, script

from zipmoe.bench import worker_run
from zipmoe.bench.benchmark import Benchmark, BenchmarkPlan, Measured
from zipmoe.bench.contenders import Contender, Models, Variant, WorkerCommands, variants
from zipmoe.bench.control_group import MemoryUse
from zipmoe.bench.measurement import Generation, WorkerOutput
from zipmoe.bench.memory_levels import MemoryLevel
from zipmoe.bench.prompts import random_prompts
from zipmoe.bench.setting_trials import Choice, choose
from zipmoe.errors import InvalidArgumentError

LEVEL, OTHER = MemoryLevel("50%", 2_000_000_000, False), MemoryLevel("75%", 3_000_000_000, False)
THIRD = MemoryLevel("90%", 3_500_000_000, False)
FITS = MemoryLevel("fits", 9_000_000_000, True)


class Runs:
    """Stands in for measuring: TTFT and TPOT by (read-ahead, share); nothing for others."""

    def __init__(
        self,
        times: dict[tuple[int | None, float | None], tuple[float, float]],
        reason: str = "killed by the memory limit while it loaded",
    ) -> None:
        self.times = times
        self.reason = reason
        self.asked: list[tuple[int | None, float | None]] = []

    def __call__(self, variant: Variant) -> Measured:
        key = (variant.read_ahead_kib, variant.cpu_share)
        self.asked.append(key)
        if key not in self.times:
            return Measured(variant, LEVEL, 0, self.reason)
        first, step = self.times[key]
        found = Generation(1, (first, first + step), (0, 0), ((1, 2),))
        return Measured(variant, LEVEL, 0, None, WorkerOutput({"seconds": 1.0}, (found,), None, True))


def test_a_single_setting_needs_no_trial() -> None:
    runs = Runs({})
    only = variants(Contender.LLAMA_CPP, (), (0.5,))
    assert choose(only, runs) == Choice(only)
    assert runs.asked == []


def test_shares_until_one_is_killed_then_read_aheads_with_the_best() -> None:
    runs = Runs({(128, 0.5): (1.0, 0.5), (128, 0.6): (1.0, 0.3), (128, 0.7): (1.0, 0.4), (8192, 0.6): (1.0, 0.9)})
    chosen = choose(variants(Contender.ACCELERATE, (128, 8192), (0.8, 0.5, 0.6, 0.7, 0.9)), runs)
    assert chosen == Choice((Variant(Contender.ACCELERATE, 128, 0.6),))
    assert runs.asked == [(128, 0.5), (128, 0.6), (128, 0.7), (128, 0.8), (8192, 0.6)]


@pytest.mark.parametrize(
    "reason",
    [
        "took longer than 1800 s, ended while it loaded",
        "ended with code 1 while it loaded: no space left on device",
        "killed by SIGSEGV while it generated",
        "a library says no",
    ],
)
def test_a_failure_that_is_not_the_limits_does_not_end_the_trials(reason: str) -> None:
    runs = Runs({(128, 0.6): (1.0, 0.3), (128, 0.8): (1.0, 0.2)}, reason)
    chosen = choose(variants(Contender.ACCELERATE, (128,), (0.8, 0.5, 0.6, 0.7)), runs)
    assert chosen == Choice((Variant(Contender.ACCELERATE, 128, 0.8),))
    assert runs.asked == [(128, 0.5), (128, 0.6), (128, 0.7), (128, 0.8)]
    assert choose(variants(Contender.ACCELERATE, (128,), (0.5, 0.6)), Runs({}, reason)) == Choice(
        (Variant(Contender.ACCELERATE, 128, 0.5),), reason
    )


def test_the_limits_reason_is_the_one_that_ends_the_trials() -> None:
    use = MemoryUse(peak_bytes=1, oom_kills=1)
    reason = worker_run._reason(WorkerOutput(None, (), None, False), -9, None, use, None, "")
    assert reason is not None and reason.startswith(worker_run.KILLED_BY_LIMIT)


def test_the_other_read_ahead_may_be_better() -> None:
    runs = Runs({(128, None): (1.0, 0.5), (8192, None): (0.95, 0.3)})
    chosen = choose(variants(Contender.LLAMA_CPP, (128, 8192), (0.5,)), runs)
    assert chosen == Choice((Variant(Contender.LLAMA_CPP, 8192),))


def test_a_setting_that_is_clearly_earlier_is_measured_too() -> None:
    runs = Runs({(128, None): (1.0, 0.3), (8192, None): (0.8, 0.5)})
    chosen = choose(variants(Contender.LLAMA_CPP, (128, 8192), (0.5,)), runs)
    assert chosen.variants == (Variant(Contender.LLAMA_CPP, 128), Variant(Contender.LLAMA_CPP, 8192))


def test_when_nothing_works_the_reason_is_known_after_one_run() -> None:
    runs = Runs({})
    chosen = choose(variants(Contender.ACCELERATE, (128, 8192), (0.6, 0.5)), runs)
    assert runs.asked == [(128, 0.5)]
    assert chosen == Choice((Variant(Contender.ACCELERATE, 128, 0.5),), "killed by the memory limit while it loaded")


WORKER = f"""
import json, sys
job = json.loads(sys.stdin.read())
share = job["settings"]["cpu_bytes"] / job["memory_bytes"]
if share > 0.75:
    sys.exit("too much")
step = abs(share - 0.6) + 0.1
print({LOADED!r}, flush=True)
for batch in job["batches"]:
    steps = [1 + step * number for number in range(job["new_tokens"])]
    fields = {{"batch": len(batch), "token_seconds": steps, "read_bytes": [0] * len(steps)}}
    tokens = [list(range(len(steps)))] * len(batch)
    print(json.dumps({{"kind": "generation", "tokens": tokens, **fields}}), flush=True)
print({DONE!r})
"""


def _plan(source: Path, packed: Path, levels: tuple[MemoryLevel, ...], **options: object) -> BenchmarkPlan:
    settings: dict[str, object] = {"new_tokens": 5, "cpu_shares": (0.5, 0.6, 0.8), "trial_tokens": 3, **options}
    prompts = random_prompts(2, 2, 4, 100)
    return BenchmarkPlan(Models(packed, source), levels, prompts, (Contender.ACCELERATE,), **settings)  # type: ignore[arg-type]


def _shares(measured: list[Measured]) -> list[tuple[str, float | None, bool, int]]:
    return [(each.level.label, each.variant.cpu_share, each.trial, len(each.output.generations)) for each in measured]


@pytest.fixture
def commands() -> WorkerCommands:
    return WorkerCommands(overrides={"accelerate": [sys.executable, "-S", "-c", WORKER]})


def test_the_benchmark_tries_and_measures(tiny_source: Path, tiny_packed: Path, commands: WorkerCommands) -> None:
    plan = _plan(tiny_source, tiny_packed, (LEVEL, FITS), rounds=2)
    measured = Benchmark(plan, None, commands=commands).run()
    assert _shares(measured) == [
        ("50%", 0.5, True, 1),
        ("50%", 0.6, True, 1),
        ("50%", 0.8, True, 0),
        ("50%", 0.6, False, 2),
        ("fits", 0.5, False, 0),  # there is nothing to offload: known without a run
        ("50%", 0.6, False, 2),
        ("fits", 0.5, False, 0),
    ]
    tokens = [len(each.output.generations[0].tokens[0]) for each in measured if each.output.generations]
    assert tokens == [3, 3, 5, 5]


def test_trials_at_one_level_serve_the_others(tiny_source: Path, tiny_packed: Path, commands: WorkerCommands) -> None:
    plan = _plan(tiny_source, tiny_packed, (OTHER, LEVEL), trial_levels=("50%",))
    measured = Benchmark(plan, None, commands=commands).run()
    assert [each[:3] for each in _shares(measured) if not each[2]] == [("75%", 0.6, False), ("50%", 0.6, False)]
    assert {each.level.label for each in measured if each.trial} == {"50%"}


def test_a_level_where_nothing_works_says_nothing_of_the_others(tiny_source: Path, tiny_packed: Path) -> None:
    worker = WORKER.replace("share > 0.75", f"job['memory_bytes'] == {LEVEL.limit_bytes}")
    commands = WorkerCommands(overrides={"accelerate": [sys.executable, "-S", "-c", worker]})
    plan = _plan(tiny_source, tiny_packed, (OTHER, LEVEL, THIRD), trial_levels=("75%", "50%"))
    measured = Benchmark(plan, None, commands=commands).run()
    assert [each[:2] for each in _shares(measured) if not each[2]] == [("75%", 0.6), ("50%", 0.5), ("90%", 0.6)]


def test_without_trials_every_setting_is_measured(
    tiny_source: Path, tiny_packed: Path, commands: WorkerCommands
) -> None:
    measured = Benchmark(_plan(tiny_source, tiny_packed, (LEVEL,), trial_tokens=0), None, commands=commands).run()
    assert [each[1:3] for each in _shares(measured)] == [(0.5, False), (0.6, False), (0.8, False)]


def test_slow_contenders_get_one_prompt_and_few_tokens(tiny_source: Path, tiny_packed: Path) -> None:
    worker = """
import json, sys
job = json.loads(sys.stdin.read())
assert len(job["batches"]) == 1 and job["new_tokens"] == 2 and list(job["settings"]) == ["offload_folder"], job
"""
    prompts = random_prompts(2, 2, 4, 100)
    plan = BenchmarkPlan(
        Models(tiny_packed, tiny_source), (LEVEL,), prompts, (Contender.AIRLLM,), new_tokens=5, slow_new_tokens=2
    )
    last = script(LOADED, generation(1.0, 2.0), DONE)[-1].replace("sys.stdin.read()\n", "")
    command = [sys.executable, "-S", "-c", worker + last]
    (measured,) = Benchmark(plan, None, commands=WorkerCommands(overrides={"airllm": command})).run()
    assert measured.reason is None
    assert [len(batch) for batch in measured.batches] == [1]


@pytest.mark.parametrize("tokens", [1, -1])
def test_a_trial_needs_a_time_between_tokens(tiny_source: Path, tiny_packed: Path, tokens: int) -> None:
    with pytest.raises(InvalidArgumentError, match="--trial-tokens"):
        _plan(tiny_source, tiny_packed, (LEVEL,), trial_tokens=tokens)


def test_who_is_known_to_be_killed_can_be_left_out(tiny_source: Path, tiny_packed: Path) -> None:
    good = {"transformers": script(LOADED, generation(1.0, 2.0), DONE)}
    plan = BenchmarkPlan(
        Models(tiny_packed, tiny_source),
        (LEVEL, FITS),
        random_prompts(1, 1, 4, 100),
        (Contender.TRANSFORMERS,),
        only_where_it_fits=(Contender.TRANSFORMERS,),
    )
    measured = Benchmark(plan, None, commands=WorkerCommands(overrides=good)).run()
    assert [each.level.label for each in measured] == ["fits"]
