"""A worker that fails in any way is a reason in words, and what it measured before stays."""

from __future__ import annotations

import sys

import pytest
from bench.worker_scripts import DONE, LOADED, generation, script

from zipmoe.bench.control_group import MemoryUse
from zipmoe.bench.measurement import UnreadableWorkerError, read_output
from zipmoe.bench.worker_run import run_worker

RUN = generation(1.0, 1.25, 1.75)


def test_a_good_worker_has_no_reason() -> None:
    done = run_worker(script(LOADED, RUN, DONE), "{}", None, 60)
    assert done.reason is None
    assert done.memory is None
    (found,) = done.output.generations
    assert found.ttft_seconds == 1.0
    assert found.step_seconds == (0.25, 0.5)
    assert found.decode_seconds == 0.75
    assert found.read_bytes_per_step == 100.0


def test_the_job_arrives_on_standard_input() -> None:
    command = [
        sys.executable,
        "-S",
        "-c",
        'import sys; sys.stderr.write(sys.stdin.read()); print(\'{"kind": "done"}\')',
    ]
    assert run_worker(command, '{"model": "m"}', None, 60).stderr_tail == '{"model": "m"}'


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (script(then="raise SystemExit('no such model')"), "ended with code 1 while it loaded: no such model"),
        (script(LOADED, then="sys.exit(3)"), "ended with code 3 while it generated: without a word"),
        (script(LOADED, RUN, then="sys.exit(3)"), "ended with code 3 after 1 of its generations: without a word"),
        (script(LOADED, then="import os; os.kill(os.getpid(), 11)"), "killed by SIGSEGV while it generated"),
        (script(LOADED, RUN), "ended after 1 of its generations without saying so"),
        (script("Hello!"), "a worker wrote 'Hello!'"),
        (script(LOADED, "[1, 2]"), "a worker wrote '[1, 2]'"),
        (
            script('{"kind": "failed", "reason": "budget below the floor"}', then="sys.exit(1)"),
            "budget below the floor",
        ),
        (["/nonexistent/python"], "cannot be started: No such file or directory: /nonexistent/python"),
    ],
)
def test_reasons(command: list[str], reason: str) -> None:
    assert run_worker(command, "{}", None, 60).reason == reason


def test_too_long_a_run_is_ended_and_keeps_what_it_measured() -> None:
    waits = "import threading; threading.Event().wait()"
    done = run_worker(script(LOADED, RUN, then=waits), "{}", None, 3)
    assert done.reason == "took longer than 3 s, ended after 1 of its generations"
    assert len(done.output.generations) == 1


def test_a_kill_by_the_limit_is_named() -> None:
    class Group:
        def command(self, command: list[str]) -> list[str]:
            return command

        def use(self) -> MemoryUse:
            return MemoryUse(1000, 1)

    killed = script(LOADED, then="import os; os.kill(os.getpid(), 9)")
    done = run_worker(killed, "{}", Group(), 60)  # type: ignore[arg-type]
    assert done.reason == "killed by the memory limit while it generated"
    assert done.memory == MemoryUse(1000, 1)


def test_bytes_that_are_no_text_are_garbage() -> None:
    command = [sys.executable, "-S", "-c", "import sys; sys.stdout.buffer.write(b'\\xff\\xfe\\n')"]
    assert run_worker(command, "{}", None, 60).reason == "a worker wrote '\ufffd\ufffd'"


def test_a_line_cut_off_by_a_kill_is_left_out() -> None:
    output = read_output(f"{LOADED}\n{RUN}\n{RUN[:20]}")
    assert len(output.generations) == 1
    assert not output.done


@pytest.mark.parametrize(
    "line",
    [
        generation(1.0, 0.5),  # time runs backwards
        generation(),
        generation(1.0, tokens=[[1, 2]]),
        generation(1.0, batch=2, tokens=[[1]]),
        '{"kind": "generation", "batch": "many"}',
        '{"kind": "surprise"}',
        '{"kind": "loaded"}',
        "null",
    ],
)
def test_lines_that_contradict_themselves_are_refused(line: str) -> None:
    with pytest.raises(UnreadableWorkerError):
        read_output(f"{line}\n")
