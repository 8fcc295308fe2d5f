"""Models that were changed, wrapped or watched after they were loaded: the last layer computes all positions."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from observed_model import PROMPT, PROMPTS
from torch import nn

from zipmoe.errors import UnsupportedOperationError
from zipmoe.hf.configuration import ZipMoEConfig
from zipmoe.hf.module_parts import called_once, places


def same(observed, whole, **options):
    found, expected = (model(input_ids=PROMPT, logits_to_keep=1, **options).logits for model in (observed, whole))
    return torch.equal(found, expected)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("name", ["mlp", "self_attn"])
def test_parts_of_the_last_layer_in_an_earlier_one(observed, whole, name, copied):
    for model in (observed.model, whole):
        first, last = model.model.layers
        part = getattr(last, name)
        setattr(first, name, copy.copy(part) if copied else part)
    assert same(observed, whole, use_cache=False)
    assert same(observed, whole, use_cache=False)


def test_a_copy_of_the_last_layer_before_it(observed, whole):
    for model in (observed.model, whole):
        first, last = model.model.layers
        model.model.layers = nn.ModuleList([first, copy.copy(last), last])
        model.config.num_hidden_layers = 3
        model.config.layer_types = [*model.config.layer_types, model.config.layer_types[-1]]
    assert same(observed, whole, use_cache=False)


@pytest.mark.parametrize("part", ["mlp", "self_attn", None])
def test_a_hook_of_an_earlier_layer_that_calls_the_last_one(observed, whole, part):
    seen = []
    for model in (observed.model, whole):

        def call(module, args, output, model=model):
            last = model.model.layers[-1]
            if part == "mlp":
                seen.append(last.mlp(output))
                return
            positions = model.model.rotary_emb(output, torch.arange(output.shape[1])[None])
            if part == "self_attn":
                seen.append(last.self_attn(hidden_states=output, position_embeddings=positions, attention_mask=None)[0])
            else:
                seen.append(last(output, position_embeddings=positions))

        model.model.layers[0].register_forward_hook(call)
    assert same(observed, whole)
    assert torch.equal(*seen)


class Around(nn.Module):
    """Has a place for another module, and calls it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_the_last_layer_within_an_earlier_one(observed, whole):
    for model in (observed.model, whole):
        model.model.layers[0] = Around(Around(model.model.layers[-1]))
    assert same(observed, whole, use_cache=False)
    shared = Around(observed.layer)
    assert not called_once([observed.layer], [*places(nn.ModuleList([shared, Around(shared)]))])


def test_circles_and_modules_that_are_not_of_python(observed, whole):
    observed.model.model.layers[0].owner = observed.model
    assert same(observed, whole)
    assert observed.rows == [11]
    del observed.model.model.layers[0].owner
    for model in (observed.model, whole):
        gate = torch.jit.script(nn.Linear(model.config.hidden_size, 1, bias=False, dtype=torch.bfloat16))
        gate.weight.data.fill_(0.125)
        model.model.layers[0].mlp.shared_expert_gate = gate
    assert same(observed, whole)


class Looking(nn.Module):
    """Asks the last block what it makes of its input, behind the back of everybody who looks at the modules."""

    def __init__(self, inner, block):
        super().__init__()
        self.inner = inner
        self.blocks = [block]
        self.seen = None

    def forward(self, hidden_states, **kwargs):
        self.seen = self.blocks[0](hidden_states)
        return self.inner(hidden_states, **kwargs)


def test_an_earlier_layer_of_unknown_code(observed, whole):
    looking = []
    for model in (observed.model, whole):
        first, last = model.model.layers
        model.model.layers[0] = Looking(first, last.mlp)
        looking.append(model.model.layers[0])
    assert same(observed, whole)
    assert torch.equal(looking[0].seen, looking[1].seen)


class Mixed(nn.Module):
    """Adds what is the same for all positions."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + x.mean(0, keepdim=True)


def test_another_child_of_the_last_block(observed, whole):
    for model in (observed.model, whole):
        block = model.model.layers[-1].mlp
        block.shared_expert = Mixed(block.shared_expert)
    assert same(observed, whole)


@pytest.mark.parametrize("place", ["norm", "layers.1.post_attention_layernorm", "layers.1.mlp.gate"])
def test_another_forward_of_a_class(observed, monkeypatch, place):
    module = observed.model.model.get_submodule(place)
    family = next(each for each in type(module).__mro__ if each.__module__.startswith("transformers."))
    own, seen = type(module).forward, []

    def forward(self, given, *args, **kwargs):
        if self is module:
            seen.append(given.shape[:-1].numel())
        return own(self, given, *args, **kwargs)

    monkeypatch.setattr(family, "forward", forward)
    observed(input_ids=PROMPT, logits_to_keep=1)
    assert observed.rows == [11] and set(seen) == {11}


@pytest.mark.parametrize("place", ["layers.1", "layers.1.mlp", "norm"])
def test_another_call_of_a_class(observed, whole, place):
    for model in (observed.model, whole):
        module = model.model.get_submodule(place)
        family = type(module)

        class Called(family):
            def __call__(self, *args, **kwargs):
                output = super().__call__(*args, **kwargs)
                return output + output.mean(1, keepdim=True)

        module.__class__ = Called
    assert same(observed, whole)


def test_a_subclass_that_calls_the_base_model_itself(packed_model, whole):
    class Called(transformers.Qwen2MoeForCausalLM):
        def __call__(self, *args, **kwargs):
            self.states = self.model(input_ids=kwargs["input_ids"]).last_hidden_state
            return super().__call__(*args, **kwargs)

    settings = ZipMoEConfig(memory="8GB", mode="fast")
    with pytest.warns(UserWarning, match="quantization_config"):
        model = Called.from_pretrained(packed_model("qwen2_moe").folder, quantization_config=settings)
    with model.zipmoe_engine, torch.no_grad():
        model(input_ids=PROMPT)
        for _ in range(2):
            assert same(model, whole)
            assert torch.equal(model.states, whole.model(input_ids=PROMPT).last_hidden_state)


def test_another_call_of_all_modules(observed, monkeypatch):
    own = nn.Module.__call__

    def call(self, *args, **kwargs):
        return own(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", call)
    observed(input_ids=PROMPT, logits_to_keep=1)
    assert observed.rows == [11]


@pytest.mark.parametrize("how", ["around the model", "the model", "base model", "last layer"])
def test_compiled_models(observed, whole, how):
    kept = (1, 2, 0)
    expected = [whole(input_ids=PROMPTS, logits_to_keep=count).logits for count in kept]
    hidden = whole.model(input_ids=PROMPTS).last_hidden_state
    model = call = observed.model
    if how == "around the model":
        call = torch.compile(model, backend="eager")
    else:
        part = {"the model": model, "base model": model.model, "last layer": observed.layer}[how]
        part.compile(backend="eager")
    with torch.no_grad():
        for _ in range(2):
            for count, logits in zip(kept, expected, strict=True):
                assert torch.equal(call(input_ids=PROMPTS, logits_to_keep=count).logits, logits)
            assert torch.equal(model.model(input_ids=PROMPTS).last_hidden_state, hidden)


def test_a_copy_of_the_last_block_is_refused_as_any_other(observed):
    with pytest.raises(UnsupportedOperationError, match="cannot be copied"):
        copy.deepcopy(observed.layer.mlp)
