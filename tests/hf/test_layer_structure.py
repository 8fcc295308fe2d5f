"""Which decoder layers and sparse blocks are told to do what the native core computes in one call, from their code."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812, as the families have it
from native_steps import count_calls, load
from torch import nn
from transformers.models.dots1 import modeling_dots1 as dots1
from transformers.models.granitemoe import modeling_granitemoe as granitemoe
from transformers.models.hy_v3 import modeling_hy_v3 as hy_v3
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.olmoe import modeling_olmoe as olmoe
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from zipmoe.hf.experts_forward import PackedInterfaceExperts
from zipmoe.hf.fused_attention import FusedAttention
from zipmoe.hf.fused_feed_forward import FusedFeedForward
from zipmoe.hf.fused_linear import FusedLinear
from zipmoe.hf.fused_norm import FusedNorm
from zipmoe.hf.fused_router import FusedRouter
from zipmoe.hf.layer_structure import BlockParts, LayerParts, block_parts, layer_parts
from zipmoe.hf.mentioned_names import mentioned_names

WIDTH = 32


class Norm(FusedNorm):
    pass


class Attention(FusedAttention):
    pass


class Router(FusedRouter):
    def __init__(self, any_shape: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, WIDTH))
        self._zipmoe_native = SimpleNamespace(any_shape=any_shape)


class Experts(PackedInterfaceExperts):
    pass


class Shared(FusedFeedForward):
    pass


class Gate(FusedLinear):
    pass


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_in = Norm()
        self.attn = Attention()
        self.norm_out = Norm()
        self.mlp = nn.Identity()

    def forward(self, x, attention_mask=None, position_ids=None, cache=None, position_embeddings=None, **kwargs):
        residual = x
        x = self.norm_in(x)
        x, _ = self.attn(
            hidden_states=x,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        x = residual + x
        residual = x
        x = self.norm_out(x)
        x = self.mlp(x)
        return residual + x


class Block(nn.Module):
    """With all parts."""

    def __init__(self, any_shape: bool = False) -> None:
        super().__init__()
        self.gate = Router(any_shape)
        self.experts = Experts()
        self.shared_expert = Shared()
        self.shared_expert_gate = Gate()

    def forward(self, x):
        shape = x.shape
        x = x.view(-1, shape[-1])
        _, weights, ids = self.gate(x)
        out = self.experts(x, ids, weights)
        out += F.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return out.view(shape)


class RoutedOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Router()
        self.experts = Experts()

    def forward(self, x):
        b, s, d = x.shape
        x = x.view(-1, d)
        _, weights, ids = self.gate(x)
        return self.experts(x, ids, weights).reshape(b, s, d)


LAYER = LayerParts("norm_in", "attn", "norm_out", "mlp")
BLOCK = BlockParts("gate", "experts", "shared_expert", "shared_expert_gate")


def changed(base: type[nn.Module], source: str, *args: Any, **scope: Any) -> Any:
    """An object of ``base`` with this code in the place of its ``forward``'s."""
    scope = {"F": F, "torch": torch, **scope}
    exec(source, scope)
    return type("Changed", (base,), {"forward": scope["forward"]})(*args)


def of_family(kind: type[nn.Module], **children: Any) -> Any:
    """An object with a family's code."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, child in children.items():
        setattr(module, name, child)
    return module


# Layers


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


def halved(values: torch.Tensor) -> torch.Tensor:
    return values / 2 if values.abs().max() > 100 else values


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


# Blocks


@pytest.mark.parametrize("any_shape", [False, True])
def test_a_block(any_shape: bool) -> None:
    assert block_parts(Block(any_shape)) == BLOCK
    assert block_parts(RoutedOnly()) == BlockParts("gate", "experts")


def test_blocks_of_families() -> None:
    routed = {"gate": Router(), "experts": Experts()}
    block = of_family(qwen2_moe.Qwen2MoeSparseMoeBlock, **routed, shared_expert=Shared(), shared_expert_gate=Gate())
    assert block_parts(block) == BLOCK
    for kind in (qwen3_moe.Qwen3MoeSparseMoeBlock, olmoe.OlmoeSparseMoeBlock):
        assert block_parts(of_family(kind, **routed)) == BlockParts("gate", "experts")
    block = of_family(mixtral.MixtralSparseMoeBlock, **routed, jitter_noise=0.1)
    assert block.training and block_parts(block) == BlockParts("gate", "experts")
    block = of_family(granitemoe.GraniteMoeMoE, router=Router(), experts=Experts(), input_size=WIDTH)
    assert block_parts(block) == BlockParts("router", "experts")


def test_blocks_of_families_that_do_more() -> None:
    parts = {"experts": Experts(), "shared_experts": Shared()}
    assert block_parts(of_family(hy_v3.HYV3MoE, gate=Router(), **parts, enable_moe_fp32_combine=False)) is None


def test_the_router_is_given_what_it_routes() -> None:
    """Tokens of sequences, only if it takes them as tokens."""
    for any_shape in (False, True):
        block = of_family(dots1.Dots1MoE, gate=Router(any_shape), experts=Experts(), shared_experts=Shared())
        assert block_parts(block) == (BlockParts("gate", "experts", "shared_experts") if any_shape else None)


def block_of(body: str, base: type[nn.Module] = Block, head: str = "def forward(self, x):\n", **scope: Any) -> Any:
    lines = ["s = x.shape", "x = x.view(-1, s[-1])", *body.split(";")]
    return changed(base, head + "".join(f" {line.strip()}\n" for line in lines), **scope)


GATE = "F.sigmoid(self.shared_expert_gate(x))"
SHARED = f"{GATE} * self.shared_expert(x)"
ROUTED = f"_, w, i = self.gate(x); g = {SHARED}; o = self.experts(x, i, w)"


@pytest.mark.parametrize(
    "body",
    [
        f"{ROUTED}; o = o + g; return o.reshape(s)",
        f"{ROUTED}; o += g; return o.view(*s)",
        f"{ROUTED}; return (g + o).view(s)",
        "_, w, i = self.gate(x); g = self.shared_expert_gate(x).sigmoid(); o = self.shared_expert(x);"
        " o *= g; o += self.experts(x, i, w); return torch.reshape(o, s)",
    ],
)
def test_blocks_that_are_put_otherwise(body: str) -> None:
    assert block_parts(block_of(body)) == BLOCK


OTHER_BLOCKS = {
    "shared output scaled": f"{ROUTED}; return (o + 2 * g).view(s)",
    "shared output scaled by hardly anything": f"{ROUTED}; return (o + 1.0001 * g).view(s)",
    "a small number is added": f"{ROUTED}; return (o + g + 1e-12).view(s)",
    "routed output scaled": f"{ROUTED}; o *= 2; return (o + g).view(s)",
    "weights changed": f"_, w, i = self.gate(x); w = w * 2; o = self.experts(x, i, w); return (o + {SHARED}).view(s)",
    "weights changed in place": (
        f"_, w, i = self.gate(x); w *= w; o = self.experts(x, i, w); return (o + {SHARED}).view(s)"
    ),
    "ids changed": f"_, w, i = self.gate(x); i = i + 1; o = self.experts(x, i, w); return (o + {SHARED}).view(s)",
    "ids changed in place": (
        f"_, w, i = self.gate(x); i += i; o = self.experts(x, i, w); return (o + {SHARED}).view(s)"
    ),
    "weights for ids": f"_, w, i = self.gate(x); o = self.experts(x, w, i); return (o + {SHARED}).view(s)",
    "logits for weights": f"w, _, i = self.gate(x); o = self.experts(x, i, w); return (o + {SHARED}).view(s)",
    "router called twice": f"self.gate(x); {ROUTED}; return (o + g).view(s)",
    "experts called twice": f"{ROUTED}; o = self.experts(x, i, w); return (o + g).view(s)",
    "experts called twice, one left out": f"{ROUTED}; self.experts(x, i, w); return (o + g).view(s)",
    "router not called": f"self.gate; o = self.experts(x, x, x); return (o + {SHARED}).view(s)",
    "experts not called": f"self.experts; _, w, i = self.gate(x); return (x + {SHARED}).view(s)",
    "shared not called": "_, w, i = self.gate(x); self.shared_expert, self.shared_expert_gate;"
    " return self.experts(x, i, w).view(s)",
    "gate not used": "_, w, i = self.gate(x); F.sigmoid(self.shared_expert_gate(x));"
    " return (self.experts(x, i, w) + self.shared_expert(x)).view(s)",
    "gate without its sigmoid": (
        "_, w, i = self.gate(x); g = self.shared_expert_gate(x) * self.shared_expert(x);"
        " return (self.experts(x, i, w) + g).view(s)"
    ),
    "sigmoid of the sigmoid": f"{ROUTED.replace(GATE, f'F.sigmoid({GATE})')}; return (o + g).view(s)",
    "gate of the routed": "_, w, i = self.gate(x); o = self.experts(x, i, w) + self.shared_expert(x);"
    " return (F.sigmoid(self.shared_expert_gate(x)) * o).view(s)",
    "shared of the routed": "_, w, i = self.gate(x); o = self.experts(x, i, w);"
    " return (o + F.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(o)).view(s)",
    "input added": f"{ROUTED}; return (x + o + g).view(s)",
    "input changed": f"x += x; {ROUTED}; return (o + g).view(s)",
    "input changed behind": f"{ROUTED}; x += o; return (o + g).view(s)",
    "experts of another input": f"{ROUTED.replace('self.experts(x', 'self.experts(x + x')}; return (o + g).view(s)",
    "no tensor": f"{ROUTED}; return (o + g).view(s), w",
    "another shape": f"{ROUTED}; return o + g",
    "large values cut": f"{ROUTED}; return (o * (o < 1e4) + g).view(s)",
    "large gate": f"{ROUTED}; return (o + g * (g < 1e4)).view(s)",
    "a value is looked for": f"{ROUTED}; return (o if 9.0 in o else o + g).view(s)",
    "few sequences": f"{ROUTED}; return (o + g if s[0] < 9 else o).view(s)",
    "one sequence": f"{ROUTED}; return (o + g if s[0] != 17 else o).view(s)",
    "one of some numbers of sequences": f"{ROUTED}; return (o if s[0] in (4, 5) else o + g).view(s)",
    "even sequences": f"{ROUTED}; return (o + g if s[0] % 2 else o).view(s)",
    "sizes that are equal": f"{ROUTED}; return (o if s == x.shape else o + g).view(s)",
    "no columns": f"{ROUTED}; return (o + g if s[2] else o).view(s)",
    "few rows": f"{ROUTED}; return (o[:8] + g[:8]).view(s)",
    "a number for the rows": f"{ROUTED}; return (o + g).view(s[0], s[1], 0 * s[2])",
    "noise outside of training": f"x = x * self.jitter_noise; {ROUTED}; return (o + g).view(s)",
    "noise outside of training, now none": (
        f"x = x if self.jitter_noise == 0 else x + x; {ROUTED}; return (o + g).view(s)"
    ),
    "random values": f"{ROUTED}; torch.empty_like(o).uniform_(0, 1); return (o + g).view(s)",
    "an attribute is set": f"{ROUTED}; self.hidden_dim = s; return (o + g).view(s)",
    "goes on after errors": f"{ROUTED}; o = o + g\n try:\n  s[3]\n except: pass\n return o.view(s)",
}
UNKNOWN_NAMES = {
    "method": f"{ROUTED}; return (o + g).view(s).contiguous()",
    "attribute": f"{ROUTED}; return (o + g).view(s) if self.fast else (o + g).view(s)",
    "other bits": f"{ROUTED}; return (o + g).view(torch.int16).view(torch.bfloat16).view(s)",
    "gate with another function": f"{ROUTED.replace('F.sigmoid', 'F.tanh')}; return (o + g).view(s)",
    "sum of the values": f"{ROUTED}; return (o + g).view(s) if o.sum() < 100 else o",
    "global": f"{ROUTED}; return (o + g).view(s) if len(o) < 100 else o",
}
KNOWN_NAMES = {
    *(
        "gate",
        "experts",
        "shared_expert",
        "shared_expert_gate",
        "shape",
        "view",
        "reshape",
        "F",
        "sigmoid",
        "hidden_dim",
    ),
    *("torch", "jitter_noise", "empty_like", "uniform_"),
}


@pytest.mark.parametrize("body", OTHER_BLOCKS.values(), ids=OTHER_BLOCKS.keys())
def test_other_blocks(body: str) -> None:
    """All of which mention known names only."""
    block = block_of(body)
    block.jitter_noise = 0.0
    assert {"gate", "experts", "shared_expert", "shared_expert_gate"} <= {*mentioned_names(type(block))} <= KNOWN_NAMES
    assert block_parts(block) is None


@pytest.mark.parametrize("body", UNKNOWN_NAMES.values(), ids=UNKNOWN_NAMES.keys())
def test_blocks_that_mention_other_names(body: str) -> None:
    block = block_of(body)
    block.fast = True
    assert block_parts(block) is None


def test_a_function_with_a_known_name() -> None:
    body = f"{ROUTED}; return (o + g).view(s)"
    assert block_parts(block_of(body)) == BLOCK

    def sigmoid(values: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(values) if values.abs().max() < 50 else torch.ones_like(values)

    assert block_parts(block_of(body, F=SimpleNamespace(sigmoid=sigmoid))) is None
    head = "def forward(self, x, own=own):\n"
    assert block_parts(block_of(body.replace("F.sigmoid", "own"), Block, head, own=sigmoid)) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block, "scale", nn.Parameter(torch.ones(1))),
        lambda block: block.register_buffer("scale", torch.ones(1)),
        lambda block: setattr(block, "dropout", nn.Identity()),
        lambda block: setattr(block, "gate", nn.Identity()),
        lambda block: setattr(block, "experts", nn.Identity()),
        lambda block: setattr(block, "shared_expert", nn.Identity()),
        lambda block: setattr(block, "shared_expert_gate", nn.Linear(WIDTH, 1)),
        lambda block: setattr(block, "second", Shared()),
    ],
    ids=["parameter", "buffer", "child", "other router", "other experts", "other shared", "other gate", "two shared"],
)
def test_blocks_with_other_parts(change: Any) -> None:
    block = Block()
    change(block)
    assert block_parts(block) is None


@pytest.mark.parametrize("name", ["", "gate", "experts", "shared_expert", "shared_expert_gate"])
def test_blocks_and_parts_that_are_called_otherwise(name: str) -> None:
    block = Block()
    module = block.get_submodule(name)
    module.__class__ = type("Called", (type(module),), {"__call__": lambda self, *args: halved(args[0])})
    assert block_parts(block) is None


# In a model


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
