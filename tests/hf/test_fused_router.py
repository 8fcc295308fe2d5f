"""Routers in the native core: which formulas are recognised, which look alike, and with what they are called."""

from __future__ import annotations

import pytest
import torch
from native_steps import gaussian
from torch import nn
from torch.nn import functional as F  # noqa: N812 (the name that families have)

from zipmoe import _native
from zipmoe.engine.fused_compute import STEP_ROWS_MAX
from zipmoe.hf.fused_router import FusedRouter, fuse_router


class Softmax(nn.Module):
    """As Mixtral's and Qwen's."""

    def __init__(self, experts=16, size=64, top_k=4):
        super().__init__()
        self.top_k = top_k
        self.hidden_dim = size
        self.norm_topk_prob = True
        self.weight = nn.Parameter(2 * size**-0.5 * gaussian(experts, size, seed=1), requires_grad=False)
        self.eval()

    def forward(self, hidden_states):
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        router_logits = F.linear(hidden_states, self.weight)
        scores = F.softmax(router_logits, dtype=torch.float, dim=-1)
        weights, indices = torch.topk(scores, self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights /= weights.sum(dim=-1, keepdim=True)
        return router_logits, weights.to(router_logits.dtype), indices


class Sigmoid(Softmax):
    def forward(self, hidden_states):
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        router_logits = F.linear(hidden_states, self.weight)
        weights, indices = torch.topk(router_logits.float().sigmoid(), self.top_k, dim=-1)
        return router_logits, weights, indices


class InShape(Softmax):
    """Keeps the shape of its inputs."""

    def forward(self, hidden_states):
        router_logits = F.linear(hidden_states, self.weight)
        weights, indices = torch.topk(F.softmax(router_logits, dtype=torch.float, dim=-1), self.top_k, dim=-1)
        return router_logits, weights, indices


class Logits32(Softmax):
    def forward(self, hidden_states):
        router_logits = F.linear(hidden_states.float(), self.weight.float())
        weights, indices = torch.topk(router_logits.softmax(-1), self.top_k, dim=-1)
        return router_logits, weights, indices


class Scaled(Softmax):
    def forward(self, hidden_states):
        logits, weights, indices = Softmax.forward(self, hidden_states)
        return logits, weights * 2.5, indices


class Scores(Softmax):
    """The first of the triple is not the logits."""

    def forward(self, hidden_states):
        logits, weights, indices = Softmax.forward(self, hidden_states)
        return logits.softmax(-1), weights, indices


class Capped(Softmax):
    """Only large logits show it."""

    def forward(self, hidden_states):
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        router_logits = F.linear(hidden_states, self.weight).clamp(max=1000.0)
        weights, indices = torch.topk(F.softmax(router_logits, dtype=torch.float, dim=-1), self.top_k, dim=-1)
        return router_logits, weights, indices


class Jittered(Softmax):
    def __init__(self):
        super().__init__()
        self.router_jitter_noise = 0.1

    def forward(self, hidden_states):
        if self.training and self.router_jitter_noise > 0:
            hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(0.9, 1.1)
        return Softmax.forward(self, hidden_states)


class ByGroups(Softmax):
    """Only the better half of the experts' groups may be chosen."""

    def forward(self, hidden_states):
        router_logits = F.linear(hidden_states, self.weight)
        scores = F.softmax(router_logits, dtype=torch.float, dim=-1)
        groups = scores.view(-1, 4, 4)
        chosen = torch.topk(groups.amax(-1), 2, dim=-1).indices
        kept = torch.zeros(groups.shape[:2]).scatter_(1, chosen, 1.0).unsqueeze(-1)
        weights, indices = torch.topk((groups * kept).flatten(1), self.top_k, dim=-1)
        return router_logits, weights, indices


class Corrected(Softmax):
    """A correction of the choice, as DeepSeek's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("e_score_correction_bias", torch.zeros(16))


class WithBias(Softmax):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(16, dtype=torch.bfloat16), requires_grad=False)


class Smallest(Softmax):
    def forward(self, hidden_states):
        router_logits = F.linear(hidden_states, self.weight)
        scores = F.softmax(router_logits, dtype=torch.float, dim=-1)
        weights, indices = torch.topk(scores, self.top_k, dim=-1)
        return router_logits, weights.flip(-1), indices.flip(-1).clone().fill_(0)


class Tuple2(Softmax):
    def forward(self, hidden_states):
        return Softmax.forward(self, hidden_states)[1:]


@pytest.fixture
def check(monkeypatch):
    """Compares a router's answer with its class's own, and says whether the native core gave it."""
    native = []
    original = _native.route

    def noted(*args):
        native.append(1)
        original(*args)

    monkeypatch.setattr(_native, "route", noted)

    def compare(module, own, x):
        native.clear()
        found = module(x)
        was_native = bool(native)
        expected = own.forward(module, x)
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
        assert torch.allclose(found[0].float(), expected[0].float(), rtol=2.0**-7, atol=2.0**-7)
        if torch.equal(found[0], expected[0]):  # no logit is rounded the other way
            assert torch.equal(found[2], expected[2])
            assert torch.allclose(found[1].float(), expected[1].float(), rtol=2.0**-7)
        return was_native

    return compare


@pytest.mark.parametrize("own", [Softmax, Sigmoid])
@pytest.mark.parametrize("experts, size, top_k", [(16, 64, 4), (128, 512, 8), (8, 96, 8), (512, 64, 10), (3, 64, 1)])
def test_routers_of_known_formulas(check, own, experts, size, top_k):
    module = own(experts, size, top_k)
    assert fuse_router(module)
    for seed in range(20):
        assert check(module, own, gaussian(3, size, seed=100 + seed))
    assert check(module, own, gaussian(1, 3, size))
    assert check(module, own, gaussian(STEP_ROWS_MAX, size))
    assert not check(module, own, gaussian(STEP_ROWS_MAX + 1, size))


@pytest.mark.parametrize("normalised", [False, True])
def test_large_routers_are_recognised_whatever_their_numbers(normalised):
    """With many experts some logits are equal, or nearly, in every other row."""
    for seed in range(5):
        module = Softmax(256, 256, 8)
        module.norm_topk_prob = normalised
        module.weight.copy_(gaussian(256, 256, seed=seed) * 0.02)
        assert fuse_router(module)


@pytest.mark.parametrize(
    "other", [Logits32, Scaled, Scores, Capped, Jittered, ByGroups, Corrected, WithBias, Smallest, Tuple2]
)
def test_other_routers_are_left_alone(other):
    module = other()
    assert not fuse_router(module)
    assert type(module) is other


def test_inputs_of_three_dimensions(check):
    module = InShape()
    assert fuse_router(module)
    assert check(module, InShape, gaussian(3, 64))
    assert not check(module, InShape, gaussian(1, 3, 64))


def test_calls_that_are_the_familys(check):
    module = Softmax()
    assert fuse_router(module)
    x = gaussian(3, 64)
    assert check(module, Softmax, x)
    assert not check(module.train(), Softmax, x)
    module.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not check(module, Softmax, x)
    module.weight.requires_grad_()
    assert module(x)[0].requires_grad
    module.weight.requires_grad_(False)
    assert module(x.clone().requires_grad_())[0].requires_grad
    with pytest.raises(RuntimeError):
        module(torch.ones((1, 65), dtype=torch.bfloat16))


def test_settings_of_the_moment(check):
    module = Softmax()
    assert fuse_router(module)
    x = gaussian(3, 64)
    assert check(module, Softmax, x)
    module.top_k = 2
    assert check(module, Softmax, x) and module(x)[2].shape == (3, 2)
    module.norm_topk_prob = False
    assert check(module, Softmax, x)
    module.weight = nn.Parameter(gaussian(16, 64, seed=5), requires_grad=False)
    assert check(module, Softmax, x)
    module.hidden_dim = 32
    with pytest.raises(RuntimeError):
        module(x)
    assert isinstance(module, FusedRouter) and module._zipmoe_native is None
