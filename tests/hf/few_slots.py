"""Packed models with slots for a few of their experts, so that something is left to predict."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from zipmoe.engine.statistics import EngineCounters
from zipmoe.errors import BudgetExceededError
from zipmoe.hf.configuration import ZipMoEConfig

PROMPTS = torch.tensor([[5, 9, 31, 77, 120], [7, 7, 200, 41, 6], [18, 64, 3, 240, 99]])


def take_memory(engine: Any, slots: int = 0) -> None:
    """Account for memory that is not there, as much as the budget allows with that many slots in the first class."""
    taken = 0
    for step in (1 << power for power in reversed(range(8, 44))):
        with contextlib.suppress(BudgetExceededError):
            engine.account("taken by the test", taken + step)
            if engine._native.size_classes[0][1] >= slots:
                taken += step
    engine.account("taken by the test", taken)


def load(packed: Any, look_ahead: bool, *, slots: int = 5, mode: str = "exact", **arguments: Any) -> Any:
    """The model with few slots for experts."""
    early = arguments.pop("early_routing", True)
    settings = ZipMoEConfig(memory="4GB", mode=mode, context_tokens=32, early_routing=early, look_ahead=look_ahead)
    with pytest.warns(UserWarning, match="quantization_config"):
        model = packed.load(quantization_config=settings, **arguments)
    engine = model.zipmoe_engine
    (size,) = {size for size, _ in engine._native.size_classes}
    take_memory(engine, slots)
    assert engine._native.size_classes == [(size, slots)]
    return model


@contextlib.contextmanager
def both(packed: Any, **arguments: Any) -> Iterator[tuple[Any, Any]]:
    """The model that looks ahead, and the one that does not."""
    models = load(packed, True, **arguments), load(packed, False, **arguments)
    try:
        yield models
    finally:
        for model in models:
            model.zipmoe_engine.close()


def decode(model: Any, prompt: torch.Tensor, steps: int = 6) -> list[torch.Tensor]:
    """Logits of a prompt and of some greedy steps after it."""
    logits, cache, ids = [], None, prompt
    for _ in range(steps):
        output = model(input_ids=ids, cache=cache, use_cache=True)
        logits.append(output.logits)
        cache, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
    return logits


def counters(model: Any) -> EngineCounters:
    return model.zipmoe_engine.statistics.counters()
