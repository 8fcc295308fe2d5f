"""Norms in the native core: which ones, and with what they are called."""

from __future__ import annotations

import pytest
import torch
from native_steps import gaussian
from torch import nn

from zipmoe.engine.fused_compute import STEP_ROWS_MAX
from zipmoe.hf.fused_norm import FusedNorm, fuse_norm


class RootMeanSquare(nn.Module):
    """As most families have it."""

    def __init__(self, size=64, weight=None):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * gaussian(size, seed=3) if weight is None else weight, requires_grad=False)
        self.variance_epsilon = 1e-6
        self.own_calls = 0

    def forward(self, x):
        self.own_calls += 1
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class OnePlusWeight(RootMeanSquare):
    def forward(self, x):
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * (1 + self.weight.float())).to(x.dtype)


class WithoutMean(RootMeanSquare):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class AnotherEpsilon(RootMeanSquare):
    """The attribute is there and means something else."""

    def __init__(self):
        super().__init__()
        self.eps = 1e-6
        self.variance_epsilon = 1e-2

    def forward(self, x):
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class EpsilonOutside(RootMeanSquare):
    def forward(self, x):
        wide = x.float()
        return self.weight * (wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + 1e-3)).to(x.dtype)


class InGroups(RootMeanSquare):
    def forward(self, x):
        wide = x.float().unflatten(-1, (2, -1))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.flatten(-2).to(x.dtype)


class InFloat32(RootMeanSquare):
    def forward(self, x):
        return super().forward(x).float()


class Gated(RootMeanSquare):
    def forward(self, x, gate):
        return super().forward(x) * gate


class WithABuffer(RootMeanSquare):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(1))


class EpsilonInTheBuffer(RootMeanSquare):
    def __init__(self):
        super().__init__()
        self.variance_epsilon = torch.tensor(1e-6)


OTHERS = [OnePlusWeight, WithoutMean, AnotherEpsilon, EpsilonOutside, InGroups, InFloat32, Gated, WithABuffer]


def test_the_common_norm():
    module = RootMeanSquare()
    assert fuse_norm(module)
    assert isinstance(module, RootMeanSquare) and isinstance(module, FusedNorm)
    module.own_calls = 0
    for shape in ((64,), (1, 64), (3, 64), (1, 3, 64), (1, 1, 3, 64)):
        x = gaussian(*shape)
        found, expected = module(x), RootMeanSquare.forward(module, x)
        assert found.shape == shape
        assert torch.allclose(found.float(), expected.float(), rtol=2.0**-7, atol=0)
    assert module.own_calls == 5  # those for the comparison


@pytest.mark.parametrize("other", [*OTHERS, EpsilonInTheBuffer])
def test_other_norms_are_left_alone(other):
    module = other()
    assert not fuse_norm(module)
    assert type(module) is other


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(64, bias=False, dtype=torch.bfloat16),
        nn.LayerNorm(64, dtype=torch.bfloat16),
        nn.RMSNorm(64, dtype=torch.bfloat16),
        nn.RMSNorm(64, eps=1e-5),
        nn.Linear(64, 64, dtype=torch.bfloat16),
        nn.Embedding(64, 64, dtype=torch.bfloat16),
        nn.Identity(),
    ],
    ids=repr,
)
def test_modules_of_torch(module):
    assert not fuse_norm(module)


def called_natively(module, *args, **kwargs):
    module.own_calls = 0
    module(*args, **kwargs)
    return module.own_calls == 0


def test_calls_that_are_the_familys():
    module = RootMeanSquare()
    assert fuse_norm(module)
    assert called_natively(module, gaussian(3, 64))
    assert called_natively(module, gaussian(STEP_ROWS_MAX + 1, 64))
    assert not called_natively(module, gaussian(1, 64).float())
    assert not called_natively(module, gaussian(64, 3).T)  # not contiguous
    assert not called_natively(module, torch.empty((0, 64), dtype=torch.bfloat16))
    assert not called_natively(module, x=gaussian(3, 64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not called_natively(module, gaussian(3, 64))
    x = gaussian(3, 64).requires_grad_()
    assert not called_natively(module, x)
    assert module(x).requires_grad
    with torch.no_grad():
        assert called_natively(module, x)
    module.weight.requires_grad_()
    assert not called_natively(module, gaussian(3, 64))


def test_numbers_of_the_moment():
    module = RootMeanSquare()
    assert fuse_norm(module)
    x = gaussian(3, 64)
    for change in (
        lambda: setattr(module, "variance_epsilon", 3.0),
        lambda: module.weight.mul_(2),
        lambda: setattr(module, "weight", nn.Parameter(gaussian(64, seed=8), requires_grad=False)),
        lambda: setattr(module, "weight", nn.Parameter(gaussian(64, 2, seed=8)[:, 0], requires_grad=False)),
        lambda: setattr(module, "variance_epsilon", torch.tensor(0.5)),
    ):
        change()
        assert torch.allclose(module(x).float(), RootMeanSquare.forward(module, x).float(), rtol=2.0**-6, atol=0)


def test_a_weight_that_is_computed():
    module = RootMeanSquare()
    assert fuse_norm(module)

    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    x = gaussian(3, 64)
    before = module(x)
    nn.utils.parametrize.register_parametrization(module, "weight", Doubled())
    assert torch.allclose(module(x).float(), 2 * before.float(), rtol=2.0**-6, atol=0)


@pytest.mark.parametrize("shape", [(), (65,), (1, 63), (64, 1)])
def test_inputs_of_another_shape_are_the_familys(shape):
    module, own = RootMeanSquare(), RootMeanSquare()
    assert fuse_norm(module)
    x = torch.ones(shape, dtype=torch.bfloat16)
    try:
        expected = own(x)
    except (RuntimeError, IndexError) as error:
        with pytest.raises(type(error)):
            module(x)
    else:
        assert torch.equal(module(x), expected)
