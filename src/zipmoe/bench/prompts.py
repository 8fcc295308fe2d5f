"""Prompts of a benchmark: all of the same number of tokens, so that they can be batched and compared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zipmoe.errors import InvalidArgumentError

TOPICS = 64
"""Models of the benchmark scripts have so many topics: token t belongs to topic t % 64, and a topic has its experts."""
Prompt = tuple[int, ...]


@dataclass(frozen=True)
class PromptSet:
    """Prompts, and what they are (for the report)."""

    prompts: tuple[Prompt, ...]
    """As many as the largest batch needs, and no fewer than are measured one by one."""
    single: int
    """The first so many are measured one by one."""
    description: str

    def batches(self, sizes: Sequence[int]) -> tuple[tuple[Prompt, ...], ...]:
        """Every single prompt as a batch of its own, then one batch of every larger size."""
        singles = tuple((prompt,) for prompt in self.prompts[: self.single]) if 1 in sizes else ()
        return singles + tuple(self.prompts[:size] for size in sorted(set(sizes)) if size > 1)


def topic_prompts(topics: Sequence[int], count: int, tokens: int, vocabulary: int) -> PromptSet:
    """Prompts that stay on one topic each: ids are topic + 64 * k with random k (seed: the topic).

    Args:
        topics: of the prompts that are measured one by one; batches go on with the others, in ascending order.
        count: prompts needed in all; topics repeat with other ids beyond 64.
        tokens: of each prompt.
        vocabulary: ids below this.
    """
    import numpy as np

    if vocabulary < TOPICS or not all(0 <= topic < TOPICS for topic in topics):
        raise InvalidArgumentError(f"topics are 0 to {TOPICS - 1}, for models with at least so many token ids")
    order = [*dict.fromkeys(topics), *(topic for topic in range(TOPICS) if topic not in topics)]
    prompts = []
    for number in range(max(count, len(topics))):
        topic = order[number % TOPICS]
        seed: Any = topic if number < TOPICS else [topic, number // TOPICS]
        ids = np.random.default_rng(seed).integers(0, vocabulary // TOPICS, tokens) * TOPICS + topic
        prompts.append(tuple(int(token) for token in ids))
    named = ", ".join(map(str, dict.fromkeys(topics)))
    return PromptSet(tuple(prompts), len(dict.fromkeys(topics)), f"token ids of topics {named}")


def random_prompts(single: int, count: int, tokens: int, vocabulary: int) -> PromptSet:
    """Token ids without sense, the same in every benchmark."""
    source = random.Random(0)
    prompts = tuple(tuple(source.randrange(vocabulary) for _ in range(tokens)) for _ in range(max(count, single)))
    return PromptSet(prompts, single, "random token ids (routing is not that of text: give a --prompt-file)")


def file_prompts(path: Path, tokenizer: Any, single: int, count: int, tokens: int) -> PromptSet:
    """One prompt per non-empty line of a UTF-8 text file, cut to ``tokens`` tokens; lines repeat if there are too few.

    Raises:
        InvalidArgumentError: the file cannot be read or is empty, or a line has too few tokens.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeError) as error:
        raise InvalidArgumentError(f"cannot read the prompts in {str(path)!r}: {error}") from error
    if not lines:
        raise InvalidArgumentError(f"{str(path)!r} holds no prompts", hint="write one prompt per line")
    encoded = []
    for number, line in enumerate(lines, start=1):
        ids = tokenizer(line)["input_ids"]
        if len(ids) < tokens:
            raise InvalidArgumentError(
                f"prompt {number} in {str(path)!r} has {len(ids)} tokens, {tokens} are needed",
                hint="write longer prompts, or ask for fewer --prompt-tokens",
            )
        encoded.append(tuple(int(token) for token in ids[:tokens]))
    prompts = tuple(encoded[number % len(encoded)] for number in range(max(count, single)))
    repeated = f", repeated: there are only {len(encoded)}" if len(prompts) > len(encoded) else ""
    return PromptSet(prompts, min(single, len(encoded)), f"lines of {path.name}{repeated}")
