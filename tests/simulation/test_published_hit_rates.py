"""Hit rates that are known from other replays of the same traces (docs/simulation.md explains the two settings)."""

from __future__ import annotations

import pytest
from published_traces_folder import FOLDER, needs_traces
from small_traces import COSTS, EXPERT

from zipmoe import _native
from zipmoe.planning.partition import PoolPlan
from zipmoe.planning.trace import RoutingTrace
from zipmoe.simulation.belady import optimal_hits
from zipmoe.simulation.replay import CacheSettings, replay
from zipmoe.simulation.trace_choice import open_trace

pytestmark = needs_traces
OLMOE, KIMI = "olmoe_299.jsonl.gz", "kimi_linear_300.jsonl.gz"


def global_requests(trace: RoutingTrace) -> list[list[int]]:
    experts = trace.header.experts[0]
    return [[layer * experts + e for e in ids] for step in trace.steps for layer, ids in enumerate(step.layers)]


def hit_rate(trace: RoutingTrace, requests: list[list[int]], slots: int, policy: str, **options: float) -> float:
    """One pool for the whole model, without the limit on ranks."""
    pools = _native.LayerPools(
        sum(trace.header.experts),
        (0, slots, 0, 0),
        policy,
        tolerance=1e9,
        requests_per_step=len(requests) // len(trace.steps),
        **options,
    )
    return sum(state == 1 for wanted in requests for state in pools.access(wanted)[0]) / sum(map(len, requests))


@pytest.mark.parametrize(
    ("slots", "lru", "lfu", "lfuda", "belady"),
    [
        (61, 0.000, 0.209, 0.111, 0.363),  # 6 %: less than the 128 experts of one token
        (128, 0.408, 0.347, 0.341, 0.571),
        (256, 0.526, 0.536, 0.552, 0.737),
        (512, 0.745, 0.791, 0.792, 0.896),
    ],
)
def test_olmoe_layer_by_layer(slots: int, lru: float, lfu: float, lfuda: float, belady: float) -> None:
    whole = open_trace(FOLDER / OLMOE)
    trace = RoutingTrace(whole.header, whole.steps[:220])
    requests = global_requests(trace)
    assert hit_rate(trace, requests, slots, "lru") == pytest.approx(lru, abs=0.0006)
    assert hit_rate(trace, requests, slots, "lfu") == pytest.approx(lfu, abs=0.0006)
    # There the age was taken before the victim of the same access had left, here after.
    assert hit_rate(trace, requests, slots, "lfuda") == pytest.approx(lfuda, abs=0.0025)
    assert sum(optimal_hits(requests, slots, may_pass=False)) / sum(map(len, requests)) == pytest.approx(
        belady, abs=0.0006
    )


@pytest.mark.parametrize(
    ("name", "share", "lru", "decayed"),
    [
        (OLMOE, 0.125, 0.319, 0.397),
        (OLMOE, 0.25, 0.565, 0.578),
        (OLMOE, 0.40, 0.696, 0.731),
        (OLMOE, 0.60, 0.860, 0.878),
        (KIMI, 0.125, 0.576, 0.581),
        (KIMI, 0.25, 0.730, 0.740),
        (KIMI, 0.40, 0.825, 0.831),
        (KIMI, 0.60, 0.898, 0.899),
    ],
)
def test_decayed_counts_against_lru_expert_by_expert(name: str, share: float, lru: float, decayed: float) -> None:
    trace = open_trace(FOLDER / name)
    slots = int(share * sum(trace.header.experts))
    requests = [[expert] for wanted in global_requests(trace) for expert in wanted]
    assert hit_rate(trace, requests, slots, "lru") == pytest.approx(lru, abs=0.0006)
    assert hit_rate(trace, requests, slots, "zipmoe", half_life_steps=16.0) == pytest.approx(decayed, abs=0.0012)


def test_drawn_steps_of_the_published_counts() -> None:
    for name, layers, top_k in (("paper_qwen.npz", 24, 4), ("paper_deepseek.npz", 26, 6), ("paper_switch.npz", 12, 1)):
        trace = open_trace(FOLDER / name, prompts=2)
        assert len(trace.header.experts) == layers
        assert all(len(ids) == top_k for step in trace.steps for ids in step.layers)
        report = replay(trace, PoolPlan(compressed=16), COSTS, EXPERT, CacheSettings("zipmoe"))
        assert 0 < report.hit_rate < 1
