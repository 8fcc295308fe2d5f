"""Experts modules that are called outside of a model, which would switch gradients off."""

from __future__ import annotations

import pytest
import torch
from native_steps import gaussian

import zipmoe
from zipmoe.errors import UnsupportedOperationError
from zipmoe.hf.configuration import ZipMoEConfig
from zipmoe.hf.experts_forward import PackedInterfaceExperts


@pytest.mark.parametrize("order", ["grouped_mm", "eager"])
@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_gradients_of_anything_are_refused(packed_model, family, mode, order):
    settings = ZipMoEConfig(memory="8GB", mode=mode)
    model = zipmoe.load(packed_model(family).folder, experts_implementation=order, quantization_config=settings)
    with model.zipmoe_engine:
        experts = next(module for module in model.modules() if isinstance(module, PackedInterfaceExperts))
        for rows in (1, 100):
            ids = torch.arange(3).expand(rows, 3)
            weights = torch.full((rows, 3), 0.25, dtype=torch.bfloat16)
            hidden = gaussian(rows, model.config.hidden_size)
            for inputs in (
                (hidden.clone().requires_grad_(), ids, weights),
                (hidden, ids, weights.clone().requires_grad_()),
                (hidden, ids, weights.float().requires_grad_()),
            ):
                with pytest.raises(UnsupportedOperationError, match="cannot be trained"):
                    experts(*inputs)
                with torch.no_grad():
                    assert experts(*inputs).shape == hidden.shape
