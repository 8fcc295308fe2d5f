"""Look-ahead changes when experts are read and nothing else: no bit of the logits, no count of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from few_slots import PROMPTS, both, counters, decode, load

from zipmoe.engine.pool_slots import PoolSlots
from zipmoe.errors import InvalidArgumentError
from zipmoe.hf.configuration import ZipMoEConfig
from zipmoe.hf.look_ahead import may_look_ahead

PREDICTABLE = ("qwen2_moe", "ernie4_5_moe", "mixtral")
OTHERS = ("dbrx",)


def assert_same(model: Any, other: Any, prompt: torch.Tensor) -> None:
    for ours, theirs in zip(decode(model, prompt), decode(other, prompt), strict=True):
        assert torch.equal(ours, theirs)


def observe(model: Any) -> tuple[list[Any], list[Any]]:
    """Lists that grow with every request and with every prediction: the group's path and the ids."""
    requests: list[Any] = []
    predictions: list[Any] = []
    model.zipmoe_engine.request_observer = lambda path, ids: requests.append((path, list(ids)))
    look_ahead = model.zipmoe_look_ahead._look_ahead
    original = look_ahead.predict

    def predict(group: Any, expert_ids: Sequence[int]) -> None:
        predictions.append((group.path, list(expert_ids)))
        original(group, expert_ids)

    look_ahead.predict = predict
    return requests, predictions


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("family", PREDICTABLE)
def test_logits_do_not_change(packed_model, family, early, mode):
    with both(packed_model(family), mode=mode, early_routing=early) as (model, other), torch.no_grad():
        for rows in (1, 3):
            assert_same(model, other, PROMPTS[:rows])
        ours, theirs = counters(model), counters(other)
        assert ours.requests == theirs.requests
        assert ours.hits + ours.misses + ours.prefetched == theirs.hits + theirs.misses
        assert ours.predicted_reads > 0
        assert ours.predicted_reads >= ours.prefetched + ours.wasted_reads
        assert (theirs.predicted_reads, theirs.prefetched, theirs.wasted_reads, theirs.wasted_bytes) == (0, 0, 0, 0)


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_say_so(packed_model, family):
    with both(packed_model(family)) as (model, other), torch.no_grad():
        assert_same(model, other, PROMPTS[:1])
        assert "no look-ahead, as this model's routers cannot be asked early" in model.zipmoe_mode_line()
        assert counters(model).predicted_reads == 0


def test_the_eager_order(packed_model):
    with both(packed_model("qwen2_moe"), experts_implementation="eager") as (model, other), torch.no_grad():
        assert_same(model, other, PROMPTS[:1])
        assert counters(model).predicted_reads > 0


def test_inference_mode_and_generate(packed_model):
    packed = packed_model("qwen2_moe")
    with both(packed) as (model, other):
        assert torch.equal(packed.generate(model), packed.generate(other))
        with torch.inference_mode():
            assert_same(model, other, PROMPTS[:1])


def test_the_next_layer_is_predicted_from_this_one_for_few_rows_and_for_many(packed_model):
    model = load(packed_model("qwen2_moe"), True)
    with torch.no_grad():
        _, predictions = observe(model)
        decode(model, PROMPTS[:1], steps=1)
        assert predictions == []
        decode(model, PROMPTS[:1], steps=3)
        layers = list(model.zipmoe_engine.folder.manifest.expert_groups)
        paths = [group.path for group in layers]
        assert [path for path, _ in predictions] == paths[1:] * 3  # of the prompt, too
        experts, top_k = model.config.num_experts, model.config.num_experts_per_tok
        for rows in range(1, 2 * experts):
            del predictions[:]
            model(input_ids=torch.arange(rows).view(1, -1))
            expected = paths[1:] if rows <= 3 or rows * top_k >= experts else []
            assert [path for path, _ in predictions] == expected
    model.zipmoe_engine.close()


def test_the_last_layer_of_a_step_of_many_sequences_predicts_the_first_of_the_next(packed_model):
    model = load(packed_model("qwen2_moe"), True)
    with model.zipmoe_engine, torch.no_grad():
        decode(model, PROMPTS[:1], steps=1)
        paths = [group.path for group in model.zipmoe_engine.folder.manifest.expert_groups]
        prompts = torch.cat([PROMPTS, PROMPTS])
        cache = model(input_ids=prompts).cache
        _, predictions = observe(model)
        chosen: list[torch.Tensor] = []
        model.model.layers[0].mlp.gate.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
        model(input_ids=prompts[:, -1:], cache=cache)
        assert [path for path, _ in predictions] == [*paths[1:], paths[0]]
        ids = chosen[0].reshape(-1).tolist()
        counts = [ids.count(expert) for expert in predictions[-1][1]]
        assert counts == sorted(counts, reverse=True) and counts[-1] >= 3
        assert len(counts) == sum(ids.count(expert) >= 3 for expert in range(model.config.num_experts))
        del predictions[:]
        model(input_ids=prompts[:, -2:], cache=cache)  # several tokens: what comes next is another kind of step
        model(input_ids=prompts[:3, -1:])  # few sequences: the next tokens are waited for
        assert [path for path, _ in predictions] == paths[1:] * 2


def test_many_rows_predict_every_expert_that_is_named_in_the_order_of_its_tokens(packed_model):
    model = load(packed_model("qwen2_moe"), True)
    with torch.no_grad():
        decode(model, PROMPTS[:1], steps=1)
        _, predictions = observe(model)
        first, second = (layer.mlp for layer in model.model.layers[:2])
        seen: list[torch.Tensor] = []
        first.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
        model(input_ids=PROMPTS)
        chosen = second.gate.route(seen[-1].reshape(PROMPTS.numel(), -1))[2].reshape(-1).tolist()
        predicted = predictions[0][1]
        assert set(predicted) == set(chosen) and len(predicted) == len(set(chosen))
        tokens = [chosen.count(expert) for expert in predicted]
        assert tokens == sorted(tokens, reverse=True)
    model.zipmoe_engine.close()


def test_a_pass_with_many_rows_begins_with_the_first_layer(packed_model):
    model = load(packed_model("qwen2_moe"), True)
    engine = model.zipmoe_engine
    with torch.no_grad():
        decode(model, PROMPTS[:1], steps=1)
        begun: list[Any] = []
        look_ahead = model.zipmoe_look_ahead._look_ahead
        original = look_ahead.predict_sweep

        def predict_sweep(group: Any) -> None:
            begun.append(group.path)
            original(group)

        look_ahead.predict_sweep = predict_sweep
        fewest = -(-4 * model.config.num_experts // model.config.num_experts_per_tok)
        model(input_ids=torch.arange(fewest - 1).view(1, -1))
        assert begun == []
        before = counters(model)
        model(input_ids=torch.arange(fewest).view(1, -1))
        assert begun == [next(iter(engine.folder.manifest.expert_groups)).path]
        assert counters(model).since(before).predicted_reads > 0
    engine.close()


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("slots", [2, 3, 4, 6, 8])
def test_prompts_in_small_pools_change_nothing(packed_model, slots, mode):
    with both(packed_model("qwen2_moe"), slots=slots, mode=mode) as (model, other), torch.no_grad():
        for tokens in (3, 9, 20, 24):
            ids = torch.arange(tokens).view(1, -1) * 7 % model.config.vocab_size
            for _ in range(2):
                assert torch.equal(model(input_ids=ids).logits, other(input_ids=ids).logits)
        ours, theirs = counters(model), counters(other)
        assert ours.requests == theirs.requests
        assert ours.hits + ours.misses + ours.prefetched == theirs.hits + theirs.misses
        assert ours.predicted_reads >= ours.prefetched + ours.wasted_reads
        if slots == 2:  # none of them is kept for predictions
            assert (ours.predicted_reads, ours.prefetched) == (0, 0)
        else:
            assert ours.predicted_reads > 0


def test_a_prediction_is_what_the_next_router_says_of_this_input(packed_model):
    model = load(packed_model("qwen2_moe"), True)
    with torch.no_grad():
        decode(model, PROMPTS[:1], steps=1)
        _, predictions = observe(model)
        first, second = (layer.mlp for layer in model.model.layers[:2])
        seen: list[torch.Tensor] = []
        first.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
        decode(model, PROMPTS[:1], steps=2)
        expected = second.gate.route(seen[-1].reshape(1, -1))[2]
        layers = len(model.model.layers)
        assert predictions[layers - 1][1] == expected[0].tolist()  # the prompt's come first
    model.zipmoe_engine.close()


def test_what_comes_true_is_used(packed_model):
    """Blocks that all get the same input: every prediction comes true, and nothing is read in vain."""
    model = load(packed_model("qwen2_moe"), True)
    model.zipmoe_next_token.predict = lambda _: None  # not what this is about
    with torch.no_grad():
        decode(model, PROMPTS[:1], steps=1)
        layers = model.model.layers
        for layer in layers[1:]:
            layer.mlp.gate.weight.copy_(layers[0].mlp.gate.weight)
        constant = torch.randn(1, 1, model.config.hidden_size, dtype=torch.bfloat16)
        for layer in layers:
            layer.mlp.register_forward_pre_hook(lambda _, args: (constant,), prepend=True)
        requests, predictions = observe(model)
        model(input_ids=PROMPTS[:1, :1])
        assert [sorted(ids) for _, ids in predictions] == [sorted(ids) for _, ids in requests[1:]]
        assert counters(model).wasted_reads == 0
    model.zipmoe_engine.close()


def test_slots_are_part_of_the_pool(packed_model):
    model = load(packed_model("qwen2_moe"), True, slots=5)
    other = load(packed_model("qwen2_moe"), False, slots=5)
    with torch.no_grad():
        decode(model, PROMPTS[:1])
        decode(other, PROMPTS[:1])
    engine = model.zipmoe_engine
    assert engine.budget.ledger.keys() == other.zipmoe_engine.budget.ledger.keys()
    assert sum(engine._native.resident(record) for record in range(_experts(model))) <= 5
    for each in (model, other):
        each.zipmoe_engine.close()


def _experts(model: Any) -> int:
    return sum(len(group.records) for group in model.zipmoe_engine.folder.manifest.expert_groups)


def test_the_mode_line(packed_model):
    packed = packed_model("qwen2_moe")
    model = load(packed, True)
    assert "; look-ahead to the next layer's experts, 2 slots kept for it" in model.zipmoe_mode_line()
    with torch.no_grad():
        decode(model, PROMPTS[:1], steps=1)
    layers = len(model.zipmoe_engine.folder.manifest.expert_groups) - 1
    assert f"look-ahead to the next layer's experts in {layers} layers, 2 slots" in model.zipmoe_mode_line()
    model.zipmoe_engine.close()
    plain = load(packed, False)
    assert "look-ahead" not in plain.zipmoe_mode_line()
    plain.zipmoe_engine.close()


@pytest.mark.parametrize(("slots", "kept"), [(5, "2 slots"), (4, "2 slots"), (3, "1 slot"), (2, "0 slots")])
def test_the_mode_line_has_the_slots_that_a_small_pool_spares(packed_model, slots, kept):
    model = load(packed_model("qwen2_moe"), True, slots=slots)
    with model.zipmoe_engine:
        assert f"; look-ahead to the next layer's experts, {kept} kept for it" in model.zipmoe_mode_line()
        with torch.no_grad():
            decode(model, PROMPTS[:1])
        assert kept != "0 slots" or counters(model).predicted_reads == 0


def test_pools_by_residency_have_none(packed_model):
    settings = ZipMoEConfig(memory="4GB", mode="exact", context_tokens=32, pools=PoolSlots(0, 2), look_ahead=True)
    with pytest.warns(UserWarning, match="quantization_config"):
        model = packed_model("qwen2_moe").load(quantization_config=settings)
    assert "no look-ahead, which needs one pool of whole experts" in model.zipmoe_mode_line()
    with torch.no_grad():
        decode(model, PROMPTS[:1])
    assert counters(model).predicted_reads == 0
    model.zipmoe_engine.close()


@pytest.mark.parametrize("wanted", [None, True, False])
def test_by_default_where_something_can_be_predicted(packed_model, wanted):
    """Not where every expert has a slot: nothing is missing there, and no slot is kept for predictions."""
    settings = {"memory": "8GB", "mode": "exact", "context_tokens": 32, "look_ahead": wanted}
    with pytest.warns(UserWarning, match="quantization_config"):
        model = packed_model("qwen2_moe").load(quantization_config=ZipMoEConfig(**settings))
    with model.zipmoe_engine:
        assert ("look-ahead" in model.zipmoe_mode_line()) == bool(wanted)
        with torch.no_grad():
            decode(model, PROMPTS[:1])
            before = counters(model)
            decode(model, PROMPTS[:1])
        after = counters(model)
        assert after.misses == before.misses and after.predicted_reads == 0
    small = load(packed_model("qwen2_moe"), False)
    with small.zipmoe_engine:
        assert may_look_ahead(small.zipmoe_engine, wanted) == (wanted is not False)


def test_the_option():
    assert ZipMoEConfig().look_ahead is None
    assert ZipMoEConfig(look_ahead=True).get_loading_attributes()["look_ahead"] is True
    with pytest.raises(InvalidArgumentError, match="look_ahead"):
        ZipMoEConfig(look_ahead="yes")
