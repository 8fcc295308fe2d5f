"""What memory this process uses and has used, from /proc and its control group."""

from __future__ import annotations

from pathlib import Path

from zipmoe.engine.limits import memory_control_groups, read_number


def resident_bytes(root: Path = Path("/")) -> int:
    """Memory that the process has in use now: anonymous, mapped files (libraries) and shared memory."""
    fields = _status(root)
    return sum(fields.get(name, 0) for name in ("RssAnon", "RssFile", "RssShmem"))


def peak_resident_bytes(root: Path = Path("/")) -> int:
    """Largest resident set of the process so far (VmHWM), mapped libraries included, page cache not."""
    return _status(root).get("VmHWM", 0)


def control_group_peak_bytes(root: Path = Path("/")) -> int | None:
    """Largest memory use of the process's control group so far, page cache and other processes in it included.

    None where the kernel does not tell (no memory control group, or version 2 before Linux 5.19).
    """
    for group in memory_control_groups(root):
        peak = read_number(group.directory / ("memory.peak" if group.version == 2 else "memory.max_usage_in_bytes"))
        if peak is not None:
            return peak
    return None


def _status(root: Path) -> dict[str, int]:
    try:
        text = (root / "proc/self/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    fields = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        parts = value.split()
        if len(parts) == 2 and parts[1] == "kB":
            fields[name] = int(parts[0]) * 1024
    return fields
