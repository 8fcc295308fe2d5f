"""What a step costs outside of its routed experts: packed dense matrices, and the small operations of every layer.

All numbers are those of the machine's profile. Dense matrices (attention, shared experts, the language-model head) are
in memory packed; every step decodes each of them block by block with all workers and multiplies it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from zipmoe.planning.device import DeviceProfile
from zipmoe.planning.partition import FULL_BYTES_PER_WEIGHT
from zipmoe.store.manifest import Manifest

STEP_OPERATIONS = 75
"""Torch operations of a step outside of its layers (mask, rotary tables, last norm, choice of the token)."""
LAYER_OPERATIONS = 95
"""Of a layer outside of its experts: norms, projections, rotary embedding, attention, router, shared expert."""
EXPERT_OPERATIONS = 16
"""Of one activated expert: rows, two products, gate, routing weight, and asking for its matrices."""
# All three counted with a dispatch mode in packed Qwen2-MoE models of 2 and 4 layers and 2 and 4 experts per token.


@dataclass(frozen=True)
class StepCosts:
    """Seconds of one step, by what is done."""

    decode_seconds: float
    """Dense matrices from their packed form."""
    execute_seconds: float
    """Products with them."""
    dispatch_seconds: float
    """Small operations."""

    @property
    def seconds(self) -> float:
        """All together."""
        return self.decode_seconds + self.execute_seconds + self.dispatch_seconds


def dense_bytes(manifest: Manifest, looked_up: Collection[str] = ()) -> int:
    """BF16 bytes of the packed dense matrices that every step multiplies with.

    Args:
        manifest: of the folder.
        looked_up: full names of embeddings, of which a step decodes single rows. One that is tied to a linear layer is
            multiplied all the same.
    """
    multiplied = (
        matrix for matrix in manifest.dense if not {matrix.parameter, *matrix.tied_parameters} <= set(looked_up)
    )
    return sum(FULL_BYTES_PER_WEIGHT * matrix.rows * matrix.columns for matrix in multiplied)


def step_costs(
    profile: DeviceProfile, codec: str, multiplied_bytes: int, layers: int, active_experts: float, tokens: int = 1
) -> StepCosts:
    """Costs of a step outside of the routed experts.

    Args:
        profile: of the machine.
        codec: of the folder.
        multiplied_bytes: see ``dense_bytes``.
        layers: sparse layers.
        active_experts: distinct experts of a layer in a step.
        tokens: of a step.
    """
    rate = profile.decode_bytes_per_second.get(codec)
    if rate is None and codec in profile.decompress_bytes_per_second:  # as for experts: shards over all workers
        per_byte = 1 / (FULL_BYTES_PER_WEIGHT * profile.decompress_bytes_per_second[codec] * profile.workers)
        rate = 1 / (per_byte + 1 / profile.recombine_bytes_per_second)
    operations = STEP_OPERATIONS + layers * (LAYER_OPERATIONS + EXPERT_OPERATIONS * active_experts)
    return StepCosts(
        decode_seconds=multiplied_bytes / rate if rate else 0.0,
        execute_seconds=profile.execute_seconds(multiplied_bytes, tokens),
        dispatch_seconds=operations * profile.dispatch_seconds,
    )
