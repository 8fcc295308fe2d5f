"""What a worker is told and tells: a job as JSON on standard input, one JSON object per line on standard output.

Lines: ``loaded`` once, ``generation`` for every batch of prompts, ``failed`` with a reason, ``done`` at the end. What a
worker has measured before it is killed is thus not lost. Libraries that print go to standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

_PR_SET_PDEATHSIG = 1


def let_openmp_wait(*, passively: bool) -> None:
    """How torch's threads wait between products, before torch is imported: as importing ``zipmoe`` has it for ZipMoE,
    and as everybody else finds it for the others (the benchmark has imported ``zipmoe``, and workers inherit that).
    """
    if passively:
        os.environ["OMP_WAIT_POLICY"] = "passive"
    else:
        os.environ.pop("OMP_WAIT_POLICY", None)


@dataclass(frozen=True)
class Job:
    """What to load and what to generate."""

    model: str
    """Folder, or file."""
    batches: tuple[tuple[tuple[int, ...], ...], ...]
    """Batches of prompts of token ids; prompts of one batch are equally long."""
    new_tokens: int
    threads: int
    memory_bytes: int
    settings: dict[str, Any]
    """Of this engine alone."""

    @property
    def largest_context_tokens(self) -> int:
        """Over all sequences of the largest batch."""
        return max(len(batch) * (len(batch[0]) + self.new_tokens) for batch in self.batches)

    def to_json(self) -> str:
        """The other side of ``from_json``."""
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Read a job."""
        fields = json.loads(text)
        fields["batches"] = tuple(tuple(tuple(prompt) for prompt in batch) for batch in fields["batches"])
        return cls(**fields)


class Reporter:
    """Writes the lines."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def say(self, kind: str, **fields: Any) -> None:
        """One line, at once."""
        self._out.write(json.dumps({"kind": kind, **fields}) + "\n")
        self._out.flush()


def storage_read_bytes() -> int:
    """Bytes that this process had the disk read so far, page faults on mapped files included."""
    with open("/proc/self/io", encoding="ascii") as lines:  # noqa: PTH123 - called once per token
        for line in lines:
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    return 0


def run_worker(work: Callable[[Job, Reporter], None]) -> None:
    """Do the job that stands on standard input; exits with 1 and a ``failed`` line if it cannot be done."""
    _die_with_parent()
    reporter = Reporter(_claim_stdout())
    try:
        work(Job.from_json(sys.stdin.read()), reporter)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        named = type(error).__module__.startswith("zipmoe")
        reporter.say("failed", reason=lines[0] if named else f"{type(error).__name__}: {lines[0]}")
        raise
    reporter.say("done")


def _claim_stdout() -> IO[str]:
    """A private copy of standard output; what others print goes to standard error from now on."""
    sys.stdout.flush()
    private = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(private, "w", encoding="utf-8")


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
