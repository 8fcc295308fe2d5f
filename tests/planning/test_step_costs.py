"""What a step costs beside its experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from large_folder import EMBEDDING, RHO, large_manifest

from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.planning.device import DeviceProfile
from zipmoe.planning.packed_products import ALL_PRODUCTS, NO_PRODUCTS, PackedProducts
from zipmoe.planning.step_costs import (
    EXPERT_OPERATIONS,
    LAYER_OPERATIONS,
    STEP_OPERATIONS,
    DenseBytes,
    StepCosts,
    dense_bytes,
    step_costs,
)
from zipmoe.store.manifest import DenseMatrix, Manifest

DENSE = (
    DenseMatrix("model.embed_tokens.weight", (), 1000, 10, ()),
    DenseMatrix("model.layers.0.mlp.up_proj.weight", (), 20, 10, ()),
    DenseMatrix("lm_head.weight", (), 1000, 10, ()),
)


def manifest(*dense: DenseMatrix) -> Manifest:
    return Manifest("0", "m", "A", "f", 0, CodecSettings("zstd", 3, 2), {}, (), dense, (), "g")


def test_embeddings_are_looked_up_not_multiplied() -> None:
    assert dense_bytes(manifest(*DENSE)).bfloat16 == 2 * (10_000 + 200 + 10_000)
    assert dense_bytes(manifest(*DENSE), {"model.embed_tokens.weight"}).bfloat16 == 2 * (200 + 10_000)


def test_packed_bytes_are_those_of_the_sections() -> None:
    folder = large_manifest("fx3")
    multiplied = dense_bytes(folder, {EMBEDDING})
    assert multiplied == DenseBytes(2 * 8192 * 2048, 8192 * 2048 + int(8192 * 2048 * RHO))


def test_an_embedding_that_is_also_the_head_is_multiplied() -> None:
    tied = replace(DENSE[0], tied_parameters=("lm_head.weight",))
    assert dense_bytes(manifest(tied, DENSE[1]), {"model.embed_tokens.weight"}).bfloat16 == 2 * (10_000 + 200)


def test_every_part_comes_from_the_profile(profile: DeviceProfile) -> None:
    measured = replace(profile, decode_bytes_per_second={"zstd": 4e9}, dispatch_seconds=1e-6)
    costs = step_costs(measured, "zstd", DenseBytes(12_000_000, 9_000_000), layers=3, active_experts=4)
    assert costs.decode_seconds == pytest.approx(12e6 / 4e9)
    assert costs.execute_seconds == pytest.approx(2 * 1e-3)  # an expert of half the bytes takes 1 ms
    assert costs.dispatch_seconds == pytest.approx(
        (STEP_OPERATIONS + 3 * (LAYER_OPERATIONS + 4 * EXPERT_OPERATIONS)) * 1e-6
    )
    assert costs.seconds == pytest.approx(costs.decode_seconds + costs.execute_seconds + costs.dispatch_seconds)


def test_without_a_measured_rate_shards_are_spread_over_the_workers(profile: DeviceProfile) -> None:
    dense = DenseBytes(8_000_000, 6_000_000)
    costs = step_costs(profile, "zstd", dense, layers=1, active_experts=1)
    assert costs.decode_seconds == pytest.approx(4e6 / 1e9 / 6 + 8e6 / 8e9)
    assert step_costs(profile, "other", dense, layers=1, active_experts=1).decode_seconds == 0  # computes packed


def test_products_with_packed_weights(fused_profile: DeviceProfile) -> None:
    dense = DenseBytes(8_000_000, 6_000_000)

    def costs(products: PackedProducts, tokens: int = 1, profile: DeviceProfile = fused_profile) -> StepCosts:
        return step_costs(profile, "fx3", dense, layers=3, active_experts=4, tokens=tokens, products=products)

    fast = costs(ALL_PRODUCTS)
    assert (fast.decode_seconds, fast.execute_seconds) == (0, pytest.approx(6e6 / 14e9))
    assert fast.dispatch_seconds == pytest.approx((STEP_OPERATIONS + 3 * LAYER_OPERATIONS) * 1e-6)
    assert costs(ALL_PRODUCTS, tokens=2).execute_seconds == pytest.approx(6e6 / 12e9)
    exact = costs(NO_PRODUCTS)
    assert exact.decode_seconds == pytest.approx(8e6 / 4e9)
    assert exact.execute_seconds == pytest.approx(fused_profile.execute_seconds(8e6))
    assert (
        costs(ALL_PRODUCTS, tokens=3).decode_seconds == exact.decode_seconds
    )  # more tokens than kernels were measured
    mixed = costs(PackedProducts(experts=False, dense=True))
    assert (mixed.execute_seconds, mixed.dispatch_seconds) == (fast.execute_seconds, exact.dispatch_seconds)
    unmeasured = replace(fused_profile, fused_bytes_per_second={}, unpacked_bytes_per_second=())
    assert costs(ALL_PRODUCTS, profile=unmeasured) == exact
