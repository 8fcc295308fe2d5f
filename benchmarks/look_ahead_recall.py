"""How often does the next layer's router, asked early, name the experts that it will choose?

A model of the common layout (``model.layers[i]`` with ``post_attention_layernorm`` and ``mlp.gate``), packed or not,
writes a text. For every token and sparse layer but the first: the share of the chosen experts (top k) that are among
the first n by the logits of that layer's router on hidden states known a layer earlier, for n = k, k + 2 and 2 k. The
same for the first sparse layers and what is known of them when a token has been chosen, before its step begins.

Run: python benchmarks/look_ahead_recall.py MODEL [--text TEXT]
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import zipmoe  # noqa: F401  (packed folders load by AutoModelForCausalLM, too)
from zipmoe.hf.next_token_look_ahead import unit_rms

TOPICS = 64
FIRST_LAYERS = 3
"""So many are compared with what is known before a step."""
SOURCES = {
    "layer input, next norm": ("layer", True),
    "before the experts, next norm": ("residual", True),
    "block input as it is": ("block", False),
    "layer output, next norm": ("output", True),
}


def known_before_a_step(embedding: torch.Tensor, residual: torch.Tensor, norm: Any) -> dict[str, torch.Tensor]:
    """Estimates of a router's input, by name, from the rows of the tokens.

    Args:
        embedding: (tokens, hidden).
        residual: (tokens, hidden), what the norm before the router is given.
        norm: that norm.
    """
    before = torch.cat([residual[:1], residual[:-1]])
    exchanged = before - torch.cat([embedding[:1], embedding[:-1]]) + embedding
    return {
        "embedding at unit RMS": unit_rms(embedding),
        "embedding, the layer's norm": norm(embedding),
        "embedding + what layers added to the token before, the layer's norm": norm(exchanged),
        "residual of the token before, the layer's norm": norm(before),
    }


def watch(model: Any) -> tuple[dict[tuple[str, int], torch.Tensor], list[int]]:
    """Hidden states and chosen experts of the last pass, by name and layer; the sparse layers."""
    seen: dict[tuple[str, int], torch.Tensor] = {}
    layers = [i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")]

    def keep(name: str, index: int, value: Any) -> None:
        seen[name, index] = (value[0] if isinstance(value, tuple) else value).detach()

    for i in layers:
        layer = model.model.layers[i]
        layer.register_forward_pre_hook(lambda _, args, i=i: keep("layer", i, args[0]))
        layer.register_forward_hook(lambda _, args, out, i=i: keep("output", i, out))
        norm = layer.post_attention_layernorm
        norm.register_forward_hook(lambda _, args, out, i=i: (keep("residual", i, args[0]), keep("block", i, out))[0])
        layer.mlp.gate.register_forward_hook(lambda _, args, out, i=i: keep("chosen", i, out[2]))
    return seen, layers


def main() -> None:
    """Generate, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint or packed folder")
    parser.add_argument("--text", help="beginning of the text [default: 64 token ids of one topic, as make-model's]")
    parser.add_argument("--tokens", type=int, default=100, help="new tokens")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    if options.text is None:
        ids = torch.arange(64)[None] * 101 % (model.config.vocab_size // TOPICS) * TOPICS + 7
    else:
        ids = AutoTokenizer.from_pretrained(options.model)(options.text, return_tensors="pt")["input_ids"]
    torch.manual_seed(0)
    seen, layers = watch(model)
    shares: dict[str, list[float]] = defaultdict(list)
    with torch.no_grad():
        text = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=options.tokens)
        model(text, use_cache=False)
        seen = dict(seen)  # norms are called again below
        new = slice(ids.shape[1], None)
        embedding = model.get_input_embeddings()(text)[0]

        def compare(name: str, index: int, given: torch.Tensor) -> None:
            chosen = seen["chosen", index].view(text.shape[1], -1)[new]
            top_k = chosen.shape[-1]
            logits = (given[new] @ model.model.layers[index].mlp.gate.weight.T).float()
            for n in sorted({top_k, top_k + 2, 2 * top_k}):
                found = (chosen[:, :, None] == logits.topk(n).indices[:, None, :]).any(-1).float().mean()
                shares[f"{name}: {top_k} among {n}"].append(round(found.item(), 3))

        for index in layers[:FIRST_LAYERS]:
            norm = model.model.layers[index].post_attention_layernorm
            residual = seen["residual", index].view(text.shape[1], -1)
            for name, given in known_before_a_step(embedding, residual, norm).items():
                compare(f"before the step: {name}", index, given)
        for before, after in pairwise(layers):
            layer = model.model.layers[after]
            chosen = seen["chosen", after].view(text.shape[1], -1)[new]
            top_k = chosen.shape[-1]
            for name, (source, normed) in SOURCES.items():
                hidden = seen[source, before].view(text.shape[1], -1)
                compare(name, after, layer.post_attention_layernorm(hidden) if normed else hidden)
            last = (chosen[1:, :, None] == chosen[:-1, None, :]).any(-1).float().mean()
            shares[f"of the token before: {top_k} among {top_k}"].append(round(last.item(), 3))
    print(json.dumps({name: {"mean": sum(s) / len(s), "by layer": s} for name, s in shares.items()}, indent=1))


if __name__ == "__main__":
    main()
