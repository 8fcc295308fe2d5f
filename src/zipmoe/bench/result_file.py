"""The raw result: machine, versions, settings, every token time. Names no paths and no host."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from zipmoe import _native
from zipmoe._version import __version__
from zipmoe.bench.benchmark import BenchmarkPlan, Measured
from zipmoe.bench.comparison import Agreement, Row, agreements, rows_of
from zipmoe.bench.contenders import Models
from zipmoe.planning.device import host_fingerprint
from zipmoe.profiling.disk_identity import disk_identity

RESULT_VERSION = 1


@dataclass(frozen=True)
class BenchmarkResult:
    """What a benchmark found."""

    plan: BenchmarkPlan
    measured: tuple[Measured, ...]
    limited: bool
    """Whether limits were set."""
    read_ahead_kib: int | None
    """Of the disk with the packed folder, where nothing changed it."""
    other_cores_busy: float
    """Mean number of cores that neither the benchmark nor its contenders kept busy meanwhile."""

    @property
    def rows(self) -> list[Row]:
        """The comparison."""
        return rows_of(self.measured)

    @property
    def agreements(self) -> list[Agreement]:
        """Tokens against plain Transformers'."""
        return agreements(self.measured)

    def heading(self) -> list[str]:
        """What stands on top of every report."""
        plan = self.plan
        limit = "limits include page cache" if self.limited else "NO LIMIT was set: only zipmoe keeps to its budget"
        ahead = "unknown" if self.read_ahead_kib is None else f"{self.read_ahead_kib} KiB"
        tried = f" (tried: {', '.join(map(str, plan.read_aheads))} KiB)" if plan.read_aheads else ""
        few = [contender.value for contender in plan.contenders if contender.slow]
        slow = f"; {', '.join(few)}: one prompt, {plan.slow_new_tokens} new tokens" if few else ""
        return [
            f"machine   {host_fingerprint().describe()}, {_native.best_instruction_set()}, {plan.threads} threads",
            f"disk      {disk_identity(plan.models.packed).describe()}, read-ahead {ahead}{tried}",
            f"model     {plan.models.packed.name}",
            f"prompts   {plan.prompts.single} of {len(plan.prompts.prompts[0])} tokens: {plan.prompts.description}; "
            f"{plan.new_tokens} new tokens, {plan.rounds} round{'s' if plan.rounds != 1 else ''}{slow}",
            f"memory    {limit}",
            f"others    kept {self.other_cores_busy:.1f} cores busy meanwhile",
        ]

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        plan = self.plan
        return {
            "zipmoe_bench": RESULT_VERSION,
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "zipmoe_version": __version__,
            "machine": {
                **asdict(host_fingerprint()),
                "instruction_set": _native.best_instruction_set(),
                "kernel": os.uname().release,
                "python": platform.python_version(),
            },
            "disk": {**asdict(disk_identity(plan.models.packed)), "read_ahead_kib": self.read_ahead_kib},
            "settings": {
                "models": _names(plan.models),
                "limited": self.limited,
                "levels": [asdict(level) for level in plan.levels],
                "contenders": [contender.value for contender in plan.contenders],
                "prompts": plan.prompts.description,
                "prompt_tokens": len(plan.prompts.prompts[0]),
                "new_tokens": plan.new_tokens,
                "batches": list(plan.batches),
                "rounds": plan.rounds,
                "read_ahead_kib": list(plan.read_aheads),
                "accelerate_shares": list(plan.cpu_shares),
                "trial_tokens": plan.trial_tokens,
                "slow_new_tokens": plan.slow_new_tokens,
                "threads": plan.threads,
            },
            "other_cores_busy": self.other_cores_busy,
            "rows": [row.to_json() for row in self.rows],
            "agreement_with_transformers": [asdict(each) for each in self.agreements],
            "runs": [_run(each) for each in self.measured],
        }


def _names(models: Models) -> dict[str, str | None]:
    return {name: None if path is None else path.name for name, path in vars(models).items()}


def _run(measured: Measured) -> dict[str, Any]:
    return {
        "contender": measured.variant.contender.value,
        "settings": {
            "read_ahead_kib": measured.variant.read_ahead_kib,
            "cpu_share": measured.variant.cpu_share,
        },
        "level": measured.level.label,
        "limit_bytes": measured.level.limit_bytes,
        "round": measured.round,
        "trial": measured.trial,
        "reason": measured.reason,
        "seconds": measured.seconds,
        "memory": None if measured.memory is None else asdict(measured.memory),
        "read_ahead_kib": measured.read_ahead_kib,
        "still_cached_bytes": measured.still_cached_bytes,
        "machine_rates": [asdict(rate) for rate in measured.rates],
        "loaded": measured.output.loaded,
        "generations": [
            {**{k: v for k, v in vars(each).items() if k != "other"}, **each.other}
            for each in measured.output.generations
        ],
        "stderr_tail": measured.stderr_tail if measured.reason else "",
    }
