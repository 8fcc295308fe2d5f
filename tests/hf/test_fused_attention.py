"""Attention of single tokens in the native core: with all that is done to caches, and what it leaves to the family."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from native_steps import Attention, close, count_calls, gaussian, load
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from zipmoe.engine.fused_compute import STEP_ROWS_MAX
from zipmoe.errors import ZipMoEError
from zipmoe.hf.cache_room import CacheRoom


@pytest.fixture(params=["qwen2_moe", "mixtral", "qwen3_moe"])
def family(request):
    return request.param


@pytest.fixture
def pair(family, packed_model):
    """The same attention, native and the family's own."""
    folder = packed_model(family).folder
    native, own = load(folder), load(folder, fused_steps=False)
    with native.zipmoe_engine, own.zipmoe_engine:
        yield Attention(native), Attention(own)


@pytest.fixture
def calls(monkeypatch):
    return count_calls(monkeypatch)


def grow(attend, cache):
    return [attend(cache, tokens=5)] + [attend(cache) for _ in range(150)]


def crop(attend, cache):
    grown = [attend(cache, tokens=9), *(attend(cache) for _ in range(4))]
    cache.crop(-3)
    return grown + [attend(cache) for _ in range(4)]


def reorder(attend, cache):
    outputs = [attend(cache, rows=3, tokens=4)]
    for order in ([2, 0, 0], [1, 1, 1], [0, 1, 2]):
        outputs += [attend(cache, rows=3) for _ in range(2)]
        cache.reorder_cache(torch.tensor(order))
    return [*outputs, attend(cache, rows=3)]


def repeat(attend, cache):
    outputs = [attend(cache, tokens=4), attend(cache)]
    cache.batch_repeat_interleave(3)
    return [*outputs, attend(cache, rows=3), attend(cache, rows=3)]


def select(attend, cache):
    outputs = [attend(cache, rows=3, tokens=4), attend(cache, rows=3)]
    cache.batch_select_indices(torch.tensor([2, 1]))
    return [*outputs, attend(cache, rows=2), attend(cache, rows=2)]


def reset(attend, cache):
    outputs = [attend(cache, tokens=4), attend(cache), attend(cache)]
    cache.reset()
    return [*outputs, attend(cache, tokens=6), attend(cache), attend(cache)]


def second_prompt(attend, cache):
    return [attend(cache, tokens=n) for n in (4, 1, 1, 7, 1, 2, 1, 1)]


def copies(attend, cache):
    """Several continuations of one prefix, none of which sees another's tokens."""
    outputs = [attend(cache, tokens=6), attend(cache), attend(cache)]
    kept, stored = copy.deepcopy(cache), pickle.dumps(cache)
    outputs += [attend(cache), attend(cache)]
    outputs += [attend(kept), attend(kept)]
    loaded = pickle.loads(stored)
    outputs += [attend(loaded), attend(loaded)]
    return [*outputs, attend(cache)]


def shared_layer(attend, cache):
    """A shallow copy of a cache's layer: both continue from the same tensors."""
    outputs = [attend(cache, tokens=6), attend(cache), attend(cache)]
    other = DynamicCache()
    other.layers.append(copy.copy(cache.layers[0]))
    outputs += [attend(other), attend(other), attend(cache), attend(cache)]
    return [*outputs, attend(other)]


def tensors_put_back(attend, cache):
    outputs = [attend(cache, tokens=6), attend(cache), attend(cache)]
    layer = cache.layers[0]
    keys, values = layer.keys, layer.values
    before = keys.clone()
    outputs += [attend(cache), attend(cache)]
    assert torch.equal(keys, before)
    layer.keys, layer.values = keys, values
    return [*outputs, attend(cache), attend(cache)]


def scaled_in_place(attend, cache):
    """Changed in place, the same tensors hold other values."""
    outputs = [attend(cache, tokens=6), attend(cache), attend(cache)]
    cache.layers[0].keys.mul_(0.5)
    return [*outputs, attend(cache), attend(cache)]


SCENARIOS = [
    *(grow, crop, reorder, repeat, select, reset, second_prompt, copies, shared_layer, tensors_put_back),
    scaled_in_place,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_whatever_is_done_to_a_cache(pair, scenario, calls):
    native, own = pair
    caches = DynamicCache(), DynamicCache()
    found = scenario(native, caches[0])
    singles = sum(output.shape[1] == 1 for output in found)
    assert calls.attention == singles > 2
    expected = scenario(own, caches[1])
    assert calls.attention == singles
    assert native.module._zipmoe_native is not None
    for one, other in zip(found, expected, strict=True):
        assert close(one, other)
    layers = [cache.layers[0] for cache in caches]
    assert close(layers[0].keys, layers[1].keys) and close(layers[0].values, layers[1].values)


def test_room_grows_seldom(packed_model, monkeypatch):
    made = []
    original = CacheRoom.__init__

    def counted(self, keys, values, capacity):
        made.append(keys.shape[2])
        original(self, keys, values, capacity)

    monkeypatch.setattr(CacheRoom, "__init__", counted)
    model = load(packed_model("qwen2_moe").folder)
    with model.zipmoe_engine:
        attend, cache = Attention(model), DynamicCache()
        attend(cache, tokens=60)
        for _ in range(200):
            attend(cache)
    assert made == [60, 61, 128, 192, 256]  # the first one is for the comparison


def last_calls(attend, calls, cache=None, rows=1, before=lambda: None, **options):
    """How many native calls a token takes after two native ones, with something changed ``before`` it."""
    cache = DynamicCache() if cache is None else cache
    attend(cache, rows=rows, tokens=4)
    attend(cache, rows=rows)
    attend(cache, rows=rows)
    assert calls.attention == 2
    before()
    attend(cache, rows=rows, **options)
    return calls.attention - 2


@pytest.fixture
def attend(packed_model):
    model = load(packed_model("qwen3_moe").folder)
    with model.zipmoe_engine:
        yield Attention(model)


def test_an_ordinary_call_is_native(attend, calls):
    assert last_calls(attend, calls) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"attention_mask": torch.zeros((1, 1, 1, 7), dtype=torch.bfloat16)},
        {"attention_mask": torch.ones((1, 1, 1, 7), dtype=torch.bool)},
        {"output_attentions": True},
        {"an_option_of_tomorrow": 3},
        {"cu_seq_lens_q": torch.tensor([0, 1])},
    ],
    ids=str,
)
def test_options_go_to_the_family(attend, calls, options):
    assert last_calls(attend, calls, **options) == 0


@pytest.mark.parametrize("option", ["position_ids", "use_cache", "cache_position", "output_attentions"])
def test_options_that_change_nothing(attend, calls, option):
    values = {"position_ids": torch.tensor([[6]]), "use_cache": True, "cache_position": torch.tensor([6])}
    assert last_calls(attend, calls, **{option: values.get(option)}) == 1


def test_attention_chosen_by_the_configuration(attend, calls):
    config = attend.model.config
    assert last_calls(attend, calls, before=lambda: setattr(config, "_attn_implementation", "eager")) == 0
    config._attn_implementation = "sdpa"


def test_another_function_under_the_name_of_sdpa(attend, calls, monkeypatch):
    def other(module, query, key, value, mask, **_):
        return torch.zeros_like(query).transpose(1, 2), None

    def replace():
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", other)

    assert last_calls(attend, calls, before=replace) == 0


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_of_the_parts_are_called(attend, calls, name, kind):
    seen, handles = [], []

    def hook():
        handles.append(getattr(attend.module.get_submodule(name), kind)(lambda *_: seen.append(name)))

    assert last_calls(attend, calls, before=hook) == 0
    assert seen == [name]
    handles[0].remove()
    cache = DynamicCache()
    attend(cache, tokens=3)
    attend(cache)
    assert calls.attention == 3  # native again


def test_hooks_of_all_modules_are_called(attend, calls):
    seen, handles = [], []

    def hook():
        register = torch.nn.modules.module.register_module_forward_hook
        handles.append(register(lambda module, *_: seen.append(module)))

    try:
        assert last_calls(attend, calls, before=hook) == 0
    finally:
        handles[0].remove()
    assert attend.module.q_proj in seen and attend.module.k_norm in seen


def test_a_forward_of_its_own(attend, calls):
    """What accelerate does to a module."""
    norm = attend.module.q_norm
    seen = []

    def replace():
        original = norm.forward
        norm.forward = lambda *args: (seen.append(1), original(*args))[1]

    assert last_calls(attend, calls, before=replace) == 0
    assert seen == [1]
    del norm.forward


def test_a_forward_that_the_class_of_a_norm_is_given_later(attend, calls, monkeypatch):
    seen = []
    original = Qwen3MoeRMSNorm.forward

    def noted(self, x):
        seen.append(self)
        return original(self, x)

    assert last_calls(attend, calls, before=lambda: monkeypatch.setattr(Qwen3MoeRMSNorm, "forward", noted)) == 0
    assert seen == [attend.module.q_norm, attend.module.k_norm]


class Adapter(torch.nn.Module):
    """What PEFT puts in the place of a linear layer."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.asked = 0

    def forward(self, x):
        self.asked += 1
        return self.base(x) * 2


@pytest.mark.parametrize("name", ["q_proj", "v_proj", "o_proj", "q_norm"])
def test_parts_that_are_replaced(attend, calls, name):
    adapter = Adapter(attend.module.get_submodule(name))
    assert last_calls(attend, calls, before=lambda: setattr(attend.module, name, adapter)) == 0
    assert adapter.asked == 1


def test_numbers_that_are_changed(packed_model, calls):
    """Weights of norms, biases and the scale of the scores are those of the moment."""
    for name in ("qwen2_moe", "qwen3_moe"):
        models = load(packed_model(name).folder), load(packed_model(name).folder, fused_steps=False)
        with models[0].zipmoe_engine, models[1].zipmoe_engine:
            outputs = []
            for model in models:
                attend, cache = Attention(model), DynamicCache()
                attend(cache, tokens=5)
                attend(cache)
                module = attend.module
                with torch.no_grad():
                    if name == "qwen2_moe":
                        module.k_proj.bias = torch.nn.Parameter(module.k_proj.bias * 3, requires_grad=False)
                        module.v_proj.bias.data = module.v_proj.bias.data * 2
                        module.q_proj.bias.mul_(2)
                    else:
                        module.k_norm.weight = torch.nn.Parameter(module.k_norm.weight * 3, requires_grad=False)
                        module.q_norm.variance_epsilon = 0.5
                module.scaling = module.scaling * 2
                outputs.append([attend(cache), attend(cache)])
            assert models[0].model.layers[0].self_attn._zipmoe_native.checked
            for found, expected in zip(*outputs, strict=True):
                assert close(found, expected)


def test_converted_and_converted_back(packed_model, calls):
    model = load(packed_model("qwen2_moe").folder)
    with model.zipmoe_engine:
        attend = Attention(model)
        assert last_calls(attend, calls) == 1
        model.float()
        cache = DynamicCache()
        hidden = gaussian(1, 4, 64).float()
        attend.of(hidden, 0, cache)
        attend.of(hidden[:, :1], 4, cache)
        assert calls.attention == 3
        model.to(torch.bfloat16)
        cache = DynamicCache()
        attend(cache, tokens=4)
        attend(cache)
        attend(cache)
        assert calls.attention == 5


def test_one_part_in_float32(attend, calls):
    with pytest.raises(RuntimeError, match="same dtype"):  # the family's own code
        last_calls(attend, calls, before=attend.module.q_norm.float)
    assert calls.attention == 2


@pytest.mark.parametrize("rows, native", [(1, 1), (3, 1), (STEP_ROWS_MAX, 1), (STEP_ROWS_MAX + 1, 0)])
def test_few_rows(attend, calls, rows, native):
    cache = DynamicCache()
    attend(cache, rows=rows, tokens=3)
    attend(cache, rows=rows)
    attend(cache, rows=rows)
    assert calls.attention == 2 * native


def test_gradients_and_training_and_autocast(attend, calls):
    assert last_calls(attend, calls, before=lambda: setattr(attend.module, "training", True)) == 0
    attend.module.training = False
    cache = DynamicCache()
    attend(cache, tokens=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attend(cache)
    assert calls.attention == 2
    attend(cache)
    assert calls.attention == 3


def test_other_caches(attend, calls):
    config = attend.model.config
    static = StaticCache(config=config, max_cache_len=16)
    attend(static, tokens=4)
    attend(static)
    assert calls.attention == 0
    float_cache = DynamicCache()
    attend(float_cache, tokens=4)
    layer = float_cache.layers[0]
    layer.keys, layer.values = layer.keys.float(), layer.values.float()
    with pytest.raises(RuntimeError):  # as in the family's own code
        attend(float_cache)
    assert calls.attention == 0


def test_a_class_derived_from_the_cache(attend, calls):
    class Noted(DynamicCache):
        pass

    cache = Noted()
    attend(cache, tokens=4)
    attend(cache)
    assert calls.attention == 0


def test_without_a_prompt_the_first_token_is_the_familys(attend, calls):
    cache = DynamicCache()
    attend(cache)
    assert calls.attention == 0
    attend(cache)
    attend(cache)
    assert calls.tokens == [1, 2]
    assert attend.module._zipmoe_native.checked


def test_inference_mode_and_back(packed_model, calls):
    folder = packed_model("qwen2_moe").folder
    models = load(folder), load(folder, fused_steps=False)
    with models[0].zipmoe_engine, models[1].zipmoe_engine:
        outputs = []
        for model in models:
            attend, cache = Attention(model), DynamicCache()
            with torch.inference_mode():
                attend(cache, tokens=4)
                attend(cache)
                attend(cache)
            outside = [attend(cache), attend(cache)]
            with torch.inference_mode():
                outside.append(attend(cache).clone())
            outputs.append(outside)
    assert calls.attention == 5
    for found, expected in zip(*outputs, strict=True):
        assert close(found, expected)


def test_inputs_of_another_width_are_refused_by_torch(attend, calls):
    cache = DynamicCache()
    attend(cache, tokens=4)
    attend(cache)
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|shape"):
        attend.of(gaussian(1, 1, 32), 5, cache)


def test_positions_for_other_heads(attend, calls):
    cache = DynamicCache()
    attend(cache, tokens=4)
    hidden = gaussian(1, 1, 64)
    for shape in ((1, 1, 32), (2, 1, 16), (1, 2, 16)):
        angles = torch.ones(shape, dtype=torch.bfloat16)
        with pytest.raises(RuntimeError):
            attend.of(hidden, 4, cache, position_embeddings=(angles, angles))
    angles = torch.ones((1, 1, 8), dtype=torch.float32)
    with pytest.raises(RuntimeError):
        attend.of(hidden, 4, cache, position_embeddings=(angles, angles))
    assert calls.attention == 0


def test_the_first_use_decides(packed_model, calls):
    """Another result: the family's own code from then on. No result that tells anything: compared again."""
    model = load(packed_model("qwen2_moe").folder)
    with model.zipmoe_engine:
        assert model.zipmoe_fused_steps().attentions == 2
        attend, cache = Attention(model), DynamicCache()
        attend(cache, tokens=4)
        nothing = torch.full((1, 1, 64), torch.nan, dtype=torch.bfloat16)
        for _ in range(2):
            assert attend.of(nothing, 4, cache).isnan().all()
            cache.crop(-1)
        assert not attend.module._zipmoe_native.checked
        # At position 0 nothing is rotated, so that it does not show how.
        attend.of(gaussian(1, 1, 64), 0, cache)
        assert not attend.module._zipmoe_native.checked
        attend(cache)
        assert attend.module._zipmoe_native.checked
        other = Attention(model, layer=1)
        other.module._zipmoe_native.ingredients.unchanged = lambda: True
        other.module.scaling = 3 * other.module.scaling  # not noticed: what is compared differs
        cache = DynamicCache()
        cache.layers.append(DynamicLayer())
        other(cache)
        expected_calls = calls.attention + 1
        other(cache)
        assert other.module._zipmoe_native is None
        other(cache)
        assert calls.attention == expected_calls
        assert model.zipmoe_fused_steps().attentions == 1
        assert "steps in one call each: 1 attention," in model.zipmoe_mode_line()


def test_a_closed_engine_says_so(packed_model):
    model = load(packed_model("qwen2_moe").folder)
    attend, cache = Attention(model), DynamicCache()
    attend(cache, tokens=4)
    attend(cache)
    before = cache.layers[0].keys.clone()
    model.zipmoe_engine.close()
    with pytest.raises(ZipMoEError, match="closed"):
        attend(cache)
    assert torch.equal(cache.layers[0].keys, before)
