"""Plans for the memory of a run: they fit, the fastest in a replay is taken, and fused codecs want C."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from large_folder import EMBEDDING, EXPERTS, LAYERS, MACHINE, RHO, WEIGHTS, large_manifest

from zipmoe.engine.pool_budget import pools_bytes
from zipmoe.engine.pool_slots import PoolSlots
from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.folder_plan import FolderCosts
from zipmoe.planning.packed_products import NO_PRODUCTS
from zipmoe.planning.partition import PoolPlan, parse_pools
from zipmoe.planning.trace import RoutingTrace, TraceHeader, TraceStep
from zipmoe.simulation.budget_plan import PlanRequest, plan_for_budget
from zipmoe.simulation.replayed_choice import LearntSteps

ALL_EXPERTS = int(LAYERS * EXPERTS * WEIGHTS * (1 + RHO))
TOP_K = 4


def routing(steps: int = 40, experts: int = EXPERTS, seed: int = 0) -> RoutingTrace:
    """A prompt and then single tokens; the more popular half of the experts gets 6 of 10 activations, as in Qwen."""
    chance = random.Random(seed)
    weights = [1.4 - 0.8 * rank / experts for rank in range(experts)]

    def layer(step: int, count: int) -> tuple[int, ...]:
        ids: set[int] = set()
        while len(ids) < count:
            ids |= {(rank + step // 10) % experts for rank in chance.choices(range(experts), weights)}
        return tuple(sorted(ids))

    taken = [TraceStep(0, 30, tuple(layer(0, experts // 2) for _ in range(LAYERS)))]
    taken += [TraceStep(n, 1, tuple(layer(n, TOP_K) for _ in range(LAYERS))) for n in range(1, steps)]
    return RoutingTrace(TraceHeader("large", (experts,) * LAYERS, TOP_K), tuple(taken))


def request(codec: str, share: float, trace: RoutingTrace | None = None, **more: object) -> PlanRequest:
    staging = pools_bytes(large_manifest(codec), PoolSlots())
    free = staging + int(ALL_EXPERTS * share)
    return PlanRequest(large_manifest(codec), MACHINE, TOP_K, free, trace, looked_up=(EMBEDDING,), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("codec", ["zstd", "fx3"])
@pytest.mark.parametrize("traced", [True, False], ids=["trace", "alike"])
def test_the_fastest_of_the_proposals_that_fit_is_chosen(codec: str, share: float, traced: bool) -> None:
    asked = request(codec, share, routing() if traced else None)
    plan = plan_for_budget(asked)
    assert plan.slots is not None
    assert pools_bytes(asked.manifest, plan.slots) <= asked.free_bytes
    assert plan.fits
    assert all(plan.chosen.step_seconds <= other.step_seconds * 1.02 for other in plan.runner_ups)
    assert (plan.chosen.replayed_seconds is not None) == traced
    assert plan.replayed_steps == (39 if traced else 0)
    assert plan.chosen.step_seconds == pytest.approx(plan.chosen.expert_seconds + plan.rest.seconds)
    decoded = 2 * 8192 * 2048  # the head; the embedding is looked up
    assert plan.rest.decode_seconds == pytest.approx(decoded / MACHINE.decode_bytes_per_second[codec])


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_on_a_measured_machine_a_fused_codec_gets_compressed_experts(share: float) -> None:
    for trace in (routing(), None):
        slots = plan_for_budget(request("fx3", share, trace)).slots
        assert slots is not None
        assert slots.experts == (0, slots.compressed, 0, 0)
        assert slots.compressed >= int(EXPERTS * share) - 1


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_where_packed_weights_are_multiplied_f_costs_more_and_saves_nothing(share: float) -> None:
    machine = replace(MACHINE, fused_bytes_per_second={"fx3": (54e9,)}, unpacked_bytes_per_second=(67e9,))
    for trace in (routing(), None):
        fast = plan_for_budget(replace(request("fx3", share, trace), profile=machine))
        assert fast.slots is not None
        assert fast.slots.experts == (0, fast.slots.compressed, 0, 0)
        assert fast.slots.compressed >= int(EXPERTS * share) - 1
        assert fast.rest.decode_seconds == 0
        head = 8192 * 2048 + int(8192 * 2048 * RHO)
        assert fast.rest.execute_seconds == pytest.approx(head / 54e9)
        exact = plan_for_budget(replace(request("fx3", share, trace), profile=machine, products=NO_PRODUCTS))
        assert exact.chosen.step_seconds > fast.chosen.step_seconds
        assert exact.rest == plan_for_budget(request("fx3", share, trace)).rest  # as if never measured


def test_a_partition_that_is_asked_for_is_forecast() -> None:
    asked = request("zstd", 0.5, routing())
    chosen = plan_for_budget(asked)
    again = plan_for_budget(asked, chosen.slots)
    assert again.chosen.plan == chosen.chosen.plan
    assert again.chosen.step_seconds == chosen.chosen.step_seconds
    slots = PoolSlots(2, 3, 4, 5)
    plan = plan_for_budget(asked, slots)
    assert plan.slots == slots
    learnt = LearntSteps.of(routing())
    replayed = learnt.replayed(PoolPlan(2, 3, 4, 5), FolderCosts.of(asked.manifest, MACHINE), 16.0)
    assert plan.chosen.expert_seconds == replayed.seconds_per_step
    assert plan.chosen.step_seconds * 1.02 >= chosen.chosen.step_seconds
    value = plan.to_json()
    assert value["plan"] == {"F": 2, "C": 3, "S": 4, "E": 5}
    assert value["step_seconds"] == pytest.approx(value["expert_seconds"] + value["other_seconds"])
    assert {"plan", "step_seconds", "expert_seconds"} <= value["runner_ups"][0].keys()
    assert value["planning_seconds"] > 0
    beyond = plan_for_budget(request("zstd", 0.3, routing()), PoolSlots(compressed=40))
    assert not beyond.fits
    with pytest.raises(InvalidArgumentError, match="codec has F, C"):
        plan_for_budget(request("fx3", 0.5), PoolSlots(sign_mantissa=2))


def test_where_everything_fits_no_plan_is_worse_than_the_single_pool() -> None:
    for codec in ("zstd", "fx3"):
        for share in (1.0, 1.005, 1.2, 1.5):
            plan = plan_for_budget(request(codec, share, routing()))
            assert plan.single_pool is not None
            best = plan.single_pool if plan.slots is None else plan.chosen
            assert best.step_seconds <= plan.single_pool.step_seconds
            assert plan.to_json()["single_pool"] == (plan.slots is None)
    tight = request("zstd", 1.0, routing())
    tight = PlanRequest(tight.manifest, MACHINE, TOP_K, tight.free_bytes - 30_000_000, routing())
    plan = plan_for_budget(tight)  # the single pool needs no staging
    assert plan.single_pool is not None
    assert plan.slots is None or plan.chosen.step_seconds <= plan.single_pool.step_seconds


def test_what_was_replayed_is_the_end_of_the_trace() -> None:
    long = routing(steps=2000)
    learnt = LearntSteps.of(long)
    assert learnt.trace.steps[-1] == long.steps[-1]
    assert len(learnt.trace.steps) * LAYERS <= 4000
    assert learnt.warm_up_steps == len(learnt.trace.steps) // 4  # it does not begin with a prompt
    short = LearntSteps.of(routing(steps=10))
    assert (short.warm_up_steps, short.counted, short.counts[0]) == (1, 9, False)


def test_pools_can_be_restricted() -> None:
    plan = plan_for_budget(request("zstd", 0.5, routing(), pools=parse_pools("C")))
    assert plan.slots is not None
    assert plan.slots.experts == (0, plan.slots.compressed, 0, 0)
    assert plan.single_pool is None


def test_other_models_traces_and_uneven_layers_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="the trace has layers of"):
        plan_for_budget(request("zstd", 0.5, routing(experts=20)))
