"""Limits that include page cache, on this machine where it allows them, and on made-up ones of both versions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bench.worker_scripts import LOADED, script

from zipmoe.bench import control_group
from zipmoe.bench.control_group import GROUP_PREFIX, GroupParent, LimitedGroup, find_parent, sweep
from zipmoe.bench.file_eviction import evict
from zipmoe.bench.worker_run import run_worker
from zipmoe.errors import MemoryLimitUnavailableError

MIB = 1 << 20


@pytest.fixture(scope="module")
def parent() -> GroupParent:
    try:
        return find_parent()
    except MemoryLimitUnavailableError as error:
        pytest.skip(str(error))


def test_a_worker_beyond_the_limit_is_killed(parent: GroupParent) -> None:
    with parent.make(64 * MIB) as group:
        done = run_worker(script(LOADED, then="waste = bytearray(256 << 20); print(waste[-1])"), "{}", group, 60)
    assert done.reason == "killed by the memory limit while it generated"
    assert done.memory is not None
    assert done.memory.oom_kills >= 1
    assert not group.directory.exists()


def test_page_cache_counts(parent: GroupParent, tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(os.urandom(32 * MIB))
    if evict([file]):
        pytest.skip("the folder for tests lies in a file system in memory")
    read = f"f = open({str(file)!r}, 'rb', 0)\nwhile f.read(1 << 20): pass\n"
    with parent.make(128 * MIB) as group:
        with_file = run_worker(script(then=read), "{}", group, 60).memory
    with parent.make(128 * MIB) as group:
        without = run_worker(script(then=""), "{}", group, 60).memory
    assert with_file is not None
    assert without is not None
    assert with_file.oom_kills == 0
    if with_file.peak_bytes is not None and without.peak_bytes is not None:
        assert with_file.peak_bytes - without.peak_bytes > 30 * MIB


def test_a_group_is_gone_after_an_interrupt_with_all_that_ran_in_it(parent: GroupParent) -> None:
    with pytest.raises(KeyboardInterrupt):
        with parent.make(64 * MIB) as group:
            command = group.command([sys.executable, "-S", "-c", "print('up', flush=True)\nwhile True: input()"])
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            raise KeyboardInterrupt
    assert process.wait(60) == -9
    assert not group.directory.exists()


def test_groups_of_dead_benchmarks_are_swept_and_those_of_living_ones_are_not(parent: GroupParent) -> None:
    dead = subprocess.Popen([sys.executable, "-S", "-c", ""])
    dead.wait()
    stale = LimitedGroup(parent.version, parent.directory / f"{GROUP_PREFIX}{dead.pid}-1", 64 * MIB)
    with parent.make(64 * MIB) as living:
        sweep(parent.directory)
        assert not stale.directory.exists()
        assert living.directory.exists()


# --- machines made of files


def _machine(root: Path, kind: str, mount: str, options: str, own: str, line: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(f"30 29 0:26 / {mount} rw - {kind} cgroup {options}\n")
    (root / "proc/self/cgroup").write_text(line)
    directory = root / mount.lstrip("/") / own
    directory.mkdir(parents=True)
    return directory


class _Directories:
    """Makes control files appear in new directories, as the kernel does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
        make = Path.mkdir

        def mkdir(path: Path, *args: object, **kwargs: object) -> None:
            make(path, *args, **kwargs)  # type: ignore[arg-type]
            if path.name.startswith(GROUP_PREFIX):
                for name, text in files.items():
                    (path / name).write_text(text)

        monkeypatch.setattr(Path, "mkdir", mkdir)
        monkeypatch.setattr(Path, "rmdir", shutil.rmtree)


V1_FILES = {
    "memory.limit_in_bytes": "",
    "memory.memsw.limit_in_bytes": "",
    "memory.max_usage_in_bytes": "7000\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    "cgroup.procs": "",
}
V2_FILES = {
    "memory.max": "",
    "memory.swap.max": "",
    "memory.peak": "8000\n",
    "memory.events": "low 0\nhigh 0\nmax 9\noom 1\noom_kill 1\noom_group_kill 0\n",
    "cgroup.procs": "",
}


def test_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = _machine(tmp_path, "cgroup", "/sys/fs/cgroup/memory", "rw,memory", "mine", "4:memory:/mine\n")
    _Directories(monkeypatch, V1_FILES)
    found = find_parent(tmp_path)
    assert (found.version, found.directory) == (1, own)
    with found.make(5000) as group:
        assert (group.directory / "memory.limit_in_bytes").read_text() == "5000\n"
        assert (group.directory / "memory.memsw.limit_in_bytes").read_text() == "5000\n"  # no swap beyond it
        assert group.use() == control_group.MemoryUse(7000, 2)
    assert not group.directory.exists()


def test_version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = _machine(tmp_path, "cgroup2", "/sys/fs/cgroup", "rw", "mine", "0::/mine\n")
    (own.parent / "cgroup.controllers").write_text("cpu memory\n")
    (own / "cgroup.subtree_control").write_text("")
    _Directories(monkeypatch, V2_FILES)
    found = find_parent(tmp_path)
    assert (found.version, found.directory) == (2, own)
    assert (own / "cgroup.subtree_control").read_text() == "+memory\n"
    with found.make(5000) as group:
        assert (group.directory / "memory.max").read_text() == "5000\n"
        assert (group.directory / "memory.swap.max").read_text() == "0\n"
        assert group.use() == control_group.MemoryUse(8000, 1)


def test_version_2_moves_this_process_out_of_the_way_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = _machine(tmp_path, "cgroup2", "/sys/fs/cgroup", "rw", "", "0::/\n")
    (own / "cgroup.controllers").write_text("memory\n")
    (own / "cgroup.subtree_control").write_text("")
    _Directories(monkeypatch, V2_FILES)
    write = control_group._write

    def busy_until_moved(path: Path, value: int | str) -> None:
        moved = list(own.glob(f"{GROUP_PREFIX}*-command"))
        if path.name == "cgroup.subtree_control" and not moved:
            raise OSError(16, "Device or resource busy")
        write(path, value)

    monkeypatch.setattr(control_group, "_write", busy_until_moved)
    with find_parent(tmp_path):
        (child,) = own.glob(f"{GROUP_PREFIX}*-command")
        assert (child / "cgroup.procs").read_text() == f"{os.getpid()}\n"
    assert (own / "cgroup.procs").read_text() == f"{os.getpid()}\n"
    assert not child.exists()


def test_a_machine_without_the_controller(tmp_path: Path) -> None:
    own = _machine(tmp_path, "cgroup2", "/sys/fs/cgroup", "rw", "mine", "0::/mine\n")
    (own.parent / "cgroup.controllers").write_text("cpu\n")
    with pytest.raises(MemoryLimitUnavailableError, match="no memory controller is mounted") as refusal:
        find_parent(tmp_path)
    assert "systemd-run --user --scope" in str(refusal.value.hint)


def test_a_machine_that_does_not_allow_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(tmp_path, "cgroup", "/sys/fs/cgroup/memory", "rw,memory", "mine", "4:memory:/mine\n")

    def refused(path: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(MemoryLimitUnavailableError, match="mine: Permission denied"):
        find_parent(tmp_path)
