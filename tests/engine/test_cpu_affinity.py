"""Lists of CPUs: read, checked, written; and kept by every thread of a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from zipmoe.engine.cpu_affinity import check_cpus, describe_cpus, parse_cpus
from zipmoe.errors import InvalidArgumentError

ALLOWED = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0", (0,)),
        ("0-3,6", (0, 1, 2, 3, 6)),
        (" 2 , 0-1", (0, 1, 2)),
        ("1,1-2", (1, 2)),
        ([4, 0], (0, 4)),
        ((7,), (7,)),
    ],
)
def test_lists_are_read(text: object, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["", ",", "a", "0-", "-1", "3-1", "0,", "1.5", "0-99999999999", [], [-1], [True], ["x"], 3]
)
def test_what_is_no_list_is_refused(text: object) -> None:
    with pytest.raises(InvalidArgumentError, match="is not a list of CPUs"):
        parse_cpus(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["0", "0-1", "0,2", "0-2,5,7-8"])
def test_lists_are_written_as_they_are_read(text: str) -> None:
    assert describe_cpus(parse_cpus(text)) == text


def test_cpus_that_are_not_there_are_named() -> None:
    there = describe_cpus(ALLOWED)
    with pytest.raises(InvalidArgumentError, match="CPU 5000 is not among those that this process may use") as one:
        check_cpus([ALLOWED[0], 5000])
    assert one.value.hint == f"it may use {there}"
    with pytest.raises(InvalidArgumentError, match="CPUs 5000-5001 are not among"):
        check_cpus([5000, 5001])


@pytest.mark.parametrize("name", ["GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES", "KMP_AFFINITY"])
def test_openmp_must_not_place_threads_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0")
    with pytest.raises(InvalidArgumentError, match=name) as refused:
        check_cpus(ALLOWED)
    assert refused.value.hint == f"leave out cpus, or unset {name}"
    monkeypatch.setenv(name, "false")
    check_cpus(ALLOWED)


def test_threads_that_are_there_and_those_to_come_are_kept() -> None:
    script = f"""
import os, threading
from zipmoe.engine.cpu_affinity import keep_process_on
leave = threading.Event()
threading.Thread(target=leave.wait).start()
keep_process_on([{ALLOWED[0]}])
threading.Thread(target=leave.wait).start()
assert threading.active_count() == 3
print({{tuple(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}})
leave.set()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{{({ALLOWED[0]},)}}"
