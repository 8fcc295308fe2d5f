"""Whether ``torch.compile`` has a hand in a call: it traces what hooks do once, for the states that it sees then."""

from __future__ import annotations

import torch
from torch import nn


def is_compiled_call() -> bool:
    """Whether the code at hand is traced, or is run between the parts that are."""
    if torch.compiler.is_compiling():
        return True
    callback = torch._C._dynamo.eval_frame.get_eval_frame_callback()
    return callback is not None and callback is not False


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None
