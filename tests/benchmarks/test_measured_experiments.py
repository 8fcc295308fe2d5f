"""The measured experiments run, count and check what they say; their times mean nothing on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import offline_time
import page_cache_isolation
import pytest
import shards_and_workers

from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.codecs.registry import settings_from_options
from zipmoe.store.pack import pack
from zipmoe.store.packed_folder import PackedFolder


def test_every_operating_point_packs_and_is_compared(tiny_source: Path, tmp_path: Path) -> None:
    offline_time.warm(tiny_source)
    points: dict[str, Any] = {}
    for label in ("fx3", "zstd-huf", "lz4hc-9"):
        settings = settings_from_options(*offline_time.POINTS[label])
        found = offline_time.one_pack(tiny_source, tmp_path / "packed", settings, jobs=1)
        assert not (tmp_path / "packed").exists()
        assert found["matrices_compared"] > 0
        assert found["source_bytes"] > 0
        points[label] = {"rounds": [found]}
    assert len({point["rounds"][0]["matrices_compared"] for point in points.values()}) == 1
    table = offline_time.tables_of(points)
    assert f"{points['fx3']['rounds'][0]['matrices_compared']} matrices equal" in table
    assert "lz4 |" not in table


def test_engines_of_all_shards_serve_the_same_requests(tiny_source: Path, tmp_path: Path) -> None:
    folders = {}
    for shards in (1, 2):
        path = tmp_path / str(shards)
        pack(tiny_source, path, CodecSettings("zstd", 3, shards), jobs=1, min_dense_bytes=0)
        folders[shards] = PackedFolder.open(path)
    found = shards_and_workers.measured(folders, (1, 2), rounds=2, requests=6)
    assert list(found) == [f"K={k}, {threads}" for k in (1, 2) for threads in ("1 thread", "2 threads")]
    assert all(len(rounds) == 2 for rounds in found.values())
    assert len({one["hit_rate"] for rounds in found.values() for one in rounds[:1]}) == 1
    assert all(one["layer_seconds"] > 0 for rounds in found.values() for one in rounds)
    assert "| K=2 |" in shards_and_workers.tables_of([], found)


def test_requests_are_distinct_and_in_range() -> None:
    requests = shards_and_workers.routing(experts=6, layers=3, requests=12)
    assert [layer for layer, _ in requests] == [0, 1, 2] * 4
    assert all(len(set(ids)) == 4 and set(ids) <= set(range(6)) for _, ids in requests)
    assert requests == shards_and_workers.routing(experts=6, layers=3, requests=12)


def _run(tpot: float, device_bytes: int) -> dict[str, Any]:
    return {
        "tpot_seconds": tpot,
        "ttft_seconds": 1.0,
        "hit_rate": 0.5,
        "asked_bytes": 3_000_000_000,
        "asked_bytes_per_token": 20_000_000.0,
        "device_read_bytes": device_bytes,
        "peak_bytes": 1_900_000_000,
        "peak_cache_bytes": 100_000_000,
        "oom_kills": 0,
    }


def test_direct_and_buffered_runs_are_compared_round_by_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = page_cache_isolation.prompt_ids(640)
    assert len(ids) == 64 and all(number % 64 == 7 and number < 640 for number in ids)
    runs = {"auto": [_run(0.1, 1), _run(0.2, 1)], "buffered": [_run(0.2, 1), _run(0.2, 1)]}
    case = {"codec": "fx3", "share": 0.25, "limit_bytes": 2_000_000_000, "runs": runs}
    table = page_cache_isolation.tables_of({"fx3 0.25": case})
    assert "| fx3 | 25% (2.00 GB) | direct | 150 | 1 | 1.00 | 50.0% | 1.90 | 0.10 | 20 |" in table
    assert "| buffered | 200 | 1.50 |" in table

    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 640}))
    seen: list[list[str]] = []

    def fake(tools: Path, memory: int, command: list[str], evict: Path) -> tuple[dict[str, Any], str, str]:
        seen.append(command)
        asked = {
            "tpot_seconds": 0.1,
            "ttft_seconds": 1.0,
            "hit_rate": 0.5,
            "read_bytes": 5,
            "read_bytes_per_token": 1.0,
        }
        figures = {"rc": 0, "read_bytes": 6, "peak_total": 7, "peak_cache": 8, "oom_kills": 0, "cpu_wait_s": 0.0}
        return figures, json.dumps({"mode": "buffered reads with 4", "tokens": [1], "statistics": asked}), ""

    monkeypatch.setattr(page_cache_isolation, "limited_run", fake)
    found = page_cache_isolation.one_run(tmp_path, tmp_path, 1000, "buffered", 3)
    assert (found["asked_bytes"], found["device_read_bytes"], found["peak_cache_bytes"]) == (5, 6, 8)
    assert seen[0][seen[0].index("--io") + 1] == "buffered"
    with pytest.raises(SystemExit, match="asked for direct reads"):
        page_cache_isolation.one_run(tmp_path, tmp_path, 1000, "auto", 3)
