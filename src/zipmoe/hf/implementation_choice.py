"""Which implementation a configuration names, read at every token: the public properties take 10 microseconds each,
because configurations look every attribute up in several places.
"""

from __future__ import annotations

import functools
from typing import Any


def attention_implementation(config: Any) -> str | None:
    """``config._attn_implementation``."""
    return _choice(config, "_attn_implementation")


def sdpa_is_transformers_own() -> bool:
    """Whether the name "sdpa" still means Transformers' own attention function."""
    functions, own = _attention_functions()
    return functions["sdpa"] is own


@functools.cache
def _attention_functions() -> tuple[Any, Any]:
    # Imported here, because this package is registered at the end of the import of Transformers' model loading.
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS, sdpa_attention_forward


def experts_implementation(config: Any) -> str | None:
    """``config._experts_implementation``."""
    return _choice(config, "_experts_implementation")


def _choice(config: Any, name: str) -> str | None:
    try:
        choice: str | None = object.__getattribute__(config, f"{name}_internal")
    except AttributeError:
        choice = getattr(config, name)
    return choice
