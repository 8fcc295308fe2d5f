"""What a step costs outside of its routed experts: packed dense matrices, and the small operations of every layer.

All numbers are those of the machine's profile. Dense matrices (attention, shared experts, the language-model head) are
in memory packed; every step multiplies packed weights where the run's mode, the codec and the machine let it, and else
decodes each of them block by block with all workers and multiplies it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from zipmoe.planning.device import DeviceProfile
from zipmoe.planning.layer_costs import TensorBytes
from zipmoe.planning.packed_products import ALL_PRODUCTS, PackedProducts
from zipmoe.planning.partition import FULL_BYTES_PER_WEIGHT
from zipmoe.store.manifest import Manifest

STEP_OPERATIONS = 75
"""Torch operations of a step outside of its layers (mask, rotary tables, last norm, choice of the token)."""
LAYER_OPERATIONS = 95
"""Of a layer outside of its experts: norms, projections, rotary embedding, attention, router, shared expert."""
EXPERT_OPERATIONS = 16
"""Of one activated expert: rows, two products, gate, routing weight, and asking for its matrices."""
# All three counted with a dispatch mode in packed Qwen2-MoE models of 2 and 4 layers and 2 and 4 experts per token.
# With packed products a layer has about as many outside of its experts, not counting how an array changes hands (five
# operations, none of which computes), and its experts have none: one call computes them all.


@dataclass(frozen=True)
class StepCosts:
    """Seconds of one step, by what is done."""

    decode_seconds: float
    """Dense matrices from their packed form."""
    execute_seconds: float
    """Products with them, which may read the packed form."""
    dispatch_seconds: float
    """Small operations."""

    @property
    def seconds(self) -> float:
        """All together."""
        return self.decode_seconds + self.execute_seconds + self.dispatch_seconds


@dataclass(frozen=True)
class DenseBytes:
    """Of the dense matrices that every step multiplies with."""

    bfloat16: int
    packed: int


def dense_bytes(manifest: Manifest, looked_up: Collection[str] = ()) -> DenseBytes:
    """Bytes of the packed dense matrices that every step multiplies with.

    Args:
        manifest: of the folder.
        looked_up: full names of embeddings, of which a step decodes single rows. One that is tied to a linear layer is
            multiplied all the same.
    """
    multiplied = [
        matrix for matrix in manifest.dense if not {matrix.parameter, *matrix.tied_parameters} <= set(looked_up)
    ]
    blocks = (tensor for matrix in multiplied for block in matrix.blocks for tensor in TensorBytes.of_record(block))
    return DenseBytes(
        sum(FULL_BYTES_PER_WEIGHT * matrix.rows * matrix.columns for matrix in multiplied),
        sum(tensor.exponent + tensor.sign_mantissa for tensor in blocks),
    )


def step_costs(
    profile: DeviceProfile,
    codec: str,
    multiplied: DenseBytes,
    layers: int,
    active_experts: float,
    tokens: int = 1,
    products: PackedProducts = ALL_PRODUCTS,
) -> StepCosts:
    """Costs of a step outside of the routed experts.

    Args:
        profile: of the machine.
        codec: of the folder.
        multiplied: see ``dense_bytes``.
        layers: sparse layers.
        active_experts: distinct experts of a layer in a step.
        tokens: of a step.
        products: which ones read the packed form, if codec and machine have kernels for that.
    """
    fused = profile.fused_bytes_per_second.get(codec, ())[:tokens]
    kernels = len(fused) == tokens
    per_layer = LAYER_OPERATIONS + (0.0 if kernels and products.experts else EXPERT_OPERATIONS * active_experts)
    dispatch = (STEP_OPERATIONS + layers * per_layer) * profile.dispatch_seconds
    if kernels and products.dense:
        return StepCosts(0.0, multiplied.packed / fused[-1], dispatch)
    rate = profile.decode_bytes_per_second.get(codec)
    if rate is None and codec in profile.decompress_bytes_per_second:  # as for experts: shards over all workers
        per_byte = 1 / (FULL_BYTES_PER_WEIGHT * profile.decompress_bytes_per_second[codec] * profile.workers)
        rate = 1 / (per_byte + 1 / profile.recombine_bytes_per_second)
    return StepCosts(
        decode_seconds=multiplied.bfloat16 / rate if rate else 0.0,
        execute_seconds=profile.execute_seconds(multiplied.bfloat16, tokens),
        dispatch_seconds=dispatch,
    )
