"""How good and how fast is the scheduler? (docs/results/scheduler_quality.json)

Quality: makespans of the cache-affinity and the FIFO order on the same random layers, against the proven optimum on
small ones (OR-tools CP-SAT, needs `ortools`) and against the lower bound on larger ones. Model time only: the result is
the same on every machine.

Speed: microseconds of this machine for ordering and simulating a layer of 60 experts x 3 tensors x 4 shards on 6
workers, by which states the experts are in and by whether tensors cost the same, and the ratio of the two orders'
makespans; and a bad case, in which every task has costs of its own, one block takes all of them,
and workers and reads are so well balanced that every position of every task must be simulated.

Run: python benchmarks/scheduler_quality.py [--json docs/results/scheduler_quality.json]
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from zipmoe import _native

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "schedule"))

from schedule_instances import TICK_SECONDS, larger_layer, schedule, small_layer, ticks

EXPERTS, TENSORS, SHARDS, WORKERS = 60, 3, 4, 6
# States of the experts, repeated; F C S E M = 0 1 2 3 4.
MIXES = {
    "all states": [0, 1, 2, 3, 4],
    "misses and S": [4, 2],
    "misses and C": [4, 1],
    "one miss, S": [4] + [2] * 59,
    "one miss, C": [4] + [1] * 59,
}
# Seconds for one tensor of 2.9 million weights: a disk of 3.5 GB/s and of 0.7 GB/s, a fast and a slow decompressor.
MACHINES = {
    "fast disk, slow decompression": {"read": 0.8e-3, "decompress": 1.2e-3},
    "fast disk, fast decompression": {"read": 0.8e-3, "decompress": 0.3e-3},
    "slow disk, fast decompression": {"read": 4.1e-3, "decompress": 0.3e-3},
}
SIZES = {"one size": (1.0, 1.0, 1.0), "two sizes": (1.0, 1.0, 2.0), "three sizes": (1.0, 0.7, 1.6)}


def summary(ratios: list[float]) -> dict[str, float]:
    """Mean, median, 99th percentile and largest of some ratios."""
    return {
        "mean": statistics.fmean(ratios),
        "median": statistics.median(ratios),
        "p99": float(np.quantile(ratios, 0.99)),
        "largest": max(ratios),
    }


def compare_with_optimum(instances: int) -> dict[str, object]:
    """Solve small layers to proven optimality."""
    from optimal_makespan import optimal_makespan

    affinity_ratios: list[float] = []
    fifo_ratios: list[float] = []
    bound_shares: list[float] = []
    violations: list[int] = []
    begin = time.process_time()
    for seed in range(instances):
        layer = small_layer(seed)
        native = schedule(layer)
        affinity, fifo = ticks(native.makespan), ticks(schedule(layer, "fifo").makespan)
        lower = math.ceil(native.lower_bound / TICK_SECONDS - 1e-4)
        optimum = optimal_makespan(layer, lower, min(affinity, fifo), solver_seconds=600.0)
        if affinity * layer.workers > (3 * layer.workers - 1) * optimum:
            violations.append(seed)
        if optimum == 0:
            continue
        affinity_ratios.append(affinity / optimum)
        fifo_ratios.append(fifo / optimum)
        bound_shares.append(affinity / optimum / (3 - 1 / layer.workers))
        if sys.stderr.isatty():
            print(f"\r{seed + 1} of {instances} solved", end="", file=sys.stderr)
    pairs = list(zip(affinity_ratios, fifo_ratios, strict=True))
    return {
        "instances": instances,
        "solver_cpu_seconds": time.process_time() - begin,
        "violations_of_the_bound": violations,
        "largest_share_of_the_bound": max(bound_shares),
        "affinity_over_optimum": summary(affinity_ratios),
        "fifo_over_optimum": summary(fifo_ratios),
        "affinity_optimal": sum(ratio == 1 for ratio in affinity_ratios) / len(pairs),
        "fifo_optimal": sum(ratio == 1 for ratio in fifo_ratios) / len(pairs),
        "affinity_shorter_than_fifo": sum(a < f for a, f in pairs) / len(pairs),
        "affinity_longer_than_fifo": sum(a > f for a, f in pairs) / len(pairs),
    }


def compare_with_lower_bound(instances: int) -> dict[str, object]:
    """Compare larger layers with the lower bound, which no schedule reaches in general."""
    affinity_ratios, fifo_ratios, improvements = [], [], []
    for seed in range(instances):
        layer = larger_layer(seed)
        native, fifo = schedule(layer), schedule(layer, "fifo")
        if native.lower_bound == 0:
            continue
        affinity_ratios.append(native.makespan / native.lower_bound)
        fifo_ratios.append(fifo.makespan / native.lower_bound)
        improvements.append(fifo.makespan / native.makespan)
    return {
        "instances": instances,
        "affinity_over_lower_bound": summary(affinity_ratios),
        "fifo_over_lower_bound": summary(fifo_ratios),
        "fifo_over_affinity": summary(improvements),
    }


def measure_speed(rounds: int) -> list[dict[str, object]]:
    """Time `layer_makespan` on this machine; the smallest of some rounds, since others use the machine too."""
    execute = np.random.default_rng(0).uniform(0.1e-3, 1e-3, EXPERTS)
    results: list[dict[str, object]] = []
    for machine_name, machine in MACHINES.items():
        for sizes_name, sizes in SIZES.items():
            costs = [
                [machine["read"] * size for size in sizes],
                [machine["read"] * 0.4 * size / SHARDS for size in sizes],
                [machine["decompress"] * size / SHARDS for size in sizes],
                [0.1e-3 * size for size in sizes],
            ]
            for mix_name, mix in MIXES.items():
                states = np.array((mix * EXPERTS)[:EXPERTS], np.uint8)
                microseconds, makespans = {}, {}
                for order in ("cache_affinity", "fifo"):
                    times = []
                    for _ in range(rounds):
                        begin = time.perf_counter()
                        makespans[order] = _native.layer_makespan(
                            states, TENSORS, *costs, execute, SHARDS, WORKERS, order
                        )
                        times.append(time.perf_counter() - begin)
                    microseconds[order] = min(times) * 1e6
                results.append(
                    {
                        "machine": machine_name,
                        "tensors": sizes_name,
                        "states": mix_name,
                        "affinity_microseconds": microseconds["cache_affinity"],
                        "fifo_microseconds": microseconds["fifo"],
                        "fifo_over_affinity_makespan": makespans["fifo"] / makespans["cache_affinity"],
                    }
                )
    return results


def measure_worst_case(rounds: int) -> dict[str, float]:
    """Time `schedule_layer`, conversion of its lists included, on one miss and S everywhere else, balanced."""
    generator = np.random.default_rng(1)
    tasks = EXPERTS * TENSORS
    factor = generator.uniform(0.7, 1.3, tasks)
    shard = 0.1e-3 * factor
    decompress = 0.97 * WORKERS * shard * generator.uniform(0.9, 1.1, tasks)
    arguments = (
        np.repeat(np.arange(EXPERTS), TENSORS).tolist(),
        list(range(TENSORS)) * EXPERTS,
        [4] * TENSORS + [2] * (tasks - TENSORS),
        [1e-3] * tasks,
        shard.tolist(),
        decompress.tolist(),
        [0.1e-3] * tasks,
        generator.uniform(0.1e-3, 1e-3, EXPERTS).tolist(),
        SHARDS,
        WORKERS,
    )
    microseconds = {}
    for order in ("cache_affinity", "fifo"):
        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            _native.schedule_layer(*arguments, order)
            times.append(time.perf_counter() - begin)
        microseconds[order] = min(times) * 1e6
    return microseconds


def print_ratios(title: str, ratios: dict[str, float]) -> None:
    """One line of a table."""
    print(f"{title:<28}" + "".join(f" {ratios[name]:>8.4f}" for name in ("mean", "median", "p99", "largest")))


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description="How good and how fast is the scheduler?")
    parser.add_argument("--instances", type=int, default=2000, help="small layers solved to optimality; 0: none")
    parser.add_argument("--larger-instances", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=200, help="timed calls per case")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()

    print(f"python, numpy     {platform.python_version()}, {np.__version__}")
    report: dict[str, object] = {"python": platform.python_version()}
    print(f"\n{'ratio':<28} {'mean':>8} {'median':>8} {'p99':>8} {'largest':>8}")
    if arguments.instances:
        import ortools

        optimum = compare_with_optimum(arguments.instances)
        report |= {"ortools": ortools.__version__, "optimum": optimum}
        print_ratios("cache affinity / optimum", optimum["affinity_over_optimum"])
        print_ratios("FIFO / optimum", optimum["fifo_over_optimum"])
    larger = compare_with_lower_bound(arguments.larger_instances)
    report["lower_bound"] = larger
    print_ratios("cache affinity / lower bound", larger["affinity_over_lower_bound"])
    print_ratios("FIFO / lower bound", larger["fifo_over_lower_bound"])
    print_ratios("FIFO / cache affinity", larger["fifo_over_affinity"])
    if arguments.instances:
        print(
            f"\nof {optimum['instances']} small layers: bound violated by {len(optimum['violations_of_the_bound'])};"
            f" at most {optimum['largest_share_of_the_bound']:.0%} of it reached;"
            f" optimal {optimum['affinity_optimal']:.1%} (FIFO {optimum['fifo_optimal']:.1%});"
            f" shorter than FIFO {optimum['affinity_shorter_than_fifo']:.1%},"
            f" longer {optimum['affinity_longer_than_fifo']:.1%}"
        )
    speed = measure_speed(arguments.rounds)
    report["speed"] = {"experts": EXPERTS, "tensors": TENSORS, "shards": SHARDS, "workers": WORKERS, "cases": speed}
    print(
        f"\n{EXPERTS} experts x {TENSORS} tensors x {SHARDS} shards, {WORKERS} workers; smallest of {arguments.rounds}"
    )
    print(f"{'machine':<31} {'tensors':<12} {'states':<13} {'us':>6} {'FIFO us':>8} {'FIFO/affinity makespan':>23}")
    for case in speed:
        print(
            f"{case['machine']:<31} {case['tensors']:<12} {case['states']:<13} {case['affinity_microseconds']:>6.0f}"
            f" {case['fifo_microseconds']:>8.0f} {case['fifo_over_affinity_makespan']:>23.3f}"
        )
    worst = measure_worst_case(min(arguments.rounds, 50))
    report["speed_worst_case_microseconds"] = worst
    print(f"bad case: {worst['cache_affinity']:.0f} us (FIFO {worst['fifo']:.0f} us)")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {arguments.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
