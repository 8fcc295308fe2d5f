"""Readers of routing traces that others have published, in their own formats.

- Per-prompt counts of the ZipMoE paper's artefact (``paper_*.npz``): how often each expert was activated while a
  prompt's answer was generated, ``counts`` uint8 [prompts, layers, experts]. The order of steps is lost.
- Per-token ids of sqliteai/waste (``*.jsonl.gz``): ``{"tok": n, "layers": [[ids], ...]}`` per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zipmoe.planning.trace import RoutingTrace, TraceError, TraceHeader, TraceStep, read_json_lines

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PublishedTrace:
    """What the file itself does not say."""

    file: str
    model: str
    experts: int
    top_k: int


PER_PROMPT_COUNTS = (
    PublishedTrace("paper_qwen.npz", "Qwen1.5-MoE-A2.7B-Chat", 60, 4),
    PublishedTrace("paper_deepseek.npz", "DeepSeek-V2-Lite-Chat", 64, 6),
    PublishedTrace("paper_switch.npz", "switch-large-128", 128, 1),
)
PER_TOKEN_IDS = (
    PublishedTrace("olmoe_299.jsonl.gz", "OLMoE-1B-7B-0924", 64, 8),
    PublishedTrace("kimi_linear_300.jsonl.gz", "Kimi-Linear-48B-A3B", 256, 8),
)


@dataclass(frozen=True)
class PromptCounts:
    """Activations of each expert per prompt, at one token per decode step."""

    model: str
    top_k: int
    counts: IntArray
    """[prompts, sparse layers, experts]."""

    @property
    def steps(self) -> IntArray:
        """Decode steps of each prompt, [prompts, sparse layers]; where the source has gaps, layers differ."""
        return np.asarray(self.counts.sum(axis=2) // self.top_k, dtype=np.int64)


def read_prompt_counts(folder: Path, published: PublishedTrace) -> PromptCounts:
    """Read a file of per-prompt counts. Layers that no prompt uses (dense ones) are left out.

    Raises:
        TraceError: the file is missing, has another shape, or counts that are no multiple of top_k.
    """
    path = folder / published.file
    try:
        with np.load(path, allow_pickle=False) as archive:
            counts = archive["counts"].astype(np.int64)
    except (OSError, ValueError, KeyError) as error:
        raise TraceError(f"{path} cannot be read as per-prompt counts: {error}") from error
    if counts.ndim != 3 or counts.shape[2] != published.experts:
        raise TraceError(f"{path}: counts of shape {counts.shape} instead of [prompts, layers, {published.experts}]")
    counts = counts[:, counts.any(axis=(0, 2))]
    if (counts.sum(axis=2) % published.top_k).any():
        raise TraceError(f"{path}: activations are not a multiple of top_k {published.top_k}")
    return PromptCounts(published.model, published.top_k, counts)


def read_token_ids(folder: Path, published: PublishedTrace) -> RoutingTrace:
    """Read a file of per-token ids as a trace of one-token steps.

    Raises:
        TraceError: the file is missing, or its lines do not fit the model.
    """
    path = folder / published.file
    steps = []
    layers = 0
    for line in read_json_lines(path):
        try:
            ids = tuple(tuple(sorted(int(expert) for expert in layer)) for layer in line["layers"])
            steps.append(TraceStep(int(line["tok"]), 1, ids))
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path} does not hold token ids: {error!r}") from error
        layers = layers or len(ids)
    if not layers:
        raise TraceError(f"{path} is empty")
    return RoutingTrace(TraceHeader(published.model, (published.experts,) * layers, published.top_k), tuple(steps))
