"""Which disk a folder is on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zipmoe.profiling.disk_identity import DiskIdentity, OtherLoad, disk_identity


def _root(tmp_path: Path, mounts: list[str], stat: str = "") -> Path:
    root = tmp_path / "root"
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/mountinfo").write_text("\n".join(mounts) + "\n")
    (root / "proc/stat").write_text(stat)
    return root


def _number(path: Path) -> str:
    device = path.stat().st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def test_the_mount_with_the_files_number(tmp_path: Path) -> None:
    root = _root(
        tmp_path,
        [
            "20 1 0:99 / / rw - overlay overlay rw",
            f"21 20 {_number(tmp_path)} / / rw,relatime shared:1 - ext4 /dev/my\\040disk rw",
            "22 20 0:77 / /elsewhere rw - xfs /dev/other rw",
        ],
    )
    identity = disk_identity(tmp_path, root)
    assert (identity.device, identity.filesystem) == ("/dev/my disk", "ext4")
    assert identity.total_bytes > 0
    assert "/dev/my disk (ext4, " in identity.describe()


def test_a_file_system_with_numbers_of_its_own_is_found_by_path(tmp_path: Path) -> None:
    mounts = ["20 1 0:1 / / rw - ext4 /dev/a rw", f"21 20 0:2 / {tmp_path} rw - btrfs /dev/b rw"]
    assert disk_identity(tmp_path, _root(tmp_path, mounts)).device == "/dev/b"


@pytest.mark.parametrize("mounts", [[], ["garbage"], ["1 2 3 - x"]])
def test_without_mount_table_the_number_remains(tmp_path: Path, mounts: list[str]) -> None:
    identity = disk_identity(tmp_path, _root(tmp_path, mounts))
    assert identity.device == f"device {_number(tmp_path)}"


def test_digest_tells_disks_apart() -> None:
    disks = [DiskIdentity("a", "ext4", 1), DiskIdentity("a", "ext4", 2), DiskIdentity("b", "ext4", 1)]
    assert len({disk.digest for disk in disks}) == 3


def test_load_of_others_is_never_negative(tmp_path: Path) -> None:
    assert OtherLoad(_root(tmp_path, [], "")).cores() == 0
    root = _root(tmp_path, [], "cpu  100 0 100 1000 0 0 0 0 0 0\n")
    load = OtherLoad(root)
    (root / "proc/stat").write_text("cpu  100000 0 100 1000 0 0 0 50 0 0\n")
    assert load.cores() > 0
