"""What the code of a ``forward`` mentions, and does after the mention of an attribute; where that is not to be told."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from zipmoe.hf.mentioned_names import CodeAfter, code_after, mentioned_names


def function(source: str, module: str = "transformers.models.some") -> Any:
    """``forward`` as if a module had defined it."""
    scope: dict[str, Any] = {"__name__": module}
    exec(source, scope)
    return scope["forward"]


def test_variables_of_outer_functions_have_no_names() -> None:
    def kind(own: Any) -> Any:
        class Outer:
            def forward(self, x: Any) -> Any:
                return own(self.norm(x))

        return Outer

    class Plain:
        def forward(self, x: Any) -> Any:
            return abs(self.norm(x))

    assert mentioned_names(Plain) == ["abs", "norm"]
    assert mentioned_names(kind(abs)) is None


def test_names_and_slices_behind_the_mention() -> None:
    forward = function("def forward(self, x):\n x = self.norm(x[:2])\n x = self.mlp(x)\n return self.last(x)[-x.n :]")
    assert code_after(forward, "mlp") == CodeAfter(frozenset({"last", "n"}), 1)
    assert code_after(forward, "norm") == CodeAfter(frozenset({"mlp", "last", "n"}), 2)
    assert code_after(forward, "last") == CodeAfter(frozenset({"n"}), 1)


@pytest.mark.parametrize("constant", [slice(-1, None), (slice(None), slice(-1, None))])
def test_slices_that_are_constants(constant: Any) -> None:
    forward = function("def forward(self, x):\n x = self.mlp(x)\n return x[5]")
    code = forward.__code__
    forward.__code__ = code.replace(co_consts=tuple(constant if each == 5 else each for each in code.co_consts))
    assert code_after(forward, "mlp") == CodeAfter(frozenset(), 1)


def test_a_loop_over_what_is_mentioned_and_one_before_it() -> None:
    forward = function("def forward(self, x):\n for each in self.layers:\n  x = each(x)\n return self.norm(x)")
    assert code_after(forward, "layers") == CodeAfter(frozenset({"norm"}), 0)
    assert code_after(forward, "norm") == CodeAfter(frozenset(), 0)


@pytest.mark.parametrize(
    "source",
    [
        "def forward(self, x):\n return x",
        "def forward(self, x):\n return self.mlp(self.mlp(x))",
        "def forward(self, x):\n for _ in range(2):\n  x = self.mlp(x)\n return x",
        "def forward(self, x):\n while x.more:\n  x = self.mlp(x)\n return x",
        "def forward(self, x):\n x = self.mlp(x)\n return x @ x",
        "def forward(self, x):\n x = self.mlp(x)\n return (lambda: x)()",
    ],
)
def test_what_is_not_to_be_told(source: str) -> None:
    assert code_after(function(source), "mlp") is None


def test_code_of_others() -> None:
    source = "def forward(self, x):\n return self.mlp(x)"
    assert code_after(function(source), "mlp") == CodeAfter(frozenset(), 0)
    assert code_after(function(source, "somebody.models"), "mlp") is None
    assert code_after(len, "mlp") is None


@pytest.mark.parametrize(("module", "known"), [("transformers.utils", True), ("somebody", False)])
def test_wrappers_must_be_transformers_own(module: str, known: bool) -> None:
    wrap: Callable[..., Any] = function("def forward(*args):\n return args", module)
    wrapped = functools.wraps(function("def forward(self, x):\n return self.mlp(x)"))(wrap)
    assert (code_after(wrapped, "mlp") is not None) == known
