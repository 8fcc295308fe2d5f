"""Feed-forward networks of dense matrices in the native core."""

from __future__ import annotations

import pytest
import torch
from native_steps import close, count_calls, gaussian, load
from torch import nn

from zipmoe.engine.fused_compute import FusedCompute
from zipmoe.hf.fused_feed_forward import FusedFeedForward, fuse_feed_forward


@pytest.fixture
def calls(monkeypatch):
    return count_calls(monkeypatch)


@pytest.fixture
def pair(packed_model):
    """The same shared expert, native and the family's own."""
    folder = packed_model("qwen2_moe").folder
    native, own = load(folder), load(folder, fused_steps=False)
    with native.zipmoe_engine, own.zipmoe_engine, torch.no_grad():
        for model in (native, own):
            model(input_ids=torch.ones((1, 5), dtype=torch.int64))  # the first pass is watched to find the routers
        yield tuple(model.model.layers[0].mlp.shared_expert for model in (native, own))


def test_values(pair, calls):
    native, own = pair
    for seed, shape in enumerate(((1, 64), (3, 64), (1, 1, 64), (64,), (3, 1, 64))):
        x = gaussian(*shape, seed=seed)
        assert close(native(x), own(x))
    assert calls.feed_forward == 5
    assert native._zipmoe_native.checked


def test_calls_that_are_the_familys(pair, calls):
    native, own = pair
    native(gaussian(1, 64))
    assert calls.feed_forward == 1
    for x in (gaussian(64, 2).T, torch.empty((0, 64), dtype=torch.bfloat16)):
        assert torch.equal(native(x), own(x))
    native(x=gaussian(1, 64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        native(gaussian(1, 64))
    assert calls.feed_forward == 1
    for shape in ((1, 63), (2, 32)):
        with pytest.raises(RuntimeError):
            native(torch.ones(shape, dtype=torch.bfloat16))
    assert calls.feed_forward == 1
    native(gaussian(1, 64))
    assert calls.feed_forward == 2


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj", "act_fn"])
def test_hooks_of_the_parts_are_called(pair, calls, name):
    native, _ = pair
    x = gaussian(1, 64)
    native(x)
    seen = []
    handle = native.get_submodule(name).register_forward_hook(lambda *_: seen.append(name))
    native(x)
    assert seen == [name] and calls.feed_forward == 1
    handle.remove()
    native(x)
    assert seen == [name] and calls.feed_forward == 2


class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x) * 2


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_parts_that_are_replaced(pair, calls, name):
    native, own = pair
    x = gaussian(1, 64)
    native(x)
    for module in pair:
        setattr(module, name, Adapter(module.get_submodule(name)))
    assert close(native(x), own(x))
    assert calls.feed_forward == 1


def test_a_bias_and_another_activation(pair, calls):
    native, own = pair
    x = gaussian(1, 64)
    native(x)
    for module in pair:
        module.act_fn = nn.ReLU()
    assert close(native(x), own(x)) and close(native(x), own(x))
    assert calls.feed_forward == 3  # the native core knows that one, too
    for module in pair:
        module.act_fn = nn.Softplus()
    assert close(native(x), own(x))
    assert calls.feed_forward == 3
    assert native._zipmoe_native is None


def test_a_bias_that_is_given_later(pair, calls):
    native, own = pair
    x = gaussian(1, 64)
    native(x)
    for module in pair:
        module.up_proj.bias = nn.Parameter(gaussian(64, seed=4), requires_grad=False)
    assert close(native(x), own(x))
    assert calls.feed_forward == 1


def test_matrices_of_several_records_are_left_to_the_family(packed_model, monkeypatch, calls):
    monkeypatch.setattr(FusedCompute, "is_one_record", lambda self, name: "down_proj" not in name)
    model = load(packed_model("qwen2_moe").folder)
    with model.zipmoe_engine:
        assert model.zipmoe_fused_steps().feed_forwards == 0
        assert model.zipmoe_fused_steps().attentions == 2


def test_what_is_one_record(pair):
    native, _ = pair
    compute = native._zipmoe_native.compute
    assert compute.is_one_record(native.gate_proj._zipmoe_parameter)


def test_the_first_use_decides(pair, calls):
    native, own = pair
    made = native._zipmoe_native
    zeros = torch.zeros((1, 64), dtype=torch.bfloat16)
    assert torch.equal(native(zeros), own(zeros)) and not made.checked
    broken = zeros + torch.nan
    assert native(broken).isnan().all() and not made.checked
    assert calls.feed_forward == 2
    made.ingredients.unchanged = lambda: True
    native.act_fn = nn.Tanh()  # not noticed: what is compared differs
    expected = own.down_proj(torch.tanh(own.gate_proj(gaussian(1, 64))) * own.up_proj(gaussian(1, 64)))
    assert close(native(gaussian(1, 64)), expected)
    assert native._zipmoe_native is None
    assert close(native(gaussian(1, 64)), expected)
    assert calls.feed_forward == 3


def test_only_networks_of_the_known_shape(pair):
    native, own = pair
    assert isinstance(native, FusedFeedForward)
    original = type(own)

    class Clamped(original):
        def forward(self, x):
            return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(max=1e4))

    class Swapped(original):
        """The first use shows it, not the names."""

        def forward(self, x):
            return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

    own.__class__ = Clamped
    assert not fuse_feed_forward(own)
    own.__class__ = Swapped
    assert fuse_feed_forward(own)
    x = gaussian(1, 64)
    expected = Swapped.forward(own, x)
    assert torch.equal(own(x), expected)
    assert own._zipmoe_native is None
    own.__class__ = original
    own.dropout = 0.1
    assert not fuse_feed_forward(own)
    del own.dropout
    assert fuse_feed_forward(own)
