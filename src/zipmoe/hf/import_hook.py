"""Registers the plug-in as soon as Transformers' model loading is imported, whichever of the two is imported first.

Importing ``zipmoe`` must stay cheap (the command line starts with it), so that torch and Transformers are not imported
here.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_TARGET = "transformers.modeling_utils"
"""Imported before any model is loaded, and after everything that registration needs."""


def install() -> None:
    """Register now if Transformers can already load models, else when it can."""
    target = sys.modules.get(_TARGET)
    if target is not None and not getattr(target.__spec__, "_initializing", False):
        _register()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(MetaPathFinder):
    """Finds the target module as the other finders would, with a loader that registers afterwards.

    It stays until the module was imported: a program may ask where the module is long before.
    """

    def __init__(self) -> None:
        self._asking_others = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TARGET or self._asking_others:
            return None
        self._asking_others = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking_others = False
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader, self)
        return spec


class _RegisteringLoader(Loader):
    def __init__(self, loader: Loader, finder: _AfterImport) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        _register()


def _register() -> None:
    try:
        from zipmoe.hf.registration import register

        register()
    except Exception as error:
        # An import of Transformers must not fail because of a plug-in that this program may not even use. A packed
        # folder still refuses to load without it.
        warnings.warn(
            f"ZipMoE cannot register with Transformers, packed folders will not load: {error!r}", stacklevel=2
        )
