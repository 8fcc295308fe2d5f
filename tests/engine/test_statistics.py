"""Numbers of a run, the mode line, and the ways of reading."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from packed_model import EXPERTS, GROUPS, PARAMETERS, PackedModel

from zipmoe import _native
from zipmoe.engine.statistics import EngineCounters, Statistics


def test_counters_of_an_engine(model: PackedModel) -> None:
    dense_bytes = sum(block.length for matrix in model.folder.manifest.dense for block in matrix.blocks)
    with model.engine(4) as engine:
        start = engine.statistics.counters()
        assert (start.reads, start.read_bytes, start.hits, start.misses) == (3, dense_bytes, 0, 0)
        assert start.hit_rate is None
        handle = engine.group(GROUPS[0])
        for wanted in ([0, 1], [1, 2, 3], [0]):
            with engine.request(handle, wanted) as request:
                for expert in request:
                    engine.matrix(handle, expert, PARAMETERS[1])
        run = engine.statistics.counters().since(start)
        assert (run.requests, run.hits, run.misses, run.reads, run.evictions) == (3, 2, 4, 4, 0)
        assert run.hit_rate == pytest.approx(1 / 3)
        assert run.read_bytes == sum(model.record(0, expert).length for expert in range(4))
        assert run.decoded_bytes == 6 * 64 * 48 * 2
        assert run.decode_seconds > 0 and run.read_seconds > 0 and run.verify_seconds > 0
        assert 0 < run.longest_read_seconds <= engine.statistics.counters().read_latency_seconds


def test_report_of_a_run_with_a_known_clock() -> None:
    now = 0.0
    counted: dict[str, Any] = {"hits": 5, "misses": 5, "read_bytes": 1000}
    statistics = Statistics(lambda: dict(counted), clock=lambda: now)
    empty = statistics.report()
    assert (empty.tokens, empty.ttft_seconds, empty.tpot_seconds, empty.hit_rate) == (0, None, None, None)
    assert empty.read_bytes_per_token is None
    now = 10.0
    statistics.start_run()
    now = 12.5
    counted.update(hits=6, misses=15, read_bytes=8000)
    statistics.token_generated()
    one = statistics.report()
    assert (one.tokens, one.ttft_seconds, one.tpot_seconds) == (1, 2.5, None)
    for step in range(4):
        now = 12.5 + 0.25 * (step + 1)
        counted["read_bytes"] += 100
        counted["hits"] += 2
        statistics.token_generated()
    report = statistics.report()
    assert (report.tokens, report.ttft_seconds, report.tpot_seconds) == (5, 2.5, 0.25)
    assert (report.hits, report.misses, report.hit_rate) == (9, 10, pytest.approx(9 / 19))
    assert (report.read_bytes, report.first_token_read_bytes, report.read_bytes_per_token) == (7400, 7000, 100)
    assert report.peak_resident_bytes > 0
    line = report.line()
    for part in (
        "5 tokens",
        "TTFT 2.500 s",
        "TPOT 0.2500 s",
        "hit rate 47.4% (9 of 19)",
        "100 B per token",
        "peak memory",
    ):
        assert part in line
    assert json.loads(json.dumps(report.as_dict()))["tokens"] == 5


def test_native_counters_have_the_names_of_the_dataclass(model: PackedModel) -> None:
    with model.engine(2) as engine:
        assert set(engine._native.counters()) == set(EngineCounters.__dataclass_fields__)


def test_mode_line_says_everything(model: PackedModel) -> None:
    with model.engine(3, io_threads=1, verify="first") as engine:
        line = engine.mode_line("exact", "grouped_mm")
    assert "\n" not in line
    for part in (
        "codec fx3",
        "mode exact with grouped_mm combine",
        f"{_native.best_instruction_set()} decoding with 2 threads",
        "reads with 1 thread",
        "checksums first",
        "budget ",
        f"for 3 of {2 * EXPERTS} experts (3 x ",
    ):
        assert part in line


def test_buffered_reads_are_reported_and_right(model: PackedModel) -> None:
    with model.engine(2, io_mode="buffered", instruction_set="scalar") as engine:
        line = engine.mode_line("fast", "eager")
        assert "buffered reads with 4 threads (buffered reads were asked for)" in line
        assert "scalar decoding" in line
        handle = engine.group(GROUPS[1])
        for expert in range(EXPERTS):
            matrix = engine.expert_matrix(handle, expert, PARAMETERS[0])
            assert torch.equal(matrix, model.experts[GROUPS[1], expert, PARAMETERS[0]])
