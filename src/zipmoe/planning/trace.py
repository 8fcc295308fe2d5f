"""Routing traces: which experts of every sparse layer each step activated.

A trace file is JSON lines (gzip if the name ends in ``.gz``). The first line is the header
``{"zipmoe_trace": 1, "model": name, "experts": [experts of each sparse layer], "top_k": k}``; every other line is one
forward pass: ``{"step": n, "tokens": t, "layers": [[distinct expert ids, ascending], ...]}``.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from zipmoe.errors import InvalidArgumentError
from zipmoe.store.durable_files import clear_write_errors, partial_path, publish

TRACE_VERSION = 1
_VERSION_KEY = "zipmoe_trace"
_COMPRESSED = ".gz"


class TraceError(InvalidArgumentError):
    """A file is not a routing trace, or contradicts itself."""


@dataclass(frozen=True)
class TraceHeader:
    """What a trace is about."""

    model: str
    experts: tuple[int, ...]
    """Experts of each sparse layer, in the order of the layers."""
    top_k: int
    """Experts that a router selects per token."""

    def __post_init__(self) -> None:
        if not self.experts or self.top_k < 1 or self.top_k > min(self.experts):
            raise TraceError(f"a router cannot select {self.top_k} of the experts of layers of {list(self.experts)}")


@dataclass(frozen=True)
class TraceStep:
    """One forward pass."""

    step: int
    tokens: int
    """Tokens that went through it (all sequences of the batch together)."""
    layers: tuple[tuple[int, ...], ...]
    """Distinct expert ids of each layer, ascending."""

    def check(self, header: TraceHeader) -> None:
        """Raise :class:`TraceError` unless this step can belong to a trace with that header."""
        where = f"step {self.step}"
        if self.tokens < 1:
            raise TraceError(f"{where}: {self.tokens} tokens")
        if len(self.layers) != len(header.experts):
            raise TraceError(f"{where}: {len(self.layers)} layers instead of {len(header.experts)}")
        for layer, (ids, experts) in enumerate(zip(self.layers, header.experts, strict=True)):
            if not ids:
                raise TraceError(f"{where}, layer {layer}: no expert is active")
            if any(low >= high for low, high in pairwise(ids)):
                raise TraceError(f"{where}, layer {layer}: expert ids are not distinct and ascending")
            if ids[0] < 0 or ids[-1] >= experts:
                raise TraceError(f"{where}, layer {layer}: expert ids outside 0..{experts - 1}")
            if len(ids) > self.tokens * header.top_k:
                raise TraceError(
                    f"{where}, layer {layer}: {len(ids)} experts for {self.tokens} tokens and top_k {header.top_k}"
                )


@dataclass(frozen=True)
class RoutingTrace:
    """A whole trace in memory."""

    header: TraceHeader
    steps: tuple[TraceStep, ...]

    def __post_init__(self) -> None:
        for step in self.steps:
            step.check(self.header)

    def activations(self, layer: int) -> npt.NDArray[np.bool_]:
        """Whether each expert of a layer was active in each step: bool [steps, N]."""
        active = np.zeros((len(self.steps), self.header.experts[layer]), dtype=np.bool_)
        for row, step in zip(active, self.steps, strict=True):
            row[list(step.layers[layer])] = True
        return active

    def mean_tokens(self) -> float:
        """Tokens per step."""
        if not self.steps:
            raise TraceError("the trace has no steps")
        return sum(step.tokens for step in self.steps) / len(self.steps)

    def decode_steps(self, largest_batch: int = 1) -> RoutingTrace:
        """Only the steps of at most ``largest_batch`` tokens: prompts are processed in large steps that activate
        nearly all experts and say little about the cache's work while text is generated.
        """
        return RoutingTrace(self.header, tuple(step for step in self.steps if step.tokens <= largest_batch))

    def batched(self, steps: int) -> RoutingTrace:
        """Consecutive ``steps`` steps as one: the trace of a batch made of one sequence's neighbouring tokens.

        Such tokens resemble each other more than sequences of different users do. A last incomplete group is dropped.
        """
        if steps < 1:
            raise InvalidArgumentError(f"cannot batch {steps} steps")
        groups = [self.steps[start : start + steps] for start in range(0, len(self.steps) - steps + 1, steps)]
        merged = tuple(
            TraceStep(
                number,
                sum(step.tokens for step in group),
                tuple(
                    tuple(sorted({i for ids in layer for i in ids}))
                    for layer in zip(*(s.layers for s in group), strict=True)
                ),
            )
            for number, group in enumerate(groups)
        )
        return RoutingTrace(self.header, merged)


class TraceWriter:
    """Appends steps to an open trace file; each line is complete when it is written."""

    failed = False
    """Whether a line could not be written: the file may end anywhere."""

    def __init__(self, file: IO[str], header: TraceHeader, path: Path) -> None:
        self._file = file
        self._header = header
        self._path = path
        self._next_step = 0
        self._write_line(
            {
                _VERSION_KEY: TRACE_VERSION,
                "model": header.model,
                "experts": list(header.experts),
                "top_k": header.top_k,
            },
        )

    def append(self, tokens: int, layers: Sequence[Sequence[int]]) -> None:
        """Write one forward pass: its number of tokens and each layer's expert ids (any order, repeats allowed).

        Raises:
            TraceError: the step does not fit the header.
            NotEnoughDiskError: the disk is full.
        """
        ids = tuple(tuple(sorted({int(expert) for expert in layer})) for layer in layers)
        step = TraceStep(self._next_step, tokens, ids)
        step.check(self._header)
        self._write_line({"step": step.step, "tokens": step.tokens, "layers": [list(layer) for layer in ids]})
        self._next_step += 1

    def _write_line(self, value: dict[str, Any]) -> None:
        try:
            with clear_write_errors(self._path):
                self._file.write(json.dumps(value, separators=(",", ":")) + "\n")
        except BaseException:
            self.failed = True
            raise


@contextmanager
def open_trace_writer(path: Path, header: TraceHeader) -> Iterator[TraceWriter]:
    """Write a trace step by step; it gets its name at the end.

    However the ``with`` block is left, all steps that were appended are kept, unless they cannot be written: then
    nothing is there.

    Raises:
        NotEnoughDiskError: the disk is full.
    """
    temporary = partial_path(path)
    with clear_write_errors(path):
        file = _open(temporary, "w", compressed=path.suffix == _COMPRESSED)
    writer: TraceWriter | None = None
    try:
        writer = TraceWriter(file, header, path)
        yield writer
    finally:
        try:
            with clear_write_errors(path):
                file.close()
                if writer is not None and not writer.failed:
                    publish(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_trace(path: Path, trace: RoutingTrace) -> None:
    """Write a whole trace; steps are numbered from 0."""
    with open_trace_writer(path, trace.header) as writer:
        for step in trace.steps:
            writer.append(step.tokens, step.layers)


def read_trace(path: Path) -> RoutingTrace:
    """Read and check a trace file.

    Raises:
        TraceError: the file is missing, not a trace, of another version, or contradicts itself.
    """
    lines = read_json_lines(path)
    if not lines or not isinstance(lines[0], dict) or _VERSION_KEY not in lines[0]:
        raise TraceError(f"{path} is not a routing trace", hint="record one with --record-trace")
    header, *rest = lines
    if header[_VERSION_KEY] != TRACE_VERSION:
        raise TraceError(
            f"{path} is a trace of version {header[_VERSION_KEY]!r}; this build reads version {TRACE_VERSION}",
            hint="record it again",
        )
    try:
        parsed = TraceHeader(_string(header["model"]), _integers(header["experts"]), _integer(header["top_k"]))
        steps = tuple(
            TraceStep(_integer(line["step"]), _integer(line["tokens"]), tuple(_integers(ids) for ids in line["layers"]))
            for line in rest
        )
        return RoutingTrace(parsed, steps)
    except (KeyError, TypeError) as error:
        raise TraceError(f"{path} is damaged: {error}", hint="record it again") from error
    except TraceError as error:
        raise TraceError(f"{path}: {error}", hint="record it again") from error


def read_json_lines(path: Path) -> list[Any]:
    """All JSON values of a file with one per line, decompressed if its name ends in ``.gz``.

    Raises:
        TraceError: the file cannot be read or a line is not JSON.
    """
    values = []
    try:
        with _open(path, "r", compressed=path.suffix == _COMPRESSED) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        values.append(json.loads(line))
                    except json.JSONDecodeError as error:
                        raise TraceError(f"{path}, line {number} is not JSON: {error.msg}") from error
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read as a trace: {error}") from error
    return values


def _open(path: Path, mode: Literal["r", "w"], *, compressed: bool) -> IO[str]:
    if compressed:
        return io.TextIOWrapper(gzip.GzipFile(path, f"{mode}b"), encoding="utf-8")
    return path.open(mode, encoding="utf-8")


def _integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not an integer")
    return value


def _integers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    return tuple(_integer(item) for item in value)


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value
