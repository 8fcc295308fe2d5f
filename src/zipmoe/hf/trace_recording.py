"""Records which experts every sparse layer activates while a model runs: the planner's and the simulator's input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from zipmoe.engine.engine import Engine
from zipmoe.engine.model_shape import EXPERTS_PER_TOKEN, largest, text_config
from zipmoe.errors import UnsupportedOperationError
from zipmoe.hf.call_shape import call_shape
from zipmoe.planning.trace import TraceHeader, TraceWriter, open_trace_writer


@contextmanager
def record_trace(model: Any, path: Path) -> Iterator[None]:
    """Write the routing of every forward pass of ``model`` inside the ``with`` block to a new trace file.

    Experts are written as they are requested: of the last layer none for positions that it leaves out
    (``docs/compute.md``).

    Args:
        model: a loaded packed model.
        path: the file; see ``docs/planning.md`` for its format.

    Raises:
        UnsupportedOperationError: an encoder-decoder model: its passes do not run the same layers.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedOperationError("routing is recorded for decoder-only models, whose passes run the same layers")
    engine: Engine = model.zipmoe_engine
    groups = engine.folder.manifest.expert_groups
    experts = tuple(len(group.records) for group in groups)
    top_k = min(largest(text_config(model.config), EXPERTS_PER_TOKEN) or 1, *experts)
    header = TraceHeader(Path(model.config.name_or_path).name or model.config.model_type, experts, top_k)
    with open_trace_writer(path, header) as writer:
        recording = _Recording([group.path for group in groups], writer)
        hooks = (
            model.register_forward_pre_hook(recording.begin, with_kwargs=True),
            model.register_forward_hook(recording.end),
        )
        engine.request_observer = recording.observe
        try:
            yield
        finally:
            engine.request_observer = None
            for hook in hooks:
                hook.remove()


class _Recording:
    def __init__(self, paths: list[str], writer: TraceWriter) -> None:
        self._paths = paths
        self._writer = writer
        self._tokens = 0
        self._active: dict[str, set[int]] = {}

    def begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sequences, length = call_shape(args, kwargs)
        self._tokens = sequences * length
        self._active = {path: set() for path in self._paths}

    def observe(self, path: str, expert_ids: Sequence[int]) -> None:
        if path in self._active:
            self._active[path].update(expert_ids)

    def end(self, *_: Any) -> None:
        self._writer.append(self._tokens, [sorted(self._active[path]) for path in self._paths])
        self._active = {}
