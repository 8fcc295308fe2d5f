"""A packed model against plain Transformers on its original checkpoint: every bit of the logits, and how it loads."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_models import architecture, logits, tiny_inputs
from transformers import PreTrainedModel

import zipmoe
from zipmoe.errors import BudgetExceededError

SHAPES = ((2, 12), (1, 1), (1, 5))
"""(batch, tokens) of the compared forward passes: a prefill, one token as in decoding, and a length between."""


def load_plain(family: str, source: Path, **arguments: Any) -> PreTrainedModel:
    """The original checkpoint in plain Transformers."""
    return architecture(family).from_pretrained(source, **arguments).eval()


def load_packed(family: str, folder: Path, **arguments: Any) -> PreTrainedModel:
    """The packed folder in Transformers, after checking that it loads completely and without a word."""
    with no_warnings():
        model, report = zipmoe.load(folder, output_loading_info=True, **arguments)
    assert isinstance(model, architecture(family))
    assert not any(report.values()), report
    assert not [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    return model.eval()


def shrink_pool(packed: PreTrainedModel) -> None:
    """Take all memory from the expert pool that it can give: two slots are left for each size of expert."""
    engine, taken = packed.zipmoe_engine, 0
    for step in (1 << power for power in reversed(range(12, 44))):
        with contextlib.suppress(BudgetExceededError):
            engine.account("taken by the test", taken + step)
            taken += step


def assert_same_logits(
    family: str, plain: PreTrainedModel, packed: PreTrainedModel, shapes: Sequence[tuple[int, int]] = SHAPES
) -> None:
    """Bit for bit, with inputs of all ``shapes`` (batch, tokens)."""
    for batch, tokens in shapes:
        inputs = tiny_inputs(family, batch=batch, tokens=tokens)
        expected, found = logits(plain, **inputs), logits(packed, **inputs)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), f"{(batch, tokens)}: largest difference {(found - expected).abs().max()}"


def assert_same_answers(family: str, source: Path, folder: Path, **arguments: Any) -> None:
    """Load both and compare their logits."""
    packed = load_packed(family, folder, **arguments)
    assert_same_logits(family, load_plain(family, source), packed)
    packed.zipmoe_engine.close()


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Fail on any Python warning and on any message of Transformers' loggers at the level of a warning or above."""
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Collect(logging.WARNING)
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        logger.removeHandler(handler)
    assert not messages, messages
