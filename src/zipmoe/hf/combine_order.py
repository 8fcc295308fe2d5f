"""In which order the outputs of the experts of a token are summed: it decides the last bits of BF16 logits.

``grouped_mm`` is Transformers' default: the K weighted outputs of a token are laid out in top-k order and summed at
once. ``eager`` adds them one expert after the other, in ascending expert id, rounding to BF16 each time.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from zipmoe.errors import UnsupportedOperationError
from zipmoe.store.guard_tensor import EXPERTS_IMPLEMENTATION


class CombineOrder(Enum):
    """The two orders of Transformers; the value is the name that Transformers gives it."""

    GROUPED_MM = "grouped_mm"
    EAGER = "eager"


def combine_order(experts_implementation: str | None) -> CombineOrder:
    """The combine order that ``config._experts_implementation`` names.

    Raises:
        UnsupportedOperationError: it names an implementation whose bits ZipMoE does not reproduce.
    """
    try:
        return CombineOrder(experts_implementation)
    except ValueError:
        raise UnsupportedOperationError(
            f"experts_implementation={experts_implementation!r} cannot compute on packed experts",
            hint='use "grouped_mm" or "eager", or "zipmoe" for the default of the model\'s family',
        ) from None


def resolve_experts_implementation(model: Any, requested: str | None) -> str:
    """What ``requested`` means for ``model`` (a PreTrainedModel): ``"zipmoe"`` and None are its family's default.

    Raises:
        UnsupportedOperationError: it cannot compute on packed experts.
    """
    default = requested is None or requested == EXPERTS_IMPLEMENTATION
    return combine_order(model.get_correct_experts_implementation(None) if default else requested).value


def resolve_all_experts_implementations(model: Any) -> None:
    """Let the configurations in ``model`` name the combine order that plain Transformers would use."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_experts_implementation_internal"):
            owner = module if hasattr(module, "get_correct_experts_implementation") else model
            # The internal attribute: the public one would set all sub-configurations at once.
            requested = config._experts_implementation_internal
            config._experts_implementation_internal = resolve_experts_implementation(owner, requested)
