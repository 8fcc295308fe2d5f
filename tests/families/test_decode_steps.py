"""Decode steps of every family in the mode ``fast``: their error against FP64, and which parts are native."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from equality import load_packed, load_plain
from family_table import FAMILIES
from fp64_reference import compare, decode, inputs_and_steps, reference_model, rms
from native_layers import NativeLayers, logits_of_steps
from tiny_models import interface_families

from zipmoe import _native
from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.hf.fused_attention import FusedAttention
from zipmoe.hf.fused_feed_forward import FusedFeedForward

Folder = Callable[[str], Path]
Packed = Callable[[str, CodecSettings], Path]

NATIVE: dict[str, tuple[int, int, int, int, int, int, int]] = {
    "afmoe": (0, 2, 13, 0, 1, 0, 0),
    "aria": (3, 3, 7, 3, 0, 0, 3),
    "axk1": (0, 2, 10, 0, 0, 0, 0),
    "axk2": (0, 2, 9, 0, 0, 0, 0),
    "bailing_hybrid": (0, 3, 8, 0, 0, 0, 0),
    "beam": (0, 0, 19, 0, 0, 0, 0),
    "cohere2_moe": (0, 0, 0, 2, 0, 0, 0),
    "deepseek_ocr2": (3, 3, 12, 0, 0, 1, 2),
    "deepseek_v2": (0, 3, 13, 0, 0, 0, 0),
    "deepseek_v3": (0, 3, 13, 0, 0, 0, 0),
    "deepseek_v32": (0, 2, 9, 0, 0, 0, 0),
    "deepseek_v4": (0, 0, 0, 0, 0, 0, 0),
    "dots1": (2, 2, 9, 0, 0, 1, 1),
    "dots3_note": (0, 3, 16, 0, 0, 0, 0),
    "ernie4_5_moe": (0, 3, 7, 0, 0, 0, 0),
    "ernie4_5_vl_moe": (0, 2, 6, 0, 0, 0, 0),
    "exaone_moe": (0, 3, 13, 0, 0, 0, 0),
    "flex_olmo": (0, 0, 13, 3, 0, 0, 0),
    "flint": (0, 2, 9, 0, 0, 0, 0),
    "gemma4": (0, 2, 22, 0, 2, 0, 0),
    "glm4_moe": (3, 3, 7, 0, 0, 1, 2),
    "glm4_moe_lite": (0, 2, 9, 0, 0, 0, 0),
    "glm4v_moe": (3, 3, 13, 0, 0, 1, 2),
    "glm5_next": (0, 0, 18, 0, 0, 0, 0),
    "glm_moe_dsa": (0, 2, 9, 0, 0, 0, 0),
    "gpt_oss": (0, 0, 5, 0, 0, 0, 0),
    "granitemoe": (3, 0, 7, 0, 0, 0, 0),
    "granitemoe_swa": (0, 0, 5, 0, 0, 0, 0),
    "granitemoehybrid": (0, 0, 6, 0, 0, 0, 0),
    "granitemoeshared": (3, 0, 7, 0, 0, 0, 0),
    "hunyuan_v1_moe": (0, 3, 13, 0, 0, 0, 0),
    "hy_v3": (2, 2, 9, 0, 0, 1, 1),
    "hy_v4": (0, 2, 9, 0, 0, 0, 0),
    "hy_v4_vl": (0, 2, 10, 0, 0, 0, 0),
    "inkling": (0, 0, 10, 0, 0, 0, 0),
    "inkling2": (0, 0, 8, 0, 1, 0, 0),
    "inkling2_loop": (0, 0, 8, 0, 1, 0, 0),
    "jamba": (0, 2, 18, 2, 0, 0, 0),
    "kimi_linear": (0, 3, 8, 0, 0, 0, 0),
    "kolibri1": (0, 2, 13, 0, 0, 0, 0),
    "laguna": (0, 2, 9, 0, 0, 0, 0),
    "lara_mini": (0, 3, 11, 0, 4, 0, 0),
    "lfm2_moe": (0, 0, 9, 0, 0, 0, 0),
    "mellum": (2, 0, 9, 2, 0, 2, 0),
    "mimo_v2_flash": (0, 1, 7, 0, 0, 0, 0),
    "minimax": (0, 0, 6, 2, 0, 0, 0),
    "minimax_m2": (0, 0, 13, 0, 0, 0, 0),
    "minimax_m3_vl": (0, 0, 0, 0, 0, 0, 0),
    "mistral4": (0, 3, 13, 0, 0, 0, 0),
    "mistral_large4": (0, 2, 15, 0, 6, 0, 0),
    "mixtral": (3, 0, 7, 3, 0, 3, 0),
    "muse_spark": (0, 0, 9, 0, 0, 0, 0),
    "nemotron_h": (0, 0, 5, 0, 0, 0, 0),
    "olmoe": (0, 0, 13, 3, 0, 0, 0),
    "phimoe": (3, 0, 0, 0, 0, 0, 0),
    "qwen2_moe": (2, 2, 5, 2, 0, 0, 2),
    "qwen3_5_moe": (0, 2, 0, 2, 0, 0, 0),
    "qwen3_moe": (3, 0, 13, 3, 0, 3, 0),
    "qwen3_next": (0, 2, 0, 2, 0, 0, 0),
    "qwen3_omni_moe": (3, 0, 13, 3, 0, 3, 0),
    "qwen3_vl_moe": (3, 0, 13, 3, 0, 3, 0),
    "qwen4_exp": (0, 2, 0, 2, 0, 0, 0),
    "solar_open": (3, 3, 7, 0, 0, 0, 3),
    "unlimited_ocr": (0, 2, 5, 0, 9, 0, 0),
    "zaya": (0, 0, 7, 0, 0, 0, 0),
}
"""Attentions and feed-forward networks that were native in a step (these attentions were native in prompts, too), and
native norms, routers and small matrices, of the tiny models; then the layers that steps computed in one call, and those
of which the first half was one. What is missing here: other shapes of attention (latent, gated, with sinks, full-width
norms, rotated in pairs), layers with a sliding window or without positions, positions in FP32, norms of 1 + weight or
in FP32, routers with corrections, groups or logits in FP32. Not whole are layers with such a router, with transposed
experts (aria), or with a gate of the shared expert that is packed here, as every matrix is (qwen2_moe).
"""
NO_STEPS = {"diffusion_gemma", "openai_privacy_filter"}
"""They do not generate token after token."""
NOT_RUN = {"deepseek_ocr2": 2, "ernie4_5_moe": 1, "unlimited_ocr": 1}
"""Whole layers that these steps do not call as they must be called: of parts that see no text, or given positions in
FP32, or a cache with layers of their own.
"""
NOISE = 1.15
"""Both errors are sums of roundings, of which no two implementations make the same."""


def test_the_table_is_complete() -> None:
    assert NATIVE.keys() == (interface_families() & FAMILIES.keys()) - NO_STEPS


@pytest.mark.parametrize("family", sorted(NATIVE))
def test_steps(family: str, packed: Packed, checkpoint: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = load_packed(family, packed(family, CodecSettings("fx3", None, 1)), mode="fast")
    models = reference_model(family, checkpoint(family)), load_plain(family, checkpoint(family)), fast
    given = [inputs_and_steps(family, seed=seed, tokens=4, steps=4) for seed in range(1, 6)]
    found = compare(*([decode(model, *each) for each in given] for model in models))
    assert found.errors[0].numel() > 0
    assert rms(found.errors[1]) <= NOISE * rms(found.errors[0])
    assert found.alike[1] >= 0.7 * found.alike[0]
    steps = fast.zipmoe_fused_steps()
    attentions, feed_forwards = (_used(fast, kind) for kind in (FusedAttention, FusedFeedForward))
    layers = NativeLayers(monkeypatch)
    logits_of_steps(fast, *given[0])  # the comparison watches the calls of the experts, which a whole layer leaves out
    modules = (attentions, feed_forwards, steps.norms, steps.routers, steps.linears)
    assert modules + layers.counts == NATIVE[family]
    assert steps.layers == layers.counts[0] + NOT_RUN.get(family, 0)
    if _native.attends_prompts():
        assert _prompted(fast) == attentions
    fast.zipmoe_engine.close()


def _prompted(model: Any) -> int:
    """Attentions that were native in a prompt."""
    natives = [module._zipmoe_native for module in model.modules() if isinstance(module, FusedAttention)]
    return sum(native is not None and native.prompts.checked for native in natives)


def _used(model: Any, kind: type) -> int:
    natives = [module._zipmoe_native for module in model.modules() if isinstance(module, kind)]
    return sum(native is not None and native.checked for native in natives)
