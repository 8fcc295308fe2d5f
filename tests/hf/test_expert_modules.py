"""One description of experts modules for the packer and the plug-in."""

from __future__ import annotations

import pytest
import torch
import transformers
from representative_models import TINY_MODELS

from zipmoe.checkpoint.expert_modules import ExpertLayout, find_expert_groups
from zipmoe.errors import UnsupportedCheckpointError

EXPECTED = {
    "mixtral": ("model.layers.0.mlp.experts", ("gate_up_proj", "down_proj"), 6, ((192, 64), (64, 96)), 2),
    "gpt_oss": ("model.layers.0.mlp.experts", ("gate_up_proj", "down_proj"), 8, ((64, 128), (64, 64)), 2),
    "dbrx": ("transformer.blocks.0.ffn.experts.mlp", ("w1", "v1", "w2"), 6, ((48, 64),) * 3, 2),
    "llama4": ("model.layers.0.feed_forward.experts", ("gate_up_proj", "down_proj"), 6, ((64, 96), (48, 64)), 2),
    "longcat_flash": ("model.layers.0.mlp.experts", ("gate_up_proj", "down_proj"), 6, ((96, 64), (64, 48)), 2),
    "jetmoe": ("model.layers.0.mlp.input_linear", ("weight",), 6, ((96, 64),), 8),
    "switch": (
        "encoder.block.1.layer.1.mlp.experts",
        ("expert_{expert}.wi.weight", "expert_{expert}.wo.weight"),
        6,
        ((96, 64), (64, 96)),
        4,
    ),
}


def meta(family):
    tiny = TINY_MODELS[family]
    with torch.device("meta"):
        return getattr(transformers, tiny.architecture)._from_config(tiny.config(), dtype=torch.bfloat16)


@pytest.mark.parametrize("family", EXPECTED)
def test_groups(family):
    groups = find_expert_groups(meta(family))
    first = min(groups, key=lambda group: group.path.replace("encoder", "!")) if family == "switch" else groups[0]
    path, parameters, experts, shapes, count = EXPECTED[family]
    assert (first.path, first.parameters, first.num_experts, first.slice_shapes) == (path, parameters, experts, shapes)
    assert len(groups) == count


@pytest.mark.parametrize("family", EXPECTED)
def test_slices_together_are_the_parameters(family):
    model = TINY_MODELS[family].build()
    for group in find_expert_groups(model):
        for parameter, shape in zip(group.parameters, group.slice_shapes, strict=True):
            slices = []
            for expert in range(group.num_experts):
                whole = model.get_parameter(group.parameter_name(parameter, expert))
                slices.append(group.parameter_slice(whole, parameter, expert))
                assert slices[-1].shape == shape
            if group.layout is not ExpertLayout.MODULE_PER_EXPERT:
                assert torch.equal(torch.cat(slices).flatten(), whole.flatten()[: torch.cat(slices).numel()])
        names = list(group.parameter_names())
        assert len(names) == len(set(names))
        assert all(model.get_parameter(name) is not None for name in names)


def test_biases_and_routers_are_not_experts():
    names = {name for group in find_expert_groups(meta("gpt_oss")) for name in group.parameter_names()}
    assert not [name for name in names if "bias" in name or "router" in name]


def test_families_that_cannot_be_run_are_refused():
    with torch.device("meta"):
        nllb = transformers.NllbMoeForConditionalGeneration._from_config(
            transformers.NllbMoeConfig(
                vocab_size=64,
                d_model=16,
                encoder_layers=4,
                decoder_layers=4,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                num_experts=2,
            )
        )
        doge = transformers.DogeForCausalLM._from_config(
            transformers.DogeConfig(
                vocab_size=64,
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                is_moe=True,
                num_experts=16,
                num_experts_per_tok=2,
            )
        )
    with pytest.raises(UnsupportedCheckpointError, match="expert_0 and expert_1"):
        find_expert_groups(nllb)
    with pytest.raises(UnsupportedCheckpointError, match="embedding"):
        find_expert_groups(doge)


def test_models_without_experts_have_no_groups():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
            )
        )
    assert find_expert_groups(model) == []
