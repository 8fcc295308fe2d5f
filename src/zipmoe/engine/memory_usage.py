"""What memory this process uses and has used, from /proc and its control group."""

from __future__ import annotations

import ctypes
from pathlib import Path

from zipmoe.engine.limits import memory_control_groups, read_fields, read_number


def resident_bytes(root: Path = Path("/")) -> int:
    """Memory that the process has in use now: anonymous, mapped files (libraries) and shared memory."""
    fields = _status(root)
    return sum(fields.get(name, 0) for name in ("RssAnon", "RssFile", "RssShmem"))


def charged_bytes(root: Path = Path("/")) -> int:
    """Memory in use now that counts against the limits of this process: as ``resident_bytes``, but of the mapped files
    (libraries) only as much as the control groups with a limit pay for; all of it where none has one.

    Pages of a file are charged to the group that read them first, so a process in another group gets them for nothing.
    Should they be charged to it one day, they are clean pages, which the kernel drops before it ends a process.
    """
    fields = _status(root)
    mapped = fields.get("RssFile", 0)
    paid = [
        read_fields(directory / "memory.stat").get("file_mapped" if group.version == 2 else "total_mapped_file", mapped)
        for group in memory_control_groups(root)
        for directory in group.limited()
    ]
    return fields.get("RssAnon", 0) + fields.get("RssShmem", 0) + min(mapped, max(paid, default=mapped))


def return_free_memory() -> None:
    """Give memory that was freed, but is kept for the next allocations, back to the system.

    After a long prompt that is most of its activations. Does nothing where the C library has no such function.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


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
