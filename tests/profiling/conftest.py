"""Small packed folders, and a cache of each test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from zipmoe.store.packed_folder import PackedFolder


@pytest.fixture(scope="session")
def zstd_packed(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model packed with zstd in two shards; treat it as read-only."""
    from zipmoe.store.manifest import CodecSettings
    from zipmoe.store.pack import pack

    folder = tmp_path_factory.mktemp("zstd_packed") / "model"
    pack(tiny_source, folder, CodecSettings("zstd", "huf", 2), jobs=1, min_dense_bytes=0)
    return folder


@pytest.fixture
def zstd_folder(zstd_packed: Path) -> PackedFolder:
    return PackedFolder.open(zstd_packed)


@pytest.fixture
def fx3_folder(tiny_packed: Path) -> PackedFolder:
    return PackedFolder.open(tiny_packed)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, for this test alone."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache
