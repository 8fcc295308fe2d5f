"""Early routing changes when experts are read and nothing else: no bit of the logits, no count."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from few_slots import decode, take_memory

from zipmoe.errors import InvalidArgumentError, UnsupportedOperationError
from zipmoe.hf.configuration import ZipMoEConfig
from zipmoe.hf.early_routing import EarlyRouter

SHARED_FIRST = ("qwen2_moe", "ernie4_5_moe")
OTHERS = ("mixtral", "gpt_oss", "deepseek_v3")


def load(packed: Any, early: bool, *, mode: str = "fast", **arguments: Any) -> Any:
    """The model with two slots for experts."""
    settings = ZipMoEConfig(memory="4GB", mode=mode, context_tokens=32, early_routing=early)
    with pytest.warns(UserWarning, match="quantization_config"):
        model = packed.load(quantization_config=settings, **arguments)
    take_memory(model.zipmoe_engine)
    return model


@contextlib.contextmanager
def both(packed: Any, **arguments: Any) -> Iterator[tuple[Any, Any]]:
    """The model that routes early, and the one that does not."""
    models = load(packed, True, **arguments), load(packed, False, **arguments)
    try:
        yield models
    finally:
        for model in models:
            model.zipmoe_engine.close()


def routers(model: Any) -> list[EarlyRouter]:
    return [module for module in model.modules() if isinstance(module, EarlyRouter)]


def count_taken(model: Any) -> list[bool]:
    """A list that grows with every request: whether it had begun early."""
    early = model.zipmoe_engine.early
    original, taken = early.take, []

    def take(*arguments: Any) -> bool:
        taken.append(original(*arguments))
        return taken[-1]

    early.take = take
    return taken


def assert_same(model: Any, other: Any, prompt: torch.Tensor) -> None:
    for ours, theirs in zip(decode(model, prompt, 4), decode(other, prompt, 4), strict=True):
        assert torch.equal(ours, theirs)


PROMPTS = torch.tensor([[5, 9, 31, 77, 120], [7, 7, 200, 41, 6], [18, 64, 3, 240, 99]])


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", [*SHARED_FIRST, *OTHERS])
def test_logits_and_counts_do_not_change(packed_model, family, mode, rows):
    with both(packed_model(family), mode=mode) as (model, other):
        taken, observed = count_taken(model), {True: [], False: []}
        model.zipmoe_engine.request_observer = lambda *request: observed[True].append(request)
        other.zipmoe_engine.request_observer = lambda *request: observed[False].append(request)
        with torch.no_grad():
            assert_same(model, other, PROMPTS[:rows])
        assert not routers(other)
        assert bool(routers(model)) == (family in SHARED_FIRST)
        layers = len(model.zipmoe_engine.folder.manifest.expert_groups)
        assert taken == [False] * layers + [family in SHARED_FIRST] * 3 * layers
        assert observed[True] == observed[False]
        counts = [each.zipmoe_engine._native.counters() for each in (model, other)]
        assert all(count["misses"] > 0 for count in counts)
        # Which experts stay where there is no room for all depends on the order in which reads complete.
        assert len({(count["requests"], count["hits"] + count["misses"]) for count in counts}) == 1


@pytest.mark.parametrize("family", SHARED_FIRST)
def test_the_eager_order(packed_model, family):
    with both(packed_model(family), experts_implementation="eager") as (model, other), torch.no_grad():
        taken = count_taken(model)
        assert_same(model, other, PROMPTS[:2])
        assert taken[-1]


def test_the_order_may_change_while_the_model_lives(packed_model):
    with both(packed_model("qwen2_moe")) as (model, other), torch.no_grad():
        for order in ("grouped_mm", "eager", "grouped_mm"):
            model.set_experts_implementation(order)
            other.set_experts_implementation(order)
            assert_same(model, other, PROMPTS[:1])


def test_inference_mode(packed_model):
    with both(packed_model("qwen2_moe")) as (model, other), torch.inference_mode():
        taken = count_taken(model)
        assert_same(model, other, PROMPTS[:1])
        assert taken[-1]


def test_generate(packed_model):
    packed = packed_model("qwen2_moe")
    with both(packed) as (model, other):
        assert torch.equal(packed.generate(model), packed.generate(other))
        assert torch.equal(packed.generate(model), packed.generate(other))


def test_a_router_that_is_called_with_something_else_computes(packed_model):
    with both(packed_model("qwen2_moe")) as (model, other), torch.no_grad():
        assert_same(model, other, PROMPTS[:1])
        taken = count_taken(model)
        for each in (model, other):
            each.model.layers[0].mlp.gate.register_forward_pre_hook(lambda _, args: (args[0] * -2,))
        assert_same(model, other, PROMPTS[:1])
        assert not all(taken)


def test_a_router_whose_result_is_changed(packed_model):
    """The request that began early is given up where the experts are asked for others."""
    with both(packed_model("qwen2_moe")) as (model, other), torch.no_grad():
        assert_same(model, other, PROMPTS[:1])
        taken = count_taken(model)
        for each in (model, other):
            gate = each.model.layers[1].mlp.gate
            gate.register_forward_hook(lambda _, args, result: (*result[:2], (result[2] + 1) % 8))
        assert_same(model, other, PROMPTS[:1])
        assert taken == [True, False] * 4


def test_an_input_that_is_changed_in_place_is_routed_again(packed_model):
    with both(packed_model("qwen2_moe")) as (model, other), torch.no_grad():
        assert_same(model, other, PROMPTS[:1])
        for each in (model, other):
            each.model.layers[0].mlp.shared_expert.register_forward_hook(lambda _, args, output: args[0].mul_(-2))
        assert_same(model, other, PROMPTS[:1])


def test_ids_that_are_changed_in_place_are_read_again(packed_model):
    with both(packed_model("qwen2_moe")) as (model, other), torch.no_grad():
        assert_same(model, other, PROMPTS[:1])
        for each in (model, other):
            gate = each.model.layers[0].mlp.gate
            gate.register_forward_hook(lambda _, args, result: (result[0], result[1], result[2].sub_(7).abs_()))
        assert_same(model, other, PROMPTS[:1])


class StoppedError(Exception):
    """Raised between the router and the experts."""


def stop(*_: Any) -> None:
    raise StoppedError


def test_a_block_that_fails_after_its_router_was_asked(packed_model):
    with both(packed_model("qwen2_moe")) as (model, other), torch.no_grad():
        assert_same(model, other, PROMPTS[:1])
        engine = model.zipmoe_engine
        for layer, then in ((0, None), (1, "resize"), (0, "matrix"), (1, "thread")):
            hook = model.model.layers[layer].mlp.shared_expert.register_forward_pre_hook(stop)
            with pytest.raises(StoppedError):
                model(PROMPTS[:1])
            hook.remove()
            group = engine.group("model.layers.0.mlp.experts")
            if then == "resize":
                engine.account("taken by the test", 0)
            elif then == "matrix":
                for name in group.parameters:
                    ours = engine.expert_matrix(group, 3, name)
                    assert torch.equal(ours, other.zipmoe_engine.expert_matrix(group_of(other), 3, name))
            elif then == "thread":
                with ThreadPoolExecutor(1) as another:
                    another.submit(assert_same, model, other, PROMPTS[:1]).result(timeout=60)
            assert_same(model, other, PROMPTS[:1])


def group_of(model: Any) -> Any:
    return model.zipmoe_engine.group("model.layers.0.mlp.experts")


def test_the_first_call_may_fail(packed_model):
    with both(packed_model("qwen2_moe")) as (model, other), torch.no_grad():
        for place in ("shared_expert", "experts"):
            for each in (model, other):  # the other one, too: results are the native core's from the second prompt on
                hook = getattr(each.model.layers[0].mlp, place).register_forward_pre_hook(stop)
                with pytest.raises(StoppedError):
                    each(PROMPTS[:1])
                hook.remove()
        assert_same(model, other, PROMPTS[:1])
        assert len(routers(model)) == 2


def test_the_engine_may_be_closed_in_between(packed_model):
    with both(packed_model("qwen2_moe")) as (model, _), torch.no_grad():
        model(PROMPTS[:1])
        shared = model.model.layers[0].mlp.shared_expert
        shared.register_forward_pre_hook(lambda *_: model.zipmoe_engine.close())
        with pytest.raises(UnsupportedOperationError, match="closed"):
            model(PROMPTS[:1])


def test_a_batch_without_tokens(packed_model):
    with both(packed_model("qwen2_moe")) as (model, other), torch.no_grad():
        for each in (model, other):
            each(PROMPTS[:1])
        nothing = torch.empty(1, 0, 64, dtype=torch.bfloat16)
        blocks = [each.model.layers[0].mlp for each in (model, other)]
        assert torch.equal(*(block(nothing) for block in blocks))


def test_the_switch_is_a_truth_value():
    assert ZipMoEConfig().early_routing
    assert ZipMoEConfig(early_routing=False).get_loading_attributes()["early_routing"] is False
    with pytest.raises(InvalidArgumentError, match="early_routing"):
        ZipMoEConfig(early_routing="no")
