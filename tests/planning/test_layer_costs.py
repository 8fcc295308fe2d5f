from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from zipmoe import _native
from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.device import DeviceProfile
from zipmoe.planning.hit_law import hit_patterns
from zipmoe.planning.layer_costs import LayerCosts, MakespanBound, ScheduledMakespan, TensorBytes, states_of_pattern
from zipmoe.planning.partition import CodecCapabilities

SEPARABLE = CodecCapabilities(separable=True, fused=False)
FUSED = CodecCapabilities(separable=False, fused=True)
F, C, S, E, M = range(5)


def states(*codes: int) -> np.ndarray:
    return np.array(codes, dtype=np.uint8)


COSTS = LayerCosts(
    read_sign_mantissa_seconds=(4.0, 2.0),
    read_shard_seconds=(0.5, 0.25),
    decompress_seconds=(1.0, 0.5),
    recombine_seconds=(0.2, 0.1),
    execute_seconds_by_tokens=(3.0, 3.5),
    shards=2,
    workers=3,
)


def test_bound_by_hand() -> None:
    bound = MakespanBound(COSTS, assignments=2)
    assert bound(states(F, F)) == pytest.approx(6.0)  # execution
    assert bound(states(C)) == pytest.approx(1.0 + 0.2 + 3.5)  # one shard of the first tensor, then 2 tokens
    # Misses: E 2 * (0.5 + 0.25) and SM 6 each. Disk 15; workers 2 * 3 / 3; execution 2 * 3.3.
    assert bound(states(M, M)) == pytest.approx(15.0)
    assert bound(states(S, E)) == pytest.approx(1.5 + 6.0)


def test_bound_with_decoding_and_latency() -> None:
    costs = LayerCosts((5.0,), (0.0,), (0.0,), (0.0,), (1.0,), 0, 3, io_latency_seconds=0.5, decode_seconds=2.0)
    bound = MakespanBound(costs, assignments=3)
    assert bound(states(F, C, C)) == pytest.approx(3 * 1.0 + 2 * 2.0)
    assert bound(states(F, F, M)) == pytest.approx(5.0 + 3.0 + 0.5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_bound_is_the_scheduler_s_and_no_schedule_beats_it(size: int) -> None:
    bound, scheduled = MakespanBound(COSTS, assignments=size), ScheduledMakespan(COSTS, assignments=size)
    patterns = hit_patterns(size)
    together = bound.of_patterns(patterns)
    for pattern, expected in zip(patterns, together, strict=True):
        code = states_of_pattern(pattern)
        tasks = [(n, t) for n in range(size) for t in range(2)]
        schedule = _native.schedule_layer(
            [n for n, _ in tasks],
            [t for _, t in tasks],
            [int(code[n]) for n, _ in tasks],
            [COSTS.read_sign_mantissa_seconds[t] for _, t in tasks],
            [COSTS.read_shard_seconds[t] for _, t in tasks],
            [COSTS.decompress_seconds[t] for _, t in tasks],
            [COSTS.recombine_seconds[t] for _, t in tasks],
            [3.0] * size,
            COSTS.shards,
            COSTS.workers,
        )
        assert expected == pytest.approx(schedule.lower_bound, abs=1e-9)
        assert bound(code) == pytest.approx(expected)
        assert scheduled(code) == pytest.approx(schedule.makespan)
        assert scheduled(code) >= expected - 1e-9


def test_fused_codec_reads_or_computes() -> None:
    costs = LayerCosts((5.0,), (0.0,), (0.0,), (0.0,), (1.0,), 0, 3, io_latency_seconds=0.5, decode_seconds=2.0)
    makespan = ScheduledMakespan(costs, assignments=2)
    assert makespan(states(F, F)) == pytest.approx(2.0)
    assert makespan(states(F, C)) == pytest.approx(4.0)
    assert makespan(states(C, M)) == pytest.approx(5.0 + 3.0 + 0.5)  # the cached one executes meanwhile


def test_more_tokens_per_expert_take_longer() -> None:
    assert COSTS.execute_seconds(1) == 3.0
    assert COSTS.execute_seconds(1.5) == 3.25
    assert COSTS.execute_seconds(4) == pytest.approx(4.5)
    # 8 assignments on 4 experts: 2 tokens each.
    assert MakespanBound(COSTS, assignments=8)(states(F, F, F, F)) == pytest.approx(14.0)
    assert ScheduledMakespan(COSTS, assignments=8)(states(F, F, F, F)) == pytest.approx(14.0)


def test_costs_from_a_profile(profile: DeviceProfile) -> None:
    tensors = (TensorBytes(1_000_000, 340_000, 1_000_000), TensorBytes(500_000, 170_001, 500_000))
    costs = LayerCosts.from_profile(profile, "zstd", SEPARABLE, tensors, shards=4)
    assert costs.read_sign_mantissa_seconds[0] == pytest.approx(profile.read_seconds(1_000_000))
    assert costs.read_shard_seconds[1] == pytest.approx(profile.read_seconds(42_501))
    assert costs.decompress_seconds == pytest.approx((2.5e-4, 1.25e-4))
    assert costs.recombine_seconds == pytest.approx((2.5e-4, 1.25e-4))
    assert costs.execute_seconds_by_tokens == pytest.approx((5e-4, 7.5e-4, 1.25e-3))  # half the measured expert
    assert (costs.shards, costs.workers, costs.io_latency_seconds, costs.decode_seconds) == (4, 6, 1e-4, 0)


def test_costs_of_a_fused_codec(profile: DeviceProfile) -> None:
    tensors = (TensorBytes(1_000_000, 1_340_000, 0),)
    costs = LayerCosts.from_profile(profile, "fx3", FUSED, tensors, shards=1)
    assert costs.shards == 0
    assert costs.read_sign_mantissa_seconds == pytest.approx((1_340_000 / 2e9,))
    assert costs.decompress_seconds == costs.recombine_seconds == costs.read_shard_seconds == (0.0,)
    assert costs.decode_seconds == pytest.approx(2_000_000 / 4e9)
    assert LayerCosts.from_profile(profile, "other", FUSED, tensors, shards=1).decode_seconds == 0


def test_costs_of_experts_that_are_computed_as_they_lie(fused_profile: DeviceProfile) -> None:
    tensors = (TensorBytes(1_000_000, 1_340_000, 0),)
    costs = LayerCosts.from_profile(fused_profile, "fx3", FUSED, tensors, shards=1)
    packed, unpacked = (1_340_000 / 14e9, 1_340_000 / 12e9), (2e6 / 16e9, 2e6 / 15e9)
    decoded = fused_profile.execute_seconds(2e6, 3) + 2e6 / 4e9  # of three tokens, more than kernels were measured with
    assert costs.packed_execute_seconds_by_tokens == pytest.approx((*packed, decoded))
    assert costs.execute_seconds_by_tokens == pytest.approx((*unpacked, fused_profile.execute_seconds(2e6, 3)))
    by_state = costs.execute_seconds_by_state(1.5)
    assert by_state[F] == pytest.approx(sum(unpacked) / 2)
    assert by_state[1:] == pytest.approx(np.full(4, sum(packed) / 2))
    exact = LayerCosts.from_profile(fused_profile, "fx3", FUSED, tensors, shards=1, fast=False)
    assert exact.packed_execute_seconds_by_tokens == ()
    assert exact.execute_seconds_by_state(1)[C] == pytest.approx(fused_profile.execute_seconds(2e6) + 2e6 / 4e9)
    # Two in C and one in F: nothing is read, the products follow each other.
    for makespan in (ScheduledMakespan(costs, 3), MakespanBound(costs, 3)):
        assert makespan(states(F, C, C)) == pytest.approx(unpacked[0] + 2 * packed[0], rel=1e-6)
    missed = MakespanBound(costs, 1)(states(M))
    assert missed == pytest.approx(1_340_000 / 2e9 + packed[0] + costs.io_latency_seconds)
    assert missed == pytest.approx(ScheduledMakespan(costs, 1)(states(M)), rel=1e-6)


def test_impossible_costs_are_refused(profile: DeviceProfile) -> None:
    with pytest.raises(InvalidArgumentError, match="knows nothing about codec 'lz4'"):
        LayerCosts.from_profile(profile, "lz4", SEPARABLE, (TensorBytes(10, 3, 10),), shards=4)
    with pytest.raises(InvalidArgumentError, match="0 shards"):
        LayerCosts.from_profile(profile, "zstd", SEPARABLE, (TensorBytes(10, 3, 10),), shards=0)
    with pytest.raises(InvalidArgumentError, match="four costs"):
        LayerCosts((1.0,), (1.0, 2.0), (1.0,), (1.0,), (1.0,), 1, 1)
    with pytest.raises(InvalidArgumentError, match="none of them negative"):
        LayerCosts((1.0,), (-1.0,), (1.0,), (1.0,), (1.0,), 1, 1)


def test_on_shared_cores_decoding_and_execution_follow_each_other(profile: DeviceProfile) -> None:
    tensors = (TensorBytes(1_000_000, 340_000, 1_000_000), TensorBytes(500_000, 170_000, 500_000))
    apart = LayerCosts.from_profile(profile, "zstd", SEPARABLE, tensors, shards=4)
    shared = LayerCosts.from_profile(replace(profile, shared_cores=True), "zstd", SEPARABLE, tensors, shards=4)
    assert shared.decompress_seconds == (0.0, 0.0)
    assert shared.recombine_seconds == pytest.approx(  # no decoding rate was measured: the shards over all workers
        [4 * c / 6 + r for c, r in zip(apart.decompress_seconds, apart.recombine_seconds, strict=True)]
    )
    measured = replace(profile, shared_cores=True, decode_bytes_per_second={"zstd": 3e9})
    costs = LayerCosts.from_profile(measured, "zstd", SEPARABLE, tensors, shards=4)
    assert costs.recombine_seconds == pytest.approx([2e6 / 3e9, 1e6 / 3e9])
    assert (costs.read_shard_seconds, costs.shards) == (apart.read_shard_seconds, 4)
    # Three experts in C: nothing is left to overlap, decoding and execution add up.
    seconds = ScheduledMakespan(costs, 3)(states_of_pattern(np.array([0, 3, 0, 0, 0])))
    assert seconds == pytest.approx(3 * (3e6 / 3e9 + costs.execute_seconds(1)), rel=1e-6)
    # The disk works meanwhile: of one miss and two hits, what is read hides behind the hits' decoding.
    mixed = ScheduledMakespan(costs, 3)(states_of_pattern(np.array([0, 2, 0, 0, 1])))
    reading = sum(costs.read_sign_mantissa_seconds) + 4 * sum(costs.read_shard_seconds)
    assert reading < 2 * (1e-3 + costs.execute_seconds(1))
    assert mixed == pytest.approx(seconds + costs.io_latency_seconds, rel=1e-6)
