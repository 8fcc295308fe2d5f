"""Which decoder layers the native core has computed in one call, and how to have them computed part by part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from zipmoe.engine.fused_compute import FusedCompute, LayerStep
from zipmoe.hf.fused_layer import FusedLayer
from zipmoe.hf.fused_norm import FusedNorm


class NativeLayers:
    """Notes the layers of steps of one token from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # The layers' norms stand for them; they are kept, so that no other object gets their address.
        self._whole: dict[int, Any] = {}
        self._first_halves: dict[int, Any] = {}
        layers, first_half = FusedCompute.layers, FusedCompute.attention_in_layer

        def noted_layers(compute: FusedCompute, steps: Sequence[LayerStep], *args: Any) -> torch.Tensor:
            self._whole |= {id(step.norms): step.norms for step in steps}
            return layers(compute, steps, *args)

        def noted_first_half(compute: FusedCompute, norms: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            self._first_halves[id(norms)] = norms
            return first_half(compute, norms, *args)

        monkeypatch.setattr(FusedCompute, "layers", noted_layers)
        monkeypatch.setattr(FusedCompute, "attention_in_layer", noted_first_half)

    @property
    def counts(self) -> tuple[int, int]:
        """Layers that were computed as a whole, and those of which the first half was."""
        return len(self._whole), len(self._first_halves)

    def forget(self) -> None:
        """Begin anew."""
        self._whole.clear()
        self._first_halves.clear()


def logits_of_steps(model: Any, inputs: dict[str, torch.Tensor], steps: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of a prompt and of ``steps`` after it, each (sequences, 1) tokens. Nobody watches, so nothing need be called."""
    found, cache = [], None
    with torch.no_grad():
        for each in [inputs, *({"input_ids": step} for step in steps)]:
            torch.manual_seed(0)
            output = model(**each, use_cache=True, **({} if cache is None else {"cache": cache}))
            cache = output.cache
            found.append(output.logits)
    return found


@contextlib.contextmanager
def computed_in_parts(model: Any) -> Iterator[None]:
    """Calls of the layers' norms are watched here, so none may be left out; the norms themselves stay native."""
    hooks = [
        child.register_forward_hook(_do_nothing)
        for layer in model.modules()
        if isinstance(layer, FusedLayer)
        for child in layer.children()
        if isinstance(child, FusedNorm)
    ]
    yield
    for hook in hooks:
        hook.remove()


def _do_nothing(*_: Any) -> None:
    pass
