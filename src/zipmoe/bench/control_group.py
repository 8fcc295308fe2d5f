"""Control groups with a memory limit that includes page cache: every contender of a benchmark runs in one.

Limits on the resident set alone would favour whoever maps the model: the page cache would be his, and free. Version 1
and version 2 of the kernel's memory controller are supported; both need the right to make groups (root, or a delegated
group). Groups carry the process id of the benchmark in their names: those of dead ones are removed at the next start.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from zipmoe.engine.limits import ControlGroup, memory_control_groups, read_number
from zipmoe.errors import MemoryLimitUnavailableError

GROUP_PREFIX = "zipmoe-bench-"
_REMOVAL_SECONDS = 10.0
_ENTER = 'echo $$ > "$0" && exec "$@"'
"""For /bin/sh: the process enters the group before the program that is measured starts."""
_HINT = (
    "run as root, or in a group of its own (systemd-run --user --scope -p Delegate=yes zipmoe bench ...); "
    "--no-limit measures without one"
)


@dataclass(frozen=True)
class MemoryUse:
    """What the processes of a group used so far."""

    peak_bytes: int | None
    """Anonymous memory and page cache; None where the kernel does not tell (version 2 before Linux 5.19)."""
    oom_kills: int


class LimitedGroup:
    """One control group; a context manager that kills what is left in the group and removes it."""

    def __init__(self, version: int, directory: Path, limit_bytes: int) -> None:
        """Make the group and set its limit, swap excluded.

        Raises:
            OSError: the group cannot be made or the limit not be set.
        """
        self._version = version
        self.directory = directory
        self.limit_bytes = limit_bytes
        directory.mkdir()
        try:
            if version == 1:
                _write(directory / "memory.limit_in_bytes", limit_bytes)
                swap, swap_limit = directory / "memory.memsw.limit_in_bytes", limit_bytes
            else:
                _write(directory / "memory.max", limit_bytes)
                swap, swap_limit = directory / "memory.swap.max", 0
            if swap.exists():  # not there: the kernel does not account swap, or there is none
                _write(swap, swap_limit)
        except BaseException:
            self.remove()
            raise

    def command(self, command: Sequence[str]) -> list[str]:
        """``command`` wrapped so that it runs inside the group from its first instruction on."""
        return ["/bin/sh", "-c", _ENTER, str(self.directory / "cgroup.procs"), *command]

    def use(self) -> MemoryUse:
        """Peak and kills so far."""
        if self._version == 1:
            peak = read_number(self.directory / "memory.max_usage_in_bytes")
            events = "memory.oom_control"
        else:
            peak, events = read_number(self.directory / "memory.peak"), "memory.events"
        kills = re.search(r"^oom_kill (\d+)$", _read(self.directory / events), re.MULTILINE)
        return MemoryUse(peak, int(kills[1]) if kills else 0)

    def kill(self) -> None:
        """Kill everything that runs inside."""
        _kill(self.directory)

    def remove(self) -> None:
        """Kill what runs inside, and remove the group.

        Raises:
            OSError: the group is still in use after ten seconds.
        """
        _remove(self.directory)

    def __enter__(self) -> Self:
        """The group is there already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove it."""
        self.remove()


class GroupParent:
    """The directory below which limited groups are made; a context manager that leaves it as it was."""

    def __init__(self, version: int, directory: Path, own_group: Path | None = None) -> None:
        """``own_group``: the child that this process had to move into."""
        self.version = version
        self.directory = directory
        self._own_group = own_group
        self._made = 0

    def make(self, limit_bytes: int) -> LimitedGroup:
        """A new group with this limit.

        Raises:
            MemoryLimitUnavailableError: the kernel refuses.
        """
        self._made += 1
        directory = self.directory / f"{GROUP_PREFIX}{os.getpid()}-{self._made}"
        try:
            return LimitedGroup(self.version, directory, limit_bytes)
        except OSError as error:
            raise MemoryLimitUnavailableError(
                f"no memory limit of {limit_bytes} bytes could be set in {directory}: {error.strerror}", hint=_HINT
            ) from error

    def close(self) -> None:
        """Move this process back to where it was."""
        if self._own_group is not None:
            # Refused while groups of others need the controller: then everything stays as it is.
            with contextlib.suppress(OSError):
                _write(self.directory / "cgroup.subtree_control", "-memory")
                _write(self.directory / "cgroup.procs", os.getpid())
                self._own_group.rmdir()
            self._own_group = None

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


def find_parent(root: Path = Path("/")) -> GroupParent:
    """Where this process can make limited groups; groups of dead benchmarks there are removed.

    Args:
        root: directory that holds ``proc`` and the control group mounts (tests pass a directory of their own).

    Raises:
        MemoryLimitUnavailableError: nowhere.
    """
    refusals = ["no memory controller is mounted"]
    for group in memory_control_groups(root):
        if group.version == 2 and "memory" not in _read(group.top / "cgroup.controllers").split():
            continue
        for directory in dict.fromkeys((group.directory, group.top)):
            sweep(directory)
            try:
                _try(group.version, directory)
                return GroupParent(group.version, directory)
            except OSError as error:
                refusals.append(f"{directory}: {error.strerror}")
        if group.version == 2:
            try:
                return _parent_after_moving(group)
            except OSError as error:
                refusals.append(f"{group.directory}, after moving into a child: {error.strerror}")
    raise MemoryLimitUnavailableError(f"no limit could be set: {'; '.join(refusals[-2:])}", hint=_HINT)


def sweep(directory: Path) -> None:
    """Remove groups below ``directory`` that benchmarks have left behind which no longer run."""
    for child in sorted(directory.glob(f"{GROUP_PREFIX}*")):
        match = re.fullmatch(rf"{GROUP_PREFIX}(\d+)(?:-\w+)?", child.name)
        if match and not _runs(int(match[1])):
            with contextlib.suppress(OSError):  # of another user: his next benchmark removes it
                _remove(child)


def _try(version: int, directory: Path) -> None:
    """OSError unless groups with a limit can be made below ``directory``."""
    if version == 2 and "memory" not in _read(directory / "cgroup.subtree_control").split():
        _write(directory / "cgroup.subtree_control", "+memory")
    trial = directory / f"{GROUP_PREFIX}{os.getpid()}-trial"
    with LimitedGroup(version, trial, 1 << 30):
        if not os.access(trial / "cgroup.procs", os.W_OK):
            raise PermissionError(errno.EACCES, "processes may not be moved into a new group")


def _parent_after_moving(group: ControlGroup) -> GroupParent:
    """Version 2 hands controllers only to children of groups without processes: move this one into a child first."""
    own = group.directory / f"{GROUP_PREFIX}{os.getpid()}-command"
    own.mkdir()
    parent = GroupParent(2, group.directory, own)
    try:
        _write(own / "cgroup.procs", os.getpid())
        _try(2, group.directory)
    except BaseException:
        with contextlib.suppress(OSError):
            _write(group.directory / "cgroup.procs", os.getpid())
            own.rmdir()
        raise
    return parent


def _remove(directory: Path) -> None:
    deadline = time.monotonic() + _REMOVAL_SECONDS
    while True:
        _kill(directory)
        try:
            directory.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.02)  # the kernel takes a moment to bury the killed


def _kill(directory: Path) -> None:
    for process in _read(directory / "cgroup.procs").split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _write(path: Path, value: int | str) -> None:
    path.write_text(f"{value}\n", encoding="utf-8")
