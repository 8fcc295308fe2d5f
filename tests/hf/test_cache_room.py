"""Buffers behind cached tokens: they end with the tensors that are views of them, at once and without a collector."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from native_steps import Attention, count_calls, gaussian, load
from transformers import DynamicCache

from zipmoe.hf.cache_room import CacheRoom, capacity_for, has_room, promise_room


@pytest.fixture(autouse=True)
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def attend(packed_model):
    model = load(packed_model("qwen3_moe").folder)
    with model.zipmoe_engine:
        yield Attention(model)


def memory_of(room):
    buffers = room._held[0]
    return [weakref.ref(each) for each in (buffers.keys, buffers.values, buffers.key_words, buffers.value_words)]


def other_tensors(cache):
    layer = cache.layers[0]
    layer.keys, layer.values = layer.keys.clone(), layer.values.clone()


def other_keys(cache):
    cache.layers[0].keys = cache.layers[0].keys.clone()


CHANGES = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "reset": lambda cache: cache.reset(),
    "crop": lambda cache: cache.crop(-1),
    "update": lambda cache: cache.update(gaussian(2, 2, 3, 16), gaussian(2, 2, 3, 16), 0),
    "other tensors": other_tensors,
    "other keys": other_keys,
    "no layers": lambda cache: cache.layers.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_buffers_end_with_what_the_layer_held(attend, change):
    cache = DynamicCache()
    attend(cache, rows=2, tokens=4)
    for _ in range(3):
        attend(cache, rows=2)
    assert has_room(cache.layers[0])
    memory = memory_of(cache.layers[0]._zipmoe_room)
    assert all(each() is not None for each in memory)
    CHANGES[change](cache)
    alive = {
        each.ctypes.data if isinstance(each, np.ndarray) else each.data_ptr()
        for each in (reference() for reference in memory)
        if each is not None
    }
    held = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None]
    assert alive <= {tensor.untyped_storage().data_ptr() for tensor in held}
    assert bool(alive) == (change in ("crop", "other keys"))  # which leave views of the buffers, or of one


def test_buffers_end_with_a_second_prompt_and_with_the_cache(attend):
    cache = DynamicCache()
    attend(cache, tokens=4)
    for _ in range(3):
        attend(cache)
    first = memory_of(cache.layers[0]._zipmoe_room)
    attend(cache, tokens=5)
    assert all(each() is None for each in first) and not has_room(cache.layers[0])
    attend(cache)
    second = memory_of(cache.layers[0]._zipmoe_room)
    assert all(each() is not None for each in second)
    del cache
    assert all(each() is None for each in second)


@pytest.mark.parametrize("beams", [1, 3])
def test_no_buffers_but_those_of_the_layers(packed_model, monkeypatch, beams):
    """A long answer, whose rooms grow, and beam search, which reorders the cache at every token."""
    packed = packed_model("qwen2_moe")
    made, most = [], 0
    original = CacheRoom.__init__

    def counted(self, keys, values, capacity):
        nonlocal most
        original(self, keys, values, capacity)
        made.append(memory_of(self))
        most = max(most, sum(any(each() is not None for each in memory) for memory in made))

    monkeypatch.setattr(CacheRoom, "__init__", counted)
    calls = count_calls(monkeypatch)
    model = load(packed.folder)
    with model.zipmoe_engine:
        ids = packed.inputs["input_ids"]
        model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=beams, max_new_tokens=80, min_new_tokens=80)
    assert calls.attention > 2 * 60 and len(made) > 4
    # Only one that grows is copied from buffers, and those of the same layer.
    assert most <= model.config.num_hidden_layers + (beams == 1)


def layer_of(tokens):
    cache = DynamicCache()
    cache.update(gaussian(1, 2, tokens, 16), gaussian(1, 2, tokens, 16), 0)
    return cache.layers[0]


def test_room_is_as_large_as_was_promised():
    layer = layer_of(7)
    promise_room(layer, 9)
    room = CacheRoom.behind(layer)
    assert room.capacity == 9 and room.key_words.shape == room.value_words.shape == (1, 2, 9, 16)
    room.give(layer, 8)
    assert CacheRoom.behind(layer) is room
    room.give(layer, 9)
    assert not has_room(layer)
    assert CacheRoom.behind(layer).capacity == capacity_for(10)  # a promise holds once


@pytest.mark.parametrize("promised", [0, 6, 7])
def test_a_promise_of_too_little_does_not_count(promised):
    layer = layer_of(7)
    promise_room(layer, promised)
    assert CacheRoom.behind(layer).capacity == capacity_for(8) == 64
