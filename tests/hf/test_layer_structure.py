"""Which decoder layers are told to do what the native core computes in one call, from their code."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from native_steps import count_calls, load
from structures import (
    LAYER,
    WIDTH,
    Attention,
    Layer,
    Norm,
    changed,
    halved,
    of_family,
)
from torch import nn
from transformers.models.dots1 import modeling_dots1 as dots1
from transformers.models.granitemoe import modeling_granitemoe as granitemoe
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.olmoe import modeling_olmoe as olmoe
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from zipmoe.hf.layer_structure import LayerParts, layer_parts
from zipmoe.hf.mentioned_names import mentioned_names


def test_a_layer() -> None:
    assert layer_parts(Layer()) == LAYER


@pytest.mark.parametrize(
    "kind",
    [
        qwen2_moe.Qwen2MoeDecoderLayer,
        mixtral.MixtralDecoderLayer,
        qwen3_moe.Qwen3MoeDecoderLayer,
        olmoe.OlmoeDecoderLayer,
        dots1.Dots1DecoderLayer,
    ],
)
def test_layers_of_families(kind: type[nn.Module]) -> None:
    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    layer = of_family(kind, **dict(zip(names, (Norm(), Attention(), Norm(), nn.Identity()), strict=True)))
    assert layer_parts(layer) == LayerParts(*names)


def test_a_family_with_scaled_residuals() -> None:
    layer = of_family(
        granitemoe.GraniteMoeDecoderLayer,
        input_layernorm=Norm(),
        self_attn=Attention(),
        post_attention_layernorm=Norm(),
        block_sparse_moe=nn.Identity(),
        residual_multiplier=1.0,
    )
    assert layer_parts(layer) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "scale", nn.Parameter(torch.ones(1))),
        lambda layer: layer.register_buffer("scale", torch.ones(1)),
        lambda layer: setattr(layer, "dropout", nn.Identity()),
        lambda layer: setattr(layer, "norm_in", nn.RMSNorm(WIDTH)),
        lambda layer: setattr(layer, "attn", nn.Identity()),
        lambda layer: setattr(layer, "mlp", None),
    ],
    ids=["parameter", "buffer", "child", "other norm", "other attention", "no feed-forward network"],
)
def test_layers_with_other_parts(change: Any) -> None:
    layer = Layer()
    change(layer)
    assert layer_parts(layer) is None


HEAD = "def forward(self, x, attention_mask=None, cache=None, position_embeddings=None, **kwargs):\n"
ATTEND = (
    "self.attn(hidden_states=h, attention_mask=attention_mask, cache=cache,"
    " position_embeddings=position_embeddings, **kwargs)"
)
FIRST = "h = self.norm_in(x); h, w = ATTEND; x = x + h"
SECOND = "h = self.norm_out(x); h = self.mlp(h)"


def layer_of(body: str, head: str = HEAD, **scope: Any) -> Any:
    lines = body.replace("FIRST", FIRST).replace("SECOND", SECOND).replace("ATTEND", ATTEND).split(";")
    return changed(Layer, head + "".join(f" {line.strip()}\n" for line in lines), **scope)


@pytest.mark.parametrize(
    "body",
    [
        "FIRST; SECOND; return x + h",
        "h = self.norm_in(x); h = ATTEND[0]; h += x; x = self.norm_out(h); return self.mlp(x) + h",
        "h = self.norm_in(x); h, w = ATTEND; x = x + h; SECOND; x += h; return x",
        "h = self.norm_in(x); h, w = ATTEND; h += x; x = h; SECOND; h += x; return h",
    ],
)
def test_layers_that_are_put_otherwise(body: str) -> None:
    assert layer_parts(layer_of(body)) == LAYER


OTHER_LAYERS = {
    "scaled residual": "h = self.norm_in(x); h, w = ATTEND; x = 2 * x + h; SECOND; return x + h",
    "scaled by hardly anything": "FIRST; SECOND; return x + 1.0001 * h",
    "a small number is added": "FIRST; SECOND; return x + h + 1e-12",
    "difference": "h = self.norm_in(x); h, w = ATTEND; x = x - h; SECOND; return x + h",
    "residual is the normed": "x = self.norm_in(x); h = x; h, w = ATTEND; x = x + h; SECOND; return x + h",
    "second residual is the normed": "FIRST; x = self.norm_out(x); return x + self.mlp(x)",
    "norms swapped": "self.norm_in; self.attn; h = self.norm_out(x); h, w = ATTEND; x = x + h; h = self.norm_in(x);"
    " return x + self.mlp(h)",
    "norms of the outputs": "self.norm_in; h = x; h, w = ATTEND; h = self.norm_in(h); x = x + h; self.norm_out;"
    " h = self.mlp(x); h = self.norm_out(h); return x + h",
    "parallel": "h = self.norm_in(x); h, w = ATTEND; n = self.norm_out(x); return x + h + self.mlp(n)",
    "sums in another order": "h = self.norm_in(x); h, w = ATTEND; n = self.norm_out(x + h);"
    " return x + (h + self.mlp(n))",
    "network of the sum": "FIRST; self.norm_out(x); return x + self.mlp(x)",
    "network of the first norm": "n = self.norm_in(x); h = n; h, w = ATTEND; x = x + h; self.norm_out(x);"
    " return x + self.mlp(n)",
    "network asked for more": "FIRST; h = self.norm_out(x); return x + self.mlp(h, True)",
    "network called twice": "FIRST; h = self.norm_out(x); self.mlp(h); h = self.mlp(h); return x + h",
    "attention called twice": "h = self.norm_in(x); ATTEND; h, w = ATTEND; x = x + h; SECOND; return x + h",
    "norm called twice": "FIRST; self.norm_out(x); SECOND; return x + h",
    "attention's second answer": "h = self.norm_in(x); h, w = ATTEND; x = x + h + w; SECOND; return x + h",
    "tuple": "FIRST; SECOND; return (x + h,)",
    "nothing": "FIRST; SECOND; x + h",
    "the sum of the first half": "FIRST; SECOND; return x",
    "the input itself": "y = x; FIRST; SECOND; return y",
    "the input changed": "h = self.norm_in(x); h, w = ATTEND; x += h; SECOND; return x + h",
    "the input changed behind": "y = x; FIRST; SECOND; y += h; return x + h",
    "first norm's output doubled": "h = self.norm_in(x); h += h; h, w = ATTEND; x = x + h; SECOND; return x + h",
    "attention's output doubled": "h = self.norm_in(x); h, w = ATTEND; h += h; x = x + h; SECOND; return x + h",
    "second norm's output squared": "FIRST; h = self.norm_out(x); h *= h; return x + self.mlp(h)",
    "network's output doubled": "FIRST; SECOND; h += h; return x + h",
    "large values cut": "FIRST; SECOND; x = x + h; return x * (x < 1e4)",
    "large values not changed": "FIRST; SECOND; x = x + h; return x if x[0, 0, 0] < 1e4 else h",
    "power": "FIRST; SECOND; return (x + h) ** 1.0",
    "twice the other sign": "FIRST; SECOND; return -(-x) + h",
    "product of matrices": "FIRST; SECOND; return x + h @ x",
    "a value is looked for": "FIRST; x = (x, h)[9.0 in x]; SECOND; return x + h",
    "an option is looked for": "FIRST; SECOND; x = x + h; return (x, h)['more' in kwargs]",
    "two values are one": "y = x; FIRST; SECOND; x = x + h; return (h, x)[y == x]",
    "two options are one": "FIRST; SECOND; x = x + h; return (x, h)[cache == attention_mask]",
    "first columns": "FIRST; SECOND; return x + h[..., :64]",
    "first sequences": "FIRST; SECOND; return x[:16] + h[:16]",
    "columns are set": "FIRST; SECOND; x[..., 64:] = 0; return x + h",
    "a part is replaced": "FIRST; SECOND; self.mlp = self.norm_in; return x + h",
}


@pytest.mark.parametrize("body", OTHER_LAYERS.values(), ids=OTHER_LAYERS.keys())
def test_other_layers(body: str) -> None:
    """All of which mention the same names, in the same order."""
    layer = layer_of(body)
    assert mentioned_names(type(layer)) == ["norm_in", "attn", "norm_out", "mlp"]
    assert layer_parts(layer) is None


@pytest.mark.parametrize(
    "body",
    [
        "FIRST; SECOND; return (x + h).clone()",
        "FIRST; SECOND; return (x + h).float()",
        "FIRST; SECOND; return torch.add(x, h)",
        "FIRST; SECOND; self.last = h; return x + h",
        "FIRST; SECOND; return x + h if kwargs.get('more') else x",
        "FIRST; h = self.mlp(x); return x + self.norm_out(h)",
    ],
)
def test_layers_that_mention_other_names_or_in_another_order(body: str) -> None:
    assert layer_parts(layer_of(body)) is None


CALLS = {
    "another mask": "attention_mask=x, cache=cache, position_embeddings=position_embeddings, **kwargs",
    "other positions": "cache=cache, position_embeddings=(x, x), **kwargs",
    "swapped positions": "cache=cache, position_embeddings=position_embeddings[::-1], **kwargs",
    "no positions": "cache=cache, **kwargs",
    "no cache": "position_embeddings=position_embeddings, **kwargs",
    "another cache": "cache=(cache,), position_embeddings=position_embeddings, **kwargs",
    "a cache under another name": "past_key_values=cache, position_embeddings=position_embeddings",
    "an option more": "cache=cache, position_embeddings=position_embeddings, scale=2, **kwargs",
    "no options": "cache=cache, position_embeddings=position_embeddings",
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS.keys())
def test_attention_that_is_given_something_else(options: str) -> None:
    rest = "x = x + h; SECOND; return x + h"
    assert layer_parts(layer_of(f"h = self.norm_in(x); h, w = self.attn(hidden_states=h, {options}); {rest}")) is None


def test_attention_that_is_given_something_else_than_the_normed() -> None:
    for given in ("hidden_states=x", "h", "hidden_states=h + x"):
        attend = ATTEND.replace("hidden_states=h", given)
        assert layer_parts(layer_of(f"h = self.norm_in(x); h, w = {attend}; x = x + h; SECOND; return x + h")) is None


def test_options_that_never_come() -> None:
    """Without ``**kwargs`` a cache of another name is an error of the family's."""
    head = "def forward(self, x, cache, position_embeddings):\n"
    call = "self.attn(hidden_states=h, cache=cache, position_embeddings=position_embeddings)"
    assert layer_parts(layer_of(f"h = self.norm_in(x); h, w = {call}; x = x + h; SECOND; return x + h", head)) == LAYER


@pytest.mark.parametrize("name", ["use_cache", "output_router_logits", "something"])
@pytest.mark.parametrize("condition", ["{}", "not {}", "{} is None", "{} is False", "{} == 1"])
def test_layers_that_do_something_else_with_an_option(name: str, condition: str) -> None:
    head = HEAD.replace("x, ", f"x, {name}=None, ")
    assert layer_parts(layer_of("FIRST; SECOND; return x + h", head)) == LAYER
    choice = condition.format(name)
    assert layer_parts(layer_of(f"FIRST; SECOND; return x if {choice} else x + h", head)) is None
    assert layer_parts(layer_of(f"FIRST; SECOND; return (x + h, h)[{choice}]", head)) is None


def test_layers_that_go_on_after_errors() -> None:
    body = "FIRST; SECOND; x = x + h; return x"
    assert layer_parts(layer_of(body)) == LAYER
    assert layer_parts(layer_of(body.replace("return x", "\n try:\n  x + kwargs['more']\n except: return x"))) is None


def test_code_that_is_not_in_the_forward() -> None:
    body = "FIRST; h = self.norm_out(x); h = self.mlp(own(h)); return x + h"
    assert layer_parts(layer_of(body, own=halved)) is None
    head = HEAD.replace("x, ", "x, own=halved, ")
    layer = layer_of(body, head, halved=halved)
    assert mentioned_names(type(layer)) == ["norm_in", "attn", "norm_out", "mlp"]
    assert layer_parts(layer) is None

    own = halved

    class Closed(Layer):
        def forward(self, x, cache=None, position_embeddings=None, **kwargs):
            h = self.norm_in(x)
            h, _ = self.attn(hidden_states=h, cache=cache, position_embeddings=position_embeddings, **kwargs)
            x = x + h
            h = self.norm_out(x)
            h = self.mlp(h)
            return x + own(h)

    assert layer_parts(Closed()) is None


@pytest.mark.parametrize(("module", "parts"), [("transformers.utils.some", LAYER), ("somebody", None)])
def test_code_around_the_forward(module: str, parts: LayerParts | None) -> None:
    """Transformers' own renames options; what somebody else's does is not known."""
    scope: dict[str, Any] = {"__name__": module}
    exec("def around(self, *args, **kwargs):\n return 2 * self.own(*args, **kwargs)", scope)
    around = functools.wraps(Layer.forward)(scope["around"])
    assert layer_parts(type("Changed", (Layer,), {"forward": around})()) == parts


@pytest.mark.parametrize("name", ["norm_in", "attn", "norm_out", "mlp"])
def test_parts_of_a_layer_that_are_called_otherwise(name: str) -> None:
    layer = Layer()
    child = getattr(layer, name)
    child.__class__ = type("Called", (type(child),), {"__call__": lambda self, *args: halved(args[0])})
    assert layer_parts(layer) is None


def test_a_model_whose_layers_do_something_else(packed_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output of a norm is doubled where it lies."""
    packed = packed_model("qwen3_moe")
    calls = count_calls(monkeypatch)

    def forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states += hidden_states
        hidden_states, _ = self.self_attn(hidden_states=hidden_states, **kwargs)
        hidden_states = residual + hidden_states
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    for own in (qwen3_moe.Qwen3MoeDecoderLayer.forward, forward):
        monkeypatch.setattr(qwen3_moe.Qwen3MoeDecoderLayer, "forward", own)
        calls.layers = calls.first_halves = 0
        model = load(packed.folder)
        with model.zipmoe_engine:
            for _ in range(2):
                packed.generate(model)
        assert (calls.layers > 0, calls.first_halves) == (own is not forward, 0)
