"""What lies between the matrices of an expert, found by asking the module: its own function on probe values is compared
with the native activations, so that no table of families is needed and none can be wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zipmoe import _native

_PROBE_WIDTH = 128
_PROBE_ROWS = 32
_LARGEST_STEP = 2.0**-7
"""One step between neighbouring BF16 values, relative to the smaller one."""
_EQUAL_SHARE = 0.95
_FUNCTIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "identity")
_QUICK_GELU_SCALE = 1.702


def native_network(module: Any, positions: Mapping[str, int]) -> _native.ExpertNetwork | None:
    """The network of an experts module of Transformers' experts interface, for the native core.

    Args:
        module: has ``has_gate``, ``has_bias``, ``is_transposed``, and ``_apply_gate`` or ``act_fn``.
        positions: of an expert's matrices in its record, by name.

    Returns:
        None if the native core has nothing that computes the same: biases, transposed matrices, another activation.
    """
    first = "gate_up_proj" if module.has_gate else "up_proj"
    if module.has_bias or module.is_transposed or not {first, "down_proj"} <= set(positions):
        return None
    activation = native_activation(module)
    if activation is None:
        return None
    return _native.ExpertNetwork(positions[first], positions["down_proj"], activation)


def native_activation(module: Any) -> _native.GatedActivation | None:
    """The native activation that agrees with ``module._apply_gate`` (or ``act_fn``) on probe values; None without."""
    generator = torch.Generator().manual_seed(0)
    width = 2 * _PROBE_WIDTH if module.has_gate else _PROBE_WIDTH
    scales = torch.logspace(-2, 1.5, _PROBE_ROWS).unsqueeze(1)
    probe = (torch.randn((_PROBE_ROWS, width), generator=generator) * scales).to(torch.bfloat16)
    try:
        with torch.inference_mode():
            expected = (module._apply_gate(probe) if module.has_gate else module.act_fn(probe)).to(torch.bfloat16)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None  # it needs more than these values: nothing that the native core could compute
    if expected.shape != (_PROBE_ROWS, _PROBE_WIDTH):
        return None
    for activation in _candidates(module):
        found = torch.empty_like(expected)
        activation.apply(probe.view(torch.uint16).numpy(), found.view(torch.uint16).numpy())
        if _agrees(found.float(), expected.float()):
            return activation
    return None


def _agrees(found: torch.Tensor, expected: torch.Tensor) -> bool:
    close = (found - expected).abs() <= _LARGEST_STEP * expected.abs() + torch.finfo(torch.bfloat16).tiny
    return bool(close.all()) and (found == expected).float().mean().item() >= _EQUAL_SHARE


def _candidates(module: Any) -> Iterator[_native.GatedActivation]:
    """Every activation of the native core, with the constants that the module and its parts carry."""
    layouts = ("halves", "interleaved") if module.has_gate else ("none",)
    holders = [module, *module.children()]
    limits = [math.inf, *_constants(holders, "limit")]
    scales = [1.0, _QUICK_GELU_SCALE, *_constants(holders, "alpha")]
    for layout, limit, offset, activated in itertools.product(layouts, limits, (0.0, 1.0), (False, True)):
        if activated and math.isinf(limit):
            continue
        for function in _FUNCTIONS:
            for scale in dict.fromkeys(scales if function == "silu" else [1.0]):
                yield _native.GatedActivation(
                    function, layout, sigmoid_scale=scale, limit=limit, limit_activated=activated, up_offset=offset
                )


def _constants(holders: list[Any], word: str) -> list[float]:
    values = [value for holder in holders for name, value in vars(holder).items() if word in name]
    return [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool) and v > 0]
