"""Receives tokens from ``generate`` as they come: drives the clock of the statistics and prints the text."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any

from transformers import TextStreamer
from transformers.generation.streamers import BaseStreamer

if TYPE_CHECKING:
    import torch

    from zipmoe.engine.statistics import Statistics


class TokenStream(BaseStreamer):  # type: ignore[misc]
    """A streamer for one sequence.

    Args:
        tokenizer: decodes the text; needed only when ``out`` is given.
        statistics: told about every token.
        out: where the text goes; None for nowhere.
    """

    def __init__(self, tokenizer: Any, statistics: Statistics, out: IO[str] | None) -> None:
        self._statistics = statistics
        self._prompt_seen = False
        self._text = _TextTo(tokenizer, out) if out is not None else None

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then one token at a time."""
        if self._prompt_seen:
            self._statistics.token_generated()
        if self._text is not None:
            self._text.put(value)
        self._prompt_seen = True

    def end(self) -> None:
        """Flush the text."""
        if self._text is not None:
            self._text.end()


class _TextTo(TextStreamer):  # type: ignore[misc]
    def __init__(self, tokenizer: Any, out: IO[str]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._out = out

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._out.write(text + ("\n" if stream_end else ""))
        self._out.flush()
