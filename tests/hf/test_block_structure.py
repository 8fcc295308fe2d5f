"""Which sparse blocks are told to do what the native core computes in one call, from their code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structures import (
    BLOCK,
    WIDTH,
    Block,
    Experts,
    Gate,
    RoutedOnly,
    Router,
    Shared,
    changed,
    halved,
    of_family,
)
from torch import nn
from transformers.models.dots1 import modeling_dots1 as dots1
from transformers.models.granitemoe import modeling_granitemoe as granitemoe
from transformers.models.hy_v3 import modeling_hy_v3 as hy_v3
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.olmoe import modeling_olmoe as olmoe
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from zipmoe.hf.layer_structure import BlockParts, block_parts
from zipmoe.hf.mentioned_names import mentioned_names


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
