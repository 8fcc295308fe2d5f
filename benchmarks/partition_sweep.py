"""Is the planner right? Its plan against a measured sweep of partitions, and its prediction against the clock.

    zipmoe profile DST
    zipmoe run DST --prompt-ids ... --max-new-tokens 200 --record-trace TRACE
    python benchmarks/partition_sweep.py DST --trace TRACE --memory 2.02GB --memory 4.05GB --memory 6.07GB

For every budget: ``zipmoe plan`` chooses from the trace; then the chosen partition, the pure ones and mixes of two
pools (a coarse grid of the planner's own) run in turn, round after round, each as a process of its own with
``zipmoe run``; after the first round the chosen one and the fastest only. With ``--tools`` they run under
``limit-run``, whose limit includes page cache (benchmarks/README.md). Time per token is the median over the rounds.
The table goes to docs/results, the raw figures beside it as JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from result_document import add_result_options, this_machine, write_results
from tqdm import tqdm

from zipmoe.planning.partition import ExpertBytes, parse_pools, partition_grid

TOPICS = 64
LEADERS = 4
"""Partitions that are measured in every round, the chosen one beside them."""
Slots = tuple[int, int, int, int]


@dataclass
class Partition:
    """One partition of a budget: what was predicted and what was measured."""

    slots: Slots
    name: str
    predicted_seconds: float
    seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    tokens: set[tuple[int, ...]] = field(default_factory=set)
    hit_rates: dict[str, int] = field(default_factory=dict)

    @property
    def option(self) -> str:
        """For ``--pools`` and ``--slots``."""
        return ",".join(f"{letter}={count}" for letter, count in zip("FCSE", self.slots, strict=True))

    @property
    def measured_seconds(self) -> float:
        """Per token, median over the rounds."""
        return statistics.median(self.seconds)


class Sweep:
    """Runs ``zipmoe`` on one folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.prefix = shlex.split(options.prefix)

    def plan(self, memory: str, slots: str | None = None) -> dict[str, Any]:
        """What ``zipmoe plan`` says: its choice, or the forecast for given slots."""
        tokens = self.options.prompt_tokens + self.options.new_tokens
        arguments = ["plan", str(self.options.folder), "--memory", memory, "--json", "--context-tokens", str(tokens)]
        if self.options.trace is not None:
            arguments += ["--trace", str(self.options.trace)]
        if slots is not None:
            arguments += ["--slots", slots]
        return dict(json.loads(self._zipmoe(arguments).stdout))

    def run(self, memory: str, partition: Partition) -> None:
        """Generate once and keep the figures."""
        options = self.options
        rng = np.random.default_rng(options.seed)
        ids = rng.integers(0, options.vocabulary // TOPICS, options.prompt_tokens) * TOPICS + options.topic
        arguments = ["run", str(options.folder), "--memory", memory, "--pools", partition.option]
        arguments += ["--ignore-eos", "--json"]
        arguments += ["--prompt-ids", ",".join(map(str, ids.tolist())), "--max-new-tokens", str(options.new_tokens)]
        with tempfile.TemporaryDirectory() as scratch:
            figures = Path(scratch) / "limit-run.json"
            limited = []
            if options.tools is not None:
                limited = [str(options.tools / "limit-run"), "--mem", memory, "--json", str(figures), "--quiet", "--"]
            result = json.loads(self._zipmoe(arguments, [*self.prefix, *limited]).stdout)
            if limited:
                partition.peak_bytes.append(json.loads(figures.read_text())["peak_total"])
        partition.seconds.append(result["statistics"]["tpot_seconds"])
        partition.hit_rates = {**result["statistics"]["hits_by_pool"], "M": result["statistics"]["misses"]}
        partition.tokens.add(tuple(result["tokens"]))

    def _zipmoe(self, arguments: list[str], before: list[str] | None = None) -> subprocess.CompletedProcess[str]:
        command = [*(before or []), sys.executable, "-m", "zipmoe", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{shlex.join(command)}\n{done.stderr.strip()}")
        return done


def partitions(sweep: Sweep, memory: str) -> tuple[dict[str, Any], list[Partition]]:
    """The planner's choice first, then the coarse grid."""
    chosen = sweep.plan(memory)
    expert_bytes, experts = chosen["expert_bytes"], chosen["experts"]
    exponent = expert_bytes.get("E", expert_bytes["C"])
    expert = ExpertBytes(expert_bytes["F"], exponent, expert_bytes["C"] - exponent)
    pools = parse_pools(chosen["pools"])
    grid = partition_grid(chosen["budget_bytes_per_layer"], expert, experts, pools, sweep.options.step)
    found = {_slots(chosen["plan"]): Partition(_slots(chosen["plan"]), "chosen", chosen["step_seconds"])}
    for row in grid.tolist():
        slots = (row[0], row[1], row[2], row[3])
        if slots in found or not any(slots):
            continue
        candidate = Partition(slots, "", 0.0)
        candidate.predicted_seconds = sweep.plan(memory, candidate.option)["step_seconds"]
        found[slots] = candidate
    return chosen, list(found.values())


def _slots(plan: dict[str, int]) -> Slots:
    return (plan["F"], plan["C"], plan["S"], plan["E"])


def measure(sweep: Sweep, memory: str, rounds: int) -> dict[str, Any]:
    """Sweep one budget."""
    chosen, candidates = partitions(sweep, memory)
    for number in range(rounds):
        # The first round measures everything; who is far from the best by then is not measured again.
        leaders = sorted(candidates, key=lambda partition: partition.measured_seconds)[:LEADERS] if number else []
        again = [candidates[0], *(leader for leader in leaders if leader is not candidates[0])]
        for partition in tqdm(again if number else candidates, desc=memory, disable=not sys.stderr.isatty()):
            sweep.run(memory, partition)
    best = min(candidates, key=lambda partition: partition.measured_seconds)
    if len(set().union(*(partition.tokens for partition in candidates))) != 1:
        raise SystemExit(f"{memory}: the partitions do not generate the same tokens")
    return {
        "memory": memory,
        "planning_seconds": chosen["planning_seconds"],
        "chosen_over_best": candidates[0].measured_seconds / best.measured_seconds,
        "predicted_over_measured": candidates[0].predicted_seconds / candidates[0].measured_seconds,
        "best": list(best.slots),
        "partitions": [
            {
                "slots": dict(zip("FCSE", partition.slots, strict=True)),
                "name": partition.name,
                "predicted_seconds": partition.predicted_seconds,
                "measured_seconds": partition.measured_seconds,
                "rounds_seconds": partition.seconds,
                "peak_bytes": max(partition.peak_bytes, default=None),
                "requests_by_state": partition.hit_rates,
            }
            for partition in candidates
        ],
    }


def table(budgets: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = []
    for budget in budgets:
        lines += [
            f"**{budget['memory']}**: the plan takes {budget['chosen_over_best']:.3f} times the best measured one; "
            f"predicted / measured {budget['predicted_over_measured']:.2f}; "
            f"planned in {budget['planning_seconds']:.1f} s.",
            "",
            "| experts per layer | predicted ms/token | measured | predicted / measured | of the best | peak GB |",
            "|---|---|---|---|---|---|",
        ]
        rows = sorted(budget["partitions"], key=lambda row: row["measured_seconds"])
        best = rows[0]["measured_seconds"]
        for row in rows:
            slots = ", ".join(f"{letter} {count}" for letter, count in row["slots"].items() if count)
            predicted, measured = row["predicted_seconds"], row["measured_seconds"]
            peak = f"{row['peak_bytes'] / 1e9:.2f}" if row["peak_bytes"] else ""
            name = f"**{slots}** (chosen)" if row["name"] else slots
            lines.append(
                f"| {name} | {predicted * 1e3:.0f} | {measured * 1e3:.0f} | {predicted / measured:.2f} | "
                f"{measured / best:.3f} | {peak} |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Sweep every budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="packed folder")
    parser.add_argument("--memory", action="append", required=True, help="budget; may be repeated")
    parser.add_argument("--trace", type=Path, help="routing recorded with run --record-trace")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--step", type=float, default=0.5, help="grid of the sweep, as a share of the budget")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--topic", type=int, default=7, help="prompt ids are topic + 64 k (make-model's topics)")
    parser.add_argument("--seed", type=int, default=7, help="of the prompt")
    parser.add_argument("--tools", type=Path, help="folder of limit-run, to run under a limit that includes page cache")
    parser.add_argument("--prefix", default="", help="words put before every measured command, e.g. 'taskset -c 0,1'")
    add_result_options(parser, "partition_sweep")
    options = parser.parse_args()
    sweep = Sweep(options)
    budgets = []
    for memory in options.memory:
        budgets.append(measure(sweep, memory, options.rounds))
        print(table(budgets[-1:]), flush=True)
        report = {
            "machine": this_machine(),
            "folder": options.folder.name,
            "rounds": options.rounds,
            "budgets": budgets,
        }
        write_results(options.json, options.document, "Is the planner right?", report, table(budgets))


if __name__ == "__main__":
    main()
