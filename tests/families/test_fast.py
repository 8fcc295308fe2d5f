"""The mode ``fast``: an error against an FP64 reference that is no larger than that of plain Transformers in BF16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from equality import load_packed, load_plain
from family_table import CODECS, FAMILIES
from fp64_reference import compare, one_pass, reference_model, rms
from tiny_models import interface_families, logits, tiny_inputs

from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.hf.experts_forward import PackedInterfaceExperts

Folder = Callable[[str], Path]
Packed = Callable[[str, CodecSettings], Path]

NOT_FUSED = {
    "aria": "their matrices are stored transposed",
    "gpt_oss": "their matrices are stored transposed",
    "openai_privacy_filter": "their outputs are combined in eager order",  # by default; they are transposed, too
    "inkling2": "the kernels do not know their activation",  # soft caps of gate and up
    "inkling2_loop": "the kernels do not know their activation",
}
"""Why the experts of these families are decoded. Those of all others go through the native core."""
INTERFACE = sorted(interface_families() & FAMILIES.keys())
FUSED = [family for family in INTERFACE if family not in NOT_FUSED]
SHAPES = ((1, 1), (2, 1), (3, 1), (1, 3), (2, 9), (7, 5))
SEEDS = 3
NOISE = 1.15
"""Both errors are sums of roundings, of which no two implementations make the same."""
FEW_NOISE = 1.25
"""The same, for few tokens."""


CHOOSE_TOKENS = {"deepseek_v32", "glm_moe_dsa"}
"""Families that attend to the best few tokens only: another choice that rounding may turn over."""


def without_outliers(error: torch.Tensor) -> float:
    return rms(error[error.abs() <= torch.quantile(error.abs(), 0.98)])


@pytest.mark.parametrize("family", FUSED)
def test_error_against_fp64(family: str, packed: Packed, checkpoint: Folder) -> None:
    """Over sequences that are routed as in FP64: a near tie that is rounded the other way is no error of rounding."""
    plain = load_plain(family, checkpoint(family))
    fast = load_packed(family, packed(family, CodecSettings("fx3", None, 1)), mode="fast")
    models = reference_model(family, checkpoint(family)), plain, fast
    inputs = [
        tiny_inputs(family, batch=batch, tokens=tokens, seed=seed) for batch, tokens in SHAPES for seed in range(SEEDS)
    ]
    runs = [[one_pass(model, each) for each in inputs] for model in models]
    found = compare(*runs, whole=family == "diffusion_gemma")  # a canvas of 256 tokens
    assert found.errors[0].numel() > 0
    error = without_outliers if family in CHOOSE_TOKENS else rms
    assert error(found.errors[1]) <= NOISE * error(found.errors[0])
    assert found.alike[1] >= 0.7 * found.alike[0]
    modules = [module for module in fast.modules() if isinstance(module, PackedInterfaceExperts)]
    assert modules and all(module._zipmoe_network is not None for module in modules)
    counters = fast.zipmoe_engine._native.counters()
    assert counters["compute_seconds"] > 0
    fast.zipmoe_engine.close()


@pytest.mark.parametrize("family", INTERFACE)
def test_every_family_runs(family: str, packed: Packed, checkpoint: Folder) -> None:
    """Single tokens: whatever the native core cannot compute is decoded as in the mode exact."""
    plain = load_plain(family, checkpoint(family))
    fast = load_packed(family, packed(family, CODECS[0]), mode="fast")
    reference = reference_model(family, checkpoint(family))
    inputs = [tiny_inputs(family, batch=3, tokens=1, seed=seed) for seed in range(3)]
    runs = [[one_pass(model, each) for each in inputs] for model in (reference, plain, fast)]
    found = compare(*runs, whole=family == "diffusion_gemma")  # a canvas of 256 tokens
    assert found.errors[0].numel() > 0
    assert rms(found.errors[1]) <= FEW_NOISE * rms(found.errors[0])
    assert found.alike[1] >= found.alike[0] / 2
    fast.zipmoe_engine.close()


@pytest.mark.parametrize("family", sorted(NOT_FUSED))
def test_what_the_native_core_cannot_compute_is_decoded(family: str, packed: Packed) -> None:
    fast = load_packed(family, packed(family, CodecSettings("fx3", None, 1)), mode="fast")
    logits(fast, **tiny_inputs(family, batch=1, tokens=1))
    modules = [module for module in fast.modules() if isinstance(module, PackedInterfaceExperts)]
    assert modules and all(getattr(module, "_zipmoe_network", None) is None for module in modules)
    assert f"experts decoded because {NOT_FUSED[family]})" in fast.zipmoe_mode_line()
    fast.zipmoe_engine.close()


def test_a_token_is_the_same_whatever_others_are_beside_it(packed: Packed) -> None:
    """Rows of one product do not influence each other, so batches agree bit for bit."""
    fast = load_packed("qwen2_moe", packed("qwen2_moe", CodecSettings("fx3", None, 1)), mode="fast")
    layer, tokens = fast.model.layers[0], 29
    assert fast.zipmoe_engine.fused.takes(tokens)
    experts, linear = layer.mlp.experts, layer.self_attn.q_proj
    generator = torch.Generator().manual_seed(1)
    rows = (torch.randn((tokens, experts.hidden_dim), generator=generator) * 0.5).bfloat16()
    ids = torch.stack([torch.randperm(experts.num_experts, generator=generator)[:2] for _ in range(tokens)])
    ids[:20, 0], ids[:20, 1] = 1, 2  # twenty rows of one expert, few of others
    weights = torch.rand((tokens, 2), generator=generator).bfloat16()
    with torch.no_grad():
        together, linear_together = experts(rows, ids, weights), linear(rows)
        for begin in range(0, tokens, 7):
            part = slice(begin, begin + 7)
            assert torch.equal(experts(rows[part], ids[part], weights[part]), together[part])
        for token in range(tokens):
            part = slice(token, token + 1)
            assert torch.equal(experts(rows[part], ids[part], weights[part]), together[part])
            assert torch.equal(linear(rows[part]), linear_together[part])
    fast.zipmoe_engine.close()


def test_very_many_rows_are_decoded(packed: Packed, checkpoint: Folder) -> None:
    """As in the mode exact, which gives the bits of plain Transformers."""
    folder = packed("qwen2_moe", CodecSettings("fx3", None, 1))
    fast = load_packed("qwen2_moe", folder, mode="fast")
    plain = load_plain("qwen2_moe", checkpoint("qwen2_moe"))
    fast.zipmoe_engine.fused.rows_max = 3
    for tokens in (3, 4):
        inputs = torch.ones((tokens, plain.config.hidden_size), dtype=torch.bfloat16)
        before = fast.zipmoe_engine._native.counters()["compute_seconds"]
        with torch.no_grad():
            found = fast.model.layers[0].self_attn.o_proj(inputs)
            expected = plain.model.layers[0].self_attn.o_proj(inputs)
        computed = fast.zipmoe_engine._native.counters()["compute_seconds"] > before
        assert computed == (tokens == 3)
        assert computed or torch.equal(found, expected)
    fast.zipmoe_engine.close()


@pytest.mark.parametrize("shape", [(1, 128), (2, 32), (6, 32), (128,)])
def test_inputs_of_another_width_are_refused_as_torch_refuses_them(
    shape: tuple[int, ...], packed: Packed, checkpoint: Folder
) -> None:
    """Also where their numbers would fill rows of the right width."""
    fast = load_packed("qwen2_moe", packed("qwen2_moe", CodecSettings("fx3", None, 1)), mode="fast")
    plain = load_plain("qwen2_moe", checkpoint("qwen2_moe"))
    inputs = torch.ones(shape, dtype=torch.bfloat16)
    with torch.no_grad(), pytest.raises(RuntimeError) as expected:
        plain.model.layers[0].self_attn.o_proj(inputs)
    with torch.no_grad(), pytest.raises(RuntimeError) as found:
        fast.model.layers[0].self_attn.o_proj(inputs)
    assert str(found.value) == str(expected.value)
    fast.zipmoe_engine.close()


def test_a_bias_may_lie_anywhere(packed: Packed) -> None:
    fast = load_packed("qwen2_moe", packed("qwen2_moe", CodecSettings("fx3", None, 1)), mode="fast")
    linear = fast.model.layers[0].self_attn.q_proj
    inputs = torch.ones((1, linear.in_features), dtype=torch.bfloat16)
    with torch.no_grad():
        expected = linear(inputs)
        linear.bias = torch.nn.Parameter(torch.stack([linear.bias, linear.bias + 1], 1)[:, 0], requires_grad=False)
        assert not linear.bias.is_contiguous()
        assert torch.equal(linear(inputs), expected)
    fast.zipmoe_engine.close()
