"""Fixtures of the engine's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from packed_model import PackedModel, build

from zipmoe.engine.engine import Engine


@pytest.fixture
def model(tmp_path: Path) -> PackedModel:
    return build(tmp_path / "packed")


@pytest.fixture
def engine(model: PackedModel) -> Iterator[Engine]:
    """Four slots, two decoding threads."""
    with model.engine(4) as opened:
        yield opened
