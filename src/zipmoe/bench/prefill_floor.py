"""The least time to the first token on this machine: what must be read from disk, and what must be multiplied.

Both can happen at once, so that the floor is the larger of the two: bytes that the prompt's pass reads, compressed, at
the disk's direct rate, and its operations (``prefill_work.py``) at the rate that torch's BF16 product has with as many
rows as the prompt has tokens. The operations are those of plain Transformers, whatever the engine leaves out; a second,
stricter floor counts only those that the logits need. Experts of which something is in memory already are not read, and
that they see only some of the tokens, which makes their products less efficient, is not allowed for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zipmoe.bench.machine_rates import MachineRates
from zipmoe.bench.measurement import Generation
from zipmoe.bench.prefill_work import PrefillWork


@dataclass(frozen=True)
class PrefillFloor:
    """Of the prompt whose time over its floor is the median of all prompts."""

    read_bytes: float
    operations: float
    disk_seconds: float
    product_seconds: float
    achieved_seconds: float
    """Time to first token."""
    needed_operations: float
    """Those that the logits need (``PrefillWork.needed_operations``)."""
    needed_product_seconds: float

    @property
    def floor_seconds(self) -> float:
        """The larger bound."""
        return max(self.disk_seconds, self.product_seconds)

    @property
    def achieved_over_floor(self) -> float:
        """1 is the best there is."""
        return self.achieved_seconds / self.floor_seconds

    @property
    def achieved_over_strict_floor(self) -> float:
        """The same with only the operations that the logits need."""
        return self.achieved_seconds / max(self.disk_seconds, self.needed_product_seconds)

    @property
    def bound_by(self) -> str:
        """Which of the two."""
        return "disk" if self.disk_seconds > self.product_seconds else "products"


def prefill_floor(
    generations: Sequence[Generation], prompt_tokens: int, work: PrefillWork, rates: Sequence[MachineRates]
) -> PrefillFloor | None:
    """The floor of prompts of equal length and batch size that ran between these measurements of the machine.

    Args:
        generations: with the bytes that were read until the first token.
        prompt_tokens: of every sequence.
        work: of the model.
        rates: measurements of the machine; the mean of those that have a rate of products counts.

    Returns:
        None for generations that do not tell what they read, or rates that nothing is known of.
    """
    measured = [rate for rate in rates if rate.product_operations_per_second]
    if not measured or not generations:
        return None
    disk = sum(rate.disk_bytes_per_second for rate in measured) / len(measured)
    products = sum(rate.product_operations_per_second or 0.0 for rate in measured) / len(measured)
    if disk <= 0 or products <= 0:
        return None
    floors = []
    for generation in generations:
        if generation.prefill_read_bytes is None:
            return None
        operations = work.operations(prompt_tokens, generation.batch)
        needed_operations = work.needed_operations(prompt_tokens, generation.batch)
        read_bytes = float(generation.prefill_read_bytes)
        floors.append(
            PrefillFloor(
                read_bytes=read_bytes,
                operations=operations,
                disk_seconds=read_bytes / disk,
                product_seconds=operations / products,
                achieved_seconds=generation.ttft_seconds,
                needed_operations=needed_operations,
                needed_product_seconds=needed_operations / products,
            )
        )
    return sorted(floors, key=lambda floor: floor.achieved_over_floor)[(len(floors) - 1) // 2]
