"""Levels, prompts, contenders and read-ahead: what is asked for is what is measured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zipmoe import _native
from zipmoe.bench.contenders import (
    Contender,
    Models,
    Variant,
    WorkerCommands,
    cannot_run,
    job_settings,
    parse_contenders,
    variants,
)
from zipmoe.bench.file_eviction import evict
from zipmoe.bench.memory_levels import MemoryLevel, memory_levels
from zipmoe.bench.prompts import file_prompts, random_prompts, topic_prompts
from zipmoe.bench.read_ahead import changed_read_ahead, read_ahead_kib
from zipmoe.errors import InvalidArgumentError
from zipmoe.profiling.disk_identity import disk_identity

GB = 1_000_000_000


def test_levels() -> None:
    found = memory_levels("25%, 62.5%,4GB,fits", 8 * GB, 100 * GB)
    assert [level.limit_bytes for level in found] == [2 * GB, 5 * GB, 4 * GB, 14 * GB]
    assert [level.fits for level in found] == [False, False, False, True]
    assert memory_levels("fits", 8 * GB, 9 * GB)[0].limit_bytes == 9 * GB


@pytest.mark.parametrize("text", ["", "much", "0%", "200%", "10GB"])
def test_impossible_levels(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        memory_levels(text, 8 * GB, 9 * GB)


def test_topic_prompts_stay_on_their_topics() -> None:
    found = topic_prompts([7, 11], 4, 5, 640)
    assert found.single == 2
    assert [{token % 64 for token in prompt} for prompt in found.prompts] == [{7}, {11}, {0}, {1}]
    assert {len(prompt) for prompt in found.prompts} == {5}
    assert found.prompts == topic_prompts([7, 11], 4, 5, 640).prompts
    assert [len(batch) for batch in found.batches([4, 1])] == [1, 1, 4]
    assert found.batches([2]) == (found.prompts[:2],)


def test_topics_beyond_64_repeat_with_other_ids() -> None:
    found = topic_prompts([0], 65, 8, 6400)
    assert {token % 64 for token in found.prompts[64]} == {0}
    assert found.prompts[64] != found.prompts[0]
    with pytest.raises(InvalidArgumentError):
        topic_prompts([64], 1, 8, 6400)


def test_random_prompts_are_the_same_every_time() -> None:
    found = random_prompts(2, 3, 4, 10)
    assert found.prompts == random_prompts(2, 3, 4, 10).prompts
    assert all(0 <= token < 10 for prompt in found.prompts for token in prompt)
    assert len(set(found.prompts)) == 3


def test_prompts_of_a_file(tmp_path: Path) -> None:
    def tokenizer(line: str) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in line.split()]}

    path = tmp_path / "prompts.txt"
    path.write_text("one two three four\n\nsix seven eight\n")
    found = file_prompts(path, tokenizer, single=3, count=4, tokens=3)
    assert found.prompts == ((3, 3, 5), (3, 5, 5), (3, 3, 5), (3, 5, 5))
    assert found.single == 2
    with pytest.raises(InvalidArgumentError, match=r"prompt 2 .* has 3 tokens, 4 are needed"):
        file_prompts(path, tokenizer, single=1, count=1, tokens=4)


def test_variants_are_those_that_matter_to_the_contender() -> None:
    assert variants(Contender.ZIPMOE, (128, 8192), (0.3, 0.5)) == (Variant(Contender.ZIPMOE),)
    assert variants(Contender.LLAMA_CPP, (128, 8192), (0.3, 0.5)) == (
        Variant(Contender.LLAMA_CPP, 128),
        Variant(Contender.LLAMA_CPP, 8192),
    )
    assert len(variants(Contender.ACCELERATE, (128, 8192), (0.3, 0.5))) == 4
    assert variants(Contender.ACCELERATE, (), (0.3,))[0].settings == "30% for weights in memory"


def test_contenders_by_name() -> None:
    assert parse_contenders("zipmoe-exact, llama.cpp") == (Contender.ZIPMOE_EXACT, Contender.LLAMA_CPP)
    with pytest.raises(InvalidArgumentError, match="unknown contender 'vllm'"):
        parse_contenders("vllm")


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    tight, roomy = MemoryLevel("25%", GB, False), MemoryLevel("fits", 9 * GB, True)
    models = Models(tmp_path)
    assert "--gguf" in (cannot_run(Variant(Contender.LLAMA_CPP), tight, models) or "")
    assert "--source" in (cannot_run(Variant(Contender.TRANSFORMERS), tight, models) or "")
    assert cannot_run(Variant(Contender.ZIPMOE), tight, models) is None
    whole = Models(tmp_path, tmp_path, tmp_path / "m.gguf")
    assert cannot_run(Variant(Contender.ACCELERATE), tight, whole) is None
    assert "nothing to offload" in (cannot_run(Variant(Contender.ACCELERATE), roomy, whole) or "")
    settings = job_settings(Variant(Contender.ACCELERATE, cpu_share=0.3), tight, tmp_path)
    assert settings == {"offload_folder": str(tmp_path), "cpu_bytes": 300_000_000}
    assert job_settings(Variant(Contender.AIRLLM), tight, tmp_path) == {"offload_folder": str(tmp_path)}
    assert job_settings(Variant(Contender.ZIPMOE_EXACT), tight, tmp_path) == {"mode": "exact"}


def test_an_interpreter_that_is_none_is_said() -> None:
    commands = WorkerCommands({"llama.cpp": "/nonexistent/python"})
    assert "is no Python that runs" in (commands.missing_library(Contender.LLAMA_CPP) or "")
    assert commands.missing_library(Contender.ZIPMOE) is None
    launcher, module = WorkerCommands({"airllm": "/p"}).command(Contender.AIRLLM)[1:]
    assert (Path(launcher).name, module) == ("without_zipmoe.py", "airllm_layers")
    assert commands.command(Contender.LLAMA_CPP)[0] == "/nonexistent/python"


def _disk(root: Path, path: Path, partition: bool) -> Path:
    number = path.stat().st_dev
    disk = root / "sys/devices/vda"
    (disk / "queue").mkdir(parents=True)
    setting = disk / "queue/read_ahead_kb"
    setting.write_text("8192\n")
    device = disk
    if partition:
        device = disk / "vda1"
        device.mkdir()
        (device / "partition").write_text("1\n")
    link = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(device)
    return setting


@pytest.mark.parametrize("partition", [False, True])
def test_read_ahead_is_changed_and_restored(tmp_path: Path, partition: bool) -> None:
    setting = _disk(tmp_path, tmp_path, partition)
    assert read_ahead_kib(tmp_path, tmp_path) == 8192
    with pytest.raises(KeyboardInterrupt):
        with changed_read_ahead(tmp_path, 128, tmp_path):
            assert setting.read_text() == "128\n"
            raise KeyboardInterrupt
    assert setting.read_text() == "8192\n"


def test_no_read_ahead_where_there_is_no_disk(tmp_path: Path) -> None:
    assert read_ahead_kib(tmp_path, tmp_path) is None
    with pytest.raises(InvalidArgumentError, match="no block device"):
        with changed_read_ahead(tmp_path, 128, tmp_path):
            raise AssertionError("the block must not run")


def test_evicted_files_are_not_cached(tmp_path: Path) -> None:
    if disk_identity(tmp_path).filesystem in ("tmpfs", "ramfs"):
        pytest.skip("the folder for tests lies in a file system in memory")
    (tmp_path / "folder").mkdir()
    for name in ("one", "folder/two"):
        (tmp_path / name).write_bytes(b"x" * 100_000)
    assert _native.cached_bytes(str(tmp_path / "one"), 0, 100_000) > 0
    assert evict([tmp_path, tmp_path / "missing"]) == 0
    assert _native.cached_bytes(str(tmp_path / "folder/two"), 0, 100_000) == 0
