"""Whole decoder layers of one-token steps in one native call, and those that were computed ahead: the bits are those of
the layers' parts, whatever happens between two layers.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from few_slots import counters
from native_steps import Calls, count_calls, load
from representative_models import TINY_MODELS
from torch import nn
from transformers import DynamicCache

from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.errors import UnsupportedOperationError
from zipmoe.hf.fused_layer import FusedLayer
from zipmoe.hf.fused_linear import FusedLinear
from zipmoe.store.pack import pack

FAMILIES = ("qwen2_moe", "mixtral", "qwen3_moe")
PROMPT = torch.tensor([[5, 9, 31, 2], [7, 7, 1, 40], [3, 8, 60, 11]])
LAYERS = 2


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return count_calls(monkeypatch)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Packed as large models are: the gate of a shared expert is too small for it."""
    made = {}
    for name in FAMILIES:
        root = tmp_path_factory.mktemp(name)
        TINY_MODELS[name].build().save_pretrained(root / "source")
        pack(root / "source", root / "packed", CodecSettings("fx3", None, 1), jobs=1, min_dense_bytes=1024)
        made[name] = root / "packed"
    return made


@contextmanager
def opened(folder: Any) -> Any:
    """A model whose parts have shown that the native core computes the same."""
    model = load(folder)
    with model.zipmoe_engine, torch.no_grad():
        started(model, 1)
        yield model


def started(model: Any, rows: int) -> DynamicCache:
    """A cache with a prompt and a token."""
    cache = DynamicCache()
    model(input_ids=PROMPT[:rows], cache=cache)
    model(input_ids=PROMPT[:rows, :1], cache=cache)
    return cache


def step(model: Any, cache: DynamicCache, token: int = 21, **options: Any) -> torch.Tensor:
    rows = cache.layers[0].keys.shape[0]
    logits: torch.Tensor = model(input_ids=torch.full((rows, 1), token), cache=cache, **options).logits
    return logits


def in_parts(model: Any) -> list[Any]:
    """Hooks that do nothing, and that nobody may leave out: the layers' parts are called one by one."""
    norms = [layer.input_layernorm for layer in model.model.layers]
    return [norm.register_forward_hook(lambda *_: None) for norm in norms]


def remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def assert_bits_of_the_parts(model: Any, cache: DynamicCache) -> torch.Tensor:
    """Of a step, of which nothing is left in the cache; returns its logits."""
    found = step(model, cache)
    cache.crop(-1)
    hooks = in_parts(model)
    expected = step(model, cache)
    remove(hooks)
    cache.crop(-1)
    assert torch.equal(found, expected)
    return found


def entries(cache: DynamicCache) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_are_those_of_the_parts(folders, calls, family, rows):
    with opened(folders[family]) as model:
        whole, parts = started(model, rows), started(model, rows)
        for token in (21, 3, 50):
            before = calls.layers, calls.layer_calls
            found = step(model, whole, token)
            assert (calls.layers, calls.layer_calls) == (before[0] + LAYERS, before[1] + 1)
            hooks = in_parts(model)
            expected = step(model, parts, token)
            remove(hooks)
            assert calls.layer_calls == before[1] + 1
            assert torch.equal(found, expected)
        for one, other in zip(entries(whole), entries(parts), strict=True):
            assert torch.equal(one, other)


def test_the_shared_expert_has_its_gate(folders):
    with opened(folders["qwen2_moe"]) as model:
        cache = started(model, 1)
        gate = model.model.layers[0].mlp.shared_expert_gate
        assert isinstance(gate, FusedLinear)
        first = step(model, cache)
        cache.crop(-1)
        with torch.no_grad():
            gate.weight.mul_(-4)
        assert not torch.equal(step(model, cache), first)
        cache.crop(-1)
        hooks = in_parts(model)
        expected = step(model, cache)
        remove(hooks)
        cache.crop(-1)
        assert torch.equal(step(model, cache), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_are_counted_alike(folders, family):
    counted = []
    for whole in (True, False):
        with opened(folders[family]) as model:
            if not whole:
                in_parts(model)
            cache = started(model, 3)
            for token in range(6):
                step(model, cache, token)
            found = counters(model)
            counted.append((found.requests, found.hits, found.misses, found.read_bytes))
    assert counted[0] == counted[1]


def test_what_is_changed_is_used(folders, calls):
    """Weights in place, new parameters, epsilons, fewer experts."""

    def epsilon(model: Any) -> None:
        model.model.layers[1].post_attention_layernorm.variance_epsilon = 0.5

    def norm_in_place(model: Any) -> None:
        model.model.layers[0].input_layernorm.weight.data.mul_(1.5)

    def other_norm(model: Any) -> None:
        norm = model.model.layers[1].input_layernorm
        norm.weight = nn.Parameter(norm.weight.detach() * 2, requires_grad=False)

    def router(model: Any) -> None:
        gate = model.model.layers[1].mlp.gate
        gate.weight = nn.Parameter(-gate.weight.detach(), requires_grad=False)

    def fewer_experts(model: Any) -> None:
        model.model.layers[0].mlp.gate.top_k = 1

    for change in (epsilon, norm_in_place, other_norm, router, fewer_experts):
        with opened(folders["qwen2_moe"]) as model:
            cache = started(model, 1)
            before = step(model, cache)
            cache.crop(-1)
            change(model)
            counted = calls.layers
            found = step(model, cache)
            assert calls.layers == counted + LAYERS, change
            cache.crop(-1)
            hooks = in_parts(model)
            expected = step(model, cache)
            remove(hooks)
            assert torch.equal(found, expected) and not torch.equal(found, before), change


def test_the_order_of_the_sums_is_asked_each_time(folders, calls):
    with opened(folders["mixtral"]) as model:
        cache = started(model, 1)
        model.set_experts_implementation("eager")
        counted = calls.layers, calls.first_halves
        step(model, cache)
        assert (calls.layers, calls.first_halves) == (counted[0], counted[1] + LAYERS)
        model.set_experts_implementation("grouped_mm")
        step(model, cache)
        assert calls.layers == counted[0] + LAYERS


def test_who_watches_requests_sees_them(folders, calls):
    with opened(folders["qwen2_moe"]) as model:
        cache, seen = started(model, 1), []
        model.zipmoe_engine.request_observer = lambda path, ids: seen.append(path)
        counted = calls.layers
        step(model, cache)
        assert calls.layers == counted and len(seen) == LAYERS


@pytest.mark.parametrize("name", ["mlp", "mlp.gate", "mlp.experts", "mlp.shared_expert"])
def test_hooks_within_the_second_half_are_called(folders, calls, name):
    with opened(folders["qwen2_moe"]) as model:
        cache, seen = started(model, 1), []
        expected = step(model, cache)
        cache.crop(-1)
        module = model.model.layers[0].get_submodule(name)
        hook = module.register_forward_hook(lambda *_: seen.append(name))
        counted = calls.first_halves, calls.layers
        assert torch.equal(step(model, cache), expected)
        assert seen == [name]
        assert (calls.first_halves, calls.layers) == (counted[0] + 1, counted[1] + 1)
        hook.remove()
        cache.crop(-1)
        step(model, cache)
        assert calls.layers == counted[1] + 1 + LAYERS


def test_hooks_of_a_layer_are_called_with_its_own(folders, calls):
    """And may change what the next layer is given."""
    with opened(folders["qwen2_moe"]) as model:
        cache = started(model, 1)
        plain = step(model, cache)
        cache.crop(-1)
        hook = model.model.layers[0].register_forward_hook(lambda _, __, output: output * 2)
        counted = calls.layer_calls
        found = step(model, cache)
        assert calls.layer_calls == counted + LAYERS
        cache.crop(-1)
        hooks = in_parts(model)
        assert torch.equal(step(model, cache), found) and not torch.equal(found, plain)
        remove([*hooks, hook])


CHANGES = {
    "another input": lambda hidden, options: (hidden + 1, options),
    "the input changed in place": lambda hidden, options: (hidden.mul_(2), options),
    "a bit of it": lambda hidden, options: (_with_one_bit(hidden), options),
    "other positions": lambda hidden, options: (hidden, options | {"position_embeddings": _turned(options)}),
    "another option": lambda hidden, options: (hidden, options | {"output_attentions": True}),
    "an option instead of another": lambda hidden, options: (hidden, _renamed(options)),
}


def _with_one_bit(hidden: torch.Tensor) -> torch.Tensor:
    changed = hidden.clone()
    changed.view(torch.int16)[0, 0, 5] ^= 1
    return changed


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "attention_mask"} | {"output_attentions": None}


def _turned(options: dict[str, Any]) -> Any:
    cosines, sines = options["position_embeddings"]
    return sines.clone(), cosines.clone()


@pytest.mark.parametrize("name", CHANGES)
def test_a_guess_that_does_not_come_true_is_computed_anew(folders, calls, monkeypatch, name):
    """Changed where the second layer is called, which its class does not see: the layers before run ahead."""
    with opened(folders["qwen2_moe"]) as model:
        outputs = []
        for whole in (True, False):
            cache = started(model, 1)
            kind = type(model.model.layers[1])
            counted = calls.layers

            def call(self: Any, hidden: torch.Tensor, *args: Any, **options: Any) -> Any:
                if self is model.model.layers[1]:
                    hidden, options = CHANGES[name](hidden, options)
                return nn.Module.__call__(self, hidden, *args, **options)

            with monkeypatch.context() as patch:
                patch.setattr(kind, "__call__", call, raising=False)
                hooks = [] if whole else in_parts(model)
                outputs.append([step(model, cache, token) for token in (21, 4, 9)])
                remove(hooks)
            # Ahead once, in vain; attention does not take the other option.
            layers = 4 if name == "another option" else 7
            assert calls.layers - counted == (layers if whole else 0)
            outputs[-1] += entries(cache)
        for found, expected in zip(*outputs, strict=True):
            assert torch.equal(found, expected)


def test_a_wrong_guess_is_not_made_again_at_once(folders, calls, monkeypatch):
    with opened(folders["qwen2_moe"]) as model:
        cache = started(model, 1)
        layers = model.model.layers
        kind = type(layers[1])

        def call(self: Any, hidden: torch.Tensor, *args: Any, **options: Any) -> Any:
            return nn.Module.__call__(self, hidden + 1 if self is layers[1] else hidden, *args, **options)

        monkeypatch.setattr(kind, "__call__", call)
        counted = calls.layers
        step(model, cache)
        assert calls.layers == counted + LAYERS + 1  # the second layer twice
        step(model, cache)
        assert calls.layers == counted + 2 * LAYERS + 1


def test_guesses_are_made_again_after_a_while(folders, calls, monkeypatch):
    with opened(folders["mixtral"]) as model:
        cache = started(model, 1)
        layers = model.model.layers
        kind, added = type(layers[1]), [1]

        def call(self: Any, hidden: torch.Tensor, *args: Any, **options: Any) -> Any:
            return nn.Module.__call__(self, hidden + added[0] if self is layers[1] else hidden, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(kind, "__call__", call)
            step(model, cache)
        counted = calls.layer_calls
        for number in range(1, 34):
            cache.crop(-1)
            step(model, cache)
            assert calls.layer_calls == counted + (LAYERS * number if number <= 32 else LAYERS * 32 + 1)


def test_nothing_is_kept_alive_by_a_guess(folders):
    with opened(folders["mixtral"]) as model:
        cache = started(model, 1)
        model.config.num_hidden_layers = 1
        step(model, cache)
        gone = weakref.ref(cache), weakref.ref(cache.layers[1].keys)
        del cache
        gc.collect()
        assert [each() for each in gone] == [None, None]


def test_a_class_that_is_given_another_forward_before_a_weight_is_replaced(folders, monkeypatch):
    """Made anew, the native layer still stands for the code that it was compared with."""
    with opened(folders["mixtral"]) as model:
        cache = started(model, 1)
        step(model, cache)
        norm = model.model.layers[1].input_layernorm
        holder, seen = norm._zipmoe_own[0], []
        original = holder.forward

        def noted(self: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(self)
            return original(self, x)

        monkeypatch.setattr(holder, "forward", noted)
        norm.weight = nn.Parameter(norm.weight.detach() * 2, requires_grad=False)
        step(model, cache)
        assert any(each is norm for each in seen)


def test_a_step_in_float32_between_others(folders, calls):
    with opened(folders["mixtral"]) as model:
        model.float()
        started(model, 1)
        model.to(torch.bfloat16)
        cache = started(model, 1)
        step(model, cache)
        counted = calls.layers
        step(model, cache)
        assert calls.layers == counted + LAYERS


def test_layers_that_are_not_called_leave_no_trace(folders, calls):
    """Early exit: the model's own way of using its first layers only."""
    with opened(folders["mixtral"]) as model:
        cache = started(model, 1)
        expected = step(model, cache)
        cache.crop(-1)
        model.config.num_hidden_layers = 1
        before = [tensor.clone() for tensor in entries(cache)[2:]]
        short = step(model, cache)
        assert not torch.equal(short, expected)
        for one, other in zip(entries(cache)[2:], before, strict=True):
            assert torch.equal(one, other)
        counted = calls.layers
        step(model, cache, 4)
        assert calls.layers == counted + 1  # found out when this step began
        model.config.num_hidden_layers = LAYERS
        cache = started(model, 1)
        assert torch.equal(step(model, cache), expected)


def test_a_cache_that_is_changed_between_steps(folders):
    with opened(folders["qwen3_moe"]) as model:
        outputs = []
        for whole in (True, False):
            hooks = [] if whole else in_parts(model)
            cache, found = started(model, 3), []
            for change in (
                lambda cache: cache.crop(-2),
                lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
                lambda cache: cache.batch_select_indices(torch.tensor([1, 2])),
                lambda cache: None,
            ):
                found.append(step(model, cache))
                change(cache)
            outputs.append([*found, step(model, cache), *entries(cache)])
            remove(hooks)
        for one, other in zip(*outputs, strict=True):
            assert torch.equal(one, other)


def test_gradients_and_training_are_the_familys(folders, calls):
    with opened(folders["mixtral"]) as model:
        cache = started(model, 1)
        layer = model.model.layers[0]
        hidden = torch.ones((1, 1, model.config.hidden_size), dtype=torch.bfloat16)
        positions = model.model.rotary_emb(hidden, torch.tensor([[5]]))
        options = {"position_embeddings": positions, "attention_mask": None, "cache": cache}
        counted = calls.layers
        with torch.enable_grad(), pytest.raises(UnsupportedOperationError, match="gradients"):
            layer(hidden, **options)
        layer.training = True
        layer(hidden, **options)
        layer.training = False
        assert calls.layers == counted
        layer(hidden, **options)
        assert calls.layers == counted + 1  # nothing is computed ahead where the model is not called


def test_the_mode_line_counts_whole_layers(folders, packed_model):
    with opened(folders["qwen2_moe"]) as model:
        assert model.zipmoe_fused_steps().layers == LAYERS
        assert f"{LAYERS} whole layers" in model.zipmoe_mode_line()
        assert all(isinstance(layer, FusedLayer) for layer in model.model.layers)
    model = load(packed_model("qwen2_moe").folder)  # whose gates are packed
    with model.zipmoe_engine:
        assert model.zipmoe_fused_steps().layers == 0
        assert "whole layer" not in model.zipmoe_mode_line()
