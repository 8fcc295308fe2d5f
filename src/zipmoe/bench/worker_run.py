"""Runs one worker, in a process of its own and inside a control group, and says why if it did not get through."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

from zipmoe.bench.control_group import LimitedGroup, MemoryUse
from zipmoe.bench.measurement import UnreadableWorkerError, WorkerOutput, read_output

KILLED_BY_LIMIT = "killed by the memory limit"
"""How the reason begins of a worker that needed more memory than there was."""
_TAIL_CHARACTERS = 2000


@dataclass(frozen=True)
class WorkerRun:
    """What became of one worker."""

    output: WorkerOutput
    reason: str | None
    """Why it did not do everything; None if it did."""
    seconds: float
    """From start to end of the process."""
    memory: MemoryUse | None
    """None without a limit."""
    stderr_tail: str


def run_worker(command: Sequence[str], job: str, group: LimitedGroup | None, seconds: float) -> WorkerRun:
    """Run ``command`` with ``job`` on its standard input, for ``seconds`` at most.

    The process and its children are gone when this returns or raises (KeyboardInterrupt), if there is a group; without
    one, the process is.
    """
    began = time.monotonic()
    timed_out = False
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                group.command(command) if group is not None else list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        except OSError as error:
            refusal = f"cannot be started: {error.strerror}: {command[0]}"
            return WorkerRun(WorkerOutput(None, (), None, False), refusal, 0.0, None, "")
        try:
            out, _ = process.communicate(job.encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
            process.kill()
            if group is not None:
                group.kill()  # children of the worker would hold its pipes open
            out, _ = process.communicate()
        except BaseException:
            process.kill()
            process.wait()
            raise
        passed = time.monotonic() - began
        memory = group.use() if group is not None else None
        errors.seek(0)
        tail = errors.read().decode(errors="replace")[-_TAIL_CHARACTERS:]
    garbage: str | None = None
    try:
        output = read_output(out.decode(errors="replace"))
    except UnreadableWorkerError as error:
        output, garbage = WorkerOutput(None, (), None, False), str(error)
    reason = _reason(output, process.returncode, garbage, memory, seconds if timed_out else None, tail)
    return WorkerRun(output, reason, passed, memory, tail)


def _reason(
    output: WorkerOutput, code: int, garbage: str | None, memory: MemoryUse | None, limit: float | None, tail: str
) -> str | None:
    when = f"after {len(output.generations)} of its generations" if output.generations else "while it generated"
    if output.loaded is None:
        when = "while it loaded"
    if garbage is not None:
        return garbage
    if limit is not None:
        return f"took longer than {limit:g} s, ended {when}"
    if memory is not None and memory.oom_kills and code != 0:
        return f"{KILLED_BY_LIMIT} {when}"
    if output.failure is not None:
        return output.failure
    if code < 0:
        return f"killed by {signal.Signals(-code).name} {when}"
    if code != 0:
        last = (tail.strip().splitlines() or ["without a word"])[-1]
        return f"ended with code {code} {when}: {last}"
    return None if output.done else f"ended {when} without saying so"
