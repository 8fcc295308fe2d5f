"""Memory that a forward pass needs beside weights and caches: an estimate from the config, with a base reserve.

Calibrated with the 8.1 GB model of the benchmark (hidden size 2048, 4 of 60 experts, shared expert 5632). What prompts
took beyond weights and caches, and what is reserved for them, in MB: 64 tokens 29 (4 sequences of 16: 46) of 88, 256
tokens 104 of 148, 512 tokens 179 of 229, 1024 tokens 324 of 389. The allocator keeps what was used once.
"""

from __future__ import annotations

from typing import Any

from zipmoe.engine.model_shape import EXPERTS_PER_TOKEN, HIDDEN_SIZE, dtype_bytes, first, largest, text_config, value

DEFAULT_STEP_TOKENS = 512
"""Tokens of one step (prompt length times batch) that the workspace is reserved for at start; longer prompts reserve
more when they come (``Engine.account`` with ``workspace_bytes``)."""

WORKSPACE_BYTES = 64 << 20
"""Base reserve: activations of a few tokens, a copy of a tile in the kernels' own layout (32 MiB), libraries that are
loaded late (first use of a kernel, about 30 MB), allocator slack, thread stacks, page tables, and the pages that
buffered reads hold for a moment."""

HIDDEN_COPIES = 52
"""Live values of one layer per token in units of the hidden size: residual, normed input, q, k, v and their rotations
in FP32, attention output, router, and what the allocator cannot use again at once; without the routed experts. Where
attention of prompts is native, packed copies of keys and values take the place of rotations and repeated heads, which
are more."""
HIDDEN_COPIES_PER_EXPERT = 2
"""For each expert of a token: its sorted input row or output, and the weighted term that is summed in the end."""
INTERMEDIATE_COPIES = 6
"""Gate, up, activation and product of a feed-forward network, some of them in two copies for a moment."""
_INTERMEDIATE_SIZE = (
    "intermediate_size",
    "shared_expert_intermediate_size",
    "moe_intermediate_size",
    "ffn_dim",
    "ffn_hidden_size",
    "d_ff",
)
_VOCABULARY = ("vocab_size",)
_HEADS = ("num_attention_heads", "n_heads", "num_heads", "n_head", "decoder_attention_heads", "encoder_attention_heads")
_KERNELS_WITHOUT_SCORES = ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Attention implementations that compute scores block by block; all others hold the matrix of a whole layer."""
_SCORE_BYTES = 12
"""A score is held scaled and masked, widened to FP32 for the softmax, and as its result."""
_MASK_BYTES = 3
"""An entry of a mask is held as a truth value, and as a number in the dtype of the model."""
_LOGIT_BYTES = 8
"""A logit is held in BF16 and FP32, and once more while it is processed."""


def workspace_bytes(config: Any | None, step_tokens: int, logit_rows: int = 1) -> int:
    """Reserve for the activations of one forward pass.

    Args:
        config: Transformers config of the model; None for the base reserve alone.
        step_tokens: new tokens of the pass over all sequences (the prompt's length times the batch).
        logit_rows: positions whose logits are computed: one per sequence in ``generate``, every token in a plain call.
    """
    if config is None:
        return WORKSPACE_BYTES
    config = text_config(config)
    hidden = first(config, HIDDEN_SIZE) or 4096
    intermediate = largest(config, _INTERMEDIATE_SIZE) or 4 * hidden
    experts = largest(config, EXPERTS_PER_TOKEN) or 1
    values = (HIDDEN_COPIES + HIDDEN_COPIES_PER_EXPERT * experts) * hidden + INTERMEDIATE_COPIES * intermediate
    logits = logit_rows * (first(config, _VOCABULARY) or 0)
    return WORKSPACE_BYTES + _LOGIT_BYTES * logits + dtype_bytes(config) * step_tokens * values


def attention_bytes(config: Any | None, sequences: int, queries: int, keys: int, *, masked: bool) -> int:
    """Attention scores and masks of one layer, which grow with the product of ``queries`` and ``keys``.

    Args:
        config: Transformers config of the model; None counts nothing.
        sequences: number of sequences.
        queries: new tokens of each.
        keys: tokens that they attend to, themselves included.
        masked: a mask is needed that the kernels do not know (padding).
    """
    if config is None:
        return 0
    config = text_config(config)
    entries = sequences * queries * keys
    if value(config, "_attn_implementation") in _KERNELS_WITHOUT_SCORES:
        return _MASK_BYTES * entries if masked else 0
    return (_MASK_BYTES + _SCORE_BYTES * (largest(config, _HEADS) or 1)) * entries
