"""The one object that all packed modules of a model share: which engine serves them.

Modules are replaced before the weights are loaded, the engine is opened when their number of bytes is known: the slot
is what the modules can hold in the meantime.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from zipmoe.engine.engine import Engine
from zipmoe.errors import UnsupportedOperationError

EXACT_DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes that hold every BF16 weight exactly; packed weights are computed with in one of them."""


class EngineSlot:
    """Where the modules of one model find its engine."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._groups: dict[str, Any] = {}

    def open(self, engine: Engine) -> None:
        """Let ``engine`` serve the modules from now on."""
        self._engine = engine
        self._groups.clear()

    @property
    def engine(self) -> Engine:
        """The engine; UnsupportedOperationError while the model is still being loaded."""
        if self._engine is None:
            raise UnsupportedOperationError(
                "a packed weight was asked for before the model was completely loaded",
                hint="use the model that from_pretrained returns",
            )
        return self._engine

    def group(self, path: str) -> Any:
        """The engine's handle of the expert group ``path`` (a path of the manifest)."""
        handle = self._groups.get(path)
        if handle is None:
            handle = self._groups[path] = self.engine.group(path)
        return handle

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()


def refuse_copy() -> NoReturn:
    """Raise UnsupportedOperationError: what ``copy.deepcopy`` and ``pickle`` of packed objects do."""
    raise UnsupportedOperationError(
        "a packed model cannot be copied or pickled: its weights live in the memory that one engine owns",
        hint="load the folder a second time; to store it, use model.save_pretrained(folder)",
    )


def refuse_gradients(inputs: torch.Tensor) -> None:
    """Raise UnsupportedOperationError if autograd would record an operation on ``inputs``.

    Decoded weights live in scratch that the next layer overwrites; a backward pass would read wrong values.
    """
    if inputs.requires_grad and torch.is_grad_enabled():
        raise UnsupportedOperationError(
            "a packed model cannot be trained: gradients would need weights that are decoded for one operation only",
            hint="run it under torch.no_grad(), or train the original checkpoint",
        )
