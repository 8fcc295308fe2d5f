"""What, beside its class's ``forward``, a call of a module may run."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module as torch_module

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module: dicts of its hooks."""


def hooks_of_all_modules() -> tuple[dict[int, Any], ...]:
    """The dicts of the hooks on the calls of all modules."""
    return (
        torch_module._global_forward_hooks,
        torch_module._global_forward_pre_hooks,
        torch_module._global_backward_hooks,
        torch_module._global_backward_pre_hooks,
    )
