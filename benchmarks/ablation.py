"""Ablation by simulation: FIFO, marking, LRU, zipmoe, zipmoe + planning (docs/results/ablation.md).

Real routing traces are replayed on a device preset through the native pools, policies and scheduler. The first half of
each trace fills the pools and is all that the planner sees; the second half is counted. Policies are compared under the
same partitions of the same memory: all of it for F (plain BF16 experts), all for C, equal parts for F, C, S and E, the
planner's choice, and the best of the planner's candidates in a replay of the first half. Times are the simulation's, so
the results do not depend on the machine that this runs on. The second part is the study of half-lives: hit rates of LRU
and of decayed counts with one pool for the whole model or one per layer.

Run: python benchmarks/ablation.py [--traces ../shared/traces] [--json docs/results/ablation.json]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from zipmoe import _native
from zipmoe.planning.partition import ExpertState, PoolPlan
from zipmoe.planning.trace import RoutingTrace
from zipmoe.simulation.belady import optimal_hit_rate
from zipmoe.simulation.device_choice import load_device, preset_names, preset_sources
from zipmoe.simulation.experiment import even_plan, planned, planned_and_replayed, warm_up_steps
from zipmoe.simulation.expert_shape import ExpertOnDevice, ExpertShape
from zipmoe.simulation.replay import CacheSettings, replay
from zipmoe.simulation.trace_choice import open_trace

TRACES = ("olmoe_299.jsonl.gz", "kimi_linear_300.jsonl.gz", "paper_qwen.npz", "paper_deepseek.npz", "paper_switch.npz")
PER_TOKEN_TRACES = TRACES[:2]
POLICIES = ("fifo", "marking", "lru", "zipmoe")
PAPER_ORDER = ("fifo", "marking", "lru", "zipmoe", "zipmoe + planning")
MEMORY_SHARES = (0.125, 0.25, 0.5)
HALF_LIFE_SHARES = (0.125, 0.25, 0.40, 0.60)
HALF_LIVES = (4.0, 8.0, 16.0, 32.0, 64.0, math.inf)
WARM_UP = 0.5
HALF_LIFE = 16.0
WITHIN = 0.005
"""Times closer than this are called equal."""


def ablation_of(trace: RoutingTrace, expert: ExpertOnDevice, share: float, seeds: Sequence[int]) -> dict[str, Any]:
    """All policies under all partitions of one memory share."""
    warm_up = warm_up_steps(trace, WARM_UP)
    pools = expert.capabilities.pools
    begin = time.perf_counter()
    plan = planned(trace, expert, share, learn_steps=warm_up, half_life_steps=HALF_LIFE)
    planning_seconds = time.perf_counter() - begin
    partitions = {
        "F": even_plan(trace, expert, share, [ExpertState.FULL]),
        "C": even_plan(trace, expert, share, [ExpertState.COMPRESSED]),
        "even": even_plan(trace, expert, share, pools),
        "planned": plan,
        "replayed": planned_and_replayed(
            trace, expert, share, learn_steps=warm_up, settings=CacheSettings("zipmoe", HALF_LIFE)
        ),
    }
    results: dict[str, Any] = {}
    for name, partition in partitions.items():
        rows = {}
        for policy in POLICIES:
            runs = [
                replay(
                    trace,
                    partition,
                    expert.costs,
                    expert.bytes,
                    CacheSettings(policy, HALF_LIFE, seed=seed),
                    warm_up_steps=warm_up,
                )
                for seed in (seeds if policy == "marking" else seeds[:1])
            ]
            row = runs[0].to_json()
            for key in ("seconds_per_token", "read_bytes_per_token", "hit_rate"):
                row[key] = sum(getattr(run, key) for run in runs) / len(runs)
            rows[policy] = row
        results[name] = {
            "slots": dict(zip("FCSE", partition.slots, strict=True)),
            "optimal_hit_rate": optimal_hit_rate(trace, max(1, partition.total_slots), warm_up_steps=warm_up),
            "policies": rows,
        }
    return {"planning_seconds": planning_seconds, "partitions": results}


def order_of(result: dict[str, Any], fixed: str) -> tuple[list[str], dict[str, float], bool]:
    """Names from slow to fast, time relative to FIFO, and whether that is the paper's order (ties allowed)."""
    seconds = {policy: row["seconds_per_token"] for policy, row in result["partitions"][fixed]["policies"].items()}
    seconds["zipmoe + planning"] = result["partitions"]["planned"]["policies"]["zipmoe"]["seconds_per_token"]
    ratios = {name: seconds[name] / seconds["fifo"] for name in PAPER_ORDER}
    replayed = result["partitions"]["replayed"]["policies"]["zipmoe"]["seconds_per_token"]
    ratios["zipmoe + planning + replay"] = replayed / seconds["fifo"]
    chain = pairwise(PAPER_ORDER)
    holds = all(ratios[faster] <= ratios[slower] * (1 + WITHIN) for slower, faster in chain)
    return sorted(ratios, key=lambda name: -ratios[name]), ratios, holds


def single_pool_hit_rate(
    trace: RoutingTrace, share: float, policy: str, half_life: float, *, by_expert: bool, scope: str
) -> float:
    """Whole trace from a cold start, one pool of whole experts without the limit on ranks.

    ``by_expert``: experts of a layer are accessed one after the other, so that they may evict each other; otherwise a
    layer's request is one access, as in the engine.
    """
    layers, experts = len(trace.header.experts), trace.header.experts[0]
    shared = scope == "model"
    count = experts * layers if shared else experts
    pools = [
        _native.LayerPools(
            count,
            (0, int(share * count), 0, 0),
            policy,
            tolerance=float(count),
            half_life_steps=half_life,
            requests_per_step=(layers if shared else 1) * (trace.header.top_k if by_expert else 1),
        )
        for _ in range(1 if shared else layers)
    ]
    hits = total = 0
    for step in trace.steps:
        for layer, ids in enumerate(step.layers):
            wanted = [layer * experts + expert for expert in ids] if shared else list(ids)
            for request in [[expert] for expert in wanted] if by_expert else [wanted]:
                states, _ = pools[0 if shared else layer].access(request)
                hits += sum(state != ExpertState.MISS for state in states)
            total += len(ids)
    return hits / total


def half_lives_of(trace: RoutingTrace) -> list[dict[str, Any]]:
    """Hit rates of LRU and of decayed counts, per capacity."""
    rows = []
    for share in HALF_LIFE_SHARES:
        row: dict[str, Any] = {"share": share}
        for setting, by_expert, scope in (
            ("model pool, expert by expert", True, "model"),
            ("model pool, layer by layer", False, "model"),
            ("layer pools, layer by layer", False, "layer"),
        ):
            rate = {"lru": single_pool_hit_rate(trace, share, "lru", HALF_LIFE, by_expert=by_expert, scope=scope)}
            for half_life in HALF_LIVES:
                rate[f"{half_life:g}"] = single_pool_hit_rate(
                    trace, share, "zipmoe", half_life, by_expert=by_expert, scope=scope
                )
            row[setting] = rate
        rows.append(row)
    return rows


def print_ablation(name: str, share: float, result: dict[str, Any]) -> None:
    """Time relative to FIFO (1 = FIFO's), per partition."""
    for fixed in ("F", "C", "even"):
        _, ratios, holds = order_of(result, fixed)
        partition = result["partitions"][fixed]
        slots = PoolPlan(*partition["slots"].values()).describe()
        print(
            f"{name:<24} {share:>5.1%} {fixed:<5} "
            + " ".join(f"{ratio:>8.3f}" for ratio in ratios.values())
            + f"  {'yes' if holds else 'no ':<3}  {slots}"
        )
    plans = [PoolPlan(*result["partitions"][name]["slots"].values()).describe() for name in ("planned", "replayed")]
    print(f"{'':<24} planned: {plans[0]} ({result['planning_seconds']:.1f} s); after replay: {plans[1]}")


def print_half_lives(name: str, rows: list[dict[str, Any]]) -> None:
    """Hit rates; the second part of each row is the best half-life."""
    for row in rows:
        for setting in (key for key in row if key != "share"):
            rates = row[setting]
            columns = " ".join(f"{rate:.3f}" for rate in rates.values())
            print(f"{name:<24} {row['share']:>5.1%} {setting:<30} {columns}")


def main() -> None:
    """Simulate, print, write the JSON."""
    parser = argparse.ArgumentParser(description="Ablation of the cache policies and of planning, by simulation.")
    parser.add_argument("--traces", type=Path, default=Path(__file__).parents[2] / "shared" / "traces")
    parser.add_argument("--device", default="jetson-orin")
    parser.add_argument("--codec", default="zstd")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=20, help="prompts of the traces that hold counts")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of marking, averaged")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    files = [arguments.traces / name for name in TRACES if (arguments.traces / name).is_file()]
    if not files:
        print(f"skipped: no routing traces in {arguments.traces} (see --traces)")
        return
    device = load_device(arguments.device)
    print(f"device   {device.name}, {device.workers} workers; codec {arguments.codec}, {arguments.shards} shards")
    print(f"counted  second half of each trace; plans from its first half; half-life {HALF_LIFE:g} steps")
    print("\ntime per token relative to FIFO in the same fixed partition; order: as the paper's within 0.5 %?\n")
    print(
        f"{'trace':<24} {'share':>5} fixed " + " ".join(f"{n[-8:]:>8}" for n in PAPER_ORDER) + "  +replay  order  slots"
    )
    report: dict[str, Any] = {
        "device": device.name,
        "sources": preset_sources(device.name) if device.name in preset_names() else {},
        "codec": arguments.codec,
        "shards": arguments.shards,
        "prompts": arguments.prompts,
        "warm_up": WARM_UP,
        "half_life_steps": HALF_LIFE,
        "ablation": [],
        "half_lives": {},
    }
    for path in files:
        trace = open_trace(path, prompts=arguments.prompts)
        shape = ExpertShape.of_model(trace.header.model)
        expert = ExpertOnDevice.of(shape, device, arguments.codec, arguments.shards)
        for share in MEMORY_SHARES:
            result = ablation_of(trace, expert, share, range(arguments.seeds))
            orders = {fixed: order_of(result, fixed)[1:] for fixed in ("F", "C", "even")}
            report["ablation"].append(
                {
                    "trace": path.name,
                    "model": trace.header.model,
                    "memory_share": share,
                    "time_relative_to_fifo": {fixed: ratios for fixed, (ratios, _) in orders.items()},
                    "paper_order": {fixed: holds for fixed, (_, holds) in orders.items()},
                    **result,
                }
            )
            print_ablation(trace.header.model, share, result)
    print("\nhit rates from a cold start: LRU, then decayed counts with half-lives of", end=" ")
    print(", ".join(f"{half_life:g}" for half_life in HALF_LIVES), "steps\n")
    for path in files:
        if path.name in PER_TOKEN_TRACES:
            trace = open_trace(path)
            rows = half_lives_of(trace)
            report["half_lives"][trace.header.model] = rows
            print_half_lives(trace.header.model, rows)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        print(f"wrote {arguments.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
