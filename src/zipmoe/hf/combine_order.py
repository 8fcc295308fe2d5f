"""In which order the outputs of the experts of a token are summed: it decides the last bits of BF16 logits.

``grouped_mm`` is Transformers' default: the K weighted outputs of a token are laid out in top-k order and summed at
once. ``eager`` adds them one expert after the other, in ascending expert id, rounding to BF16 each time.
"""

from __future__ import annotations

from enum import Enum

from zipmoe.errors import UnsupportedOperationError

EXPERTS_IMPLEMENTATION = "zipmoe"
"""Value of ``experts_implementation`` in the config.json of a packed folder; combines as ``grouped_mm`` does."""


class CombineOrder(Enum):
    """The two orders of Transformers; the value is the name that Transformers gives it."""

    GROUPED_MM = "grouped_mm"
    EAGER = "eager"


_ORDERS = {
    EXPERTS_IMPLEMENTATION: CombineOrder.GROUPED_MM,
    "grouped_mm": CombineOrder.GROUPED_MM,
    "eager": CombineOrder.EAGER,
}


def combine_order(experts_implementation: str | None) -> CombineOrder:
    """The combine order that ``config._experts_implementation`` stands for.

    Raises:
        UnsupportedOperationError: it names an implementation whose bits ZipMoE does not reproduce.
    """
    order = _ORDERS.get(EXPERTS_IMPLEMENTATION if experts_implementation is None else experts_implementation)
    if order is None:
        raise UnsupportedOperationError(
            f"experts_implementation={experts_implementation!r} cannot compute on packed experts",
            hint='use "zipmoe" or "grouped_mm" (the default combine order of Transformers), or "eager"',
        )
    return order
