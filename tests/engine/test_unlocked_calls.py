"""Native calls that take long leave the interpreter to other threads meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Event, Thread

import numpy as np
import pytest
import torch
from packed_model import PackedModel

from zipmoe import _native

NETWORK = _native.ExpertNetwork(0, 1, _native.GatedActivation("silu", "halves"))


def another_thread_runs(call: Callable[[], object], tries: int = 500) -> bool:
    """Whether a thread that is ready to run gets its turn in one of the calls: nobody gives up the lock otherwise."""
    started, go, ran = Event(), Event(), []

    def wait() -> None:
        started.set()
        go.wait()
        ran.append(True)

    interval = sys.getswitchinterval()
    other = Thread(target=wait)
    other.start()
    started.wait()
    sys.setswitchinterval(1000)
    try:
        go.set()
        for _ in range(tries):
            call()
            if ran:
                return True
        return False
    finally:
        sys.setswitchinterval(interval)
        other.join()


def words(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint16).numpy()


def zeros(*shape: int) -> np.ndarray:
    return words(torch.zeros(shape, dtype=torch.bfloat16))


def test_norms() -> None:
    x, weight, out = zeros(512, 4096), zeros(4096), zeros(512, 4096)
    assert another_thread_runs(lambda: _native.rms_norm(x, weight, 1e-6, out))


def test_small_products() -> None:
    weights, x, out = zeros(64, 1024), zeros(256, 1024), zeros(256, 64)
    assert another_thread_runs(lambda: _native.small_linear(weights, x, out))


def test_routers() -> None:
    formula = _native.RouterFormula("softmax", 4, normalised=False)
    x, matrix, logits = zeros(256, 1024), zeros(64, 1024), zeros(256, 64)
    weights, ids = np.zeros((256, 4), np.float32), np.zeros((256, 4), np.int64)
    assert another_thread_runs(lambda: _native.route(formula, x, matrix, logits, weights, ids))


def test_what_lies_around_the_experts(model: PackedModel) -> None:
    """By a step that is refused for its last position, so that no request gives the lock up."""
    tokens, top_k = 50_000, 8
    x, out = zeros(tokens, 64), zeros(tokens, 64)
    weights = np.zeros((tokens, top_k), np.float32)
    positions = np.arange(tokens * top_k)
    positions[-1] = 0
    with model.engine(3, fused=True) as engine:

        def step() -> None:
            with pytest.raises(ValueError, match="every position occurs once"):
                engine._native.sparse_step([], [], NETWORK, x, positions, weights, out, False)

        assert another_thread_runs(step)
