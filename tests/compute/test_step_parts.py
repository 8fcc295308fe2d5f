"""Norms, routers and small linear layers of the native core against FP64, and ties against torch."""

from __future__ import annotations

import pytest
import torch

from zipmoe import _native

ROUNDING = 2.0**-8
"""Half a step between neighbouring BF16 values, relative to the smaller one, and a little for FP32."""


def words(tensor: torch.Tensor):
    return tensor.view(torch.uint16).numpy()


def gaussian(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


@pytest.mark.parametrize("size", [1, 5, 64, 2048, 4099])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_a_norm_is_rounded_once(size, scale):
    x, weight = gaussian(3, size, scale=scale), gaussian(size, seed=1)
    out = torch.empty_like(x)
    _native.rms_norm(words(x), words(weight), 1e-6, words(out))
    wide = x.double()
    expected = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    assert torch.all((out.double() - expected).abs() <= ROUNDING * 1.01 * expected.abs())


def test_a_norm_of_nothing_finite():
    x = gaussian(3, 16)
    x[0, 3], x[1, 3], x[2] = torch.nan, torch.inf, 0.0
    out = torch.empty_like(x)
    _native.rms_norm(words(x), words(torch.ones(16, dtype=torch.bfloat16)), 1e-6, words(out))
    expected = x.float() * (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert torch.equal(out.float(), expected) or torch.allclose(out.float(), expected, equal_nan=True)


@pytest.mark.parametrize("bad", [(2, 15, 2, 15), (2, 16, 3, 16), (2, 16, 2, 15)])
def test_norms_of_other_shapes_are_refused(bad):
    rows, size, out_rows, out_size = bad
    x, out = gaussian(rows, size), gaussian(out_rows, out_size)
    with pytest.raises(ValueError, match=r"norm|shape"):
        _native.rms_norm(words(x), words(gaussian(16)), 1e-6, words(out))


def routed(formula, x, matrix):
    logits = torch.empty((len(x), len(matrix)), dtype=torch.bfloat16)
    weights = torch.empty((len(x), formula.top_k))
    experts = torch.empty((len(x), formula.top_k), dtype=torch.int64)
    _native.route(formula, words(x), words(matrix), words(logits), weights.numpy(), experts.numpy())
    return logits, weights, experts


@pytest.mark.parametrize("experts, columns, top_k", [(8, 64, 3), (60, 2048, 4), (128, 256, 8), (512, 128, 10)])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalised", [False, True])
def test_routes(experts, columns, top_k, score, normalised):
    x, matrix = gaussian(5, columns), gaussian(experts, columns, seed=1, scale=0.1)
    logits, weights, ids = routed(_native.RouterFormula(score, top_k, normalised), x, matrix)
    exact = x.double() @ matrix.double().T
    slack = 1e-5 * exact.abs().amax(1, keepdim=True)
    assert torch.all((logits.double() - exact).abs() <= ROUNDING * exact.abs() + slack)
    scores = logits.double().softmax(-1) if score == "softmax" else logits.double().sigmoid()
    expected = scores.gather(1, ids)
    assert torch.equal(expected, scores.topk(top_k).values)
    expected = expected / expected.sum(-1, keepdim=True) if normalised else expected
    assert torch.allclose(weights.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "experts, top_k", [(2, 1), (8, 2), (8, 8), (60, 4), (64, 6), (128, 8), (128, 2), (128, 1), (256, 4), (512, 10)]
)
def test_equal_scores_come_in_the_order_of_torch(experts, top_k):
    """Whatever the number of distinct values: all equal, some equal, none."""
    for seed, values in enumerate((1, 2, 3, experts // 2, 1000)):
        drawn = torch.randint(0, max(values, 1), (3, experts), generator=torch.Generator().manual_seed(seed))
        # One column for each row of inputs: the logits are these values.
        matrix = (drawn.T / 8).bfloat16().contiguous()
        logits, _, ids = routed(
            _native.RouterFormula("softmax", top_k, False), torch.eye(3, dtype=torch.bfloat16), matrix
        )
        assert torch.equal(logits, matrix.T)
        assert torch.equal(ids, torch.topk(logits.float(), top_k).indices)


def test_large_logits_that_sigmoids_do_not_tell_apart():
    matrix = torch.tensor([[18.0], [30.0], [20.0], [-30.0]], dtype=torch.bfloat16)
    _, weights, ids = routed(
        _native.RouterFormula("sigmoid", 2, True), torch.ones((1, 1), dtype=torch.bfloat16), matrix
    )
    assert ids.tolist() == [[1, 2]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_formulas_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="unknown router score 'tanh'"):
        _native.RouterFormula("tanh", 1, False)
    for top_k in (0, 5):
        with pytest.raises(ValueError, match="so many experts"):
            routed(_native.RouterFormula("softmax", top_k, False), gaussian(1, 8), gaussian(4, 8))


@pytest.mark.parametrize("rows, columns", [(1, 2048), (3, 64), (130, 70), (1, 1)])
@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_small_linear_layers(rows, columns, tokens):
    weight, x, bias = gaussian(rows, columns, scale=0.1), gaussian(tokens, columns, seed=1), gaussian(rows, seed=2)
    for each in (None, bias):
        out = torch.empty((tokens, rows), dtype=torch.bfloat16)
        _native.small_linear(words(weight), words(x), words(out), None if each is None else words(each))
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if each is None else each.double())
        terms = x.double().abs() @ weight.double().abs().T
        assert torch.all((out.double() - exact).abs() <= ROUNDING * exact.abs() + 1e-6 * terms)


def test_small_linear_layers_of_other_shapes_are_refused():
    weight, x, out = gaussian(4, 8), gaussian(2, 8), gaussian(2, 4)
    for wrong in ((weight, gaussian(2, 7), out), (weight, x, gaussian(2, 5)), (weight, x, gaussian(1, 4))):
        with pytest.raises(ValueError):
            _native.small_linear(*(words(each) for each in wrong))
    with pytest.raises(ValueError, match="bias"):
        _native.small_linear(words(weight), words(x), words(out), words(gaussian(5)))
