"""Greedy generation with any Transformers model, with the time and the bytes read at every token."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from zipmoe.bench.workers.worker_protocol import storage_read_bytes


@dataclass
class TokenClock(BaseStreamer):  # type: ignore[misc]
    """A streamer that notes when each step of a batch was done."""

    on_first_token: Callable[[], None] | None = None
    began: float = field(default_factory=time.perf_counter)
    bytes_before: int = field(default_factory=storage_read_bytes)
    token_seconds: list[float] = field(default_factory=list)
    """Since the beginning."""
    read_bytes: list[int] = field(default_factory=list)
    """Since the beginning."""
    _prompt_seen: bool = False

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then one token of every sequence at a time."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.token_seconds.append(time.perf_counter() - self.began)
        self.read_bytes.append(storage_read_bytes() - self.bytes_before)
        if len(self.token_seconds) == 1 and self.on_first_token is not None:
            self.on_first_token()

    def end(self) -> None:
        """Nothing is buffered."""


def generate(
    model: Any,
    batch: Sequence[Sequence[int]],
    new_tokens: int,
    on_first_token: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Continue a batch of equally long prompts by exactly ``new_tokens`` tokens.

    Returns:
        Fields of a ``generation`` line: batch, token_seconds, read_bytes, tokens.
    """
    inputs = torch.tensor([list(prompt) for prompt in batch])
    own = model.generation_config
    own.eos_token_id = None  # generate() takes what the options leave open from the model's own
    options = GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, bos_token_id=own.bos_token_id, pad_token_id=own.pad_token_id or 0
    )
    clock = TokenClock(on_first_token)
    with torch.inference_mode():
        output = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), generation_config=options, streamer=clock
        )
    new = output[:, 1:] if model.config.is_encoder_decoder else output[:, inputs.shape[1] :]
    return {
        "batch": len(batch),
        "token_seconds": clock.token_seconds,
        "read_bytes": clock.read_bytes,
        "tokens": new.tolist(),
    }
