"""Whether calling a module would do anything but its class's ``forward``."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module as torch_module


def is_quiet(module: Any) -> bool:
    """No hooks and no ``forward`` of its own: leaving its call out is not noticed by anybody."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def nobody_watches() -> bool:
    """No hooks on the calls of all modules."""
    return not (
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )
