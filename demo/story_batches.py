"""Batches of whole stories: one story a row, from its begin token to its end token, padded at the right.

Stories are told on the fly and never repeat within a series, so there is no data file and no epoch. A causal model
needs no attention mask for right padding; the labels of the padding are :data:`IGNORED`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from transformers import PreTrainedTokenizerBase

from demo.story_grammar import Story, stories

IGNORED = -100
"""The label that torch.nn.functional.cross_entropy leaves out by default."""

SORTED_BATCHES = 4
"""Stories are sorted by length within this many batches, so that little of a batch is padding."""


@dataclass(frozen=True)
class StoryBatch:
    """``inputs`` and ``labels`` are int64 of shape (stories, longest story - 1); ``labels`` looks one token ahead."""

    inputs: torch.Tensor
    labels: torch.Tensor
    nats: float
    """Information in the stories: the least total loss that a model can have on the labels."""

    @property
    def label_count(self) -> int:
        return int((self.labels != IGNORED).sum())


def batch_of(group: list[tuple[Story, list[int]]], pad_id: int) -> StoryBatch:
    width = max(len(ids) for _, ids in group) - 1
    inputs = torch.full((len(group), width), pad_id)
    labels = torch.full((len(group), width), IGNORED)
    for row, (_, ids) in enumerate(group):
        inputs[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        labels[row, : len(ids) - 1] = torch.tensor(ids[1:])
    return StoryBatch(inputs, labels, sum(story.nats for story, _ in group))


def story_batches(seed: int, tokenizer: PreTrainedTokenizerBase, stories_per_batch: int) -> Iterator[StoryBatch]:
    """The endless series of batches of the stories of ``seed``."""
    series = stories(seed)
    while True:
        chunk = list(islice(series, stories_per_batch * SORTED_BATCHES))
        encoded = tokenizer([story.text for story in chunk])["input_ids"]
        rows = sorted(
            ((story, [*ids, tokenizer.eos_token_id]) for story, ids in zip(chunk, encoded, strict=True)),
            key=lambda row: len(row[1]),
        )
        for start in range(0, len(rows), stories_per_batch):
            yield batch_of(rows[start : start + stories_per_batch], tokenizer.pad_token_id)
