"""Who is measured, in which settings, and by which command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from zipmoe.bench.memory_levels import MemoryLevel
from zipmoe.errors import InvalidArgumentError

_WORKERS = Path(__file__).parent / "workers"
_ASK_SECONDS = 120


class Contender(StrEnum):
    """Engines that a worker exists for."""

    ZIPMOE = "zipmoe"
    """In its default mode."""
    ZIPMOE_EXACT = "zipmoe-exact"
    TRANSFORMERS = "transformers"
    ACCELERATE = "accelerate"
    LLAMA_CPP = "llama.cpp"
    DEEPSPEED = "deepspeed"
    AIRLLM = "airllm"

    @property
    def packed(self) -> bool:
        """Whether it is ours."""
        return self in (Contender.ZIPMOE, Contender.ZIPMOE_EXACT)

    @property
    def mapped(self) -> bool:
        """Whether it reads weights by page faults, so that the disk's read-ahead decides about it."""
        return self in (Contender.ACCELERATE, Contender.LLAMA_CPP)

    @property
    def offloads(self) -> bool:
        """Whether it writes a copy of the weights to a folder and reads them from there."""
        return self in (Contender.ACCELERATE, Contender.DEEPSPEED, Contender.AIRLLM)

    @property
    def slow(self) -> bool:
        """Whether a token takes seconds, so that a few tokens after one prompt must do."""
        return self in (Contender.DEEPSPEED, Contender.AIRLLM)


DEFAULT_CONTENDERS = (Contender.ZIPMOE, Contender.TRANSFORMERS, Contender.ACCELERATE, Contender.LLAMA_CPP)
_MODULES = {
    Contender.ZIPMOE: "packed_model",
    Contender.ZIPMOE_EXACT: "packed_model",
    Contender.TRANSFORMERS: "plain_transformers",
    Contender.ACCELERATE: "accelerate_offload",
    Contender.LLAMA_CPP: "llama_cpp_gguf",
    Contender.DEEPSPEED: "deepspeed_offload",
    Contender.AIRLLM: "airllm_layers",
}
_LIBRARIES = {
    Contender.ACCELERATE: "accelerate",
    Contender.LLAMA_CPP: "llama_cpp",
    Contender.DEEPSPEED: "deepspeed",
    Contender.AIRLLM: "airllm",
}


@dataclass(frozen=True)
class Models:
    """The same model in the forms that the contenders read."""

    packed: Path
    source: Path | None = None
    gguf: Path | None = None

    def of(self, contender: Contender) -> Path | None:
        """What this contender loads; None if it was not given."""
        if contender.packed:
            return self.packed
        return self.gguf if contender is Contender.LLAMA_CPP else self.source


@dataclass(frozen=True)
class Variant:
    """A contender with the settings of one run; the best variant of a contender is the one that counts."""

    contender: Contender
    read_ahead_kib: int | None = None
    """To be set on the disk; None: as it is."""
    cpu_share: float | None = None
    """Accelerate: share of the limit for weights that stay in memory."""

    @property
    def settings(self) -> str:
        """For people; empty if there is nothing to say."""
        parts = []
        if self.read_ahead_kib is not None:
            parts.append(f"read-ahead {self.read_ahead_kib} KiB")
        if self.cpu_share is not None:
            parts.append(f"{self.cpu_share:.0%} for weights in memory")
        return ", ".join(parts)


@dataclass(frozen=True)
class WorkerCommands:
    """How workers are started."""

    interpreters: Mapping[str, str] = field(default_factory=dict)
    """By name of the contender; default: the interpreter of this process."""
    overrides: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Whole commands by name of the contender."""

    def interpreter(self, contender: Contender) -> str:
        """Path of the Python that runs this contender."""
        return self.interpreters.get(contender.value, sys.executable)

    def command(self, contender: Contender) -> list[str]:
        """The worker's command line; the job goes to its standard input."""
        if contender.value in self.overrides:
            return list(self.overrides[contender.value])
        python, module = self.interpreter(contender), _MODULES[contender]
        if contender is Contender.LLAMA_CPP:
            return [python, str(_WORKERS / f"{module}.py")]  # as a file: its interpreter need not know ZipMoE
        if contender in (Contender.DEEPSPEED, Contender.AIRLLM):
            return [python, str(_WORKERS / "without_zipmoe.py"), module]
        return [python, "-m", f"zipmoe.bench.workers.{module}"]

    def missing_library(self, contender: Contender) -> str | None:
        """Why the contender's interpreter cannot run it; None if it can."""
        needed = _LIBRARIES.get(contender)
        if needed is None or contender.value in self.overrides:
            return None
        python = self.interpreter(contender)
        question = f"import importlib.util, json; print(json.dumps(importlib.util.find_spec({needed!r}) is not None))"
        try:
            answer = subprocess.run(
                [python, "-c", question], capture_output=True, text=True, timeout=_ASK_SECONDS, check=True
            )
            found = json.loads(answer.stdout)
        except (OSError, subprocess.SubprocessError, ValueError):
            return f"{Path(python).name} (--python {contender.value}=PATH) is no Python that runs"
        return None if found else f"not installed: {needed} (--python {contender.value}=PATH names one that has it)"


def parse_contenders(text: str) -> tuple[Contender, ...]:
    """A list like ``zipmoe,llama.cpp``; InvalidArgumentError for others than there are."""
    known = {contender.value: contender for contender in Contender}
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise InvalidArgumentError(
            f"unknown contender {unknown[0]!r}" if unknown else "no contender was named",
            hint=f"choose from {', '.join(known)}",
        )
    return tuple(dict.fromkeys(known[name] for name in names))


def variants(contender: Contender, read_aheads: Sequence[int], cpu_shares: Sequence[float]) -> tuple[Variant, ...]:
    """All settings in which a contender is to be measured."""
    shares: Sequence[float | None] = cpu_shares if contender is Contender.ACCELERATE else (None,)
    aheads: Sequence[int | None] = (read_aheads or (None,)) if contender.mapped else (None,)
    return tuple(Variant(contender, ahead, share) for ahead in aheads for share in shares)


def cannot_run(variant: Variant, level: MemoryLevel, models: Models) -> str | None:
    """Why this need not be tried; None if it is to be tried."""
    contender = variant.contender
    if models.of(contender) is None:
        if contender is Contender.LLAMA_CPP:
            return "no GGUF file was given (--gguf; convert the checkpoint with llama.cpp's convert_hf_to_gguf.py)"
        return "the original checkpoint was not given (--source)"
    if contender is Contender.ACCELERATE and level.fits:
        return "everything fits: there is nothing to offload"
    return None


def job_settings(variant: Variant, level: MemoryLevel, offload_folder: Path) -> dict[str, Any]:
    """The part of a job that only this contender understands."""
    if variant.contender.packed:
        return {"mode": "exact" if variant.contender is Contender.ZIPMOE_EXACT else None}
    if variant.contender is Contender.ACCELERATE:
        share = variant.cpu_share if variant.cpu_share is not None else 1.0
        return {"offload_folder": str(offload_folder), "cpu_bytes": int(level.limit_bytes * share)}
    if variant.contender.offloads:
        return {"offload_folder": str(offload_folder)}
    return {}
