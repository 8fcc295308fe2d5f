from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from zipmoe.errors import NotEnoughDiskError
from zipmoe.planning.trace import (
    RoutingTrace,
    TraceError,
    TraceHeader,
    TraceStep,
    open_trace_writer,
    read_trace,
    write_trace,
)

HEADER = TraceHeader("some/model", (4, 6), 2)
TRACE = RoutingTrace(
    HEADER,
    (
        TraceStep(0, 3, ((0, 1, 3), (0, 1, 2, 3, 4, 5))),
        TraceStep(1, 1, ((1, 2), (0, 5))),
        TraceStep(2, 1, ((0, 1), (2, 5))),
        TraceStep(3, 1, ((2, 3), (0, 1))),
    ),
)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_round_trip(tmp_path: Path, name: str) -> None:
    write_trace(tmp_path / name, TRACE)
    assert read_trace(tmp_path / name) == TRACE


def test_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with open_trace_writer(path, HEADER) as writer:
        writer.append(2, [[3, 1, 3], [5, 0]])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"zipmoe_trace": 1, "model": "some/model", "experts": [4, 6], "top_k": 2},
        {"step": 0, "tokens": 2, "layers": [[1, 3], [0, 5]]},
    ]


def test_a_step_that_does_not_fit_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with open_trace_writer(path, HEADER) as writer:
        with pytest.raises(TraceError, match="3 experts for 1 tokens"):
            writer.append(1, [[0, 1, 2], [0]])
        writer.append(1, [[0, 1], [0]])
    assert [step.step for step in read_trace(path).steps] == [0]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
@pytest.mark.parametrize("steps", [1, 2000], ids=["at the end", "on the way"])
def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, name: str, steps: int, full_disk: Callable[[Path], None]
) -> None:
    path = tmp_path / name
    full_disk(path)
    with (
        pytest.raises(NotEnoughDiskError, match=f"{name}' cannot be written: the disk is full"),
        open_trace_writer(path, HEADER) as writer,
    ):
        for step in range(steps):
            writer.append(2, [[step % 4], [step % 5, 5]])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as failed:
        write_trace(tmp_path / "gone" / "trace.jsonl", TRACE)
    assert failed.value.filename == str(tmp_path / "gone" / "trace.jsonl")


def test_what_was_recorded_until_an_interruption_stays(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with pytest.raises(KeyboardInterrupt), open_trace_writer(path, HEADER) as writer:
        writer.append(1, [[0, 1], [0]])
        assert not path.exists()
        raise KeyboardInterrupt
    assert [step.step for step in read_trace(path).steps] == [0]
    assert list(tmp_path.iterdir()) == [path]


def test_activations() -> None:
    assert TRACE.activations(0).astype(int).tolist() == [[1, 1, 0, 1], [0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1]]
    assert TRACE.mean_tokens() == 1.5


def test_only_decode_steps() -> None:
    assert [step.step for step in TRACE.decode_steps().steps] == [1, 2, 3]


def test_neighbouring_steps_as_a_batch() -> None:
    batched = TRACE.decode_steps().batched(2)
    assert batched.steps == (TraceStep(0, 2, ((0, 1, 2), (0, 2, 5))),)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is not a routing trace"),
        (['{"tok": 1}'], "is not a routing trace"),
        (['{"zipmoe_trace": 2}'], "version 2"),
        (["{"], "line 1 is not JSON"),
        (['{"zipmoe_trace": 1, "model": "m", "experts": [4]}'], "damaged: 'top_k'"),
        (['{"zipmoe_trace": 1, "model": "m", "experts": [4], "top_k": 5}'], "cannot select 5"),
        (['{"zipmoe_trace": 1, "model": "m", "experts": [4], "top_k": true}'], "True is not an integer"),
        (["HEADER", '{"step": 0, "tokens": 1, "layers": [[1, 0]]}'], "not distinct and ascending"),
        (["HEADER", '{"step": 0, "tokens": 1, "layers": [[1, 1]]}'], "not distinct and ascending"),
        (["HEADER", '{"step": 0, "tokens": 1, "layers": [[1, 4]]}'], r"outside 0\.\.3"),
        (["HEADER", '{"step": 7, "tokens": 1, "layers": [[]]}'], "step 7, layer 0: no expert is active"),
        (["HEADER", '{"step": 0, "tokens": 1, "layers": [[0], [1]]}'], "2 layers instead of 1"),
        (["HEADER", '{"step": 0, "tokens": 0, "layers": [[0]]}'], "0 tokens"),
        (["HEADER", '{"step": 0, "tokens": 1, "layers": [["0"]]}'], "'0' is not an integer"),
        (["HEADER", "[]"], "damaged"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, lines: list[str], message: str) -> None:
    header = '{"zipmoe_trace": 1, "model": "m", "experts": [4], "top_k": 2}'
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(line.replace("HEADER", header) + "\n" for line in lines))
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_missing_and_truncated_files(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "nothing.jsonl")
    path = tmp_path / "trace.jsonl.gz"
    write_trace(path, TRACE)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(path)
