"""Replays small enough to be worked out by hand."""

from __future__ import annotations

import pytest
from small_traces import COSTS, EXPERT, FUSED, FUSED_COSTS, trace_of

from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.partition import ExpertState, PoolPlan
from zipmoe.simulation.replay import CacheSettings, replay

F, C, S, E, M = ExpertState


def test_one_slot_of_c() -> None:
    trace = trace_of([[[0]], [[0]], [[1]], [[0]]], experts=3, top_k=1)
    report = replay(trace, PoolPlan(compressed=1), COSTS, EXPERT, CacheSettings("lru"))
    assert report.hit_rates == {F: 0, C: 0.25, S: 0, E: 0, M: 0.75}
    assert report.read_bytes_per_token == 3 * 140 / 4
    assert report.seconds_per_token == pytest.approx((3 * 1.625 + 1.125) / 4)
    assert report.disk_utilisation == pytest.approx(3 * 1.5 / 6)
    assert report.worker_utilisation == pytest.approx(4 * 1.0 / 6)
    assert report.execution_utilisation == pytest.approx(4 * 0.125 / 6)
    assert (report.admissions_per_step, report.evictions_per_step) == (0.75, 0.5)
    assert (report.steps, report.tokens, report.held_bytes, report.hit_rate) == (4, 4, 140, 0.25)


def test_promotions_and_demotions_read_only_what_is_not_there() -> None:
    trace = trace_of([[[0]], [[1]], [[0]], [[0]]], experts=2, top_k=1)
    report = replay(trace, PoolPlan(full=1, sign_mantissa=1), COSTS, EXPERT, CacheSettings("lru"))
    # 0: miss, to F. 1: miss, to F, and 0 drops its exponents. 0: from S only the E-chunk is read; 1 drops. 0: in F.
    assert report.hit_rates == {F: 0.25, C: 0, S: 0.25, E: 0, M: 0.5}
    assert report.read_bytes_per_step == (140 + 140 + 40 + 0) / 4
    assert report.promotions_per_step == 1 / 4
    assert report.demotions_per_step == 2 / 4
    assert report.evictions_per_step == 0
    assert report.seconds_per_step == pytest.approx((2 * 1.625 + 1.375 + 0.125) / 4)


def test_an_expert_in_e_reads_only_its_sign_mantissa_chunk() -> None:
    trace = trace_of([[[0]], [[0]]], experts=1, top_k=1)
    report = replay(trace, PoolPlan(exponent=1), COSTS, EXPERT, CacheSettings("fifo"))
    assert report.hit_rates[E] == 0.5
    assert report.read_bytes_per_step == (140 + 100) / 2
    assert report.seconds_per_step == pytest.approx((1.625 + 1.125) / 2)  # 1 s reads and decompression side by side


def test_zipmoe_drops_what_ranks_beyond_every_threshold() -> None:
    steps = [[[0]], [[0]], [[0]], [[1]], [[1]], [[1]], [[0]]]
    trace = trace_of(steps, experts=4, top_k=1)
    settings = CacheSettings("zipmoe", half_life_steps=float("inf"), tolerance=0)
    report = replay(trace, PoolPlan(compressed=1), COSTS, EXPERT, settings)
    # 1 stays out until it was activated as often as 0.
    assert report.hit_rates[C] == pytest.approx(2 / 7)
    assert report.evictions_per_step == pytest.approx(2 / 7)
    within = replay(trace, PoolPlan(compressed=1), COSTS, EXPERT, CacheSettings("zipmoe", float("inf"), tolerance=1))
    assert within.hit_rates[C] == pytest.approx(4 / 7)


def test_a_fused_codec_reads_whole_records_and_never_decompresses() -> None:
    trace = trace_of([[[0, 1]], [[0, 2]]], experts=3, top_k=2)
    report = replay(trace, PoolPlan(compressed=2), FUSED_COSTS, FUSED, CacheSettings("lru"))
    assert report.hit_rates == {F: 0, C: 0.25, S: 0, E: 0, M: 0.75}
    assert report.read_bytes_per_step == 3 * 140 / 2
    assert report.worker_utilisation == 0
    assert report.seconds_per_step == pytest.approx((3.125 + 1.625) / 2)
    with pytest.raises(InvalidArgumentError, match="S 1 needs chunks"):
        replay(trace, PoolPlan(sign_mantissa=1), FUSED_COSTS, FUSED)


def test_pools_of_the_whole_model_are_shared_by_its_layers() -> None:
    trace = trace_of([[[0], [0]], [[0], [0]], [[0], [1]]], experts=2, top_k=1)
    plan = PoolPlan(compressed=1)
    alone = replay(trace, plan, COSTS, EXPERT, CacheSettings("lru"))
    shared = replay(trace, [plan, PoolPlan()], COSTS, EXPERT, CacheSettings("lru", scope="model"))
    assert alone.hit_rates[C] == pytest.approx(3 / 6)
    assert shared.hit_rates[C] == 0  # the layers drive each other out of the only slot
    assert shared.plan is None
    assert replay(trace, plan, COSTS, EXPERT, CacheSettings("lru", scope="model")).hit_rates[C] == pytest.approx(3 / 6)


def test_warm_up_fills_pools_and_is_not_counted() -> None:
    trace = trace_of([[[0]], [[0]], [[0]]], experts=1, top_k=1, tokens=2)
    report = replay(trace, PoolPlan(full=1), COSTS, EXPERT, warm_up_steps=1, other_seconds=0.375)
    assert (report.steps, report.tokens, report.hit_rates[F]) == (2, 4, 1)
    assert report.seconds_per_step == 0.5
    assert report.seconds_per_token == 0.25
    assert report.execution_utilisation == 0.25
    with pytest.raises(InvalidArgumentError, match="3 steps of warm-up"):
        replay(trace, PoolPlan(full=1), COSTS, EXPERT, warm_up_steps=3)


def test_impossible_settings_are_refused() -> None:
    trace = trace_of([[[0]]], experts=2, top_k=1)
    with pytest.raises(InvalidArgumentError, match=r"one of auto, zipmoe, lru, .*not 'oracle'"):
        CacheSettings("oracle")
    with pytest.raises(InvalidArgumentError, match="half-life"):
        CacheSettings(half_life_steps=0)
    with pytest.raises(InvalidArgumentError, match="tolerance"):
        CacheSettings(tolerance=-1)
    with pytest.raises(InvalidArgumentError, match="scope"):
        CacheSettings(scope="universe")
    with pytest.raises(InvalidArgumentError, match="more slots than the 2 experts"):
        replay(trace, PoolPlan(compressed=3), COSTS, EXPERT)
    with pytest.raises(InvalidArgumentError, match="2 plans for 1 layers"):
        replay(trace, [PoolPlan(), PoolPlan()], COSTS, EXPERT)


def test_the_order_of_the_schedule_changes_time_and_nothing_else() -> None:
    chance = [[sorted({(7 * n) % 16, (3 * n + 1) % 16, (n * n) % 16, (5 * n + 2) % 16})] for n in range(60)]
    trace = trace_of(chance, experts=16, top_k=4)
    plan = PoolPlan(full=1, compressed=3, sign_mantissa=3, exponent=3)
    reports = [replay(trace, plan, COSTS, EXPERT, order=order) for order in ("cache_affinity", "fifo")]
    assert reports[0].hit_rates == reports[1].hit_rates
    assert reports[0].read_bytes_per_step == reports[1].read_bytes_per_step
    assert reports[0].seconds_per_step < reports[1].seconds_per_step
