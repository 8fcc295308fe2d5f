"""Both backends serve the same experts, report the same faults, and say which of them runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from packed_model import EXPERTS, GROUPS, PARAMETERS, PackedModel, build

from zipmoe import _native
from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.engine.engine import Engine
from zipmoe.engine.io_backend import MeasuredReads, ReadSettings, choose_reads
from zipmoe.engine.pool_slots import PoolSlots
from zipmoe.errors import CorruptRecordError, InvalidArgumentError, TruncatedShardError

_REFUSAL = _native.uring_refusal()
_URING = pytest.param("uring", marks=pytest.mark.skipif(bool(_REFUSAL), reason=f"io_uring: {_REFUSAL}"))
backends = pytest.mark.parametrize("backend", ["threads", _URING])


@backends
@pytest.mark.parametrize("pools", [None, PoolSlots(1, 1, 1, 1)], ids=["one pool", "pools"])
def test_every_expert_equals_the_original(tmp_path: Path, backend: str, pools: PoolSlots | None) -> None:
    model = build(tmp_path, CodecSettings("zstd", 1, 1))
    with Engine(
        model.folder, model.budget(4, spare=50_000_000), io_backend=backend, pools=pools, decode_threads=2
    ) as engine:
        assert engine._native.io_backend == backend
        for _ in range(2):
            for group in GROUPS:
                handle = engine.group(group)
                with engine.request(handle, list(range(EXPERTS))) as request:
                    for expert in request:
                        for name in PARAMETERS:
                            matrix = engine.matrix(handle, expert, name)
                            assert torch.equal(matrix, model.experts[group, expert, name])
        counters = engine.statistics.counters()
        assert counters.read_bytes > 0 and counters.verify_seconds > 0


@backends
def test_damage_and_missing_bytes_are_named(model: PackedModel, backend: str) -> None:
    group = model.folder.manifest.expert_groups[0]
    model.flip(group.records[2], 5)
    last = group.records[-1]
    path = model.file(last)
    path.write_bytes(path.read_bytes()[: last.offset + 4096])
    with model.engine(4, io_backend=backend) as engine:
        handle = engine.group(GROUPS[0])
        with pytest.raises(CorruptRecordError, match=group.records[2].name):
            engine.expert_matrix(handle, 2, PARAMETERS[0])
        with pytest.raises(TruncatedShardError, match=last.name):
            engine.expert_matrix(handle, EXPERTS - 1, PARAMETERS[0])
        assert torch.equal(engine.expert_matrix(handle, 0, PARAMETERS[0]), model.experts[GROUPS[0], 0, PARAMETERS[0]])


@backends
def test_a_request_may_be_left_and_the_engine_closed_with_reads_under_way(model: PackedModel, backend: str) -> None:
    for _ in range(10):
        with model.engine(EXPERTS, io_backend=backend) as engine:
            with engine.request(engine.group(GROUPS[0]), list(range(EXPERTS))) as request:
                next(request)
            with engine.request(engine.group(GROUPS[1]), [1]) as request:
                assert list(request) == [1]
            request = engine.request(engine.group(GROUPS[1]), list(range(EXPERTS)))
            request.__enter__()


@pytest.mark.parametrize("backend", ["auto", "threads"])
def test_the_mode_line_names_threads(model: PackedModel, backend: str) -> None:
    with model.engine(2, io_backend=backend) as engine:
        assert "reads with 4 threads" in engine.mode_line("fast", "eager")
    with model.engine(2, io_backend=backend, io_threads=3) as engine:
        assert "reads with 3 threads" in engine.mode_line("fast", "eager")


@pytest.mark.skipif(bool(_REFUSAL), reason=f"io_uring: {_REFUSAL}")
def test_the_mode_line_names_io_uring(model: PackedModel) -> None:
    with model.engine(2, io_backend="uring") as engine:
        assert f"{engine._native.io_mode} reads with io_uring" in engine.mode_line("fast", "eager")


def test_the_caller_comes_before_what_was_measured_and_that_before_the_default() -> None:
    measured = MeasuredReads({"threads": 7}, "measured best")
    assert choose_reads("auto") == ReadSettings("threads", 4)
    assert choose_reads("auto", None, None, measured) == ReadSettings("threads", 7, origin="measured best")
    assert choose_reads("threads", 3, None, measured) == ReadSettings("threads", 3)
    assert choose_reads("threads", None, None, MeasuredReads()) == ReadSettings("threads", 4)
    assert choose_reads("threads", None, None, MeasuredReads({"uring": 2}, "x")) == ReadSettings("threads", 4)
    if not _REFUSAL:
        uring = MeasuredReads({"uring": 2}, "measured best")
        assert choose_reads("uring", None, None, measured) == ReadSettings("uring", depth=8)
        assert choose_reads("uring", None, None, uring) == ReadSettings("uring", depth=2, origin="measured best")
        assert choose_reads("uring", None, 4096, uring) == ReadSettings("uring", depth=4096)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("auto", None, 2), "io_depth is of the backend uring"),
        (("auto", 0), "io_threads must be at least 1"),
        (("uring", None, 0), "io_depth must be at least 1"),
        (("uring", None, 4097), "io_depth must be at most 4096"),
    ],
)
def test_numbers_of_reads_that_cannot_be(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        choose_reads(*arguments)


def test_contradictions_and_a_backend_that_cannot_be_used_are_refused(
    model: PackedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgumentError, match="io_threads are of the backend threads"):
        model.engine(2, io_backend="uring", io_threads=2)
    monkeypatch.setattr(_native, "uring_refusal", lambda: "io_uring is forbidden here")
    with pytest.raises(InvalidArgumentError, match="io_uring is forbidden here"):
        model.engine(2, io_backend="uring")
