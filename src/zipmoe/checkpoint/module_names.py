"""Names of the packed model's modules, found again in a model that may lack or have the prefix of the base model."""

from __future__ import annotations

from typing import Any


class ModuleNames:
    """Module paths of one model (a PreTrainedModel, on the meta device or not)."""

    def __init__(self, model: Any) -> None:
        self._prefix = f"{model.base_model_prefix}."
        self._modules = {name for name, _ in model.named_modules(remove_duplicate=False)}

    def resolve(self, path: str) -> str | None:
        """The model's own path of the module that the manifest calls ``path``; None if it has no such module."""
        candidates = (path, path.removeprefix(self._prefix), self._prefix + path)
        return next((name for name in candidates if name in self._modules), None)
