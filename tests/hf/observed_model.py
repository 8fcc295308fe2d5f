"""A model that leaves positions of its last layer out, and what its last experts are given."""

from __future__ import annotations

from typing import Any

import torch
from native_steps import load

PROMPT = torch.arange(2, 13).view(1, -1) * 17 % 250
PROMPTS = torch.cat([PROMPT, PROMPT.flip(1)])


class ObservedModel:
    """A model that has compared the block's results already, and what its last block is given."""

    def __init__(self, folder):
        self.model = load(folder)
        self.layer = self.model.model.layers[-1]
        self.left_out = self.model.zipmoe_last_positions
        self.rows = []
        experts = self.layer.mlp.experts
        original = experts_class(experts).forward

        def forward(module, hidden_states, *rest):
            if module is experts:
                self.rows.append(hidden_states.shape[0])
            return original(module, hidden_states, *rest)

        self.experts_forward = forward
        with torch.no_grad():
            self.model(input_ids=PROMPT, logits_to_keep=1)
        assert self.left_out.checked

    def __call__(self, *args, **kwargs):
        del self.rows[:]
        with torch.no_grad():
            return self.model(*args, **kwargs)


def experts_class(experts: Any) -> Any:
    """Of this package, whose ``forward`` the experts run: nobody looks whether that is patched."""
    return next(
        each for each in type(experts).__mro__ if each.__module__.startswith("zipmoe.") and "forward" in vars(each)
    )
