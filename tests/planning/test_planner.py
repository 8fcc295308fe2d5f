from __future__ import annotations

import json
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest

from zipmoe.errors import InvalidArgumentError
from zipmoe.planning import expected_cost
from zipmoe.planning.expected_cost import ExpectedCost
from zipmoe.planning.hit_law import pattern_count
from zipmoe.planning.layer_costs import LayerCosts, MakespanBound, ScheduledMakespan
from zipmoe.planning.maximum_entropy import fit, fixed_size
from zipmoe.planning.partition import POOLS, CodecCapabilities, ExpertBytes, ExpertState, PoolPlan, parse_pools
from zipmoe.planning.planner import plan_pools
from zipmoe.planning.rank_model import RankModel
from zipmoe.planning.trace import RoutingTrace, TraceHeader, TraceStep
from zipmoe.planning.workload import Workload

SEPARABLE = CodecCapabilities(separable=True, fused=False)
FUSED = CodecCapabilities(separable=False, fused=True)
WEIGHTS = 3 * 1408 * 2048
RATIO = 0.34
CHUNKS = ExpertBytes.from_ratio(WEIGHTS, RATIO)
PACKED = ExpertBytes.from_ratio(WEIGHTS, RATIO, separable=False)


def chunk_costs(
    disk: float = 1e9, decompress: float = 1e9, workers: int = 6, execute: float = 3e-4, recombine: float = 2e10
) -> LayerCosts:
    """Three equal tensors, four shards; rates in bytes per second, execution in seconds."""
    tensor, shards = WEIGHTS // 3, 4
    return LayerCosts(
        (tensor / disk,) * 3,
        (RATIO * tensor / shards / disk,) * 3,
        (tensor / shards / decompress,) * 3,
        (2 * tensor / recombine,) * 3,
        (execute,),
        shards,
        workers,
    )


def packed_costs(disk: float = 1e9, decode_seconds: float = 0.0, execute: float = 3e-4) -> LayerCosts:
    tensor = WEIGHTS // 3
    nothing = (0.0,) * 3
    return LayerCosts(
        ((1 + RATIO) * tensor / disk,) * 3, nothing, nothing, nothing, (execute,), 0, 6, 0, decode_seconds
    )


def model(f: npt.NDArray[np.float64], size: int) -> RankModel:
    distinct = np.zeros(len(f) + 1)
    distinct[size] = 1
    return RankModel(np.asarray(f, dtype=np.float64), distinct, 100)


def skewed(experts: int, size: int, exponent: float) -> RankModel:
    f = np.arange(1, experts + 1, dtype=np.float64) ** -exponent
    for _ in range(100):
        f = np.minimum(f * size / f.sum(), 0.95)
    return model(f * size / f.sum(), size)


def workload(*models: RankModel, assignments: float = 4) -> Workload:
    return Workload(tuple(models), assignments, "test")


def test_expected_cost_equals_the_sum_over_all_sets() -> None:
    f = np.array([0.9, 0.8, 0.7, 0.5, 0.45, 0.3, 0.25, 0.1])
    sizes = np.array([0, 0, 0, 0.3, 0.4, 0.3])
    f *= 4 / f.sum()
    law = fit(f, sizes)

    def makespan(states: npt.NDArray[np.uint8]) -> float:
        return float((states**2).sum() + 7 * len(states))

    plans = np.array([[2, 1, 2, 1], [0, 8, 0, 0], [0, 0, 0, 0], [0, 3, 0, 2]])
    cost = ExpectedCost(law, POOLS, makespan, MakespanBound(chunk_costs(), 4), len(plans))
    assert cost.scheduled
    for plan, seconds in zip(plans, cost.seconds(plans)[0], strict=True):
        states = np.repeat(np.arange(5, dtype=np.uint8), [*plan, 8 - plan.sum()])
        expected = 0.0
        for size in (3, 4, 5):
            sets = [list(one) for one in combinations(range(8), size)]
            weights = np.array([np.prod((law.coins[0] / (1 - law.coins[0]))[one]) for one in sets])
            costs = [makespan(states[one]) for one in sets]
            expected += sizes[size] * float(weights @ costs / weights.sum())
        assert seconds == pytest.approx(expected, rel=1e-12)


def test_each_pattern_is_scheduled_once() -> None:
    calls = []

    def makespan(states: npt.NDArray[np.uint8]) -> float:
        calls.append(bytes(states))
        return 1.0 + float(states.sum())

    plan_pools(
        workload(*[skewed(60, 4, 0.5)] * 3),
        chunk_costs(),
        CHUNKS,
        20 * CHUNKS.full,
        capabilities=SEPARABLE,
        makespan=makespan,
    )
    assert len(calls) == len(set(calls)) == pattern_count(4)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.66])
def test_fused_codec_wants_all_memory_in_c_by_popularity(share: float) -> None:
    budget_bytes = int(share * 60 * PACKED.full)
    report = plan_pools(
        workload(skewed(60, 4, 0.6)), packed_costs(), PACKED, budget_bytes, capabilities=FUSED, worthwhile_gain=0
    )
    assert report.plan == PoolPlan(compressed=min(60, budget_bytes // PACKED.compressed))
    assert report.cost == "scheduler"
    assert report.pure["C"].step_seconds < report.pure["F"].step_seconds < report.pure["none"].step_seconds


def test_full_experts_win_where_decoding_is_the_bottleneck() -> None:
    slow = packed_costs(decode_seconds=0.05)
    some = plan_pools(workload(skewed(60, 4, 0.6)), slow, PACKED, 20 * PACKED.full, capabilities=FUSED)
    assert some.plan == PoolPlan(full=20)
    slow_workers = chunk_costs(decompress=5e7, workers=1)
    chunks = plan_pools(workload(skewed(60, 4, 0.6)), slow_workers, CHUNKS, 20 * CHUNKS.full, capabilities=SEPARABLE)
    assert chunks.plan == PoolPlan(full=20)


def test_compressed_experts_win_where_the_disk_is_the_bottleneck() -> None:
    fast_workers = chunk_costs(disk=3e8, decompress=2e10)
    report = plan_pools(workload(skewed(60, 4, 1.0)), fast_workers, CHUNKS, 20 * CHUNKS.full, capabilities=SEPARABLE)
    assert report.plan.full == 0
    assert report.plan.compressed >= 20
    assert report.pure["C"].step_seconds < 1.05 * min(candidate.step_seconds for candidate in report.candidates)


def test_partial_pools_win_where_overlap_hides_the_other_half() -> None:
    report = plan_pools(
        workload(skewed(60, 4, 0.2)), chunk_costs(disk=3.5e9), CHUNKS, 20 * CHUNKS.full, capabilities=SEPARABLE
    )
    assert report.plan.sign_mantissa + report.plan.exponent > 0
    assert report.step_seconds < 0.97 * min(candidate.step_seconds for candidate in report.pure.values())


def test_memory_that_saves_nothing_is_left_alone() -> None:
    f = np.concatenate([np.full(8, 0.5), np.zeros(56)])
    report = plan_pools(workload(model(f, 4)), packed_costs(), PACKED, 40 * PACKED.full, capabilities=FUSED)
    assert report.plan == PoolPlan(compressed=8)
    assert report.held_bytes == 8 * PACKED.compressed
    assert report.hit_rates[ExpertState.COMPRESSED] == 1
    assert report.read_bytes_per_step == 0


def test_no_memory_is_used_where_execution_hides_all_reading() -> None:
    slow_execution = packed_costs(disk=1e12, execute=10.0)
    report = plan_pools(workload(skewed(60, 4, 0.6)), slow_execution, PACKED, 60 * PACKED.full, capabilities=FUSED)
    assert report.plan == PoolPlan()


def test_rarely_used_tail_is_cut() -> None:
    f = np.concatenate([np.full(10, 0.39999), np.full(50, 1e-4 / 50)])
    arguments = (workload(model(f, 4)), packed_costs(), PACKED, 60 * PACKED.full)
    assert plan_pools(*arguments, capabilities=FUSED).plan == PoolPlan(compressed=10)
    exhaustive = plan_pools(*arguments, capabilities=FUSED, worthwhile_gain=0)
    assert exhaustive.plan == PoolPlan(compressed=60)


def test_pools_can_be_restricted() -> None:
    arguments = (workload(skewed(60, 4, 0.5)), chunk_costs(), CHUNKS, 20 * CHUNKS.full)
    report = plan_pools(*arguments, capabilities=SEPARABLE, pools=parse_pools("FE"))
    assert report.plan.compressed == report.plan.sign_mantissa == 0
    assert set(report.pure) == {"F", "E", "none"}
    with pytest.raises(InvalidArgumentError, match="the codec has F, C"):
        plan_pools(
            workload(skewed(60, 4, 0.5)), packed_costs(), PACKED, 10**9, capabilities=FUSED, pools=parse_pools("FS")
        )
    with pytest.raises(InvalidArgumentError, match="different codecs"):
        plan_pools(*arguments, capabilities=FUSED)


def test_separate_plans_follow_each_layer() -> None:
    # One layer has two experts that are always active; the other uses all alike.
    steep = model(np.concatenate([[1.0, 1.0], np.full(30, 2 / 30)]), 4)
    flat = model(np.full(32, 0.125), 4)
    arguments = (workload(steep, flat), chunk_costs(disk=3.5e9), CHUNKS, 6 * CHUNKS.full)
    shared = plan_pools(*arguments, capabilities=SEPARABLE)
    separate = plan_pools(*arguments, capabilities=SEPARABLE, separate=True)
    assert shared.layers[0].plan == shared.layers[1].plan
    assert separate.layers[0].plan != separate.layers[1].plan
    assert separate.step_seconds <= shared.step_seconds * 1.001
    saved = 1 - separate.step_seconds / shared.step_seconds
    assert shared.separate_gain == pytest.approx(saved, abs=2e-3)
    assert saved > 0.001


def test_forecast_by_hand() -> None:
    f = np.array([0.9, 0.6, 0.3, 0.2])
    costs = LayerCosts((2.0,), (0.0,), (0.0,), (0.0,), (1.0,), 0, 1)
    expert = ExpertBytes(full=200, exponent=140, sign_mantissa=0)
    report = plan_pools(
        workload(model(f, 2), assignments=2),
        costs,
        expert,
        280,
        capabilities=FUSED,
        other_seconds=10.0,
        worthwhile_gain=0,
    )
    assert report.plan == PoolPlan(compressed=2)
    assert report.hit_rates == pytest.approx(
        {ExpertState.FULL: 0, ExpertState.COMPRESSED: 0.75, ExpertState.SIGN_MANTISSA: 0, ExpertState.EXPONENT: 0}
        | {ExpertState.MISS: 0.25}
    )
    assert report.read_bytes_per_step == pytest.approx(0.5 * 140)
    # Two hits: 2 s of execution. One: read 2 s, execution of the hit hidden, 1 s behind. None: 2 + 2 + 1.
    coins = fit(f, fixed_size(2)).coins[0]
    w = coins / (1 - coins)
    pairs = {pair: w[pair[0]] * w[pair[1]] for pair in combinations(range(4), 2)}
    total = sum(pairs.values())
    seconds = {0: 2.0, 1: 3.0, 2: 5.0}
    expected = sum(weight / total * seconds[sum(r >= 2 for r in pair)] for pair, weight in pairs.items())
    assert report.layers[0].seconds == pytest.approx(expected, rel=1e-9)
    assert report.step_seconds == pytest.approx(expected + 10, rel=1e-9)


def test_runner_ups_are_the_next_best() -> None:
    report = plan_pools(
        workload(skewed(60, 4, 0.5)), chunk_costs(), CHUNKS, 20 * CHUNKS.full, capabilities=SEPARABLE, worthwhile_gain=0
    )
    seconds = [candidate.step_seconds for candidate in report.runner_ups]
    assert len(seconds) == 5
    assert seconds == sorted(seconds)
    assert report.step_seconds <= seconds[0]
    others = sorted(c.step_seconds for c in report.candidates)[1:6]
    assert seconds == pytest.approx(others)


def test_report_is_json() -> None:
    report = plan_pools(
        workload(skewed(60, 4, 0.5), skewed(60, 4, 0.9)),
        chunk_costs(),
        CHUNKS,
        20 * CHUNKS.full,
        capabilities=SEPARABLE,
    )
    value = json.loads(json.dumps(report.to_json(with_candidates=True)))
    assert value["plan"] == dict(zip("FCSE", report.plan.slots, strict=True))
    assert value["cost"] == "scheduler"
    assert value["hit_law"] == "exact"
    assert sum(value["hit_rates"].values()) == pytest.approx(1)
    assert value["step_seconds"] == pytest.approx(sum(layer["seconds"] for layer in value["layers"]))
    assert len(value["candidates"]) == len(report.candidates)
    assert value["held_bytes"] <= 2 * value["budget_bytes_per_layer"]
    assert "candidates" not in report.to_json()


def test_large_sets_are_bounded_and_the_report_says_so() -> None:
    many = workload(*[skewed(256, 32, 0.4)] * 2, assignments=64)
    report = plan_pools(many, chunk_costs(), CHUNKS, 64 * CHUNKS.full, capabilities=SEPARABLE)
    assert (report.cost, report.hit_law) == ("bound", "sampled")
    assert "activated sets were drawn" in report.notes[0]
    assert "max(total I/O, decompression / L" in report.notes[1]


def test_sampled_law_agrees_with_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = workload(*[skewed(64, 6, exponent) for exponent in (0.3, 0.6, 0.9)])
    costs = chunk_costs(disk=3.5e9)
    bound = MakespanBound(costs, 4)
    arguments = (layers, costs, CHUNKS, 16 * CHUNKS.full)
    exact = plan_pools(*arguments, capabilities=SEPARABLE, makespan=bound)
    assert (exact.cost, exact.hit_law) == ("given", "exact")
    monkeypatch.setattr(expected_cost, "MOST_EXACT_TERMS", 0)
    sampled = plan_pools(*arguments, capabilities=SEPARABLE)
    assert (sampled.cost, sampled.hit_law) == ("bound", "sampled")
    deviations = [
        s.step_seconds / e.step_seconds - 1 for e, s in zip(exact.candidates, sampled.candidates, strict=True)
    ]
    assert np.abs(deviations).max() < 0.02
    price = {candidate.plan: candidate.step_seconds for candidate in exact.candidates}
    best = min(price.values())
    assert min(price[c.plan] for c in [*sampled.runner_ups]) < 1.01 * best


def test_batch_mixes_over_the_number_of_distinct_experts() -> None:
    generator = np.random.default_rng(4)
    steps = []
    for number in range(60):
        ids = {int(i) for _ in range(2) for i in generator.choice(12, 2, replace=False)}
        steps.append(TraceStep(number, 2, (tuple(sorted(ids)),)))
    batch = Workload.held_out(RoutingTrace(TraceHeader("m", (12,), 2), tuple(steps)))
    assert batch.assignments == 4
    assert set(np.flatnonzero(batch.layers[0].distinct)) == {2, 3, 4}
    costs = chunk_costs()
    report = plan_pools(batch, costs, CHUNKS, 4 * CHUNKS.full, capabilities=SEPARABLE)
    scheduled = ScheduledMakespan(costs, 4)
    nothing_cached = sum(p * scheduled(np.full(k, 4, np.uint8)) for k, p in enumerate(batch.layers[0].distinct) if p)
    assert report.pure["none"].step_seconds == pytest.approx(nothing_cached, rel=1e-9)


def test_counts_on_the_edge_are_smoothed_and_reported() -> None:
    edge = RankModel(np.array([0.75, 0.75, 0.25, 0.25]), np.array([0, 0.5, 0, 0.5, 0]), 8)
    law, notes = workload(edge, edge).maximum_entropy_law()
    assert [note.split(":")[0] for note in notes] == ["layer 0", "layer 1"]
    assert law.inclusion()[0] == pytest.approx(edge.shifted(1 / 9).probabilities, abs=1e-9)
    report = plan_pools(workload(edge), chunk_costs(), CHUNKS, 2 * CHUNKS.full, capabilities=SEPARABLE)
    assert "smoothed by 0.11" in report.notes[0]


def test_workload_shift_makes_caching_less_useful() -> None:
    before = workload(skewed(60, 4, 1.0))
    plans = [
        plan_pools(load, packed_costs(), PACKED, 15 * PACKED.full, capabilities=FUSED)
        for load in (before, before.shifted(0.5), before.shifted(1.0))
    ]
    assert plans[0].step_seconds < plans[1].step_seconds < plans[2].step_seconds
    assert plans[2].hit_rates[ExpertState.COMPRESSED] == pytest.approx(plans[2].plan.compressed / 60)


def test_layers_of_different_kinds_are_planned_apart() -> None:
    with pytest.raises(InvalidArgumentError, match="same number of experts"):
        workload(skewed(60, 4, 1), skewed(64, 4, 1))
    assert Workload.uniform(3, 16, 2).probabilities().tolist() == [[0.125] * 16] * 3
