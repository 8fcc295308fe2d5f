"""Which native activation a module's own function is: the right one is found whatever digits BF16 loses, and what only
resembles one never is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from zipmoe.hf.activation_recognition import Formula, recognise_activation
from zipmoe.hf.expert_network import native_network

Function = Callable[..., torch.Tensor]


def gated(function: Function, *, interleaved: bool = False, **constants: float) -> Any:
    """An experts module whose ``_apply_gate`` is ``function(gate, up)``."""

    def apply_gate(values: torch.Tensor) -> torch.Tensor:
        gate, up = (values[..., ::2], values[..., 1::2]) if interleaved else values.chunk(2, dim=-1)
        return function(gate, up)

    return with_constants(SimpleNamespace(has_gate=True, _apply_gate=apply_gate), constants)


def plain(function: Function, **constants: float) -> Any:
    """An experts module without a gate."""
    return with_constants(SimpleNamespace(has_gate=False, act_fn=function), constants)


def with_constants(module: Any, constants: dict[str, float]) -> Any:
    module.has_bias = module.is_transposed = False
    module.children = lambda: iter(())
    for name, value in constants.items():
        setattr(module, name, value)
    return module


def times_up(function: Function) -> Function:
    return lambda gate, up: function(gate) * up


def composed_swiglu(gate: torch.Tensor, up: torch.Tensor, *, limit: float, alpha: float, offset: float) -> torch.Tensor:
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return (up + offset) * (gate * torch.sigmoid(gate * alpha))


def oai(limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0) -> Function:
    return lambda gate, up: composed_swiglu(gate, up, limit=limit, alpha=alpha, offset=offset)


def gelu_of_operations(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def clamped_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(gate.clamp(max=3.0)) * up.clamp(min=-3.0, max=3.0)


def silu_then_clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(gate).clamp(max=3.0) * up.clamp(min=-3.0, max=3.0)


KNOWN = {
    "silu": (gated(times_up(functional.silu)), Formula("silu", "halves")),
    "gelu": (gated(times_up(functional.gelu)), Formula("gelu", "halves")),
    "gelu_tanh in torch": (gated(times_up(ACT2FN["gelu_pytorch_tanh"])), Formula("gelu_tanh", "halves")),
    "gelu_tanh of operations": (gated(times_up(gelu_of_operations)), Formula("gelu_tanh", "halves")),
    "quick_gelu": (gated(times_up(ACT2FN["quick_gelu"])), Formula("silu", "halves", sigmoid_scale=1.702)),
    "interleaved": (gated(times_up(functional.silu), interleaved=True), Formula("silu", "interleaved")),
    "no rounding before the product": (
        gated(lambda gate, up: (functional.silu(gate.float()) * up.float()).to(gate.dtype)),
        Formula("silu", "halves", rounds_between=False),
    ),
    "composed of operations": (
        gated(oai(), swiglu_limit=7.0, swiglu_alpha=1.702),
        Formula("silu", "halves", sigmoid_scale=1.702, limit=7.0, up_offset=1.0),
    ),
    "the same interleaved": (
        gated(oai(), interleaved=True, limit=7.0, alpha=1.702),
        Formula("silu", "interleaved", sigmoid_scale=1.702, limit=7.0, up_offset=1.0),
    ),
    "clamped": (gated(clamped_silu, limit=3.0), Formula("silu", "halves", limit=3.0)),
    "clamped behind": (gated(silu_then_clamped, limit=3.0), Formula("silu", "halves", limit=3.0, limit_activated=True)),
    "relu": (plain(functional.relu), Formula("relu", "none")),
    "relu squared": (plain(ACT2FN["relu2"]), Formula("relu2", "none")),
    "gelu without a gate": (plain(functional.gelu), Formula("gelu", "none")),
    "identity": (plain(lambda x: x), Formula("identity", "none")),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_functions_are_found(name: str) -> None:
    module, formula = KNOWN[name]
    assert recognise_activation(module) == formula


def scaled_silu(scale: float) -> Function:
    return times_up(lambda gate: gate * torch.sigmoid(scale * gate))


NEAR_MISSES = {
    "silu of another scale": gated(scaled_silu(1.01)),
    "quick_gelu of another scale": gated(scaled_silu(1.7)),
    "a thousandth too large": gated(lambda gate, up: 1.001 * functional.silu(gate) * up),
    "gelu_tanh of another constant": gated(
        times_up(lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.0447 * x**3))))
    ),
    "gelu clipped": gated(times_up(ACT2FN["gelu_10"])),
    "mish": gated(times_up(functional.mish)),
    "hardswish": gated(times_up(functional.hardswish)),
    "leaky relu": plain(lambda x: functional.leaky_relu(x, 1e-4)),
    "relu6": plain(functional.relu6),
    "relu clipped far out": plain(lambda x: functional.relu(x).clamp(max=1e6)),
    "a clamp of the gate that shows at large values only": gated(
        lambda gate, up: functional.silu(gate.clamp(max=1e4)) * up
    ),
    "a clamp of up that shows at large values only": gated(
        lambda gate, up: functional.silu(gate) * up.clamp(min=-1e4, max=1e4)
    ),
    "a limit that the module does not carry": gated(clamped_silu),
    "another limit than the module carries": gated(clamped_silu, limit=3.03),
    "a limit for the gate only": gated(lambda gate, up: functional.silu(gate.clamp(max=3.0)) * up, limit=3.0),
    "a limit for up only": gated(lambda gate, up: functional.silu(gate) * up.clamp(min=-3.0, max=3.0), limit=3.0),
    "a limit for up from above only": gated(
        lambda gate, up: functional.silu(gate.clamp(max=3.0)) * up.clamp(max=3.0), limit=3.0
    ),
    "a limit for the gate from below too": gated(
        lambda gate, up: functional.silu(gate.clamp(min=-3.0, max=3.0)) * up.clamp(min=-3.0, max=3.0), limit=3.0
    ),
    "another offset": gated(oai(offset=1.001), limit=7.0, alpha=1.702),
    "half the offset": gated(oai(offset=0.5), limit=7.0, alpha=1.702),
    "another alpha than the module carries": gated(oai(alpha=1.71), limit=7.0, alpha=1.702),
    "an offset before the function": gated(lambda gate, up: functional.silu(gate + 2.0**-8) * up),
    "gate and up exchanged and clamped": gated(
        lambda gate, up: functional.silu(up.clamp(max=3.0)) * gate.clamp(min=-3.0, max=3.0), limit=3.0
    ),
    "gate and up exchanged": gated(lambda gate, up: functional.silu(up) * gate),
    "one value for a row": gated(lambda gate, up: functional.silu(gate) * up.mean(dim=-1, keepdim=True)),
    "a function of two arguments": gated(torch.atan2),
    "more values": gated(lambda gate, up: torch.cat([gate, up], -1)),
    "a function that fails": gated(lambda gate, up: gate.reshape(3, -1, 7) * up),
    "tuned by a parameter": plain(nn.PReLU(dtype=torch.bfloat16)),
    "xielu": plain(ACT2FN["xielu"]),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_only_resembles_a_function_is_refused(name: str) -> None:
    assert recognise_activation(NEAR_MISSES[name]) is None


def test_gelu_and_its_approximation_are_told_apart() -> None:
    for function, expected in ((functional.gelu, "gelu"), (ACT2FN["gelu_pytorch_tanh"], "gelu_tanh")):
        found = recognise_activation(plain(function))
        assert found is not None and found.function == expected


def test_a_module_that_rounds_better_than_the_kernels_is_refused() -> None:
    """Exact to the last digit where the kernels round f(gate) and the product: errors would be larger than plain's."""

    def exact(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return functional.silu(gate.double()) * up.double()

    found = recognise_activation(gated(lambda gate, up: exact(gate, up).to(gate.dtype)))
    assert found == Formula("silu", "halves", rounds_between=False)


def test_the_reason_for_decoding_is_given() -> None:
    positions = {"gate_up_proj": 0, "down_proj": 1}
    module = gated(times_up(functional.silu))
    assert not isinstance(native_network(module, positions), str)
    assert native_network(module, {"down_proj": 0}) == "they have other matrices"
    module.has_bias = True
    assert native_network(module, positions) == "they have biases"
    module.is_transposed = True
    assert native_network(module, positions) == "their matrices are stored transposed"
    assert native_network(NEAR_MISSES["mish"], positions) == "the kernels do not know their activation"
