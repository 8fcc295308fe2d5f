"""Attention of whole prompts in the native core: several new tokens of each sequence, behind none that are cached.

These are the calls without a mask in which Transformers' sdpa is causal. Behind cached tokens it is given a mask,
and goes the family's own way.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from zipmoe import _native
from zipmoe.engine.fused_compute import FusedCompute
from zipmoe.hf.cache_room import KeyValueBuffers
from zipmoe.hf.first_use import all_agree, same_formula

_PROBE_ROWS = 32
"""Rows of the first prompt that are computed twice. What a token attends to lies before it, so the first tokens of a
prompt are a prompt, and tell as much about the formula as all of it."""


class PromptAttention:
    """The attention of one module in the native core.

    Args:
        compute: of its engine.
        layer: its matrices, norms and heads.
        heads: of queries, of keys and values, and their dimensions.
    """

    def __init__(self, compute: FusedCompute, layer: _native.AttentionLayer, heads: tuple[int, int, int]) -> None:
        self._compute = compute
        self._layer = layer
        self._heads = heads
        self.checked = False
        """Whether a prompt has shown that it computes the same."""

    def attend(
        self, hidden: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, query_tokens: int = 0
    ) -> tuple[torch.Tensor, KeyValueBuffers]:
        """The output for a prompt, or for its last tokens, and what the cache is to hold.

        Args:
            hidden: BF16 [sequences, tokens, hidden], contiguous.
            cosines: BF16 [sequences or 1, tokens, rotated dimensions], contiguous.
            sines: as ``cosines``.
            query_tokens: how many of the last tokens of each sequence the output is for; 0: all.
        """
        sequences, tokens = hidden.shape[:2]
        buffers = KeyValueBuffers.empty(sequences, self._heads[1], tokens, self._heads[2])
        output = self._compute.prompt_attention(self._layer, hidden, cosines, sines, buffers, query_tokens or tokens)
        return output, buffers

    def agrees(
        self,
        hidden: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        own: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        informative_sine: float,
    ) -> bool | None:
        """Whether the first tokens of a prompt are what the module computed itself; None if they do not tell.

        Args:
            hidden: as for ``attend``.
            cosines: as for ``attend``.
            sines: as for ``attend``.
            own: the module's output, and the keys and values that it has cached.
            informative_sine: positions tell how they are rotated if they are rotated by this much.
        """
        sequences = min(hidden.shape[0], _PROBE_ROWS // 2)
        tokens = min(hidden.shape[1], _PROBE_ROWS // sequences)

        def first(part: torch.Tensor) -> torch.Tensor:
            return part[:sequences, :tokens].contiguous()

        sines = first(sines)
        output, buffers = self.attend(first(hidden), first(cosines), sines)
        verdict = all_agree(
            same_formula(output, own[0][:sequences, :tokens]),
            same_formula(buffers.keys, own[1][:sequences, :, :tokens]),
            same_formula(buffers.values, own[2][:sequences, :, :tokens]),
        )
        return None if verdict and sines.abs().max().item() < informative_sine else verdict


def takes_prompt(cache: Any, number: int) -> bool:
    """Whether layer ``number`` of an ordinary cache is an ordinary one that holds nothing yet, or will be one."""
    if number < len(cache.layers):
        layer = cache.layers[number]
        return type(layer) is DynamicLayer and not layer.is_initialized
    return cache.layer_class_to_replicate is DynamicLayer


def hold(cache: Any, number: int, entries: KeyValueBuffers) -> None:
    """Let layer ``number`` of a cache, for which ``takes_prompt``, hold what was written to ``entries``."""
    while len(cache.layers) <= number:  # as Cache.update does
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[number]
    layer.lazy_initialization(entries.keys, entries.values)
    layer.keys, layer.values = entries.keys, entries.values
