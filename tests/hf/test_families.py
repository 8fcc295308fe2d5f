"""Every kind of experts module gives the bits of plain Transformers, in both combine orders."""

from __future__ import annotations

import pytest
import torch
from representative_models import TINY_MODELS

import zipmoe

ORDERS = [None, "eager"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", TINY_MODELS)
def test_logits_and_greedy_generation_equal_plain_transformers(packed_model, family, order):
    packed = packed_model(family)
    chosen = {} if order is None else {"experts_implementation": order}
    plain = packed.plain(**chosen)
    model, loaded = packed.load(output_loading_info=True, **chosen)
    assert {name: list(found) for name, found in loaded.items() if found} == {}
    assert torch.equal(packed.logits(model), packed.logits(plain))
    assert torch.equal(packed.generate(model), packed.generate(plain))


@pytest.mark.parametrize("family", TINY_MODELS)
def test_float32_widens_exactly(packed_model, family):
    packed = packed_model(family)
    plain = packed.plain(dtype=torch.float32)
    model = packed.load(dtype=torch.float32)
    logits = packed.logits(model)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, packed.logits(plain))


@pytest.mark.parametrize("family", TINY_MODELS)
def test_nothing_packed_is_materialised(packed_model, family):
    packed = packed_model(family)
    model = packed.load()
    manifest = model._zipmoe_folder.manifest
    dense = {name for m in manifest.dense for name in (m.parameter, *m.tied_parameters)}
    experts = {f"{g.path}.{p.format(expert=e)}" for g in manifest.expert_groups for p in g.parameters for e in range(9)}
    held = dict(model.named_parameters(remove_duplicate=False))
    assert not held.keys() & (dense | experts)
    assert not any(parameter.is_meta for parameter in held.values())
    plain = packed.plain()
    assert set(held) == {name for name, _ in plain.named_parameters(remove_duplicate=False)} - dense - experts
    assert model.num_parameters() == plain.num_parameters()
    assert model.dtype == plain.dtype


def test_base_model_of_a_causal_language_model(mixtral):
    import transformers

    plain = transformers.AutoModel.from_pretrained(mixtral.source)
    model = transformers.AutoModel.from_pretrained(mixtral.folder)
    with torch.no_grad():
        ours, theirs = model(**mixtral.inputs).last_hidden_state, plain(**mixtral.inputs).last_hidden_state
    assert torch.equal(ours, theirs)


def test_load_takes_the_class_from_the_folder(mixtral):
    model = zipmoe.load(mixtral.folder, experts_implementation="eager")
    assert type(model).__name__ == "MixtralForCausalLM"
    assert torch.equal(mixtral.logits(model), mixtral.logits(mixtral.plain(experts_implementation="eager")))


def test_one_token_at_a_time_equals_plain_transformers(packed_model):
    packed = packed_model("qwen2_moe")
    plain, model = packed.plain(), packed.load()
    for tokens in (1, 2, 3):
        ids = packed.inputs["input_ids"][:1, :tokens]
        with torch.no_grad():
            assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
