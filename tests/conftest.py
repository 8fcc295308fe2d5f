"""Fixtures shared by all tests."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a suite that a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2-MoE checkpoint; treat it as read-only."""
    from tiny_checkpoint import save_tiny_checkpoint

    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny_source"))


@pytest.fixture(scope="session")
def tiny_packed(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tiny_source`` packed with FX3, small dense matrices included; treat it as read-only."""
    from zipmoe.codecs.codec_settings import CodecSettings
    from zipmoe.store.pack import pack

    folder = tmp_path_factory.mktemp("tiny_packed") / "model"
    pack(tiny_source, folder, CodecSettings("fx3", None, 1), jobs=1, min_dense_bytes=0)
    return folder


@pytest.fixture
def full_disk() -> Callable[[Path], None]:
    """Makes a file's disk full: what is written under its temporary name comes to a device that has no room."""
    from zipmoe.store.durable_files import partial_path

    def fill(path: Path) -> None:
        partial_path(path).symlink_to("/dev/full")

    return fill


@pytest.fixture(autouse=True)
def exact_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests compare bits with plain Transformers; those of the mode ``fast`` ask for it."""
    monkeypatch.setenv("ZIPMOE_MODE", "exact")
