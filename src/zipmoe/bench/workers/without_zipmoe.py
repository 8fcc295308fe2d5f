"""Runs a worker under an interpreter that has its engine but not ZipMoE, nor what ZipMoE needs.

    python without_zipmoe.py MODULE

The folders of ``zipmoe``, ``zipmoe.bench`` and ``zipmoe.bench.workers`` become importable as they are, and what ZipMoE
does when it is imported is left out: workers that run like this import only one another.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType

_WORKERS = Path(__file__).resolve().parent
_PACKAGES = {"zipmoe": _WORKERS.parents[1], "zipmoe.bench": _WORKERS.parent, "zipmoe.bench.workers": _WORKERS}


def main() -> None:
    """Run the module as a program."""
    sys.path.remove(str(_WORKERS))
    for name, folder in _PACKAGES.items():
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    runpy.run_module(f"zipmoe.bench.workers.{sys.argv[1]}", run_name="__main__")


if __name__ == "__main__":
    main()
