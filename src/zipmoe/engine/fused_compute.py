"""Products with weights as they lie in memory: the numeric mode ``fast`` (docs/compute.md).

Nothing is decoded to memory for them: kernels read the packed form.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from zipmoe import _native
from zipmoe.engine.bfloat16_words import bfloat16_words
from zipmoe.engine.record_catalogue import GroupHandle
from zipmoe.engine.record_errors import named_record_errors
from zipmoe.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from zipmoe.engine.engine import Engine

FUSED_ROWS_MAX = {"avx512": sys.maxsize, "avx2": sys.maxsize, "scalar": 3}
"""Up to this many rows of inputs the kernels of an instruction set are used (docs/compute.md): the portable ones are
for few rows only."""


STEP_ROWS_MAX = min(FUSED_ROWS_MAX[_native.gemv_instruction_set()], 64)
"""Up to this many rows, steps of attention, routers and small matrices are faster so than with torch."""


class CacheBuffers(Protocol):
    """Keys and values of one layer: BF16 patterns [sequences, heads, capacity, head dimension]."""

    @property
    def key_words(self) -> npt.NDArray[np.uint16]:
        """Keys."""

    @property
    def value_words(self) -> npt.NDArray[np.uint16]:
        """Values."""


@dataclass(frozen=True, slots=True)
class LayerStep:
    """What a whole decoder layer computes with."""

    norms: _native.LayerNorms
    attention: _native.AttentionLayer
    feed_forward: _native.DenseNetwork | _native.SparseBlock
    keys_and_values: CacheBuffers
    """The cache's buffers, with room for the token."""
    tokens: int
    """Cached ones."""


class FusedCompute:
    """Computes for one engine, whose codec has fused kernels. Inputs and outputs are BF16, sums are FP32 in one
    documented order: the results do not depend on instruction set, threads or the other rows (of at most ``rows_max``).
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        kernels = _native.gemv_instruction_set(engine._instruction_set)
        self.rows_max = FUSED_ROWS_MAX[kernels]
        """Up to this many rows of inputs the kernels are faster than decoding and torch's product, or as fast."""
        self.attends_prompts = _native.attends_prompts(engine._instruction_set)
        """Whether there is a kernel for the attention of several new tokens of a sequence."""

    def takes(self, rows: int) -> bool:
        """Whether products with so many rows of inputs are the kernels'."""
        return 0 < rows <= self.rows_max

    def what_runs(self) -> str:
        """For the mode line."""
        return "fused kernels" if self.rows_max == sys.maxsize else f"fused kernels up to {self.rows_max} rows"

    def linear(self, parameter: str, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x W^T + bias`` with a packed dense matrix.

        Args:
            parameter: name of the matrix [rows, columns].
            x: BF16 [n, columns], contiguous.
            bias: BF16 [rows], contiguous, added to the FP32 sums; or None.

        Returns:
            BF16 [n, rows].
        """
        engine = self._engine
        handle = engine._catalogue.dense_matrix(parameter)
        out = torch.empty((x.shape[0], handle.rows), dtype=torch.bfloat16)
        with engine._exclusive(), named_record_errors(engine._catalogue):
            engine._native.multiply(
                handle.blocks, bfloat16_words(x), bfloat16_words(out), None if bias is None else bfloat16_words(bias)
            )
        return out

    def projection(self, parameter: str, bias: torch.Tensor | None) -> _native.DenseProjection:
        """A packed dense matrix as part of ``attention`` or ``feed_forward``.

        Args:
            parameter: name of the matrix [rows, columns].
            bias: BF16 [rows], contiguous, read where it lies; or None.
        """
        handle = self._engine._catalogue.dense_matrix(parameter)
        return _native.DenseProjection(handle.blocks, None if bias is None else bfloat16_words(bias.detach()))

    def is_one_record(self, parameter: str) -> bool:
        """Whether a packed dense matrix is small enough for one record, as ``feed_forward`` wants it."""
        return len(self._engine._catalogue.dense_matrix(parameter).blocks) == 1

    def attention(
        self,
        layer: _native.AttentionLayer,
        x: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        keys_and_values: CacheBuffers,
        tokens: int,
    ) -> torch.Tensor:
        """Attention of one new token of each sequence, whose keys and values are written behind the cached ones.

        Args:
            layer: its matrices and heads.
            x: BF16 [sequences, 1, hidden], contiguous.
            cosines: BF16 [sequences or 1, 1, rotated dimensions], contiguous, of the token's position.
            sines: as ``cosines``.
            keys_and_values: the cache's buffers, with room for the token.
            tokens: cached ones.

        Returns:
            BF16, the shape of ``x``.
        """
        return self._attention(layer, x, cosines, sines, keys_and_values, tokens, 1)

    def prompt_attention(
        self,
        layer: _native.AttentionLayer,
        x: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        keys_and_values: CacheBuffers,
        query_tokens: int,
    ) -> torch.Tensor:
        """Causal attention of several new tokens of each sequence, behind none that are cached.

        Args:
            layer: its matrices and heads.
            x: BF16 [sequences, tokens, hidden], contiguous.
            cosines: BF16 [sequences or 1, tokens, rotated dimensions], contiguous.
            sines: as ``cosines``.
            keys_and_values: the cache's buffers, empty and with room for the tokens.
            query_tokens: how many tokens, the last ones of each sequence, attend.

        Returns:
            BF16 [sequences, query_tokens, hidden].
        """
        return self._attention(layer, x, cosines, sines, keys_and_values, 0, query_tokens)

    def _attention(
        self,
        layer: _native.AttentionLayer,
        x: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        keys_and_values: CacheBuffers,
        tokens: int,
        query_tokens: int,
    ) -> torch.Tensor:
        engine = self._engine
        hidden = x.shape[-1]
        out = torch.empty((x.shape[0], query_tokens, hidden), dtype=torch.bfloat16)
        with engine._exclusive(), named_record_errors(engine._catalogue):
            _native.attention_step(
                engine._native,
                layer,
                bfloat16_words(x.view(-1, hidden)),
                bfloat16_words(cosines),
                bfloat16_words(sines),
                keys_and_values.key_words,
                keys_and_values.value_words,
                tokens,
                bfloat16_words(out.view(-1, hidden)),
            )
        return out

    def attention_in_layer(
        self,
        norms: _native.LayerNorms,
        attention: _native.AttentionLayer,
        x: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        keys_and_values: CacheBuffers,
        tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first half of a decoder layer for one new token of each sequence.

        Args:
            norms: of the layer.
            attention: and what follows, as ``attention``.
            x: BF16 [sequences, 1, hidden], contiguous.
            cosines: BF16 [sequences or 1, 1, rotated dimensions], contiguous.
            sines: as ``cosines``.
            keys_and_values: the cache's buffers, with room for the token.
            tokens: cached ones.

        Returns:
            BF16, the shape of ``x``: x + attention(norm(x)), and the second norm of it.
        """
        engine = self._engine
        summed, normed = torch.empty_like(x), torch.empty_like(x)
        with engine._exclusive(), named_record_errors(engine._catalogue):
            _native.attention_in_layer(
                engine._native,
                norms,
                attention,
                bfloat16_words(x.view(-1, x.shape[-1])),
                bfloat16_words(cosines),
                bfloat16_words(sines),
                keys_and_values.key_words,
                keys_and_values.value_words,
                tokens,
                bfloat16_words(summed.view(-1, x.shape[-1])),
                bfloat16_words(normed.view(-1, x.shape[-1])),
            )
        return summed, normed

    def layers(
        self, steps: Sequence[LayerStep], x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> torch.Tensor:
        """Whole decoder layers, each given what the one before it has given, for one new token of each sequence.

        Args:
            steps: the layers.
            x: BF16 [sequences, 1, hidden], contiguous.
            cosines: BF16 [sequences or 1, 1, rotated dimensions], contiguous, of the tokens' positions.
            sines: as ``cosines``.

        Returns:
            BF16 [layers, sequences, 1, hidden].

        Raises:
            CorruptRecordError, TruncatedShardError, PackedFolderError: an expert cannot be read.
            UnsupportedOperationError: the same thread has a request open.
        """
        engine = self._engine
        hidden = x.shape[-1]
        outs = torch.empty((len(steps), *x.shape), dtype=torch.bfloat16)
        with engine._exclusive(), named_record_errors(engine._catalogue):
            self._begin_alone()
            _native.layers_step(
                engine._native,
                [
                    (
                        step.norms,
                        step.attention,
                        step.feed_forward,
                        step.keys_and_values.key_words,
                        step.keys_and_values.value_words,
                        step.tokens,
                    )
                    for step in steps
                ],
                bfloat16_words(x.view(-1, hidden)),
                bfloat16_words(cosines),
                bfloat16_words(sines),
                bfloat16_words(outs.view(len(steps), -1, hidden)),
            )
        return outs

    def _begin_alone(self) -> None:
        """No request but that of the native call to come."""
        engine = self._engine
        if engine._request is not None:
            raise UnsupportedOperationError("this thread has a request open already: end it first")
        engine.early.cancel()
        engine._decoded.settle()

    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """An RMS norm of many rows, on the engine's threads.

        Args:
            x: BF16 [n, size], contiguous.
            weight: BF16 [size], contiguous.
            epsilon: added to the mean of the squares.

        Returns:
            BF16, the shape of ``x``.
        """
        engine = self._engine
        out = torch.empty_like(x)
        with engine._exclusive(), named_record_errors(engine._catalogue):
            _native.rms_norm_on_threads(
                engine._native, bfloat16_words(x), bfloat16_words(weight), epsilon, bfloat16_words(out)
            )
        return out

    def feed_forward(self, network: _native.DenseNetwork, x: torch.Tensor, columns: int) -> torch.Tensor:
        """A feed-forward network of dense matrices.

        Args:
            network: its matrices.
            x: BF16 [n, hidden], contiguous.
            columns: of the result.

        Returns:
            BF16 [n, columns].
        """
        engine = self._engine
        out = torch.empty((x.shape[0], columns), dtype=torch.bfloat16)
        with engine._exclusive(), named_record_errors(engine._catalogue):
            _native.feed_forward_step(engine._native, network, bfloat16_words(x), bfloat16_words(out))
        return out

    def expert(
        self, group: GroupHandle, expert_id: int, network: _native.ExpertNetwork, x: torch.Tensor
    ) -> torch.Tensor:
        """The feed-forward network of the expert that the open request handed out last.

        Args:
            group: of the expert.
            expert_id: the expert.
            network: which of its matrices are used how.
            x: BF16 [n, hidden], contiguous.

        Returns:
            BF16 [n, hidden].

        Raises:
            UnsupportedOperationError: the expert is not the one that was handed out last.
        """
        engine = self._engine
        out = torch.empty_like(x)
        with engine._exclusive():
            engine._require_handed_out(group, expert_id)
            with named_record_errors(engine._catalogue):
                engine._native.feed_forward(group.records[expert_id], network, bfloat16_words(x), bfloat16_words(out))
        return out

    def experts(
        self,
        group: GroupHandle,
        expert_ids: Sequence[int],
        tokens: Sequence[int],
        network: _native.ExpertNetwork,
        x: torch.Tensor,
    ) -> torch.Tensor:
        """Feed-forward networks of several experts, each computed as soon as it is resident, hits first.

        Args:
            group: of the experts.
            expert_ids: distinct ids.
            tokens: rows of each expert, in the order of the ids.
            network: which of their matrices are used how.
            x: BF16 [sum of tokens, hidden], contiguous: the rows of the first expert, then those of the second ...

        Returns:
            BF16, the shape of ``x``.

        Raises:
            CorruptRecordError, TruncatedShardError, PackedFolderError: an expert cannot be read.
            UnsupportedOperationError: the same thread has a request open.
        """
        out = torch.empty_like(x)
        counts = list(tokens)
        with self._request(group, expert_ids, counts) as (records, begun):
            self._engine._native.feed_forward_request(
                records, counts, network, bfloat16_words(x), bfloat16_words(out), begun
            )
        return out

    def sparse_layer(
        self,
        group: GroupHandle,
        expert_ids: Sequence[int],
        tokens: Sequence[int],
        network: _native.ExpertNetwork,
        x: torch.Tensor,
        positions: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """The same for whole tokens: every row's experts, times their weights, summed in FP32 and rounded once.

        Args:
            group: of the experts.
            expert_ids: distinct ids.
            tokens: rows of each expert, in the order of the ids.
            network: which of their matrices are used how.
            x: BF16 [n, hidden], contiguous.
            positions: int64 [n * top_k]: where the flattened ids name the first expert, then the second ...
            weights: FP32 [n, top_k], contiguous.

        Returns:
            BF16 [n, hidden].

        Raises:
            As ``experts``.
        """
        out = torch.empty_like(x)
        counts = list(tokens)
        with self._request(group, expert_ids, counts) as (records, begun):
            self._engine._native.sparse_step(
                records,
                counts,
                network,
                bfloat16_words(x),
                positions.numpy(),
                weights.numpy(),
                bfloat16_words(out),
                begun,
            )
        return out

    @contextmanager
    def _request(
        self, group: GroupHandle, expert_ids: Sequence[int], tokens: list[int]
    ) -> Iterator[tuple[list[int], bool]]:
        """The engine for one native call that is a whole request: its records, and whether it was begun early."""
        engine = self._engine
        with engine._exclusive():
            if engine._request is not None:
                raise UnsupportedOperationError("this thread has a request open already: end it first")
            if engine.request_observer is not None:
                engine.request_observer(group.path, expert_ids)
            records = [group.records[expert_id] for expert_id in expert_ids]
            try:
                begun = engine.early.take(group, list(expert_ids), False, tokens)
                if not begun:
                    engine._decoded.settle()
                with named_record_errors(engine._catalogue):
                    yield records, begun
            except BaseException:
                engine._native.end_request()  # one that was begun early and not ended by the call
                raise
