"""Errors of BF16 models against the same model in FP64, where a model makes discrete choices.

A router that finds two scores nearly equal chooses by their rounding, and then everything behind it differs. So that
errors of rounding are compared with errors of rounding, every model's choices are recorded, and a sequence counts only
as far as all models have chosen as the reference.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class Run:
    """Logits of some passes, and for each sequence how often it was routed as in another run."""

    logits: list[torch.Tensor] = field(default_factory=list)
    """Of the last token (sequences, vocabulary), for each pass."""
    choices: list[list[torch.Tensor]] = field(default_factory=list)
    """For each pass, the sorted ids of every experts module that ran (sequences, tokens * experts per token)."""


def run(model: Any, inputs: dict[str, torch.Tensor], steps: list[torch.Tensor]) -> Run:
    """A prompt and then ``steps``, each (sequences, 1) tokens, with one cache."""
    result = Run()
    sequences = inputs["input_ids"].shape[0]

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        ids = [value for value in given if not value.is_floating_point() and value.dim() == 2]
        if ids and ids[0].shape[0] % sequences == 0:
            result.choices[-1].append(ids[0].sort(dim=-1).values.reshape(sequences, -1).clone())

    experts = [module for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")]
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in experts]
    cache = None
    try:
        for each in [inputs] if not steps else [inputs, *({"input_ids": step} for step in steps)]:
            result.choices.append([])
            torch.manual_seed(0)
            with torch.no_grad():
                options: dict[str, Any] = {"use_cache": True} if steps else {}
                output = model(**each, **options, **({} if cache is None else {"past_key_values": cache}))
            cache = output.past_key_values if steps else None
            result.logits.append(output.logits[:, -1].double().clone())
    finally:
        for hook in hooks:
            hook.remove()
    return result


def errors(reference: Run, *runs: Run) -> list[torch.Tensor]:
    """Logits less the reference's, of all passes and sequences up to the first different choice in any of the runs."""
    sequences = reference.logits[0].shape[0]
    alike = torch.ones(sequences, dtype=torch.bool)
    found: list[list[torch.Tensor]] = [[] for _ in runs]
    for index, expected in enumerate(reference.logits):
        for each in runs:
            for ids, other in zip(reference.choices[index], each.choices[index], strict=True):
                alike &= (ids == other).all(dim=1)
        for errors_of_run, each in zip(found, runs, strict=True):
            errors_of_run.append((each.logits[index] - expected)[alike].flatten())
    return [torch.cat(parts) for parts in found]


def in_fp64(plain: Any) -> Any:
    """A copy of a plain model that computes in FP64."""
    return copy.deepcopy(plain).double()


def rms(error: torch.Tensor) -> float:
    return error.double().pow(2).mean().sqrt().item()
