"""What real routing says; docs/planning.md shows these numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from zipmoe.planning.expected_cost import ExpectedCost
from zipmoe.planning.layer_costs import LayerCosts, MakespanBound, ScheduledMakespan
from zipmoe.planning.partition import POOLS, CodecCapabilities, ExpertBytes, PoolPlan
from zipmoe.planning.planner import plan_pools
from zipmoe.planning.published_traces import (
    PER_PROMPT_COUNTS,
    PER_TOKEN_IDS,
    PublishedTrace,
    read_prompt_counts,
    read_token_ids,
)
from zipmoe.planning.rank_model import (
    RankModel,
    held_out_model,
    in_sample_model,
    model_of_counts,
    ranking,
    running_model,
)
from zipmoe.planning.trace import TraceError
from zipmoe.planning.workload import Workload

QWEN, DEEPSEEK, SWITCH = PER_PROMPT_COUNTS
OLMOE, KIMI = PER_TOKEN_IDS
SHARES = (0.25, 0.5, 0.75)


def hit_rates(models: list[RankModel]) -> list[float]:
    """Share of activations on the best 25, 50 and 75 % of the experts of each layer, mean over layers."""
    return [float(np.mean([m.hit_rate(int(share * m.experts)) for m in models])) for share in SHARES]


@pytest.mark.parametrize(
    ("published", "shape", "held_out", "one_prompt_before", "in_sample"),
    [
        (QWEN, (1000, 24, 60), [0.341, 0.603, 0.824], [0.274, 0.527, 0.767], [0.633, 0.900, 1.000]),
        (DEEPSEEK, (953, 26, 64), [0.411, 0.665, 0.861], [0.318, 0.575, 0.797], [0.653, 0.908, 0.997]),
        (SWITCH, (1000, 12, 128), [0.894, 0.966, 0.991], [0.590, 0.757, 0.866], [1.000, 1.000, 1.000]),
    ],
)
def test_popularity_over_prompts(
    published_traces: Path,
    published: PublishedTrace,
    shape: tuple[int, int, int],
    held_out: list[float],
    one_prompt_before: list[float],
    in_sample: list[float],
) -> None:
    trace = read_prompt_counts(published_traces, published)
    assert trace.counts.shape == shape
    counts, steps, half = trace.counts, trace.steps, shape[0] // 2
    layers = range(shape[1])

    def models(ranked: list[np.ndarray], followed: slice) -> list[RankModel]:
        return [model_of_counts(ranked[n], counts[followed, n], steps[followed, n], trace.top_k) for n in layers]

    halves = models([counts[:half, n].sum(axis=0) for n in layers], slice(half, None))
    assert hit_rates(halves) == pytest.approx(held_out, abs=6e-4)
    assert sum(halves[0].probabilities) == pytest.approx(trace.top_k)
    assert hit_rates(models([counts[:-1, n] for n in layers], slice(1, None))) == pytest.approx(
        one_prompt_before, abs=6e-4
    )
    assert hit_rates(models([counts[:, n] for n in layers], slice(None))) == pytest.approx(in_sample, abs=6e-4)


@pytest.mark.parametrize(
    ("published", "shape", "held_out", "running", "in_sample"),
    [
        (OLMOE, (299, 16, 64), [0.453, 0.698, 0.876], [0.595, 0.825, 0.954], [0.554, 0.803, 0.952]),
        (KIMI, (300, 26, 256), [0.691, 0.877, 0.957], [0.751, 0.896, 0.967], [0.765, 0.942, 0.996]),
    ],
)
def test_popularity_over_tokens(
    published_traces: Path,
    published: PublishedTrace,
    shape: tuple[int, int, int],
    held_out: list[float],
    running: list[float],
    in_sample: list[float],
) -> None:
    trace = read_token_ids(published_traces, published)
    assert (len(trace.steps), len(trace.header.experts), trace.header.experts[0]) == shape
    layers = [trace.activations(n) for n in range(shape[1])]
    assert all((active.sum(axis=1) == 8).all() for active in layers)
    assert hit_rates([held_out_model(active) for active in layers]) == pytest.approx(held_out, abs=6e-4)
    assert hit_rates([running_model(active, 16, 32) for active in layers]) == pytest.approx(running, abs=6e-4)
    assert hit_rates([in_sample_model(active) for active in layers]) == pytest.approx(in_sample, abs=6e-4)


@pytest.mark.parametrize(
    ("published", "rates"), [(OLMOE, [0.600, 0.595, 0.585, 0.568]), (KIMI, [0.745, 0.751, 0.739, 0.733])]
)
def test_half_lives_of_8_to_64_steps(published_traces: Path, published: PublishedTrace, rates: list[float]) -> None:
    trace = read_token_ids(published_traces, published)
    layers = [trace.activations(n) for n in range(len(trace.header.experts))]
    found = [hit_rates([running_model(active, half_life, 32) for active in layers])[0] for half_life in (8, 16, 32, 64)]
    assert found == pytest.approx(rates, abs=6e-4)


def test_distinct_experts_of_a_batch(published_traces: Path) -> None:
    trace = read_token_ids(published_traces, OLMOE)
    means = []
    for batch in (1, 2, 4, 8, 16):
        models = Workload.held_out(trace.batched(batch)).layers
        means.append(float(np.mean([model.mean_distinct for model in models])))
    assert means == pytest.approx([8.0, 12.3, 18.6, 26.6, 36.1], abs=0.05)


def example_costs(weights: int, disk: float, decompress: float, workers: int) -> LayerCosts:
    """The examples of docs/planning.md: four shards, rho 0.34, execution and recombination at 50 GB/s."""
    tensor = weights // 3
    return LayerCosts(
        (tensor / disk,) * 3,
        (0.34 * tensor / 4 / disk,) * 3,
        (tensor / 4 / decompress,) * 3,
        (2 * tensor / 5e10,) * 3,
        (2 * weights / 5e10,),
        4,
        workers,
    )


SEPARABLE = CodecCapabilities(separable=True, fused=False)
OLMOE_WEIGHTS = 3 * 1024 * 2048
BALANCED = (3.5e9, 1e9, 6)
SLOW_WORKERS = (3.5e9, 2.5e8, 2)
SLOW_DISK = (5e8, 1e9, 6)


@pytest.mark.parametrize("machine", [BALANCED, SLOW_WORKERS, SLOW_DISK])
@pytest.mark.parametrize("share", SHARES)
def test_predicted_time_is_that_of_replayed_tokens(
    published_traces: Path, machine: tuple[float, float, int], share: float
) -> None:
    """The only approximation of the model is the law of joint activation: replaying the real sets through the same
    pools and scheduler takes at most 3.5 % longer than predicted.
    """
    trace = read_token_ids(published_traces, OLMOE)
    costs = example_costs(OLMOE_WEIGHTS, *machine)
    expert = ExpertBytes.from_ratio(OLMOE_WEIGHTS, 0.34)
    report = plan_pools(
        Workload.running(trace, 16, 32), costs, expert, int(share * 64 * expert.full), capabilities=SEPARABLE
    )
    assert (report.cost, report.hit_law) == ("scheduler", "exact")
    makespan = ScheduledMakespan(costs, 8)
    states = np.array([report.plan.state_of_rank(rank) for rank in range(64)], dtype=np.uint8)
    known: dict[bytes, float] = {}
    replayed = 0.0
    for layer in range(16):
        counts = np.zeros(64)
        for step, active in enumerate(trace.activations(layer)):
            if step >= 32:
                pattern = np.sort(states[active[ranking(counts)]])
                replayed += known.setdefault(pattern.tobytes(), makespan(pattern))
            counts = counts * 0.5 ** (1 / 16) + active
    ratio = report.step_seconds / (replayed / (299 - 32))
    assert 0.965 < ratio < 1.005


@pytest.mark.parametrize("machine", [BALANCED, SLOW_WORKERS, SLOW_DISK])
@pytest.mark.parametrize("share", SHARES)
def test_bound_chooses_nearly_the_plan_of_the_scheduler(
    published_traces: Path, machine: tuple[float, float, int], share: float
) -> None:
    workload = Workload.running(read_token_ids(published_traces, OLMOE), 16, 32)
    costs = example_costs(OLMOE_WEIGHTS, *machine)
    expert = ExpertBytes.from_ratio(OLMOE_WEIGHTS, 0.34)
    budget_bytes = int(share * 64 * expert.full)
    scheduled = plan_pools(workload, costs, expert, budget_bytes, capabilities=SEPARABLE)
    bounded = plan_pools(
        workload, costs, expert, budget_bytes, capabilities=SEPARABLE, makespan=MakespanBound(costs, 8)
    )
    seconds = {candidate.plan: candidate.step_seconds for candidate in scheduled.candidates}
    choice = min(bounded.candidates, key=lambda candidate: candidate.step_seconds)
    assert 0.92 < choice.step_seconds / seconds[choice.plan] <= 1 + 1e-9
    assert seconds[choice.plan] < 1.011 * min(seconds.values())


def test_fused_codec_on_real_routing(published_traces: Path) -> None:
    trace = read_token_ids(published_traces, OLMOE)
    capabilities = CodecCapabilities(separable=False, fused=True)
    expert = ExpertBytes.from_ratio(OLMOE_WEIGHTS, 0.34, separable=False)
    nothing = (0.0,) * 3
    costs = LayerCosts(
        (1.34 * OLMOE_WEIGHTS / 3 / 3.5e9,) * 3, nothing, nothing, nothing, (2 * OLMOE_WEIGHTS / 5e10,), 0, 6
    )
    workload = Workload.running(trace, 16, 32)
    plans = [
        plan_pools(workload, costs, expert, int(share * 64 * expert.full), capabilities=capabilities).plan
        for share in SHARES
    ]
    assert plans == [PoolPlan(compressed=23), PoolPlan(compressed=47), PoolPlan(compressed=64)]


@pytest.mark.slow
def test_separate_plans_gain_nothing_on_the_steps_that_follow(published_traces: Path) -> None:
    """Plans per layer are 2.3 % faster on the counts that they were chosen on, and no faster on the next ones."""

    def counted(active: np.ndarray, learn: slice, count: slice) -> RankModel:
        by_rank = active[count][:, ranking(active[learn].sum(axis=0))]
        distinct = np.zeros(active.shape[1] + 1)
        distinct[8] = 1
        return RankModel(by_rank.mean(axis=0), distinct, len(by_rank))

    expert = ExpertBytes.from_ratio(OLMOE_WEIGHTS, 0.34)
    on_paper, afterwards = [], []
    for published in PER_TOKEN_IDS:
        trace = read_token_ids(published_traces, published)
        layers = [trace.activations(n) for n in range(len(trace.header.experts))]
        first, second = slice(0, 100), slice(100, 200)
        frozen = [
            [counted(active, first, second) for active in layers],
            [counted(active, first, slice(200, None)) for active in layers],
        ]
        running = [
            [running_model(active[:180], 16, 32) for active in layers],
            [running_model(active, 16, 180) for active in layers],
        ]
        for chosen_on, tried_on in (frozen, running):
            workload = Workload(tuple(chosen_on), 8, "chosen on")
            law, _ = Workload(tuple(tried_on), 8, "tried on").maximum_entropy_law()
            for machine in (BALANCED, SLOW_DISK):
                costs = example_costs(OLMOE_WEIGHTS, *machine)
                expected = ExpectedCost(law, POOLS, ScheduledMakespan(costs, 8), MakespanBound(costs, 8), 1)
                for share in SHARES:
                    budget_bytes = int(share * published.experts * expert.full)
                    chosen, seconds = [], []
                    for separate in (False, True):
                        report = plan_pools(
                            workload, costs, expert, budget_bytes, capabilities=SEPARABLE, separate=separate
                        )
                        chosen.append(report.step_seconds)
                        seconds.append(
                            sum(
                                float(expected.seconds(np.array([layer.plan.slots]), [number])[0, 0])
                                for number, layer in enumerate(report.layers)
                            )
                        )
                    on_paper.append(1 - chosen[1] / chosen[0])
                    afterwards.append(1 - seconds[1] / seconds[0])
    assert len(on_paper) == 24
    assert np.mean(on_paper) == pytest.approx(0.0236, abs=5e-4)
    assert np.mean(afterwards) == pytest.approx(-0.003, abs=5e-4)
    assert (np.min(afterwards), np.max(afterwards)) == pytest.approx((-0.061, 0.061), abs=1e-3)


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_prompt_counts(tmp_path, QWEN)
    np.savez(tmp_path / QWEN.file, counts=np.zeros((2, 3, 59), np.uint8))
    with pytest.raises(TraceError, match="instead of"):
        read_prompt_counts(tmp_path, QWEN)
    np.savez(tmp_path / QWEN.file, counts=np.ones((2, 3, 60), np.uint8) * [[[1] * 59 + [2]]])
    with pytest.raises(TraceError, match="multiple of top_k"):
        read_prompt_counts(tmp_path, QWEN)
    with pytest.raises(TraceError, match="cannot be read"):
        read_token_ids(tmp_path, OLMOE)
