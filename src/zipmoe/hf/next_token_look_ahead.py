"""Look-ahead over the end of a step: what the first sparse layer will ask for at the token that comes next.

Between the logits of a step and the first router of the next one the disk has nothing to do. The next token is known
almost certainly at once (greedy decoding) or guessed well (sampling): the likeliest one. Its embedding, brought to the
scale of a normed input, is what the first sparse block's own router is asked with. That is a guess, the better the
nearer the block is to the embedding, so that it is compared with what the router says then; where too little comes
true, it is made no more, but for a trial now and then.

Nothing that a model computes depends on it: the embedding's rows are kept for the step to come, which needs the same.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from zipmoe.errors import ZipMoEError
from zipmoe.hf.look_ahead import ROWS_MAX, LookAheadChain
from zipmoe.hf.packed_embedding import PackedEmbedding
from zipmoe.hf.readable_rows import records_gradients

LEAST_SHARE = 0.25
"""Of the experts that were not in memory, how many must come true. A wrong one costs the reads under way, of a
millisecond or so, that a demand has to wait for; a right one saves some milliseconds."""
_MEMORY = 32
"""Predictions over which the share is taken, about."""
_TRIAL_STEPS = 32
"""Where it does not pay, a prediction is made once in so many steps."""


class TrackRecord:
    """How many predictions of missing experts come true, and whether it pays to make more."""

    def __init__(self) -> None:
        self.share = 1.0
        """Moving average; the predictions of the first steps are made on trust."""
        self._steps_without = 0

    @property
    def pays(self) -> bool:
        """Whether enough come true."""
        return self.share >= LEAST_SHARE

    def may_predict(self) -> bool:
        """Whether to predict in this step: where it does not pay, now and then."""
        if self.pays or self._steps_without + 1 >= _TRIAL_STEPS:
            self._steps_without = 0
            return True
        self._steps_without += 1
        return False

    def add(self, predicted: int, came_true: int) -> None:
        """Of so many experts that were predicted, these were asked for."""
        for number in range(predicted):
            self.share += ((number < came_true) - self.share) / _MEMORY


class NextTokenLookAhead:
    """Predicts for the first sparse block of a model from the logits of the step before.

    Args:
        chain: of the model's sparse blocks.
        embedding: of its tokens.
    """

    def __init__(self, chain: LookAheadChain, embedding: nn.Embedding) -> None:
        self.track_record = TrackRecord()
        self._chain = chain
        self._embedding = weakref.ref(embedding)
        self._unconfirmed: list[int] = []  # predicted, and not in memory then
        self._rows = 0  # for so many
        chain.first_choice_listeners.append(self.compare)

    def predict(self, logits: torch.Tensor) -> None:
        """The logits (sequences, positions, vocabulary) of a step are known: predict for the tokens that follow."""
        self._unconfirmed_is_wrong()
        first, look_ahead, embedding = self._chain.first, self._chain.look_ahead, self._embedding()
        if first is None or look_ahead is None or embedding is None or first.width != embedding.embedding_dim:
            return
        if records_gradients(logits) or logits.dim() not in (2, 3) or logits.numel() == 0:
            return
        last = logits[:, -1] if logits.dim() == 3 else logits
        if not first.is_predictable(last.shape[0]) or not self.track_record.may_predict():
            return
        tokens = likeliest(last.detach())
        if max(tokens) >= embedding.num_embeddings:
            return
        with torch.no_grad():
            try:
                found = first.likely(unit_rms(_rows(embedding, tokens)).unsqueeze(1))
                absent = [] if found is None else look_ahead.predict_next(*found, of_pass=len(tokens) > ROWS_MAX)
            except ZipMoEError:  # a damaged row, a closed engine: an error of the step that asks for it, if that comes
                return
        self._unconfirmed, self._rows = absent, len(tokens)

    def compare(self, chosen: torch.Tensor) -> None:
        """The first block's router has chosen (rows, top_k) experts."""
        if not self._unconfirmed:
            return
        if chosen.dim() == 0 or chosen.numel() != self._rows * chosen.shape[-1]:
            self._unconfirmed_is_wrong()
            return
        predicted, self._unconfirmed = self._unconfirmed, []
        asked = set(chosen.reshape(-1).tolist())
        self.track_record.add(len(predicted), sum(expert in asked for expert in predicted))

    def _unconfirmed_is_wrong(self) -> None:
        """Something else came than the step that was predicted: a prompt, or several tokens of every sequence.

        In assisted decoding that is every step, and none of them proves that a prediction was worth its reads.
        """
        predicted, self._unconfirmed = self._unconfirmed, []
        self.track_record.add(len(predicted), 0)

    def describe(self) -> str:
        """The part of the mode line."""
        chain = self._chain
        if chain.look_ahead is None or chain.watched == 0 or (chain.seen > 0 and chain.first is None):
            return ""
        first, embedding = chain.first, self._embedding()
        if embedding is None or (first is not None and first.width != embedding.embedding_dim):
            return ""
        if not self.track_record.pays:
            return "none from the likeliest next token, as too little of that came true"
        return "and from the likeliest next token to the first layer's"


def look_ahead_to_next_token(model: Any, chain: LookAheadChain) -> NextTokenLookAhead | None:
    """Predict whenever ``model`` has computed logits from now on.

    Args:
        model: in which ``get_input_embeddings`` and ``get_output_embeddings`` say what embeds tokens, and what computes
            logits from hidden states.
        chain: of its sparse blocks.

    Returns:
        What predicts; None if the model has no such modules, if the logits are not of the embedding's tokens, or if a
        look-up changes the embedding (``max_norm``).
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return None
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:  # how Transformers says that it finds none
        return None
    if not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
        return None
    if head.out_features > embedding.num_embeddings:
        return None
    predictor = NextTokenLookAhead(chain, embedding)

    def logits_known(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            predictor.predict(output)

    head.register_forward_hook(logits_known)
    return predictor


def likeliest(logits: torch.Tensor) -> list[int]:
    """The column of the largest value in each row of ``logits`` (n, vocabulary).

    BF16 values are compared as the integers of their patterns, which NumPy does a hundred times faster than torch
    compares the values: their order is the same among positive ones, and the opposite one among negative ones.
    """
    if logits.dtype is not torch.bfloat16:
        return [int(row) for row in logits.argmax(-1)]
    columns = []
    for row in logits.view(torch.int16).numpy():
        largest = int(np.argmax(row))
        columns.append(largest if row[largest] >= 0 else int(np.argmin(row)))
    return columns


def unit_rms(rows: torch.Tensor) -> torch.Tensor:
    """Rows (n, hidden) scaled as RMS norms leave them, but for their weights."""
    return functional.rms_norm(rows, rows.shape[-1:], eps=1e-12)  # torch's own epsilon is large beside an embedding


def _rows(embedding: Any, tokens: list[int]) -> torch.Tensor:
    """Rows (n, hidden) of an embedding; not a call of it: its hooks are none of our business."""
    if isinstance(embedding, PackedEmbedding):
        return embedding.look_up_ahead(tokens)
    rows: torch.Tensor = embedding.forward(torch.tensor(tokens))
    return rows
