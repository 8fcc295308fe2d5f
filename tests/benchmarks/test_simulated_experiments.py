"""The simulated experiments give the right values where they can be worked out by hand."""

from __future__ import annotations

import compressors
import memory_budgets
import policy_replay
import pytest
import replayed_models
import shards_and_workers
import utilisation
import workload_shift
from small_traces import COSTS, EXPERT, trace_of

from zipmoe.planning.partition import CodecCapabilities
from zipmoe.planning.trace import RoutingTrace, TraceHeader
from zipmoe.simulation.device_choice import load_device
from zipmoe.simulation.expert_shape import ExpertOnDevice

SMALL = ExpertOnDevice(EXPERT, COSTS, CodecCapabilities(separable=True, fused=False))
SAME = trace_of([[[2]]] * 40, experts=8, top_k=1)
"""One expert for ever: after the warm-up, whatever holds it hits always."""
ROUND = trace_of([[[n % 8]] for n in range(80)], experts=8, top_k=1)
"""Every expert in turn: recency helps nobody."""


def test_budget_of_one_hot_expert() -> None:
    result = memory_budgets.budget_of(SAME, SMALL, share=0.25)
    assert {letter: pool["slots"] for letter, pool in result["pools"].items()} == {"F": 2, "C": 2}
    for policy in memory_budgets.POLICIES:
        full = result["pools"]["F"]["policies"][policy]
        assert (full["seconds_per_token"], full["hit_rate"], full["read_bytes_per_token"]) == (0.125, 1.0, 0.0)
        assert result["pools"]["C"]["policies"][policy]["seconds_per_token"] == 1.125
    assert result["planned"]["seconds_per_token"] == 0.125
    assert result["planned"]["plan"].startswith("F 1")
    row = {"device": "d", "codec": "zstd", "model": "m", "share": 0.25, **result}
    tables = memory_budgets.tables_of([row], [0.25])
    assert tables.count("| m | 25% | 2 | 125.0 (100) |") == 1
    assert "everything in C" in tables


def test_shift_of_a_plan_that_is_right_and_of_one_that_is_not() -> None:
    rows = workload_shift.shift_of(SAME, SMALL, 0.25, [0.0, 1.0])
    assert [row["amount"] for row in rows] == [0.0, 1.0]
    assert (rows[0]["expected_ratio"], rows[0]["replayed_ratio"]) == (1.0, 1.0)
    assert rows[0]["unshifted"]["replayed_seconds"] == 0.125
    assert rows[1]["expected_ratio"] >= 1.0  # nothing is expected to be better than the plan made for the workload
    assert rows[1]["unshifted"]["plan"] == rows[0]["unshifted"]["plan"]
    assert rows[1]["unshifted"]["replayed_seconds"] > 0.5
    row = {"device": "d", "codec": "zstd", "model": "m", "share": 0.25, "rows": rows}
    assert "| m | 25% | replayed | 1.000 |" in workload_shift.tables_of([row], [0.0, 1.0])


def test_utilisation_without_any_slot() -> None:
    rows = utilisation.utilisation_of(ROUND, SMALL, share=0.01)  # 16 bytes: less than any part of an expert
    assert {row["partition"] for row in rows} == {"all F", "all C", "planned"}
    for row in rows:
        assert row["plan"] == "no pool"
        assert row["seconds_per_token"] == 1.625
        assert row["busy"] == pytest.approx({"disk": 1.5 / 1.625, "workers": 1 / 1.625, "execution": 0.125 / 1.625})
        assert row["serial_over_overlapped"] == pytest.approx(2.625 / 1.625)
    result = {"device": "d", "codec": "zstd", "model": "m", "share": 0.01, "rows": rows}
    assert "| 1625.0 | 92% | 62% | 8% | 1.62 | 1.000 |" in utilisation.tables_of([result])


def test_compressors_of_a_preset() -> None:
    device = load_device("jetson-orin")
    assert compressors.ratio_of(device, "fx3") == pytest.approx(0.6984)
    assert compressors.bfloat16_rate(device, "zstd") == pytest.approx(2 * 0.62e9 * 6)
    assert compressors.bfloat16_rate(device, "fx3") is None
    found = compressors.token_of(SAME, SMALL, 0.25)
    assert (found["seconds_per_token"], found["read_bytes_per_token"]) == (0.125, 0.0)
    common = {"device": "d", "model": "m", "share": 0.25, "bfloat16_bytes_per_second": None}
    tables = compressors.tables_of([{**common, "codec": codec, "ratio": 0.7, **found} for codec in ("fx3", "zstd huf")])
    assert "| fx3 | 0.7000 | none needed |" in tables
    assert f"| m | 25% | 125.0 ({found['plan']}) | 125.0 ({found['plan']}) |" in tables


def test_operating_points_are_codecs_too() -> None:
    trace = RoutingTrace(TraceHeader("OLMoE-1B-7B-0924", (64,), 8), ())
    huffman = replayed_models.packed_expert(trace, load_device("jetson-orin"), "zstd huf")
    plain = replayed_models.packed_expert(trace, load_device("jetson-orin"), "zstd")
    assert huffman.capabilities == plain.capabilities
    assert huffman.bytes.exponent / plain.bytes.exponent == pytest.approx(0.3245 / 0.4052, rel=1e-5)
    assert huffman.costs.shards == 4


def test_more_shards_and_workers_never_hurt_a_layer_of_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_and_workers, "SHARDS", (1, 4))
    monkeypatch.setattr(shards_and_workers, "WORKERS", (1, 2))
    header = TraceHeader("OLMoE-1B-7B-0924", (8,), 1)
    rows = shards_and_workers.simulated(RoutingTrace(header, ROUND.steps), load_device("jetson-orin"), "zstd", 0.25)
    makespan = {(row["shards"], row["workers"]): row["makespan_of_misses_seconds"] for row in rows}
    assert set(makespan) == {(1, 1), (4, 1), (1, 2), (4, 2)}
    assert makespan[4, 2] < makespan[1, 2] < makespan[1, 1]
    assert makespan[4, 1] < makespan[1, 1]
    assert all(row["seconds_per_token"] <= row["makespan_of_misses_seconds"] for row in rows)


def test_policies_that_are_replayed_against_each_other() -> None:
    alike = policy_replay.WholeRecordPools(SAME, 1, shared=True)
    result = policy_replay.reads_of(alike)
    assert set(result["cost"].values()) == {1 / 40}  # the first use, whatever the policy
    assert (result["optimum"], result["changes"]) == (pytest.approx(1 / 40), 0)
    turns = policy_replay.reads_of(policy_replay.WholeRecordPools(ROUND, 4, shared=False))
    assert turns["cost"]["lru"] == turns["cost"]["fifo"] == 1
    assert turns["optimum"] <= min(turns["cost"].values())
    row = {"model": "m", "arrangement": "single pool", "share": 0.5, **result}
    tables = policy_replay.tables_of({"m": row})
    assert "| auto | 1.0000 | 1.000 | 0 of 1 |" in tables
    moved = policy_replay.shifted(ROUND)
    assert moved.steps[:40] == ROUND.steps[:40] and moved.steps[40:] != ROUND.steps[40:]
