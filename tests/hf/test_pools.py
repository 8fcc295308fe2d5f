"""Exact-mode logits under every set of pools, every separable codec and number of shards, and several workers, while
experts move between pools all the time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from representative_models import TINY_MODELS

import zipmoe
from zipmoe import _native
from zipmoe.engine.cache_policy import policy_names
from zipmoe.engine.pool_slots import PoolSettings, PoolSlots
from zipmoe.errors import InvalidArgumentError
from zipmoe.store.manifest import CodecSettings
from zipmoe.store.pack import pack

POOLS = {
    "C": PoolSlots(0, 2),
    "F": PoolSlots(2),
    "FC": PoolSlots(1, 1),
    "S": PoolSlots(0, 0, 2),
    "E": PoolSlots(0, 0, 0, 2),
    "SE": PoolSlots(0, 0, 1, 2),
    "CS": PoolSlots(0, 1, 2),
    "FCSE": PoolSlots(1, 1, 1, 1),
}
IDS = torch.tensor([[5, 9, 31, 77, 120, 3, 240, 18, 64], [7, 7, 200, 41, 6, 99, 150, 23, 12]])
PASSES = (IDS, IDS[:1, :1], IDS[1:, :3], IDS[:, 4:5], IDS[:1, 2:3], IDS[1:, 5:6])
"""A prompt, single tokens and a short text: many experts at once, and few."""
SEPARABLE = [codec.name for codec in _native.codecs() if codec.separable and not codec.unavailable_reason]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[torch.Tensor]]]:
    """Source folder of a tiny model, and the logits of plain Transformers on it."""
    built: dict[str, tuple[Path, list[torch.Tensor]]] = {}

    def get(name: str) -> tuple[Path, list[torch.Tensor]]:
        if name not in built:
            source = tmp_path_factory.mktemp(name)
            TINY_MODELS[name].build().save_pretrained(source)
            import transformers

            model = getattr(transformers, TINY_MODELS[name].architecture).from_pretrained(source)
            built[name] = (source, passes(model))
        return built[name]

    return get


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, plain: Any) -> Callable[[str, str, int], Path]:
    built: dict[tuple[str, str, int], Path] = {}

    def get(name: str, codec: str, shards: int) -> Path:
        key = (name, codec, shards)
        if key not in built:
            built[key] = tmp_path_factory.mktemp("packed") / "model"
            level = {"zstd": 3, "lz4hc": 9}.get(codec)
            pack(plain(name)[0], built[key], CodecSettings(codec, level, shards), jobs=1, min_dense_bytes=0)
        return built[key]

    return get


def passes(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits for ids in PASSES]


def assert_exact(
    folder: Path, expected: list[torch.Tensor], pools: PoolSettings, workers: int, combine: str | None
) -> Any:
    settings = zipmoe.ZipMoEConfig(memory="8GB", mode="exact", decode_threads=workers, pools=pools)
    model = zipmoe.load(folder, experts_implementation=combine, quantization_config=settings)
    with model.zipmoe_engine as engine:
        for _ in range(2):
            for found, wanted in zip(passes(model), expected, strict=True):
                assert torch.equal(found, wanted)
            for held, slots in zip(engine._native.pool_occupancy, engine._native.pool_slots, strict=True):
                assert all(h <= s for h, s in zip(held, slots, strict=True))
        return engine.statistics.counters()


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize("codec", SEPARABLE)
def test_logits_are_equal_with_separable_codecs(plain: Any, packed: Any, codec: str, shards: int) -> None:
    _, expected = plain("mixtral")
    folder = packed("mixtral", codec, shards)
    for number, (name, slots) in enumerate(POOLS.items()):
        workers = (1, 2, 4)[(number + shards) % 3]
        pools = PoolSettings(slots, staging=1 + number % 2, half_life_steps=2.0, decompress_ahead=number % 3)
        counters = assert_exact(folder, expected, pools, workers, "grouped_mm")
        assert counters.evictions > 0
        for letter, count in counters.hits_by_pool.items():
            assert (count > 0) == (letter in name), (name, counters.hits_by_pool)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("name", ["C", "F", "FC"])
def test_logits_are_equal_with_a_fused_codec(plain: Any, packed: Any, name: str, workers: int) -> None:
    _, expected = plain("mixtral")
    folder = packed("mixtral", "fx3", 1)
    assert_exact(folder, expected, PoolSettings(POOLS[name], staging=1), workers, "grouped_mm")


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("name", POOLS)
def test_logits_are_equal_with_any_number_of_workers(plain: Any, packed: Any, name: str, workers: int) -> None:
    _, expected = plain("mixtral")
    folder = packed("mixtral", SEPARABLE[0], 4)
    pools = PoolSettings(POOLS[name], half_life_steps=2.0, decompress_ahead=2)
    assert_exact(folder, expected, pools, workers, "grouped_mm")


@pytest.mark.parametrize("name", ["F", "FCSE", "SE"])
@pytest.mark.parametrize("model", sorted(TINY_MODELS))
def test_every_kind_of_experts_works_with_pools(plain: Any, packed: Any, model: str, name: str) -> None:
    if TINY_MODELS[model].encoder_decoder:
        pytest.skip("needs other inputs; the engine sees the same requests")
    _, expected = plain(model)
    folder = packed(model, SEPARABLE[0], 2)
    combine = "grouped_mm" if TINY_MODELS[model].interface else None
    assert_exact(folder, expected, PoolSettings(POOLS[name], staging=1), 2, combine)


@pytest.mark.parametrize("policy", policy_names())
def test_logits_are_equal_under_every_policy(plain: Any, packed: Any, policy: str) -> None:
    _, expected = plain("mixtral")
    folder = packed("mixtral", SEPARABLE[0], 2)
    for number, slots in enumerate(POOLS.values()):
        half_life = 2.0 if policy == "zipmoe" else None
        pools = PoolSettings(slots, staging=1 + number % 2, policy=policy, half_life_steps=half_life)
        assert_exact(folder, expected, pools, 2, "grouped_mm")


def test_logits_are_equal_in_the_eager_order(plain: Any, packed: Any) -> None:
    import transformers

    source, _ = plain("mixtral")
    eager = transformers.MixtralForCausalLM.from_pretrained(source, experts_implementation="eager")
    expected = passes(eager)
    for name, slots in POOLS.items():
        pools = PoolSettings(slots, staging=1 + (name == "CS"), order="fifo")
        assert_exact(packed("mixtral", SEPARABLE[0], 2), expected, pools, 2, "eager")


def test_pools_are_named_in_the_mode_line(packed: Any) -> None:
    settings = zipmoe.ZipMoEConfig(memory="8GB", pools="S=2, c=1")
    model = zipmoe.load(packed("mixtral", SEPARABLE[0], 2), quantization_config=settings)
    line = model.zipmoe_mode_line()
    assert "pools F 0, C 1, S 2, E 0 of 6 experts per layer and 4 staged" in line
    assert "reads in cache_affinity order" in line
    assert "; policy auto, now zipmoe with a half-life of 16 steps" in line
    with pytest.raises(InvalidArgumentError, match="does not say how many experts"):
        zipmoe.ZipMoEConfig(pools="C=all")


@pytest.mark.parametrize("pools", [None, "C=2"])
def test_the_policy_is_chosen_with_and_without_pools(packed: Any, pools: str | None) -> None:
    settings = zipmoe.ZipMoEConfig(memory="8GB", pools=pools, policy="lfuda")
    model = zipmoe.load(packed("mixtral", SEPARABLE[0], 2), quantization_config=settings)
    assert "; policy lfuda" in model.zipmoe_mode_line()
    with pytest.raises(InvalidArgumentError, match=r"policy must be one of auto, zipmoe, lru, .*, not 'oracle'"):
        zipmoe.ZipMoEConfig(policy="oracle")
    with pytest.raises(InvalidArgumentError, match="half-life"):
        zipmoe.ZipMoEConfig(half_life_steps=0)
    with pytest.raises(InvalidArgumentError, match="the policy 'lfuda' has no half-life"):
        zipmoe.ZipMoEConfig(policy="lfuda", half_life_steps=4)
    with pytest.raises(InvalidArgumentError, match="the policy 'auto' has no half-life of its own"):
        zipmoe.ZipMoEConfig(policy="auto", half_life_steps=4)
    with pytest.raises(InvalidArgumentError, match="the policy 'lru' has no half-life"):
        zipmoe.ZipMoEConfig(pools=PoolSettings(PoolSlots(compressed=2), policy="lru"), half_life_steps=4)
    assert zipmoe.ZipMoEConfig(half_life_steps=4).half_life_steps == 4
