"""What may happen to a model between, within and around the layers that were computed ahead."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import test_fused_layer
import torch
from native_steps import Calls, count_calls
from test_fused_layer import LAYERS, assert_bits_of_the_parts, entries, in_parts, opened, remove, started, step
from torch import nn
from torch.nn.utils import parametrize

from zipmoe.errors import BudgetExceededError, CorruptRecordError

folders = test_fused_layer.folders


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return count_calls(monkeypatch)


def walk(model: Any, cache: Any, between: Any = lambda layer, options: None, token: int = 21) -> torch.Tensor:
    """A loop over the layers of one's own, in which ``between(next layer, its options)`` happens before each but the
    first; the last one's output."""
    hidden = model.model.embed_tokens(torch.tensor([[token]]))
    position = torch.tensor([[cache.layers[0].keys.shape[2]]])
    angles = model.model.rotary_emb(hidden, position)
    for number, layer in enumerate(model.model.layers):
        options = {"position_embeddings": angles, "attention_mask": None, "cache": cache}
        if number > 0:
            options = between(layer, options) or options
        hidden = layer(hidden, **options)
    return hidden


def both_ways(model: Any, between: Any, steps: int = 2, undo: Any = lambda: None) -> None:
    """The same bits as with the parts called one by one."""
    results = []
    for whole in (True, False):
        hooks = [] if whole else in_parts(model)
        cache = started(model, 1)
        results.append([walk(model, cache, between) for _ in range(steps)] + entries(cache))
        undo()
        remove(hooks)
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["mlp", "mlp.gate", "input_layernorm", "self_attn", "mlp.shared_expert"])
def test_a_hook_that_comes_between_two_layers_is_called(folders, name):
    with opened(folders["qwen2_moe"]) as model:
        cache, seen = started(model, 1), []

        def between(layer, options):
            layer.get_submodule(name).register_forward_hook(lambda *_: seen.append(name))

        walk(model, cache, between)
        assert seen == [name]


@pytest.mark.parametrize("what", ["parameter", "in place", "epsilon", "top_k", "class"])
def test_what_changes_between_two_layers_counts(folders, monkeypatch, what):
    with opened(folders["qwen2_moe"]) as model:
        layer1 = model.model.layers[1]
        norm, before = layer1.input_layernorm, layer1.input_layernorm.weight.detach().clone()
        epsilon = norm.variance_epsilon
        original = norm.weight

        def between(layer, options):
            if what == "parameter":
                norm.weight = nn.Parameter(before * 2, requires_grad=False)
            elif what == "in place":
                with torch.no_grad():
                    norm.weight.mul_(2)
            elif what == "epsilon":
                norm.variance_epsilon = 0.5
            elif what == "top_k":
                layer.mlp.gate.top_k = 1
            else:
                kind = next(k for k in type(norm).__mro__ if "forward" in vars(k) and k.__module__.startswith("transf"))
                own = vars(kind)["forward"]
                monkeypatch.setattr(kind, "forward", lambda self, x: own(self, x) * 2)

        def undo():
            monkeypatch.undo()
            norm.weight = original
            with torch.no_grad():
                norm.weight.copy_(before)
            norm.variance_epsilon = epsilon
            layer1.mlp.gate.top_k = 4

        both_ways(model, between, steps=1, undo=undo)


def test_values_that_are_replaced_between_two_layers_count(folders):
    with opened(folders["qwen2_moe"]) as model:

        def between(layer, options):
            held = options["cache"].layers[1]
            held.values = held.values * 2

        both_ways(model, between)


def test_entries_that_are_changed_in_place_between_two_layers_count(folders):
    with opened(folders["qwen2_moe"]) as model:

        def between(layer, options):
            options["cache"].layers[1].keys.mul_(-1)

        both_ways(model, between)


def test_options_of_other_names_are_others(folders):
    with opened(folders["qwen2_moe"]) as model:
        mask = torch.zeros((1, 1, 1, 200), dtype=torch.bfloat16)
        mask[..., :3] = torch.finfo(torch.bfloat16).min
        results = []
        for whole in (True, False):
            hooks = [] if whole else in_parts(model)
            cache = started(model, 1)
            length = cache.layers[0].keys.shape[2]
            hidden = model.model.embed_tokens(torch.tensor([[21]]))
            angles = model.model.rotary_emb(hidden, torch.tensor([[length]]))
            common = {"position_embeddings": angles, "cache": cache}
            hidden = model.model.layers[0](hidden, position_ids=None, **common)
            hidden = model.model.layers[1](hidden, attention_mask=mask[..., : length + 1], **common)
            results.append([hidden, *entries(cache)])
            remove(hooks)
        for found, expected in zip(*results, strict=True):
            assert torch.equal(found, expected)


def test_layers_that_share_a_place_in_the_cache(folders):
    with opened(folders["qwen2_moe"]) as model:
        model.model.layers[1].self_attn.layer_idx = 0
        hooks = in_parts(model)
        started(model, 1)  # attention that was changed compares itself once more
        remove(hooks)
        results = []
        for whole in (True, False):
            hooks = [] if whole else in_parts(model)
            cache = started(model, 1)
            found = [step(model, cache, token) for token in range(40)]
            results.append([*found, cache.layers[0].keys, cache.layers[0].values])
            remove(hooks)
        for found, expected in zip(*results, strict=True):
            assert torch.equal(found, expected)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


@pytest.mark.parametrize("name", ["input_layernorm", "post_attention_layernorm", "mlp.shared_expert_gate"])
def test_a_parametrized_weight_is_asked_each_time(folders, name):
    with opened(folders["qwen2_moe"]) as model:
        module = model.model.layers[1].get_submodule(name)
        parametrize.register_parametrization(module, "weight", Doubled())
        cache = started(model, 1)
        for factor in (1, -3):
            with torch.no_grad():
                module.parametrizations.weight.original.data.mul_(factor)
            assert_bits_of_the_parts(model, cache)


@pytest.mark.parametrize("name", ["input_layernorm", "mlp.shared_expert_gate"])
def test_a_weight_that_is_no_parameter(folders, name):
    with opened(folders["qwen2_moe"]) as model:
        module = model.model.layers[1].get_submodule(name)
        weight = module.weight.detach().clone()
        del module.weight
        module.weight = weight
        cache = started(model, 1)
        for factor in (1, -3):
            module.weight = weight * factor
            assert_bits_of_the_parts(model, cache)


@pytest.mark.parametrize("epsilon", [1, torch.tensor(0.5), 0.25])
def test_epsilons_of_other_types(folders, epsilon):
    with opened(folders["qwen2_moe"]) as model:
        model.model.layers[1].input_layernorm.variance_epsilon = epsilon
        cache = started(model, 1)
        assert_bits_of_the_parts(model, cache)


@pytest.mark.parametrize("name", ["input_layernorm", "mlp.gate", "mlp.shared_expert", "mlp.shared_expert_gate"])
def test_a_patched_class_is_noticed_also_after_other_changes(folders, monkeypatch, name):
    """A class's forward that somebody replaces, and then something else, for which the layer is made anew."""
    with opened(folders["qwen2_moe"]) as model:
        layer = model.model.layers[1]
        module = layer.get_submodule(name)
        kind = next(
            k
            for k in type(module).__mro__
            if "forward" in vars(k) and k.__module__.startswith(("transformers", "torch"))
        )
        own = vars(kind)["forward"]
        seen = []

        def forward(self, *args):
            seen.append(self)
            return own(self, *args)

        monkeypatch.setattr(kind, "forward", forward)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight = nn.Parameter(norm.weight.detach() * 2, requires_grad=False)
        gate = layer.mlp.gate
        gate.weight = nn.Parameter(-gate.weight.detach(), requires_grad=False)
        cache = started(model, 1)
        seen.clear()
        step(model, cache)
        assert module in seen


def test_experts_that_compute_in_another_dtype(folders, calls):
    with opened(folders["qwen2_moe"]) as model:
        cache = started(model, 1)
        step(model, cache)
        model.model.layers[1].mlp.experts.to(torch.float32)
        assert_bits_of_the_parts(model, cache)


def test_a_step_that_was_given_up_keeps_no_cache(folders):
    with opened(folders["qwen2_moe"]) as model:
        cache = started(model, 1)
        model.config.num_hidden_layers = 1
        step(model, cache)
        model.config.num_hidden_layers = LAYERS
        held = weakref.ref(cache)
        memory = [weakref.ref(tensor) for tensor in entries(cache)]
        del cache
        gc.collect()
        assert held() is None and not any(each() is not None for each in memory)


def test_a_step_that_was_given_up_keeps_no_model(folders):
    with opened(folders["qwen2_moe"]) as model:
        cache = started(model, 1)
        model.config.num_hidden_layers = 1
        step(model, cache)
        held = weakref.ref(model.model.layers[0])
        engine = model.zipmoe_engine
    del model, cache
    gc.collect()
    assert held() is None
    engine.close()


def test_rooms_of_layers_that_were_not_called_end(folders):
    with opened(folders["qwen2_moe"]) as model:
        cache = started(model, 1)
        cache.crop(-1)
        model.config.num_hidden_layers = 1
        step(model, cache)
        step(model, cache)
        room = getattr(cache.layers[1], "_zipmoe_room", None)
        assert room is None or not room._held or room._given is not None


def test_the_last_output_keeps_no_more_memory_than_it_has(folders):
    with opened(folders["qwen2_moe"]) as model:
        cache, seen = started(model, 1), []
        model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        step(model, cache)
        assert seen[0].untyped_storage().nbytes() == seen[0].nbytes


def test_sigmoids_are_those_of_single_values():
    from zipmoe.hf.fused_block import _sigmoids

    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    table = torch.from_numpy(_sigmoids().copy()).view(torch.int16)
    single = torch.cat([torch.sigmoid(each.view(1, 1)).view(1) for each in patterns]).view(torch.int16)
    number = ~patterns.isnan()
    assert torch.equal(table[number], single[number])
    three = torch.cat([torch.sigmoid(each.view(-1, 1)).view(-1) for each in patterns.split(3)]).view(torch.int16)
    assert torch.equal(table[number], three[number])


def test_threads_may_all_guess_wrong(folders):
    with opened(folders["qwen2_moe"]) as model:
        errors = []

        def run() -> None:
            try:
                with torch.no_grad():
                    cache = started(model, 1)
                    for token in range(70):
                        step(model, cache, token)
            except BaseException as error:
                errors.append(error)

        model.config.num_hidden_layers = 1
        threads = [threading.Thread(target=run) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert not errors


@pytest.mark.parametrize(
    "name",
    [
        "input_layernorm",
        "post_attention_layernorm",
        "self_attn",
        "mlp",
        "mlp.gate",
        "mlp.experts",
        "mlp.shared_expert",
        "mlp.shared_expert_gate",
        "self_attn.q_proj",
    ],
)
def test_a_forward_that_is_given_to_the_class_of_a_part_is_called(folders, monkeypatch, name):
    with opened(folders["qwen2_moe"]) as model:
        cache, seen = started(model, 1), []
        module = model.model.layers[1].get_submodule(name)
        own = type(module).forward

        def forward(self: Any, *args: Any, **options: Any) -> Any:
            seen.append(self)
            return own(self, *args, **options)

        monkeypatch.setattr(type(module), "forward", forward)
        step(model, cache)
        assert any(each is module for each in seen)


def test_an_expert_that_cannot_be_read_is_an_error_of_the_layer_that_asks_for_it(folders, monkeypatch):
    """And not of a layer before it, or of a step in which it is not called."""
    with opened(folders["qwen2_moe"]) as model:
        cache = started(model, 1)
        engine = model.zipmoe_engine
        own = type(engine.fused).layers

        def layers(self: Any, steps: Any, *args: Any) -> torch.Tensor:
            if len(steps) > 1 or steps[0].attention is not first:
                raise CorruptRecordError("an expert of the second layer")
            return own(self, steps, *args)

        first = model.model.layers[0].self_attn._zipmoe_native.layer
        monkeypatch.setattr(type(engine.fused), "layers", layers)
        before = [layer.keys.shape[2] for layer in cache.layers]
        with pytest.raises(CorruptRecordError):
            step(model, cache)
        assert [layer.keys.shape[2] for layer in cache.layers] == [before[0] + 1, before[1]]
        model.config.num_hidden_layers = 1
        step(model, cache)
        assert cache.layers[0].keys.shape[2] == before[0] + 2


def test_a_pass_that_did_not_fit_does_not_fit_the_next_time(folders):
    """Also with a cache whose rooms another model has made."""
    with opened(folders["qwen2_moe"]) as model, opened(folders["qwen2_moe"]) as other:
        cache = started(model, 3)
        other.zipmoe_engine.account = refuse  # whatever the pool would give
        other.zipmoe_engine.budget.reserved = lambda what: 0 if what == "key-value cache" else 1 << 40
        for _ in range(2):
            with pytest.raises(BudgetExceededError):
                step(other, cache)


def refuse(what: str, count: int) -> None:
    if what == "key-value cache":
        raise BudgetExceededError(what)


def test_a_model_that_was_widened_for_a_while_computes_whole_layers_again(folders, calls):
    with opened(folders["qwen2_moe"]) as model:
        model.float()
        started(model, 1)
        model.to(torch.bfloat16)
        cache = started(model, 1)
        assert model.zipmoe_fused_steps().layers == LAYERS
        counted = calls.layers
        step(model, cache)
        assert calls.layers == counted + LAYERS
