"""Attention of prompts against FP64 and against torch's own in BF16, over the shapes that models have."""

from __future__ import annotations

import pytest
import torch

from zipmoe import _native

needs_kernel = pytest.mark.skipif(not _native.attends_prompts(), reason="this machine has no kernel for prompts")
INSTRUCTION_SETS = [each for each in ("avx2", "avx512") if each in _native.instruction_sets()]

TOKENS = [1, 2, 3, 31, 64, 65, 512, 1000]
HEADS = [(2, 2, 64), (2, 1, 80), (3, 1, 96), (4, 2, 128), (1, 1, 192), (2, 1, 256)]


def words(tensor: torch.Tensor):
    return tensor.view(torch.uint16).numpy()


def drawn(sequences, tokens, heads, spread=1.0):
    query_heads, key_heads, dimensions = heads
    generator = torch.Generator().manual_seed(tokens * dimensions + sequences)
    return [
        (torch.randn((sequences, tokens, count, dimensions), generator=generator) * scale).bfloat16()
        for count, scale in ((query_heads, spread), (key_heads, 1.0), (key_heads, 1.0))
    ]


def native(arrays, scale, threads=2, instruction_set=""):
    queries, keys, _ = arrays
    cached = [torch.empty(keys.transpose(1, 2).shape, dtype=torch.bfloat16) for _ in range(2)]
    out = torch.empty_like(queries)
    _native.attend_prompt(
        *map(words, arrays),
        scale,
        *map(words, cached),
        words(out),
        _native.ComputeThreads(threads),
        instruction_set=instruction_set,
    )
    return out, *cached


def of_torch(arrays, scale):
    attention = torch.nn.functional.scaled_dot_product_attention
    by_head = [part.transpose(1, 2) for part in arrays]
    return attention(*by_head, scale=scale, is_causal=True, enable_gqa=True).transpose(1, 2)


@needs_kernel
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_no_larger_errors_than_torch(tokens, heads):
    scale = heads[2] ** -0.5
    errors = {"native": 0.0, "torch": 0.0}
    length = 0.0
    for spread in (1.0, 4.0):  # flat and sharp distributions
        arrays = drawn(max(2, 512 // tokens), tokens, heads, spread)  # enough roundings for their mean to tell
        exact = of_torch([part.double() for part in arrays], scale)
        found, keys, values = native(arrays, scale)
        assert torch.equal(keys, arrays[1].transpose(1, 2)) and torch.equal(values, arrays[2].transpose(1, 2))
        errors["native"] += (found.double() - exact).square().sum().item()
        errors["torch"] += (of_torch(arrays, scale).double() - exact).square().sum().item()
        length += exact.square().sum().item()
    assert errors["native"] <= errors["torch"]
    assert errors["native"] <= 2.0**-16 * length


@needs_kernel
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_same_bits(instruction_set, threads):
    arrays = drawn(2, 130, (4, 2, 64))
    expected = native(arrays, 0.125, threads=2)
    found = native(arrays, 0.125, threads, instruction_set)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@needs_kernel
def test_a_token_does_not_see_what_comes_later():
    arrays = drawn(1, 200, (2, 1, 64))
    whole = native(arrays, 0.125)[0]
    for tokens in (1, 23, 64, 100, 199):
        assert torch.equal(native([part[:, :tokens].contiguous() for part in arrays], 0.125)[0], whole[:, :tokens])


def test_portable_code_has_no_kernel():
    assert not _native.attends_prompts("scalar")
    with pytest.raises(ValueError, match="no kernel"):
        native(drawn(1, 4, (1, 1, 16)), 0.25, instruction_set="scalar")


@needs_kernel
def test_other_shapes_are_refused():
    queries, keys, values = drawn(1, 4, (2, 1, 32))
    for arrays in ((queries[:, :3], keys, values), (queries, keys, values[:, :3]), (queries, keys[..., :16], values)):
        with pytest.raises(ValueError, match=r"sequences, tokens, heads"):
            native([part.contiguous() for part in arrays], 0.25)
    with pytest.raises(ValueError, match="16 dimensions"):
        native([part[..., :24].contiguous() for part in (queries, keys, values)], 0.25)
