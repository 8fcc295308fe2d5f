"""Does the policy that ghost caches choose come close to the best fixed one? By replay of real routing traces.

Every trace is replayed whole, from a cold start, under `auto`, under every fixed policy and several half-lives: with
one pool of whole records for the model (what the engine has by default), with one per layer, and with the memory
divided evenly among the pools F, C, S and E (zstd on the simulated device). What counts is what is read: experts, or
for the four pools simulated seconds. "shifted" is the same trace whose experts change their numbers half way, all at
once. Belady's optimum, which knows the future, is the bound where pools hold whole records.

The cost of the replay is the processor time of a request under `auto` beyond that of a fixed policy, measured in turn.

Run: python benchmarks/policy_replay.py --traces DIR

It can be run in parts (--only, --shares, --arrangements): results of other parts are kept in the JSON.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from replayed_models import add_replay_options, chosen_devices, chosen_traces, packed_expert, task_progress
from result_document import add_result_options, earlier_results, table, this_machine, write_results

from zipmoe import _native
from zipmoe.planning.device import DeviceProfile
from zipmoe.planning.partition import ExpertState, PoolPlan
from zipmoe.planning.trace import RoutingTrace
from zipmoe.simulation.belady import optimal_hit_rate
from zipmoe.simulation.experiment import even_plan
from zipmoe.simulation.replay import CacheSettings
from zipmoe.simulation.replay import replay as simulate

FIXED = (
    *(("zipmoe", half_life) for half_life in (4.0, 8.0, 16.0, 32.0, 64.0, 128.0)),
    *((policy, 16.0) for policy in ("lru", "lfu", "lfuda", "fifo", "marking")),
)
SHARES = (0.05, 0.125, 0.25, 0.5, 0.75)
FORMER_DEFAULT = "zipmoe 16"
ARRANGEMENTS = ("single pool", "pool per layer", "F, C, S, E", "single pool, shifted")
WHOLE_RECORDS = (0.0, 0.0, 0.0, 0.0, 1.0)
TIMING_ROUNDS = 3


def label(policy: str, half_life: float) -> str:
    """Name of a column."""
    return f"zipmoe {half_life:g}" if policy == "zipmoe" else policy


def shifted(trace: RoutingTrace) -> RoutingTrace:
    """The trace with other experts in the same roles from its middle on."""
    chance = random.Random(0)
    renamed = [chance.sample(range(count), count) for count in trace.header.experts]
    middle = len(trace.steps) // 2
    later = [
        replace(
            step,
            layers=tuple(
                tuple(sorted(names[expert] for expert in ids)) for names, ids in zip(renamed, step.layers, strict=True)
            ),
        )
        for step in trace.steps[middle:]
    ]
    return RoutingTrace(trace.header, (*trace.steps[:middle], *later))


@dataclass(frozen=True)
class WholeRecordPools:
    """One pool of whole records for each layer, or for all of them."""

    trace: RoutingTrace
    slots: int
    shared: bool

    def requests(self) -> list[tuple[int, list[int]]]:
        """(pool, experts), in the order of the model."""
        experts = self.trace.header.experts
        firsts = [sum(experts[:layer]) if self.shared else 0 for layer in range(len(experts))]
        return [
            (0 if self.shared else layer, [firsts[layer] + e for e in ids])
            for step in self.trace.steps
            for layer, ids in enumerate(step.layers)
        ]

    def sizes(self) -> list[int]:
        """Experts that share each pool."""
        experts = self.trace.header.experts
        return [sum(experts)] if self.shared else list(experts)

    def fixed(self, policy: str, half_life: float) -> list[_native.LayerPools]:
        """Empty pools under one policy; like the engine's single pool they take in whoever was requested."""
        steps = len(self.trace.header.experts) if self.shared else 1
        return [
            _native.LayerPools(
                size,
                (0, self.slots, 0, 0),
                policy,
                tolerance=float(size),
                half_life_steps=half_life,
                requests_per_step=steps,
                seed=number,
            )
            for number, size in enumerate(self.sizes())
        ]

    def auto(self) -> _native.ReplayedPools:
        """Empty pools whose policy is chosen."""
        return _native.ReplayedPools(
            [(size, (0, self.slots, 0, 0), WHOLE_RECORDS) for size in self.sizes()],
            candidates=_native.default_candidates(),
            requests_per_step=len(self.trace.header.experts),
            tolerance=float(max(self.sizes())),
        )


def reads_of(case: WholeRecordPools) -> dict[str, Any]:
    """Experts read per step under every policy, and what the replay costs."""
    requests = case.requests()
    steps = len(case.trace.steps)
    reads: dict[str, float] = {}
    for policy, half_life in FIXED:
        pools = case.fixed(policy, half_life)
        reads[label(policy, half_life)] = sum(pools[n].access(ids)[0].count(4) for n, ids in requests) / steps
    auto = case.auto()
    reads["auto"] = sum(auto.access(n, ids)[0].count(4) for n, ids in requests) / steps
    seconds = []
    for _ in range(TIMING_ROUNDS):
        replayed, fixed = case.auto(), case.fixed("lru", 16.0)
        begin = time.thread_time()
        for number, ids in requests:
            replayed.access(number, ids)
        middle = time.thread_time()
        for number, ids in requests:
            fixed[number].access(ids)
        seconds.append((2 * middle - begin - time.thread_time()) / len(requests))
    scope = "model" if case.shared else "layer"
    requested = sum(len(ids) for _, ids in requests) / steps
    return {
        "cost": reads,
        "optimum": (1 - optimal_hit_rate(case.trace, case.slots, scope=scope)) * requested,
        "chosen": auto.policy,
        "changes": auto.policy_changes,
        "replay_microseconds_per_request": statistics.median(seconds) * 1e6,
    }


def seconds_of(trace: RoutingTrace, plan: PoolPlan, device: DeviceProfile) -> dict[str, Any]:
    """Simulated seconds per step under every policy with the four pools."""
    expert = packed_expert(trace, device, "zstd")

    def run(policy: str, half_life: float) -> Any:
        return simulate(trace, plan, expert.costs, expert.bytes, CacheSettings(policy, half_life))

    auto = run("auto", 16.0)
    costs = {label(*fixed): run(*fixed).seconds_per_step for fixed in FIXED}
    return {
        "cost": {**costs, "auto": auto.seconds_per_step},
        "optimum": None,
        "chosen": auto.chosen_policy,
        "changes": auto.policy_changes,
        "replay_microseconds_per_request": None,
    }


def cases_of(trace: RoutingTrace, device: DeviceProfile, shares: Sequence[float]) -> list[tuple[str, float, Any]]:
    """(arrangement, share, what computes its result)."""
    experts = trace.header.experts[0]
    cases: list[tuple[str, float, Any]] = []
    for share in shares:
        if int(share * experts * len(trace.header.experts)) >= 1:
            model = WholeRecordPools(trace, int(share * experts * len(trace.header.experts)), shared=True)
            cases.append(("single pool", share, lambda case=model: reads_of(case)))
        if int(share * experts) >= 1:
            layers = WholeRecordPools(trace, int(share * experts), shared=False)
            cases.append(("pool per layer", share, lambda case=layers: reads_of(case)))
        expert = packed_expert(trace, device, "zstd")
        plan = even_plan(trace, expert, share, [ExpertState(n) for n in range(4)])
        cases.append(("F, C, S, E", share, lambda plan=plan: seconds_of(trace, plan, device)))
    moved = shifted(trace)
    for share in (0.25, 0.5):
        model = WholeRecordPools(moved, int(share * experts * len(trace.header.experts)), shared=True)
        cases.append(("single pool, shifted", share, lambda case=model: reads_of(case)))
    return cases


def best_fixed(cost: dict[str, float]) -> str:
    """Name of the cheapest fixed policy."""
    return min((name for name in cost if name != "auto"), key=lambda name: cost[name])


def ratio(value: float, best: float) -> float:
    """Relative cost; 1 where nothing costs anything."""
    return value / best if best > 0 else 1.0


def tables_of(results: dict[str, dict[str, Any]]) -> str:
    """A summary, and a row for every trace, arrangement and share: cost relative to the best fixed policy."""
    by_policy: dict[str, list[float]] = {}
    rows = []
    for result in results.values():
        cost = result["cost"]
        best = best_fixed(cost)
        for name, value in cost.items():
            by_policy.setdefault(name, []).append(ratio(value, cost[best]))
        optimum = "" if result["optimum"] is None else f"{ratio(result['optimum'], cost[best]):.3f}"
        micro = result["replay_microseconds_per_request"]
        shown = ("auto", FORMER_DEFAULT, "lru", "lfuda")
        rows.append(
            [
                result["model"],
                result["arrangement"],
                f"{result['share']:.1%}",
                best,
                *(f"{ratio(cost[name], cost[best]):.3f}" for name in shown),
                optimum,
                result["changes"],
                result["chosen"],
                "" if micro is None else f"{micro:.1f}",
            ]
        )
    summary = [
        [
            name,
            f"{statistics.mean(values):.4f}",
            f"{max(values):.3f}",
            f"{sum(value > 1.01 for value in values)} of {len(values)}",
        ]
        for name, values in sorted(by_policy.items(), key=lambda item: statistics.mean(item[1]))
    ]
    micros = [m for result in results.values() if (m := result["replay_microseconds_per_request"]) is not None]
    text = "\n**Cost relative to the best fixed policy of each case** (1: as good as it).\n\n"
    text += table(["policy", "mean", "worst", "more than 1 % above"], summary)
    text += f"\nReplay: {statistics.mean(micros):.1f} microseconds per layer's request, at most {max(micros):.1f}.\n"
    text += "\n**Each case.** Relative to the best fixed policy; the optimum knows the future.\n\n"
    header = ["model", "pools", "memory", "best fixed", "auto", FORMER_DEFAULT, "lru", "lfuda", "optimum"]
    return text + table([*header, "changes", "auto in the end", "us/request"], rows)


def main() -> None:
    """Replay, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_replay_options(parser)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="memory as shares of all experts")
    parser.add_argument("--arrangements", nargs="+", choices=ARRANGEMENTS, default=ARRANGEMENTS, metavar="NAME")
    add_result_options(parser, "policy_replay")
    arguments = parser.parse_args()
    device = chosen_devices(arguments)[0]
    traces = chosen_traces(arguments)
    results: dict[str, dict[str, Any]] = earlier_results(arguments.json, "results")
    cases = [
        (trace, *case)
        for trace in traces
        for case in cases_of(trace, device, arguments.shares)
        if case[0] in arguments.arrangements
    ]
    with task_progress("replays", len(cases)) as tasks:
        for trace, arrangement, share, compute in cases:
            which = {"model": trace.header.model, "arrangement": arrangement, "share": share}
            results[", ".join(str(part) for part in which.values())] = {**which, **compute()}
            tasks.finished(f"{trace.header.model}, {arrangement}, {share:.1%}")
    tables = tables_of(results)
    print(tables)
    report = {
        "machine": this_machine(),
        "device": device.name,
        "prompts": arguments.prompts,
        "candidates": _native.default_candidates(),
        "results": results,
    }
    write_results(arguments.json, arguments.document, "Policy by replay", report, tables)


if __name__ == "__main__":
    main()
