"""ZipMoE: Mixture-of-Experts models bigger than memory, without changing a single weight bit.

Importing this package makes ``transformers.AutoModelForCausalLM.from_pretrained(packed_folder)`` work. It imports
neither torch nor Transformers itself. Imported before torch, it lets torch's threads sleep between products
(``openmp_waiting``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zipmoe import errors
from zipmoe._version import __version__
from zipmoe.hf import import_hook as _import_hook
from zipmoe.openmp_waiting import let_threads_sleep as _let_threads_sleep

if TYPE_CHECKING:
    from zipmoe.hf.configuration import ZipMoEConfig
    from zipmoe.hf.loading import load

__all__ = ["ZipMoEConfig", "__version__", "errors", "load"]

_LAZY = {"ZipMoEConfig": "zipmoe.hf.configuration", "load": "zipmoe.hf.loading"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


_let_threads_sleep()
_import_hook.install()
