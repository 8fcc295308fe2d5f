"""Opens the engine of a model within its memory budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zipmoe.hf.configuration import ZipMoEConfig
from zipmoe.store.packed_folder import PackedFolder

if TYPE_CHECKING:
    from zipmoe.engine.engine import Engine


def open_engine(model: Any, folder: PackedFolder, settings: ZipMoEConfig, cache_bytes: int) -> Engine:
    """Open the engine."""
    from zipmoe.engine.engine import Engine

    return Engine(folder, None)
