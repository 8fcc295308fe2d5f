"""Which disk a folder lies on, and how busy the machine is."""

from __future__ import annotations

import hashlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DiskIdentity:
    """What makes disk rates of one disk useless on another."""

    device: str
    """What is mounted, e.g. ``/dev/nvme0n1p2``."""
    filesystem: str
    total_bytes: int
    """Of the file system."""

    @property
    def digest(self) -> str:
        """Short name, for file names."""
        text = "\0".join((self.device, self.filesystem, str(self.total_bytes)))
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]

    def describe(self) -> str:
        """For messages."""
        return f"{self.device} ({self.filesystem}, {self.total_bytes / 1e9:.0f} GB)"


def disk_identity(path: Path, root: Path = Path("/")) -> DiskIdentity:
    """The file system that ``path`` lies on.

    Args:
        path: an existing file or folder.
        root: directory that holds ``proc`` (tests pass a directory of their own).
    """
    status = os.stat(path)  # noqa: PTH116 - one with a path that may be a fake in tests
    usage = os.statvfs(path)
    number = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    device, filesystem = _mounted(number, path.resolve(), root)
    return DiskIdentity(device, filesystem, usage.f_frsize * usage.f_blocks)


def _mounted(number: str, path: Path, root: Path) -> tuple[str, str]:
    """Source and type of the mount with this device number; the longest mount point above ``path`` if several."""
    best: tuple[int, str, str] | None = None
    longest_above: tuple[int, str, str] | None = None
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or len(kinds) < 2:
            continue
        point = _unescaped(fields[4])
        found = (len(point), _unescaped(kinds[1]), kinds[0])
        above = point == "/" or str(path) == point or str(path).startswith(point + "/")
        if fields[2] == number and above and (best is None or found[0] >= best[0]):
            best = found
        # Some file systems (btrfs) report another number for their files than for their mount.
        if above and (longest_above is None or found[0] >= longest_above[0]):
            longest_above = found
    chosen = best or longest_above
    return (chosen[1], chosen[2]) if chosen else (f"device {number}", "unknown")


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not Linux, or not for us
        return []


class OtherLoad:
    """How many cores other processes (and the hypervisor) kept busy since this was made."""

    def __init__(self, root: Path = Path("/")) -> None:
        """Begin to look."""
        self._root = root
        self._began = (time.monotonic(), self._busy_seconds(), _own_seconds())

    def cores(self) -> float:
        """Mean number of cores in use by others since the beginning; 0 where the kernel does not tell."""
        wall, busy, own = (now - then for now, then in zip(self._now(), self._began, strict=True))
        return max(0.0, (busy - own) / wall) if wall > 0 and busy > 0 else 0.0

    def _now(self) -> tuple[float, float, float]:
        return time.monotonic(), self._busy_seconds(), _own_seconds()

    def _busy_seconds(self) -> float:
        for line in _lines(self._root / "proc/stat"):
            name, *fields = line.split()
            if name == "cpu":
                user, nice, system, _, _, *rest = (int(field) for field in fields[:8])
                return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
        return 0.0


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system
