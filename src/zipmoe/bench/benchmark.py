"""The benchmark: every contender at every memory limit, in turn, round after round."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from zipmoe.bench.contenders import (
    DEFAULT_CONTENDERS,
    Contender,
    Models,
    Variant,
    WorkerCommands,
    cannot_run,
    job_settings,
    variants,
)
from zipmoe.bench.control_group import GroupParent, MemoryUse
from zipmoe.bench.file_eviction import evict
from zipmoe.bench.machine_rates import MachineRates, RateProbe
from zipmoe.bench.measurement import WorkerOutput
from zipmoe.bench.memory_levels import MemoryLevel
from zipmoe.bench.prompts import Prompt, PromptSet
from zipmoe.bench.read_ahead import changed_read_ahead, read_ahead_kib
from zipmoe.bench.setting_trials import Choice, choose
from zipmoe.bench.worker_run import WorkerRun, run_worker
from zipmoe.bench.workers.worker_protocol import Job
from zipmoe.errors import InvalidArgumentError

DEFAULT_CPU_SHARES = (0.5, 0.6, 0.7, 0.8)
TRIAL_TOKENS = 8
SLOW_NEW_TOKENS = 4
_NOTHING = WorkerOutput(None, (), None, False)


@dataclass(frozen=True)
class BenchmarkPlan:
    """Everything that is to be measured."""

    models: Models
    levels: tuple[MemoryLevel, ...]
    prompts: PromptSet
    contenders: tuple[Contender, ...] = DEFAULT_CONTENDERS
    new_tokens: int = 32
    batches: tuple[int, ...] = (1,)
    rounds: int = 1
    read_aheads: tuple[int, ...] = ()
    cpu_shares: tuple[float, ...] = DEFAULT_CPU_SHARES
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    seconds_per_run: float = 1800.0
    trial_tokens: int = TRIAL_TOKENS
    """Settings are tried by generating so many tokens after one prompt, and the best one is measured; 0: all are."""
    trial_levels: tuple[str, ...] | None = None
    """Labels of the levels where they are tried; what is best at the last one holds for all others [default: all]."""
    only_where_it_fits: tuple[Contender, ...] = ()
    """Contenders of which it is known that they are killed elsewhere."""
    slow_new_tokens: int = SLOW_NEW_TOKENS
    """Of contenders that take seconds per token; they get one prompt."""
    work_folder: Path | None = None
    """Where Accelerate offloads to [default: beside the packed folder]; best on the same disk as the models."""

    def __post_init__(self) -> None:
        """Check what no other class checks."""
        positive = {
            "--new-tokens": self.new_tokens,
            "--rounds": self.rounds,
            "--threads": self.threads,
            "--slow-new-tokens": self.slow_new_tokens,
        }
        for name, value in positive.items():
            if value < 1:
                raise InvalidArgumentError(f"{name} {value} is not a positive number")
        if self.trial_tokens == 1 or self.trial_tokens < 0:
            raise InvalidArgumentError(f"--trial-tokens {self.trial_tokens} does not show a time between tokens")
        if not self.batches or min(self.batches) < 1:
            raise InvalidArgumentError("--batch takes positive numbers, separated by commas")
        if any(kib < 0 for kib in self.read_aheads):
            raise InvalidArgumentError("--read-ahead-kib takes numbers of KiB, separated by commas")
        if not self.cpu_shares or not all(0 < share <= 1 for share in self.cpu_shares):
            raise InvalidArgumentError("--accelerate-share takes shares above 0 and at most 1")

    def leaves_out(self, contender: Contender, level: MemoryLevel) -> bool:
        """Whether this contender is not to be measured at this level."""
        return contender in self.only_where_it_fits and not level.fits

    def tries_at(self, level: MemoryLevel) -> bool:
        """Whether settings are tried at this level."""
        return self.trial_levels is None or level.label in self.trial_levels


@dataclass(frozen=True)
class Measured:
    """One variant, at one level, in one round."""

    variant: Variant
    level: MemoryLevel
    round: int
    reason: str | None
    """Why it did not get through; what it measured until then is kept."""
    output: WorkerOutput = _NOTHING
    seconds: float = 0.0
    memory: MemoryUse | None = None
    read_ahead_kib: int | None = None
    """That the disk had meanwhile."""
    still_cached_bytes: int = 0
    """Of the model, when the worker started."""
    rates: tuple[MachineRates, ...] = ()
    """Of the machine, right before and after (for our engine)."""
    batches: tuple[tuple[Prompt, ...], ...] = ()
    """What it was to generate from, in the order of its generations."""
    stderr_tail: str = ""
    trial: bool = False
    """Whether it was short and only served to choose the setting."""


class Benchmark:
    """Runs a plan."""

    def __init__(
        self,
        plan: BenchmarkPlan,
        parent: GroupParent | None,
        *,
        commands: WorkerCommands | None = None,
        rate_probe: RateProbe | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Prepare; nothing is started.

        Args:
            plan: what is measured.
            parent: where limited groups are made; None: without limits (our engine still keeps to its budget).
            commands: how workers are started.
            rate_probe: measures disk and memory beside our runs; None: no roofline.
            tell: told about every run as it ends.
        """
        self._plan = plan
        self._parent = parent
        self._commands = commands or WorkerCommands()
        self._rate_probe = rate_probe
        self._tell = tell
        self._missing = {each: self._commands.missing_library(each) for each in plan.contenders}

    def run(self) -> list[Measured]:
        """Try settings, then measure everything; rounds alternate between the two orders of the variants."""
        measured: list[Measured] = []
        plan = self._plan
        choices = self._settle(measured)
        for number in range(plan.rounds):
            order = plan.contenders if number % 2 == 0 else plan.contenders[::-1]
            for level in plan.levels:
                wanted = (contender for contender in order if not plan.leaves_out(contender, level))
                for choice in (choices[contender, level] for contender in wanted):
                    for variant in choice.variants if number % 2 == 0 else choice.variants[::-1]:
                        found = self._measure(variant, level, number, choice.reason)
                        measured.append(found)
                        self._tell(_line(found))
        return measured

    def _settle(self, measured: list[Measured]) -> dict[tuple[Contender, MemoryLevel], Choice]:
        """What is to be measured of every contender at every level; trials are added to ``measured``."""
        plan = self._plan
        choices: dict[tuple[Contender, MemoryLevel], Choice] = {}

        def tried(variant: Variant, level: MemoryLevel) -> Measured:
            found = self._measure(variant, level, 0, trial=True)
            measured.append(found)
            self._tell(f"tried: {_line(found)}")
            return found

        for contender in plan.contenders:
            every = variants(contender, plan.read_aheads, plan.cpu_shares)
            if not plan.trial_tokens:
                choices |= {(contender, level): Choice(every) for level in plan.levels}
                continue
            elsewhere = every[:1]
            for level in sorted(plan.levels, key=lambda each: not plan.tries_at(each)):  # those with trials first
                left_out = plan.leaves_out(contender, level)
                if level.fits or left_out or self._cannot(every[0], level) is not None:
                    choice = Choice(every[:1])
                elif plan.tries_at(level):
                    choice = choose(every, partial(tried, level=level))
                    if choice.reason is None:
                        elsewhere = choice.variants
                else:
                    choice = Choice(elsewhere)
                choices[contender, level] = choice
        return choices

    def _cannot(self, variant: Variant, level: MemoryLevel) -> str | None:
        return cannot_run(variant, level, self._plan.models) or self._missing[variant.contender]

    def _measure(
        self, variant: Variant, level: MemoryLevel, number: int, known: str | None = None, *, trial: bool = False
    ) -> Measured:
        reason = self._cannot(variant, level) or known
        if reason is not None:
            return Measured(variant, level, number, reason, trial=trial)
        model = self._plan.models.of(variant.contender)
        assert model is not None
        ahead = variant.read_ahead_kib
        try:
            with changed_read_ahead(model, ahead) if ahead is not None else nullcontext():
                return self._run(variant, level, number, model, trial)
        except InvalidArgumentError as error:
            return Measured(variant, level, number, str(error), trial=trial)

    def _work(self, contender: Contender, trial: bool) -> tuple[tuple[tuple[Prompt, ...], ...], int]:
        """Batches of prompts, and the tokens to generate after each."""
        plan = self._plan
        if trial:
            return (plan.prompts.prompts[:1],), plan.trial_tokens
        if contender.slow:
            return (plan.prompts.prompts[:1],), min(plan.new_tokens, plan.slow_new_tokens)
        return plan.prompts.batches(plan.batches), plan.new_tokens

    def _run(self, variant: Variant, level: MemoryLevel, number: int, model: Path, trial: bool) -> Measured:
        plan = self._plan
        before = self._rates(variant)
        batches, new_tokens = self._work(variant.contender, trial)
        with ExitStack() as stack:
            offload = self._offload_folder(variant, stack)
            job = Job(
                model=str(model.resolve()),
                batches=batches,
                new_tokens=new_tokens,
                threads=plan.threads,
                memory_bytes=level.limit_bytes,
                settings=job_settings(variant, level, offload),
            )
            still_cached = evict([plan.models.packed, *filter(None, (plan.models.source, plan.models.gguf))])
            group = stack.enter_context(self._parent.make(level.limit_bytes)) if self._parent is not None else None
            command = self._commands.command(variant.contender)
            done: WorkerRun = run_worker(command, job.to_json(), group, plan.seconds_per_run)
        return Measured(
            variant,
            level,
            number,
            self._anonymous(done.reason),
            done.output,
            done.seconds,
            done.memory,
            read_ahead_kib(model),
            still_cached,
            (*before, *self._rates(variant)),
            batches,
            self._anonymous(done.stderr_tail) or "",
            trial,
        )

    def _rates(self, variant: Variant) -> tuple[MachineRates, ...]:
        if self._rate_probe is None or not variant.contender.packed:
            return ()
        return (self._rate_probe.measure(len(self._plan.prompts.prompts[0])),)

    def _offload_folder(self, variant: Variant, stack: ExitStack) -> Path:
        if not variant.contender.offloads:
            return Path()
        parent = self._plan.work_folder or self._plan.models.packed.resolve().parent
        folder = Path(tempfile.mkdtemp(prefix="zipmoe-bench-offload-", dir=parent))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def _anonymous(self, text: str | None) -> str | None:
        """Without the paths of this machine: results are shown to others."""
        folders: Sequence[Path | None] = (self._plan.models.packed, self._plan.models.source, self._plan.models.gguf)
        for path in folders:
            if text is not None and path is not None:
                text = text.replace(f"{path.resolve().parent}/", "").replace(f"{path.parent}/", "")
        return text


def _line(measured: Measured) -> str:
    what = f"{measured.variant.contender} at {measured.level.label}"
    if measured.variant.settings:
        what += f" ({measured.variant.settings})"
    return f"{what}: {measured.reason or f'{measured.seconds:.0f} s'}"
