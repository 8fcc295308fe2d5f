"""Expected time of a sparse layer by its experts' residencies, from the native scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from zipmoe import _native
from zipmoe.schedule.residency import Residency

Order = Literal["cache_affinity", "fifo"]


@dataclass(frozen=True)
class TensorCosts:
    """Measured seconds for one tensor of an expert.

    Attributes:
        read_sign_mantissa_seconds: the SM-chunk (u); of a fused codec, the packed section.
        read_shard_seconds: one shard of the compressed E-chunk (rho * u / K).
        decompress_seconds: one shard on one worker (c).
        recombine_seconds: the whole tensor on the execution resource.
    """

    read_sign_mantissa_seconds: float
    read_shard_seconds: float = 0.0
    decompress_seconds: float = 0.0
    recombine_seconds: float = 0.0


@dataclass(frozen=True)
class LayerModel:
    """A layer whose experts have the same tensors, on one machine.

    Attributes:
        tensors: costs of each tensor of an expert.
        shards: K; 0 for a fused codec, whose records have no chunks (states S and E are then refused).
        workers: L.
    """

    tensors: tuple[TensorCosts, ...]
    shards: int
    workers: int

    def makespan_seconds(
        self,
        states: Sequence[Residency] | npt.NDArray[np.uint8],
        execute_seconds: Sequence[float] | npt.NDArray[np.float64],
        order: Order = "cache_affinity",
    ) -> float:
        """Return the seconds until the last of the selected experts is executed.

        Args:
            states: residency of each selected expert, [experts].
            execute_seconds: seconds to execute each on all its tokens (p), [experts].
            order: the order of reads and decompressions.

        Raises:
            ValueError: lengths that differ, a state that does not exist or that the codec cannot have, a duration that
                is negative or not finite.
        """
        return _native.layer_makespan(
            np.asarray(states, np.uint8),
            len(self.tensors),
            [tensor.read_sign_mantissa_seconds for tensor in self.tensors],
            [tensor.read_shard_seconds for tensor in self.tensors],
            [tensor.decompress_seconds for tensor in self.tensors],
            [tensor.recombine_seconds for tensor in self.tensors],
            np.ascontiguousarray(execute_seconds, np.float64),
            self.shards,
            self.workers,
            order,
        )
