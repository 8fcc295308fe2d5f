"""Errors of BF16 models against the same model in FP64, where a model makes discrete choices.

A router that finds two scores nearly equal chooses by their rounding, and then everything behind it differs. So that
errors of rounding are compared with errors of rounding, every model's routing is recorded, and a sequence counts only
as far as it is routed as in the reference by all models. How far that is, is a result of its own: a model that computes
worse is routed differently more often.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from equality import load_plain
from tiny_models import interface_families, logits, tiny_inputs
from torch import nn

_SAME_WEIGHT = 0.1
"""Routing weights that differ by more, relatively, come from a choice too (phimoe masks what is far below the best)."""
_COMPUTES_IN_FP32 = {"inkling2", "inkling2_loop"}
"""Families with operations that are FP32 whatever the model is: their reference is FP32."""


@dataclass
class Run:
    """Logits and routing of some passes."""

    logits: list[torch.Tensor] = field(default_factory=list)
    """Of the last token (sequences, vocabulary), for each pass."""
    routing: list[list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=list)
    """For each pass and experts module that ran: ids in ascending order and their weights (sequences, ...)."""


@dataclass
class Comparison:
    """Errors of runs against a reference, over as much of every sequence as all are routed as in the reference."""

    errors: list[torch.Tensor]
    """Of each run: logits less the reference's."""
    alike: list[float]
    """Of each run: share of passes and sequences that are routed as in the reference, up to the first difference."""


def reference_model(family: str, checkpoint: Path) -> Any:
    """The plain model in FP64 (or FP32, see above)."""
    options = {"experts_implementation": "eager"} if family in interface_families() else {}
    model = load_plain(family, checkpoint, **options)
    return model.float() if family in _COMPUTES_IN_FP32 else model.double()


def one_pass(model: Any, inputs: dict[str, torch.Tensor]) -> Run:
    """A pass without a cache."""
    result = Run()
    with _Routing(model, inputs["input_ids"].shape[0], result):
        result.routing.append([])
        result.logits.append(logits(model, **inputs)[:, -1].double())
    return result


def decode(model: Any, inputs: dict[str, torch.Tensor], steps: list[torch.Tensor]) -> Run:
    """A prompt and then ``steps``, each (sequences, 1) tokens, with one cache."""
    result, cache = Run(), None
    with torch.no_grad(), _Routing(model, inputs["input_ids"].shape[0], result):
        for each in [inputs, *({"input_ids": step} for step in steps)]:
            result.routing.append([])
            torch.manual_seed(0)
            output = model(**each, use_cache=True, **({} if cache is None else {"cache": cache}))
            cache = output.cache
            result.logits.append(output.logits[:, -1].double())
    return result


def inputs_and_steps(family: str, *, seed: int, tokens: int, steps: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """For ``decode``: three sequences."""
    inputs = tiny_inputs(family, batch=3, tokens=tokens, seed=seed)
    return inputs, [
        tiny_inputs(family, batch=3, tokens=1, seed=1000 * seed + step)["input_ids"] for step in range(steps)
    ]


def compare(references: list[Run], *runs: list[Run], whole: bool = False) -> Comparison:
    """Each of ``runs`` has a run for every reference.

    Args:
        whole: take all errors, whatever the routing: where a pass has so many tokens that some are always routed
            differently.
    """
    errors: list[list[torch.Tensor]] = [[] for _ in runs]
    alike: list[list[torch.Tensor]] = [[] for _ in runs]
    for reference, *others in zip(references, *runs, strict=True):
        same = [torch.ones(reference.logits[0].shape[0], dtype=torch.bool) for _ in others]
        for index, expected in enumerate(reference.logits):
            for run, own, share in zip(others, same, alike, strict=True):
                for routed, wanted in zip(run.routing[index], reference.routing[index], strict=True):
                    own.logical_and_(_same_routing(routed, wanted))
                share.append(own.double())
            together = torch.stack(same).all(dim=0) | whole
            for run, parts in zip(others, errors, strict=True):
                parts.append((run.logits[index] - expected)[together].flatten())
    return Comparison([torch.cat(parts) for parts in errors], [torch.cat(share).mean().item() for share in alike])


def rms(error: torch.Tensor) -> float:
    return error.double().pow(2).mean().sqrt().item()


def _same_routing(
    found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    same_ids = (found[0] == expected[0]).all(dim=1)
    return same_ids & ((found[1] - expected[1]).abs() <= _SAME_WEIGHT * expected[1].abs()).all(dim=1)


class _Routing:
    """Notes what the experts modules of a model are called with."""

    def __init__(self, model: nn.Module, sequences: int, run: Run) -> None:
        self._run, self._sequences = run, sequences
        self._modules = [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        self._hooks = [module.register_forward_pre_hook(self._note, with_kwargs=True) for module in self._modules]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        ids = next(value for value in given if not value.is_floating_point() and value.dim() == 2)
        weights = next(value for value in given if value.is_floating_point() and value.shape == ids.shape)
        order = ids.argsort(dim=-1)
        self._run.routing[-1].append(
            (
                ids.gather(-1, order).reshape(self._sequences, -1),
                weights.gather(-1, order).double().reshape(self._sequences, -1),
            )
        )
