"""What one worker measured, read from the lines that it wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class UnreadableWorkerError(ValueError):
    """A worker wrote something that is not the protocol."""


@dataclass(frozen=True)
class Generation:
    """A batch of prompts and the tokens that were generated."""

    batch: int
    """Sequences."""
    token_seconds: tuple[float, ...]
    """From the beginning of the prompt's pass to each step's tokens."""
    read_bytes: tuple[int, ...]
    """Read from the disk by then."""
    tokens: tuple[tuple[int, ...], ...]
    """Of every sequence."""
    hits: int | None = None
    misses: int | None = None
    """Requested experts, prompt included; None for engines that do not count."""
    decode_hits: int | None = None
    decode_misses: int | None = None
    """The same after the first token."""
    decode_read_bytes: int | None = None
    """Read for missing experts after the first token."""
    prefill_read_bytes: int | None = None
    """Read until the first token."""
    other: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ttft_seconds(self) -> float:
        """Time to first token."""
        return self.token_seconds[0]

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """Time of each step after the first."""
        return tuple(b - a for a, b in zip(self.token_seconds, self.token_seconds[1:], strict=False))

    @property
    def decode_seconds(self) -> float:
        """Of all steps after the first."""
        return self.token_seconds[-1] - self.token_seconds[0]

    @property
    def read_bytes_per_step(self) -> float | None:
        """Mean over the steps after the first."""
        steps = len(self.read_bytes) - 1
        return (self.read_bytes[-1] - self.read_bytes[0]) / steps if steps else None


@dataclass(frozen=True)
class WorkerOutput:
    """Everything a worker said, complete or not."""

    loaded: Mapping[str, Any] | None
    generations: tuple[Generation, ...]
    failure: str | None
    """The worker's own reason."""
    done: bool


_GENERATION_KEYS = ("hits", "misses", "decode_hits", "decode_misses", "decode_read_bytes", "prefill_read_bytes")


def read_output(text: str) -> WorkerOutput:
    """Read standard output of a worker.

    Raises:
        UnreadableWorkerError: a line is not of the protocol. A last line without its end, of a worker that was killed
            while writing, is left out.
    """
    loaded: Mapping[str, Any] | None = None
    generations: list[Generation] = []
    failure: str | None = None
    done = False
    complete, _, _ = text.rpartition("\n")
    for line in complete.splitlines():
        fields = _object(line)
        kind = fields.pop("kind", None)
        if kind == "loaded" and isinstance(fields.get("seconds"), int | float):
            loaded = fields
        elif kind == "generation":
            generations.append(_generation(fields, line))
        elif kind == "failed":
            failure = str(fields.get("reason"))
        elif kind == "done":
            done = True
        else:
            raise UnreadableWorkerError(f"a worker wrote {line[:80]!r}")
    return WorkerOutput(loaded, tuple(generations), failure, done)


def _object(line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise UnreadableWorkerError(f"a worker wrote {line[:80]!r}")
    return fields


def _generation(fields: dict[str, Any], line: str) -> Generation:
    try:
        batch = int(fields.pop("batch"))
        seconds = tuple(float(value) for value in fields.pop("token_seconds"))
        read_bytes = tuple(int(value) for value in fields.pop("read_bytes"))
        tokens = tuple(tuple(int(token) for token in sequence) for sequence in fields.pop("tokens"))
        counts = {key: int(fields.pop(key)) for key in _GENERATION_KEYS if key in fields}
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableWorkerError(f"a worker wrote {line[:80]!r}") from error
    lengths = {len(seconds), len(read_bytes), *(len(sequence) for sequence in tokens)}
    if len(tokens) != batch or len(lengths) != 1 or not seconds or list(seconds) != sorted(seconds):
        raise UnreadableWorkerError(f"a worker wrote a generation that contradicts itself: {line[:80]!r}")
    return Generation(batch, seconds, read_bytes, tokens, **counts, other=fields)
