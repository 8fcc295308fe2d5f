"""Worker: a GGUF file with llama.cpp, mapped, through the low-level interface of llama-cpp-python.

Runs alone, as a file, under any interpreter that has llama_cpp and NumPy: it imports nothing of ZipMoE. The protocol is
that of ``worker_protocol.py``.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

_LOAD_MODE_MMAP = 1
_WARNING_LEVEL = 3
_PR_SET_PDEATHSIG = 1


def storage_read_bytes() -> int:
    """Bytes that this process had the disk read so far, page faults on mapped files included."""
    with open("/proc/self/io", encoding="ascii") as lines:  # noqa: PTH123 - called once per token
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


class Model:
    """A loaded model."""

    def __init__(self, library: Any, path: str, threads: int) -> None:
        """Map the file.

        Raises:
            RuntimeError: llama.cpp cannot load it (why stands on standard error).
        """
        self._library = library
        self._threads = threads
        options = library.llama_model_default_params()
        if hasattr(options, "load_mode"):
            options.load_mode = _LOAD_MODE_MMAP
        else:
            options.use_mmap = True
        if hasattr(options, "use_extra_bufts"):
            options.use_extra_bufts = False  # copies in other layouts would not be mapped
        self._model = library.llama_model_load_from_file(path.encode(), options)
        if not self._model:
            raise RuntimeError("llama.cpp could not load the file")
        self._vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
        """Greedy continuation of equally long prompts; fields of a ``generation`` line."""
        library, length = self._library, len(prompts[0])
        options = library.llama_context_default_params()
        options.n_ctx = len(prompts) * (length + new_tokens)
        options.n_batch = max(512, length, len(prompts))
        options.n_seq_max = len(prompts)
        if hasattr(options, "kv_unified"):
            options.kv_unified = True  # n_ctx counts the tokens of all sequences
        options.n_threads = options.n_threads_batch = self._threads
        context = library.llama_init_from_model(self._model, options)
        if not context:
            raise RuntimeError("llama.cpp could not make a context")
        rows = library.llama_batch_init(max(length, len(prompts)), 0, 1)
        try:
            return self._steps(context, rows, prompts, new_tokens)
        finally:
            library.llama_batch_free(rows)
            library.llama_free(context)

    def _steps(self, context: Any, rows: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
        bytes_before, began = storage_read_bytes(), time.perf_counter()
        token_seconds: list[float] = []
        read_bytes: list[int] = []
        tokens: list[list[int]] = []
        for sequence, prompt in enumerate(prompts):
            entries = [(token, position, sequence) for position, token in enumerate(prompt)]
            tokens.append(self._decode(context, rows, entries, [len(prompt) - 1]))
        for position in range(len(prompts[0]), len(prompts[0]) + new_tokens):
            token_seconds.append(time.perf_counter() - began)
            read_bytes.append(storage_read_bytes() - bytes_before)
            if len(token_seconds) == new_tokens:
                break
            entries = [(each[-1], position, sequence) for sequence, each in enumerate(tokens)]
            found = self._decode(context, rows, entries, range(len(entries)))
            for each, token in zip(tokens, found, strict=True):
                each.append(token)
        return {
            "batch": len(prompts),
            "token_seconds": token_seconds,
            "read_bytes": read_bytes,
            "tokens": tokens,
        }

    def _decode(
        self, context: Any, rows: Any, entries: Sequence[tuple[int, int, int]], wanted: Sequence[int]
    ) -> list[int]:
        """One pass over (token, position, sequence); the most likely next token after each of the ``wanted`` rows."""
        rows.n_tokens = len(entries)
        for index, (token, position, sequence) in enumerate(entries):
            rows.token[index] = token
            rows.pos[index] = position
            rows.n_seq_id[index] = 1
            rows.seq_id[index][0] = sequence
            rows.logits[index] = index in wanted
        code = self._library.llama_decode(context, rows)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        found = []
        for index in wanted:
            logits = self._library.llama_get_logits_ith(context, index)
            found.append(int(np.ctypeslib.as_array(logits, shape=(self._vocabulary,)).argmax()))
        return found


def work(job: dict[str, Any], say: Any) -> None:
    """Load and generate."""
    os.environ.pop("OMP_WAIT_POLICY", None)  # what importing zipmoe sets, and processes inherit
    library = importlib.import_module("llama_cpp")

    def log(level: int, text: bytes, _: Any) -> None:
        if level >= _WARNING_LEVEL:
            sys.stderr.write(text.decode(errors="replace"))

    callback = library.llama_log_callback(log)
    library.llama_log_set(callback, ctypes.c_void_p(0))
    library.llama_backend_init()
    bytes_before, began = storage_read_bytes(), time.perf_counter()
    model = Model(library, job["model"], job["threads"])
    say(
        "loaded",
        seconds=time.perf_counter() - began,
        read_bytes=storage_read_bytes() - bytes_before,
        versions={"llama-cpp-python": library.__version__},
    )
    for prompts in job["batches"]:
        say("generation", **model.generate(prompts, job["new_tokens"]))


def main() -> None:
    """Do the job that stands on standard input."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the library prints goes to standard error

    def say(kind: str, **fields: Any) -> None:
        out.write(json.dumps({"kind": kind, **fields}) + "\n")
        out.flush()

    try:
        work(json.loads(sys.stdin.read()), say)
    except Exception as error:
        say("failed", reason=f"{type(error).__name__}: {error}")
        raise
    say("done")
    sys.stderr.flush()
    os._exit(0)  # the library's own destructors run in an order that can crash


if __name__ == "__main__":
    main()
