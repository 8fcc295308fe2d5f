"""Which of the memory in use counts against the limits, and memory that is given back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from zipmoe.engine.memory_usage import charged_bytes, resident_bytes, return_free_memory

KIB = 1024
STATUS = "Name:\tx\nVmHWM:\t   9000 kB\nRssAnon:\t    700 kB\nRssFile:\t    100 kB\nRssShmem:\t      8 kB\n"
V1 = ("4:memory:/a/b\n", "33 25 0:29 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory")
V2 = ("0::/a/b\n", "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw")
V1_DIRECTORY, V2_DIRECTORY = "sys/fs/cgroup/memory", "sys/fs/cgroup"
UNLIMITED_V1 = "9223372036854771712"


def machine(root: Path, version: tuple[str, str], files: dict[str, str]) -> Path:
    groups, mount = version
    written = {"proc/self/status": STATUS, "proc/self/cgroup": groups, "proc/self/mountinfo": mount, **files}
    for name, text in written.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_libraries_that_a_limited_group_does_not_pay_for_are_free(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        V1,
        {
            f"{V1_DIRECTORY}/memory.limit_in_bytes": UNLIMITED_V1,
            f"{V1_DIRECTORY}/memory.stat": f"total_mapped_file {99 * KIB}",
            f"{V1_DIRECTORY}/a/b/memory.limit_in_bytes": "4096000",
            f"{V1_DIRECTORY}/a/b/memory.stat": f"mapped_file 0\ntotal_mapped_file {30 * KIB}",
        },
    )
    assert resident_bytes(root) == 808 * KIB
    assert charged_bytes(root) == 738 * KIB


def test_every_group_with_a_limit_counts_and_at_most_what_is_mapped(tmp_path: Path) -> None:
    files = {
        f"{V2_DIRECTORY}/a/memory.max": "4096000",
        f"{V2_DIRECTORY}/a/memory.stat": f"file {500 * KIB}\nfile_mapped {60 * KIB}",
        f"{V2_DIRECTORY}/a/b/memory.max": "max",
        f"{V2_DIRECTORY}/a/b/memory.high": "2048000",
        f"{V2_DIRECTORY}/a/b/memory.stat": "file_mapped 0",
    }
    assert charged_bytes(machine(tmp_path / "some", V2, files)) == 768 * KIB
    files[f"{V2_DIRECTORY}/a/memory.stat"] = f"file_mapped {600 * KIB}"  # other processes of the group map more
    assert charged_bytes(machine(tmp_path / "more", V2, files)) == 808 * KIB


@pytest.mark.parametrize("stat", ["total_mapped_file 0", "cache 5"])
def test_without_a_limit_or_without_a_number_all_of_it_counts(tmp_path: Path, stat: str) -> None:
    limit = "4096000" if stat == "cache 5" else UNLIMITED_V1
    directory = f"{V1_DIRECTORY}/a/b"
    root = machine(tmp_path, V1, {f"{directory}/memory.limit_in_bytes": limit, f"{directory}/memory.stat": stat})
    assert charged_bytes(root) == 808 * KIB
    assert charged_bytes(tmp_path / "nothing") == 0


def test_memory_in_use_counts_on_this_machine() -> None:
    assert 10_000_000 < charged_bytes() <= resident_bytes()


def test_freed_memory_is_given_back() -> None:
    kept, freed = [], []
    for _ in range(2000):  # 128 MB in pieces that the allocator would keep, pinned by what lies between them
        freed.append(np.ones(64 * KIB, dtype=np.uint8))
        kept.append(np.ones(4 * KIB, dtype=np.uint8))
    freed.clear()
    before = resident_bytes()
    return_free_memory()
    assert resident_bytes() < before - 64_000_000
    assert all(piece.all() for piece in kept)
