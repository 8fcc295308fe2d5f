"""The network of an experts module for the native core: which matrices, which activation between them, or why it has to
be decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zipmoe import _native
from zipmoe.hf.activation_recognition import recognise_activation


def native_network(module: Any, positions: Mapping[str, int]) -> _native.ExpertNetwork | str:
    """The network of an experts module of Transformers' experts interface.

    Args:
        module: has ``has_gate``, ``has_bias``, ``is_transposed``, and ``_apply_gate`` or ``act_fn``.
        positions: of an expert's matrices in its record, by name.

    Returns:
        The reason, for people, if the native core has nothing that computes the same.
    """
    first = "gate_up_proj" if module.has_gate else "up_proj"
    if module.is_transposed:
        return "their matrices are stored transposed"
    if module.has_bias:
        return "they have biases"
    if not {first, "down_proj"} <= set(positions):
        return "they have other matrices"
    formula = recognise_activation(module)
    if formula is None:
        return "the kernels do not know their activation"
    return _native.ExpertNetwork(positions[first], positions["down_proj"], formula.activation())
