"""The promise, for every family: the packed model answers as plain Transformers does, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from equality import assert_same_logits, load_packed, load_plain, no_warnings, shrink_pool
from family_table import CODECS, FAMILIES, second_codec
from tiny_models import architecture, expert_parameters, interface_families, logits, tiny_inputs
from transformers import PreTrainedModel

from zipmoe.codecs.codec_settings import CodecSettings

Folder = Callable[[str], Path]
Packed = Callable[[str, CodecSettings], Path]

NO_GENERATION = {
    "openai_privacy_filter": "classifies tokens",
    "qwen3_omni_moe": "Transformers cannot generate from a thinker that is stored alone",
}
NEW_TOKENS = 12


@pytest.mark.parametrize("family", FAMILIES)
def test_default_order(family: str, packed: Packed, checkpoint: Folder) -> None:
    """Through ``from_pretrained`` itself: default budget, mode and the combine order that the family defaults to."""
    with no_warnings():
        model, report = architecture(family).from_pretrained(packed(family, CODECS[0]), output_loading_info=True)
    assert not any(report.values()), report
    assert not [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    assert_no_expert_in_memory(family, model)
    assert_same_logits(family, load_plain(family, checkpoint(family)), model.eval())
    model.zipmoe_engine.close()


def assert_no_expert_in_memory(family: str, model: PreTrainedModel) -> None:
    held = dict(model.named_parameters())
    for path, names in expert_parameters(model, family).items():
        assert not [name for name in names if f"{path}.{name}" in held]


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_order(family: str, packed: Packed, checkpoint: Folder) -> None:
    plain = load_plain(family, checkpoint(family), experts_implementation="eager")
    model = load_packed(family, packed(family, second_codec(family)), experts_implementation="eager", mode="exact")
    assert_same_logits(family, plain, model)
    model.zipmoe_engine.close()


@pytest.mark.parametrize("family", sorted(interface_families() & FAMILIES.keys()))
def test_the_order_can_be_changed_after_loading(family: str, packed: Packed, checkpoint: Folder) -> None:
    plain = load_plain(family, checkpoint(family))
    model = load_packed(family, packed(family, CODECS[0]), mode="exact")
    inputs = tiny_inputs(family)
    for implementation in ("eager", "grouped_mm"):
        plain.set_experts_implementation(implementation)
        model.set_experts_implementation(implementation)
        assert torch.equal(logits(model, **inputs), logits(plain, **inputs)), implementation
    model.zipmoe_engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_widened_to_float32(family: str, packed: Packed, checkpoint: Folder) -> None:
    plain = load_plain(family, checkpoint(family), dtype=torch.float32)
    model = load_packed(family, packed(family, CODECS[0]), dtype=torch.float32, mode="exact")
    assert_same_logits(family, plain, model)
    model.zipmoe_engine.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("implementation", [None, "eager"])
def test_a_pool_too_small_for_a_layer(
    family: str, implementation: str | None, packed: Packed, checkpoint: Folder
) -> None:
    plain = load_plain(family, checkpoint(family), experts_implementation=implementation)
    settings = CODECS[0] if implementation else second_codec(family)
    model = load_packed(family, packed(family, settings), experts_implementation=implementation, mode="exact")
    shrink_pool(model)
    assert_same_logits(family, plain, model)
    assert model.zipmoe_engine.statistics.counters().evictions > 0
    model.zipmoe_engine.close()


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - NO_GENERATION.keys()))
def test_greedy_generation(family: str, packed: Packed, checkpoint: Folder) -> None:
    plain = load_plain(family, checkpoint(family))
    model = load_packed(family, packed(family, second_codec(family)), mode="exact")
    assert greedy(model, family) == greedy(plain, family)
    model.zipmoe_engine.close()


def greedy(model: PreTrainedModel, family: str) -> list[list[int]]:
    torch.manual_seed(0)
    found = model.generate(
        tiny_inputs(family)["input_ids"],
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return getattr(found, "sequences", found).tolist()


LOAD_ALL = """
import sys
import transformers
for name, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        getattr(transformers, name).from_pretrained(folder)
    except (ValueError, RuntimeError) as error:
        assert "zipmoe" in str(error) or "size mismatch" in str(error), error
    else:
        raise SystemExit(f"{name} loaded random experts")
"""


def test_transformers_without_the_plug_in_refuses_every_family(packed: Packed) -> None:
    arguments = [str(a) for f in FAMILIES for a in (architecture(f).__name__, packed(f, CODECS[0]))]
    done = subprocess.run([sys.executable, "-c", LOAD_ALL, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
