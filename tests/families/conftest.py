"""Shared by the tests of all families: one thread, and one saved and packed checkpoint per family and session."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.store.pack import pack

torch.set_num_threads(1)

Folder = Callable[[str], Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    """Folder of a family's tiny model as ``save_pretrained`` writes it (the hub's layout); made at first use."""
    root = tmp_path_factory.mktemp("checkpoints")

    def folder(family: str) -> Path:
        path = root / family
        if not path.exists():
            tiny_model(family).save_pretrained(path)
        return path

    yield folder
    shutil.rmtree(root)


@pytest.fixture(scope="session")
def packed(
    checkpoint: Folder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, CodecSettings], Path]]:
    """Folder of a family's packed model, its dense matrices included whatever their size; made at first use."""
    root = tmp_path_factory.mktemp("packed")

    def folder(family: str, settings: CodecSettings) -> Path:
        path = root / f"{family}-{settings.name}"
        if not path.exists():
            pack(checkpoint(family), path, settings, jobs=1, min_dense_bytes=0)
        return path

    yield folder
    shutil.rmtree(root)
