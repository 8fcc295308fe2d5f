"""How much memory this process may have: physical memory and the control groups' limits, up the tree, version 1 and 2.

Page cache is never subtracted and "what is free now" never asked: caches are given back under pressure, and a budget
that depended on the moment of the start would be none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Version 1 writes "no limit" as the largest page-aligned number.
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True)
class MemoryLimit:
    """One upper bound, and who says so (for messages)."""

    source: str
    bytes: int


@dataclass(frozen=True)
class ControlGroup:
    """A memory control group of the process: its directory, and the topmost directory of the tree that is visible."""

    version: int
    directory: Path
    top: Path

    def lineage(self) -> list[Path]:
        """The group and its ancestors, up to the top."""
        lineage = [self.directory]
        while lineage[-1] != self.top:
            lineage.append(lineage[-1].parent)
        return lineage

    @property
    def limit_names(self) -> tuple[str, ...]:
        """Control files that hold limits."""
        return ("memory.max", "memory.high") if self.version == 2 else ("memory.limit_in_bytes",)

    def limited(self) -> list[Path]:
        """Those of the lineage that have a limit."""
        return [
            directory
            for directory in self.lineage()
            if any((read_number(directory / name) or _UNLIMITED_BYTES) < _UNLIMITED_BYTES for name in self.limit_names)
        ]


@dataclass(frozen=True)
class _Mount:
    mounted_part: str
    point: str
    kind: str
    options: frozenset[str]


def detect_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """All limits that hold for this process, smallest first; empty only where /proc is missing.

    Args:
        root: directory that holds ``proc`` and the control group mounts (tests pass a directory of their own).
    """
    limits = []
    physical = _physical_bytes(root)
    if physical is not None:
        limits.append(MemoryLimit("physical memory", physical))
    for group in memory_control_groups(root):
        for directory in group.lineage():
            for name in group.limit_names:
                value = read_number(directory / name)
                if value is not None and value < _UNLIMITED_BYTES:
                    limits.append(MemoryLimit(f"{name} of control group {directory}", value))
        # Version 1 also tells about ancestors that lie outside of a container's view.
        hierarchical = read_fields(group.directory / "memory.stat").get("hierarchical_memory_limit")
        if group.version == 1 and hierarchical is not None and hierarchical < _UNLIMITED_BYTES:
            limits.append(MemoryLimit(f"hierarchical_memory_limit of control group {group.directory}", hierarchical))
    return sorted(limits, key=lambda limit: limit.bytes)


def memory_control_groups(root: Path = Path("/")) -> list[ControlGroup]:
    """The control groups (at most one per version) that account this process's memory."""
    groups = []
    mounts = _control_group_mounts(root)
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            version, fitting = 2, [mount for mount in mounts if mount.kind == "cgroup2"]
        elif "memory" in controllers.split(","):
            version, fitting = 1, [mount for mount in mounts if mount.kind == "cgroup" and "memory" in mount.options]
        else:
            continue
        for mount in fitting[:1]:
            top = root / mount.point.lstrip("/")
            groups.append(ControlGroup(version, _group_directory(top, mount.mounted_part, path), top))
    return groups


def _group_directory(top: Path, mounted_part: str, path: str) -> Path:
    """Where ``path`` appears below the mount; containers mount only their own part of the tree."""
    below = path.lstrip("/")
    if mounted_part != "/":
        inside = path == mounted_part or path.startswith(mounted_part + "/")
        below = path[len(mounted_part) :].lstrip("/") if inside else ""
    directory = top / below
    if ".." in directory.parts or not directory.is_dir():
        return top
    return directory


def _control_group_mounts(root: Path) -> list[_Mount]:
    mounts = []
    for line in _read_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind_fields = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(kind_fields) < 3 or kind_fields[0] not in ("cgroup", "cgroup2"):
            continue
        mounts.append(
            _Mount(_unescape(fields[3]), _unescape(fields[4]), kind_fields[0], frozenset(kind_fields[2].split(",")))
        )
    return mounts


def _unescape(path: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, character)
    return path


def _physical_bytes(root: Path) -> int | None:
    for line in _read_text(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def read_number(path: Path) -> int | None:
    """The number in a control file; None where there is no such file or it holds no number (``max``)."""
    text = _read_text(path).strip()
    return int(text) if text.isdecimal() else None


def read_fields(path: Path) -> dict[str, int]:
    """The lines ``name number`` of a control file; empty where there is no such file."""
    pairs = (line.split() for line in _read_text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not there, or not for us: no information
        return ""
