"""Which calls let the last layer compute a few positions only, and which must not."""

from __future__ import annotations

import pytest
import torch
from few_slots import load as load_few_slots
from few_slots import take_memory
from observed_model import PROMPT, PROMPTS
from torch import nn

from zipmoe import _native
from zipmoe.engine.fused_compute import FusedCompute
from zipmoe.errors import InvalidArgumentError
from zipmoe.hf.configuration import ZipMoEConfig
from zipmoe.hf.last_layer import keeps_positions_apart
from zipmoe.hf.module_parts import ModuleParts


@pytest.mark.parametrize("kept", [1, 3, 10])
@pytest.mark.parametrize("ids", [PROMPT, PROMPTS])
def test_only_the_last_positions_are_computed(observed, whole, ids, kept):
    observed.left_out.fill = torch.nan
    found = observed(input_ids=ids, logits_to_keep=kept)
    assert observed.rows == [len(ids) * kept]
    expected = whole(input_ids=ids, logits_to_keep=kept)
    assert torch.equal(found.logits, expected.logits)
    for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


def test_arguments_by_position_and_embeddings(observed, whole):
    observed(PROMPT, logits_to_keep=1)
    assert observed.rows == [1]
    embedded = observed.model.get_input_embeddings()(PROMPT)
    found = observed(inputs_embeds=embedded, logits_to_keep=2).logits
    assert observed.rows == [2]
    assert torch.equal(found, whole(input_ids=PROMPT, logits_to_keep=2).logits)
    (logits, *_) = observed(PROMPT, None, None, None, None, None, True, False, 3, return_dict=False)
    assert observed.rows == [3]
    assert torch.equal(logits, whole(input_ids=PROMPT, logits_to_keep=3).logits)


def test_padding_on_the_left(observed, whole):
    mask = torch.ones_like(PROMPTS)
    mask[1, :4] = 0
    observed.left_out.fill = torch.nan
    found = observed(input_ids=PROMPTS, attention_mask=mask, logits_to_keep=1).logits
    assert observed.rows == [2]
    assert torch.equal(found, whole(input_ids=PROMPTS, attention_mask=mask, logits_to_keep=1).logits)


def test_a_prompt_behind_cached_tokens(observed, whole):
    caches = []
    for model in (observed, whole):
        cache = model(input_ids=PROMPT, logits_to_keep=1).past_key_values
        caches.append(model(input_ids=PROMPT[:, :5], cache=cache, logits_to_keep=1).logits)
    assert observed.rows == [1]
    assert torch.equal(*caches)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logits_to_keep": 0},
        {"logits_to_keep": 11},
        {"logits_to_keep": 50},
        {"logits_to_keep": torch.tensor([10])},
        {"logits_to_keep": True},
        {"logits_to_keep": 1, "output_hidden_states": True},
        {"logits_to_keep": 1, "output_attentions": True},
        {"logits_to_keep": 1, "output_router_logits": True},
        {"logits_to_keep": 11, "labels": PROMPT},
        {"logits_to_keep": 1, "something_new": 5},
    ],
)
def test_calls_that_compute_all_positions(observed, options):
    observed(input_ids=PROMPT, **options)
    assert observed.rows == [11]


@pytest.mark.parametrize("name", ["output_hidden_states", "output_router_logits"])
def test_what_the_configuration_asks_for(observed, name):
    setattr(observed.model.config, name, True)
    observed(input_ids=PROMPT, logits_to_keep=1)
    assert observed.rows == [11]


def test_calls_of_the_base_model(observed, whole):
    with torch.no_grad():
        found = observed.model.model(input_ids=PROMPT).last_hidden_state
    assert observed.rows == [11]
    assert torch.equal(found, whole.model(input_ids=PROMPT).last_hidden_state)


def test_a_nested_call_of_the_base_model(observed, whole):
    """Made from within the call of the one that may leave positions out, before it gets to its last layer."""
    seen = []

    def once(*_):
        hook.remove()
        seen.append(observed.model.model(input_ids=PROMPT.flip(1)).last_hidden_state)

    hook = observed.model.model.layers[0].register_forward_hook(once)
    found = observed(input_ids=PROMPT, logits_to_keep=1).logits
    assert observed.rows == [11, 11]
    assert torch.equal(seen[0], whole.model(input_ids=PROMPT.flip(1)).last_hidden_state)
    assert torch.equal(found, whole(input_ids=PROMPT, logits_to_keep=1).logits)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["layers.0", "layers.0.self_attn.q_proj", "layers.1.input_layernorm"])
def test_an_error_leaves_nothing_behind(observed, whole, error, place):
    module = observed.model.model.get_submodule(place)
    original = type(module).forward

    def fail(*_, **__):
        raise error("stop")

    module.forward = fail
    with pytest.raises(error, match="stop"):
        observed(input_ids=PROMPT, logits_to_keep=1)
    del module.forward
    assert type(module).forward is original
    with torch.no_grad():
        found = observed.model.model(input_ids=PROMPT).last_hidden_state
    assert torch.equal(found, whole.model(input_ids=PROMPT).last_hidden_state)
    observed(input_ids=PROMPT)
    assert observed.rows == [11]


@pytest.mark.parametrize(
    "place", ["model", "model.norm", "model.layers.1", "model.layers.1.mlp", "model.layers.1.mlp.gate"]
)
def test_whoever_watches_sees_all_positions(observed, place):
    seen = []
    module = observed.model.get_submodule(place)
    hook = module.register_forward_hook(lambda *_: seen.append(1))
    observed(input_ids=PROMPT, logits_to_keep=1)
    assert observed.rows == [11] and len(seen) == 1
    hook.remove()
    observed(input_ids=PROMPT, logits_to_keep=1)
    assert observed.rows == [1] and len(seen) == 1


def test_hidden_states_are_true_and_leave_nothing_behind(observed, whole):
    found = observed(input_ids=PROMPT, logits_to_keep=1, output_hidden_states=True).hidden_states
    assert observed.rows == [11]
    expected = whole(input_ids=PROMPT, logits_to_keep=1, output_hidden_states=True).hidden_states
    assert all(map(torch.equal, found, expected))
    observed(input_ids=PROMPT, logits_to_keep=1)
    assert observed.rows == [1]


def test_hooks_that_change_arguments_or_are_for_all_modules(observed):
    def ask_for_all(_, args, kwargs):
        return args, kwargs | {"logits_to_keep": 0}

    hook = observed.model.register_forward_pre_hook(ask_for_all, with_kwargs=True)
    assert observed(input_ids=PROMPT, logits_to_keep=1).logits.shape[1] == 11
    assert observed.rows == [11]
    hook.remove()
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    observed(input_ids=PROMPT, logits_to_keep=1)
    hook.remove()
    assert observed.rows == [11]


def test_another_structure(observed):
    layers = observed.model.model.layers
    layers.append(layers[0])
    observed(input_ids=PROMPT, logits_to_keep=1, use_cache=False)
    assert observed.rows == [11]
    del layers[-1]
    norm = observed.model.model.norm
    observed.model.model.norm = nn.Identity()
    observed(input_ids=PROMPT, logits_to_keep=1)
    assert observed.rows == [11]
    observed.model.model.norm = norm
    observed(input_ids=PROMPT, logits_to_keep=1)
    assert observed.rows == [1]


def test_another_forward(observed, monkeypatch):
    own = type(observed.layer).forward

    def forward(self, *args, **kwargs):
        return own(self, *args, **kwargs)

    monkeypatch.setattr(type(observed.layer), "forward", forward)
    observed(input_ids=PROMPT, logits_to_keep=1)
    assert observed.rows == [11]


def test_generate(observed, whole, packed_model):
    packed = packed_model("qwen2_moe")
    del observed.rows[:]
    expected = packed.generate(whole)
    for _ in range(2):
        del observed.rows[:]
        assert torch.equal(packed.generate(observed.model), expected)
        assert observed.rows == [2] * 6


@pytest.mark.skipif(not _native.attends_prompts(), reason="this machine has no kernel for prompts")
def test_queries_of_the_last_layer(observed, monkeypatch):
    asked = []
    original = FusedCompute.prompt_attention

    def attention(self, *args):
        asked.append(args[-1])
        return original(self, *args)

    monkeypatch.setattr(FusedCompute, "prompt_attention", attention)
    observed(input_ids=PROMPT, logits_to_keep=2)
    assert asked == [11, 2]
    observed(input_ids=PROMPT)
    assert asked[2:] == [11, 11]


def test_a_block_that_mixes_positions_is_left_alone(packed_model):
    with pytest.warns(UserWarning, match="quantization_config"):
        model = packed_model("qwen2_moe").load(quantization_config=ZipMoEConfig(memory="8GB", mode="fast"))
    block = model.model.layers[-1].mlp
    own = type(block)
    block.__class__ = type("Mixing", (own,), {"forward": lambda self, x: own.forward(self, x).cumsum(1)})
    left_out = model.zipmoe_last_positions
    left_out.place = type(left_out.place)(**vars(left_out.place) | _code(model))
    with model.zipmoe_engine, torch.no_grad():
        for _ in range(4):
            model(input_ids=PROMPT, logits_to_keep=1)
            assert not left_out.checked
        assert left_out.describe() == ""
        assert "of the last layer for the positions" not in model.zipmoe_mode_line()


def _code(model):
    layer = model.model.layers[-1]
    forwards = tuple(type(part).forward for part in (model, model.model, layer, layer.mlp))
    return {"forwards": forwards, "parts": ModuleParts(layer)}


@pytest.mark.parametrize("settings", [{"mode": "exact"}, {"mode": "fast", "dtype": torch.float32}])
def test_exact_and_float32_compute_everything(packed_model, settings):
    packed = packed_model("qwen2_moe")
    dtype = settings.pop("dtype", torch.bfloat16)
    with pytest.warns(UserWarning, match="quantization_config"):
        model = packed.load(quantization_config=ZipMoEConfig(memory="8GB", **settings), dtype=dtype)
    plain = packed.plain(dtype=dtype)
    assert model.zipmoe_last_positions is None
    with model.zipmoe_engine, torch.no_grad():
        for _ in range(2):
            found, expected = (each(input_ids=PROMPTS, logits_to_keep=1).logits for each in (model, plain))
            assert torch.equal(found, expected)


def test_a_model_that_is_widened_computes_everything(packed_model, observed):
    observed.model.float()
    found = observed(input_ids=PROMPT, logits_to_keep=1).logits
    assert observed.rows == [11]
    with torch.no_grad():
        expected = packed_model("qwen2_moe").plain(dtype=torch.float32)(input_ids=PROMPT, logits_to_keep=1).logits
    assert torch.equal(found, expected)
    assert "of the last layer" not in observed.model.zipmoe_mode_line()


def test_requests_and_predictions_name_the_experts_of_the_last_position(packed_model):
    model = load_few_slots(packed_model("qwen2_moe"), True, slots=5, mode="fast")
    engine, paths = model.zipmoe_engine, list(model.zipmoe_engine.folder.manifest.expert_groups)
    last = paths[-1].path
    with engine, torch.no_grad():
        for _ in range(2):  # the first pass finds the routers and compares, then both are in effect
            model(input_ids=PROMPT, logits_to_keep=1)
        requests, predictions, chosen = [], [], []
        engine.request_observer = lambda path, ids: requests.append((path, sorted(ids)))
        look_ahead = model.zipmoe_look_ahead.look_ahead
        predict = look_ahead.predict

        def observe(group, ids):
            predictions.append((group.path, len(ids)))
            predict(group, ids)

        look_ahead.predict = observe
        gate = model.model.layers[-1].mlp.gate
        route = type(gate).route

        def routed(self, given):
            result = route(self, given)
            if self is gate:
                chosen.append(sorted(result[2].reshape(-1).tolist()))
            return result

        type(gate).route = routed
        try:
            model(input_ids=PROMPT, logits_to_keep=1)
        finally:
            type(gate).route = route
        top_k = model.config.num_experts_per_tok
        assert [ids for path, ids in requests if path == last] == chosen[-1:]
        assert len(chosen[-1]) == top_k
        assert [count for path, count in predictions if path == last] == [top_k]
        assert [len(ids) for path, ids in requests if path != last] != [top_k]


def test_fewer_bytes_are_read(packed_model):
    read = []
    for wanted in (True, False):
        settings = ZipMoEConfig(memory="4GB", mode="fast", context_tokens=32, look_ahead=False, last_positions=wanted)
        with pytest.warns(UserWarning, match="quantization_config"):
            model = packed_model("qwen2_moe").load(quantization_config=settings)
        take_memory(model.zipmoe_engine, 2)
        with model.zipmoe_engine, torch.no_grad():
            model(input_ids=PROMPT, logits_to_keep=1)
            before = model.zipmoe_engine.statistics.counters()
            model(input_ids=PROMPT, logits_to_keep=1)
            read.append(model.zipmoe_engine.statistics.counters().since(before).read_bytes)
    assert 0 < read[0] < read[1]


def test_the_mode_line_and_the_option(observed, whole):
    queries = " and queries" if observed.left_out.with_attention else ""
    words = f"; experts{queries} of the last layer for the positions whose logits are asked for"
    assert words in observed.model.zipmoe_mode_line()
    assert "of the last layer" not in whole.zipmoe_mode_line()
    with pytest.raises(InvalidArgumentError, match="last_positions is 1"):
        ZipMoEConfig(last_positions=1)


class Shifted(nn.Module):
    def forward(self, x):
        return x + x.roll(1, 1)


@pytest.mark.parametrize(
    ("module", "apart"),
    [
        (nn.Identity(), True),
        (nn.LayerNorm(32, dtype=torch.bfloat16), True),
        (nn.Linear(32, 32, dtype=torch.bfloat16), True),
        (Shifted(), False),
        (nn.Conv1d(5, 5, 1, dtype=torch.bfloat16), False),
        (nn.Flatten(), False),
        (nn.Bilinear(32, 32, 32), False),
    ],
)
def test_which_modules_keep_positions_apart(module, apart):
    assert keeps_positions_apart(module, 32) == apart
