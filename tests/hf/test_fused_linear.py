"""Small unpacked linear layers in the native core."""

from __future__ import annotations

import pytest
import torch
from native_steps import gaussian
from torch import nn
from torch.nn.utils import parametrize, prune

from zipmoe import _native
from zipmoe.engine.fused_compute import STEP_ROWS_MAX
from zipmoe.hf.fused_linear import FusedLinear, fuse_linear


def linear(columns=64, rows=8, bias=True):
    module = nn.Linear(columns, rows, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    assert fuse_linear(module)
    return module


@pytest.fixture
def native(monkeypatch):
    """The shapes of inputs that the native core was given."""
    seen = []
    original = _native.small_linear

    def noted(weights, x, *rest):
        seen.append(x.shape)
        original(weights, x, *rest)

    monkeypatch.setattr(_native, "small_linear", noted)
    return seen


@pytest.mark.parametrize("bias", [False, True])
def test_values(native, bias):
    module = linear(bias=bias)
    for shape in ((64,), (3, 64), (1, 2, 64)):
        x = gaussian(*shape)
        exact = nn.functional.linear(x.double(), module.weight.double(), module.bias.double() if bias else None)
        found = module(x)
        assert found.shape == exact.shape
        assert torch.allclose(found.double(), exact, rtol=2.0**-8, atol=1e-5)
    assert native == [(1, 64), (3, 64), (2, 64)]


def test_only_small_layers_of_torch():
    class Own(nn.Linear):
        pass

    assert not fuse_linear(Own(8, 8, dtype=torch.bfloat16))
    assert not fuse_linear(nn.Linear(8, 8))
    assert not fuse_linear(nn.Linear(1 << 11, 1 << 10, dtype=torch.bfloat16))
    assert not fuse_linear(nn.Linear(8, 8, dtype=torch.bfloat16, device="meta"))
    assert isinstance(linear(), FusedLinear)


def test_calls_that_are_torchs(native):
    module = linear()
    for x in (gaussian(STEP_ROWS_MAX + 1, 64), gaussian(64, 3).T, torch.empty((0, 64), dtype=torch.bfloat16)):
        assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias))
    with torch.autocast("cpu", dtype=torch.float16):
        assert module(gaussian(1, 64)).dtype == torch.float16
    assert module(gaussian(1, 64).requires_grad_()).requires_grad
    module.bias.requires_grad_()
    assert module(gaussian(1, 64)).requires_grad
    module.bias.requires_grad_(False)
    assert not native
    for shape in ((), (63,), (2, 32), (64, 1)):
        with pytest.raises(RuntimeError) as expected:
            nn.functional.linear(torch.ones(shape, dtype=torch.bfloat16), module.weight, module.bias)
        with pytest.raises(RuntimeError) as found:
            module(torch.ones(shape, dtype=torch.bfloat16))
        assert str(found.value) == str(expected.value)
    assert not native


def test_weights_of_the_moment(native):
    module = linear()
    x = gaussian(1, 64)
    for change in (
        lambda: module.weight.mul_(2),
        lambda: setattr(module, "weight", nn.Parameter(gaussian(8, 64, seed=1), requires_grad=False)),
        lambda: setattr(module, "weight", nn.Parameter(gaussian(64, 8, seed=2).T, requires_grad=False)),
        lambda: setattr(module, "bias", nn.Parameter(gaussian(8, 2, seed=3)[:, 1], requires_grad=False)),
        lambda: setattr(module, "bias", None),
    ):
        change()
        expected = nn.functional.linear(x, module.weight, module.bias)
        assert torch.allclose(module(x).float(), expected.float(), rtol=2.0**-6, atol=1e-2)
    module.float()
    assert module(x.float()).dtype == torch.float32


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_weights_that_are_computed(native, name):
    """What torch and others put in the place of a parameter."""
    x = gaussian(1, 64)
    module = linear()
    parametrize.register_parametrization(module, name, Doubled())
    assert torch.allclose(module(x).float(), nn.functional.linear(x, module.weight, module.bias).float(), rtol=0.02)
    pruned = linear()
    prune.random_unstructured(pruned, name, amount=0.5)
    assert torch.equal(pruned(x), nn.functional.linear(x, pruned.weight, pruned.bias))
    assert not native
