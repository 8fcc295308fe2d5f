"""Experts' networks in the native core: activations, rounding where Transformers rounds, layouts of gate and up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from zipmoe import _native
from zipmoe.codecs import fx3, fx3_gemv

INFINITE = math.inf


def words(*shape: int, seed: int, deviation: float = 1.0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * np.float32(deviation)
    return fx3_gemv.round_to_bfloat16(values)


def tensor(patterns: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(patterns).view(torch.bfloat16)


@dataclass(frozen=True)
class Setting:
    """Arguments of GatedActivation, and the same in Transformers' terms on [tokens, 2 * n] or [tokens, n]."""

    function: str
    layout: str
    reference: Callable[[torch.Tensor], torch.Tensor]
    sigmoid_scale: float = 1.0
    limit: float = INFINITE
    limit_activated: bool = False
    up_offset: float = 0.0
    rounds_between: bool = True

    def native(self) -> _native.GatedActivation:
        return _native.GatedActivation(
            self.function,
            self.layout,
            sigmoid_scale=self.sigmoid_scale,
            limit=self.limit,
            limit_activated=self.limit_activated,
            up_offset=self.up_offset,
            rounds_between=self.rounds_between,
        )


def gated(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return function(gate) * up

    return apply


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=1.0), up.clamp(min=-1.0, max=1.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def gpt_oss(gate_up: torch.Tensor) -> torch.Tensor:
    return clamped_swiglu(gate_up[..., ::2], gate_up[..., 1::2])


def deepseek_v4(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate.clamp(max=0.5)) * up.clamp(min=-0.5, max=0.5)


def step3p7(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).clamp(max=0.5) * up.clamp(min=-0.5, max=0.5)


def relu2(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square()


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


SETTINGS = {
    "SwiGLU": Setting("silu", "halves", gated(functional.silu)),
    "GeGLU": Setting("gelu", "halves", gated(functional.gelu)),
    "GeGLU, tanh": Setting("gelu_tanh", "halves", gated(gelu_tanh)),
    "ReGLU": Setting("relu", "halves", gated(functional.relu)),
    "quick GELU": Setting("silu", "halves", gated(quick_gelu), sigmoid_scale=1.702),
    "bilinear": Setting("identity", "halves", gated(lambda gate: gate)),
    "gpt_oss": Setting("silu", "interleaved", gpt_oss, sigmoid_scale=1.702, limit=1.0, up_offset=1.0),
    "minimax_m3": Setting(
        "silu", "halves", lambda both: clamped_swiglu(*both.chunk(2, -1)), sigmoid_scale=1.702, limit=1.0, up_offset=1.0
    ),
    "deepseek_v4": Setting("silu", "halves", deepseek_v4, limit=0.5),
    "step3p7": Setting("silu", "halves", step3p7, limit=0.5, limit_activated=True),
    "interleaved SwiGLU": Setting("silu", "interleaved", lambda b: functional.silu(b[..., ::2]) * b[..., 1::2]),
    "GELU": Setting("gelu", "none", functional.gelu),
    "ReLU": Setting("relu", "none", functional.relu),
    "squared ReLU": Setting("relu2", "none", relu2),
}


@dataclass(frozen=True)
class Expert:
    first: np.ndarray
    down: np.ndarray
    x: np.ndarray
    first_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None

    @classmethod
    def random(cls, setting: Setting, intermediate: int, hidden: int, tokens: int, *, bias: bool = False) -> Expert:
        rows = intermediate if setting.layout == "none" else 2 * intermediate
        return cls(
            words(rows, hidden, seed=1, deviation=hidden**-0.5),
            words(hidden, intermediate, seed=2, deviation=intermediate**-0.5),
            words(tokens, hidden, seed=3),
            words(rows, seed=4) if bias else None,
            words(hidden, seed=5) if bias else None,
        )

    def reference(self, setting: Setting, dtype: torch.dtype) -> torch.Tensor:
        def linear(x: torch.Tensor, weight: np.ndarray, bias: np.ndarray | None) -> torch.Tensor:
            return functional.linear(x, tensor(weight).to(dtype), None if bias is None else tensor(bias).to(dtype))

        activated = setting.reference(linear(tensor(self.x).to(dtype), self.first, self.first_bias))
        return linear(activated, self.down, self.down_bias)

    def compute(
        self,
        activation: _native.GatedActivation,
        threads: _native.ComputeThreads,
        *,
        form: str = "packed",
        dtype: type = np.float32,
        instruction_set: str = "",
    ) -> np.ndarray:
        def matrix(weights: np.ndarray, bias: np.ndarray | None) -> tuple[np.ndarray, int, int, np.ndarray | None]:
            data = weights.ravel() if form == "raw" else fx3.encode(weights, raw_fallback=False)
            return (np.ascontiguousarray(data), *weights.shape, bias)

        out = np.empty((len(self.x), len(self.down)), dtype)
        half = len(self.first) // 2
        if form == "apart":
            biases = (None, None) if self.first_bias is None else (self.first_bias[:half], self.first_bias[half:])
            first = [matrix(self.first[:half], biases[0]), matrix(self.first[half:], biases[1])]
        else:
            first = [matrix(self.first, self.first_bias)]
        matrices = [*first, matrix(self.down, self.down_bias)]
        _native.compute_experts([(matrices, self.x, out)], activation, threads, instruction_set=instruction_set)
        return out


@pytest.fixture(scope="module")
def threads() -> _native.ComputeThreads:
    return _native.ComputeThreads(2)


def rounded(values: np.ndarray) -> np.ndarray:
    return fx3_gemv.to_float(fx3_gemv.round_to_bfloat16(values))


def activated(setting: Setting, values: np.ndarray) -> np.ndarray:
    result = values.ravel().copy()
    _native.activate(setting.function, setting.sigmoid_scale, result)
    return rounded(result.reshape(values.shape))


def step_by_step(setting: Setting, expert: Expert) -> np.ndarray:
    """The documented roundings, with the reference of the products and the native activation function."""

    def project(weights: np.ndarray, x: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        sums = fx3_gemv.multiply(weights, x)
        return sums if bias is None else sums + fx3_gemv.to_float(bias)

    both = rounded(project(expert.first, expert.x, expert.first_bias))
    limit = np.float32(setting.limit)
    if setting.layout == "none":
        middle = activated(setting, both)
    else:
        half = both.shape[1] // 2
        interleaved = setting.layout == "interleaved"
        gate, up = (both[:, ::2], both[:, 1::2]) if interleaved else (both[:, :half], both[:, half:])
        gate = gate if setting.limit_activated else np.minimum(gate, limit)
        gate = np.minimum(activated(setting, gate), limit if setting.limit_activated else np.float32(INFINITE))
        middle = gate * rounded(np.clip(up, -limit, limit) + np.float32(setting.up_offset))
    return project(expert.down, fx3_gemv.round_to_bfloat16(middle), expert.down_bias)


@pytest.mark.parametrize("label", SETTINGS)
def test_every_step_rounds_where_it_is_documented(label: str, threads: _native.ComputeThreads) -> None:
    setting = SETTINGS[label]
    for shape, tokens in (((96, 128), 1), ((333, 70), 3), ((333, 70), 9), ((1, 1), 2), ((5, 65), 4), ((20, 30), 51)):
        expert = Expert.random(setting, *shape, tokens, bias=shape == (333, 70))
        expected = step_by_step(setting, expert)
        for instruction_set in _native.instruction_sets():
            for form in ("packed", "raw"):
                found = expert.compute(setting.native(), threads, form=form, instruction_set=instruction_set)
                assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("label", SETTINGS)
@pytest.mark.parametrize("tokens", [3, 17])
def test_the_error_is_no_larger_than_transformers(tokens: int, label: str, threads: _native.ComputeThreads) -> None:
    setting = SETTINGS[label]
    expert = Expert.random(setting, 704, 1024, tokens)
    exact = expert.reference(setting, torch.float64).numpy()
    plain = expert.reference(setting, torch.bfloat16).double().numpy()
    ours = fx3_gemv.to_float(expert.compute(setting.native(), threads, dtype=np.uint16)).astype(np.float64)
    scale = np.sqrt(np.mean(exact**2))
    assert np.sqrt(np.mean((ours - exact) ** 2)) <= 1.02 * np.sqrt(np.mean((plain - exact) ** 2))
    assert np.abs(ours - plain).max() <= 0.04 * scale  # each of them is up to half as far from the exact values


def test_gate_and_up_may_be_apart(threads: _native.ComputeThreads) -> None:
    setting = SETTINGS["SwiGLU"]
    for intermediate in (96, 333):
        expert = Expert.random(setting, intermediate, 130, 3, bias=True)
        together = expert.compute(setting.native(), threads)
        assert np.array_equal(expert.compute(setting.native(), threads, form="apart"), together)


def test_the_number_of_threads_does_not_matter() -> None:
    for label in ("SwiGLU", "gpt_oss", "ReLU"):
        for tokens in (14, 53):
            expert = Expert.random(SETTINGS[label], 711, 500, tokens)
            results = [expert.compute(SETTINGS[label].native(), _native.ComputeThreads(n)) for n in (1, 2, 3, 4)]
            for result in results[1:]:
                assert np.array_equal(result, results[0])


def test_a_row_of_inputs_has_its_result_whatever_others_there_are(threads: _native.ComputeThreads) -> None:
    for label in ("SwiGLU", "gpt_oss", "ReLU"):
        expert = Expert.random(SETTINGS[label], 131, 200, 150)
        together = expert.compute(SETTINGS[label].native(), threads)
        for begin, end in ((0, 3), (3, 15), (15, 34), (34, 55), (55, 150)):
            part = replace(expert, x=expert.x[begin:end])
            assert np.array_equal(part.compute(SETTINGS[label].native(), threads), together[begin:end])


def test_several_experts_at_once_are_each_computed_alone(threads: _native.ComputeThreads) -> None:
    setting = SETTINGS["SwiGLU"]
    experts = [Expert.random(setting, 40 + 60 * i, 130, tokens) for i, tokens in enumerate((1, 60, 3, 7, 16))]
    calls = []
    for expert in experts:
        matrices = [(fx3.encode(w, raw_fallback=False), *w.shape, None) for w in (expert.first, expert.down)]
        calls.append((matrices, expert.x, np.empty((len(expert.x), 130), np.float32)))
    _native.compute_experts(calls, setting.native(), threads)
    for expert, (_, _, out) in zip(experts, calls, strict=True):
        assert np.array_equal(out, expert.compute(setting.native(), threads))
    _native.compute_experts([], setting.native(), threads)


REFERENCES: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: x / (1 + math.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "identity": lambda x: x,
}


@pytest.mark.parametrize("label", SETTINGS)
def test_evaluation_rounds_nothing(label: str) -> None:
    """And so the function itself can be told: fp32 errors of the formula are far below a step of BF16."""
    setting = SETTINGS[label]
    values = words(8, 2 * 200, seed=6, deviation=2.0)
    count = 400 if setting.layout == "none" else 200
    found = np.empty((8, count), np.float32)
    setting.native().evaluate(values, found)
    expected = setting.reference(tensor(values).double()).numpy()
    assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max()
    assert (np.abs(found - expected) <= 1e-4 * np.abs(expected) + 1e-7).all()


@pytest.mark.parametrize("label", SETTINGS)
def test_without_rounding_between_only_the_result_is_rounded(label: str) -> None:
    setting = SETTINGS[label]
    values = words(8, 2 * 200, seed=7, deviation=2.0)
    count = 400 if setting.layout == "none" else 200
    unrounded, once, between = (np.empty((8, count), dtype) for dtype in (np.float32, np.uint16, np.uint16))
    setting.native().evaluate(values, unrounded)
    replace(setting, rounds_between=False).native().apply(values, once)
    setting.native().apply(values, between)
    assert (once == fx3_gemv.round_to_bfloat16(unrounded)).all()
    if setting.layout != "none" and label not in ("ReGLU", "bilinear"):  # of these f(gate) has no digits to lose
        assert (once != between).any()


@pytest.mark.parametrize("function", REFERENCES)
def test_accuracy_of_activation_functions(function: str) -> None:
    """Over every finite BF16 value between -8 and 80."""
    values = fx3_gemv.to_float(np.arange(1 << 16, dtype=np.uint16))
    values = values[(values >= -8) & (values < 80)]
    exact = np.array([REFERENCES[function](float(value)) for value in values])
    found = values.copy()
    _native.activate(function, 1.0, found)
    # Far below what rounding to BF16 takes, .002. Only the far tail of erf is not known as well in relative terms.
    checked = (np.abs(exact) > 2.0**-125) & ((values > -6) | (function != "gelu"))
    assert (np.abs(found[checked] - exact[checked]) / np.abs(exact[checked])).max() < 1e-4
    assert np.abs(found - exact)[values < 8].max() < 2e-6


@pytest.mark.parametrize("function", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_activation_functions_far_out(function: str) -> None:
    values = np.array([-3e38, -1e4, -200.0, -0.0, 0.0, 200.0, 1e4, 1e19, np.inf, np.nan], np.float32)
    found = values.copy()
    _native.activate(function, 1.0, found)
    assert np.all(np.abs(found[:5]) < 1e-30)
    positive = values[5:8] ** 2 if function == "relu2" else values[5:8]
    assert np.allclose(found[5:8], positive, rtol=1e-6)
    assert found[8] == np.inf
    assert np.isnan(found[9])


@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        ("halves", [(20, 30), (40, 20)]),
        ("halves", [(40, 30), (40, 19)]),
        ("none", [(40, 30), (40, 20)]),
        ("none", [(20, 30), (20, 30), (40, 20)]),
        ("halves", [(20, 30), (20, 31), (40, 20)]),
        ("halves", [(20, 30), (19, 30), (40, 20)]),
        ("halves", [(40, 31), (40, 20)]),
        ("halves", [(40, 20)]),
    ],
)
def test_matrices_that_do_not_fit_are_refused(
    layout: str, shapes: list[tuple[int, int]], threads: _native.ComputeThreads
) -> None:
    matrices = [(np.zeros(rows * columns, np.uint16), rows, columns, None) for rows, columns in shapes]
    activation = _native.GatedActivation("silu", layout)
    with pytest.raises(ValueError):
        _native.compute_experts(
            [(matrices, np.zeros((1, 30), np.uint16), np.zeros((1, 40), np.float32))], activation, threads
        )


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="activation function 'swish9'"):
        _native.GatedActivation("swish9", "halves")
    with pytest.raises(ValueError, match="gate layout 'thirds'"):
        _native.GatedActivation("silu", "thirds")
