"""Shared by the tests of all families: one thread, and one saved checkpoint per family and session."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Folder of a family's tiny model as ``save_pretrained`` writes it (the hub's layout); made at first use."""
    root = tmp_path_factory.mktemp("checkpoints")

    def folder(family: str) -> Path:
        path = root / family
        if not path.exists():
            tiny_model(family).save_pretrained(path)
        return path

    yield folder
    shutil.rmtree(root)
