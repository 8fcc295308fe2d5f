"""What code may do with watched tensors and their sizes, and that all else is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from zipmoe.hf.watched_tensor import UnexpectedOperationError, WatchedTensor, plain, watched

VALUES = torch.arange(6.0).view(3, 1, 2)

KNOWN: list[Callable[[Any], Any]] = [
    lambda x: x + x,
    lambda x: x * x,
    lambda x: functional.sigmoid(x) * x,
    lambda x: torch.sigmoid(x.sigmoid()),
    lambda x: x.view(-1, x.shape[-1]),
    lambda x: x.reshape(x.shape[0] * x.shape[1], -1),
    lambda x: x.flatten(0, 1).view(x.size()),
    lambda x: torch.reshape(x, (*x.shape[:-1], -1)),
    lambda x: x.view(x.size(0), x.size(-1)),
]
UNKNOWN: list[Callable[[Any], Any]] = [
    lambda x: x + 0,
    lambda x: 1 * x,
    lambda x: x + VALUES,
    lambda x: VALUES + x,
    lambda x: torch.Tensor.add(x, x, alpha=2),
    lambda x: -x,
    lambda x: x - x,
    lambda x: x / x,
    lambda x: x**2,
    lambda x: x @ x,
    lambda x: x < VALUES,
    lambda x: x < watched(VALUES),
    lambda x: x == VALUES,
    lambda x: x == watched(VALUES),
    lambda x: x != watched(VALUES),
    lambda x: x == 1,
    lambda x: x is None or x == x.view(3, 2),
    lambda x: 1.0 in x,
    bool,
    lambda x: x or x,
    lambda x: x[0],
    lambda x: [*x],
    lambda x: x.view(torch.int32),
    lambda x: x.sum(),
    lambda x: x.item(),
    lambda x: x.tolist(),
    lambda x: x.numpy(),
    lambda x: x.clone(),
    lambda x: x.dtype,
    lambda x: x.data,
    torch.empty_like,
    lambda x: x.shape[0] == 3,
    lambda x: x.shape[0] != 3,
    lambda x: x.shape[0] > 3,
    lambda x: x.shape[0] in (1, 2),
    lambda x: x.shape == x.shape,
    lambda x: x.shape[0] and x,
    lambda x: x.shape[0] % 2,
    lambda x: x.shape[0] + 1,
    lambda x: x.shape[0] * 2,
    lambda x: int(x.size(0)) > {x.size(0): 1}[3],
]


@pytest.mark.parametrize("code", KNOWN)
def test_known(code: Callable[[Any], Any]) -> None:
    with torch.inference_mode():
        found = code(watched(VALUES))
        assert type(found) is WatchedTensor
        assert type(plain(found)) is torch.Tensor
        assert torch.equal(plain(found), code(VALUES))


@pytest.mark.parametrize("code", UNKNOWN)
def test_unknown(code: Callable[[Any], Any]) -> None:
    with torch.inference_mode(), pytest.raises((UnexpectedOperationError, TypeError, AttributeError)):
        code(watched(VALUES))


def test_changes_in_place() -> None:
    x = watched(VALUES)
    with torch.inference_mode():
        rows = x.view(-1, 2)
        rows += rows
        rows *= rows
        with pytest.raises(UnexpectedOperationError):
            rows[0] = rows
        with pytest.raises(UnexpectedOperationError):
            rows -= rows
    assert torch.equal(plain(x), 4 * VALUES * VALUES)
    assert torch.equal(VALUES, torch.arange(6.0).view(3, 1, 2))
