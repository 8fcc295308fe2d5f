"""Tiny random models of every Mixture-of-Experts family that Transformers knows.

A model is made from its family's own default configuration: fields with well-known names are shrunk by one table
(``SMALL``), lists with one entry per layer are cut down to the distinct kinds of layer, and what a family needs beyond
that is data in ``FAMILIES``. The families are also found by scanning the installed Transformers, so that a new one
cannot be missed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from family_table import (
    EXPERTS,
    FAMILIES,
    GROUPED_ROUTING,
    MAX_LAYERS,
    OWN_LOOP_EXPERTS,
    SMALL,
    SPECIAL_TOKENS,
    TOKEN_ID,
    TOKENS,
    VOCABULARY,
)
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

LONG_ROW = 256
"""Matrices with longer rows than this get a smaller spread, or activations would grow from layer to layer."""


@functools.cache
def interface_families() -> frozenset[str]:
    """Model directories whose experts go through the experts interface, found as Transformers itself finds them."""
    models = Path(transformers.__file__).parent / "models"
    return frozenset(
        path.parent.name for path in models.glob("*/modeling_*.py") if "@use_experts_implementation" in path.read_text()
    )


@functools.cache
def families_with_experts() -> frozenset[str]:
    """Model directories that define an experts or mixture module of any kind."""
    models = Path(transformers.__file__).parent / "models"
    module = re.compile(r"^class \w*(Expert|MoE|MOE|Moe)\w*\(nn\.", re.MULTILINE)
    return frozenset(path.parent.name for path in models.glob("*/modeling_*.py") if module.search(path.read_text()))


def expert_parameters(model: nn.Module, family: str) -> dict[str, tuple[str, ...]]:
    """Module path -> names of the parameters that hold its experts' matrices (biases and norms are none)."""
    found: dict[str, tuple[str, ...]] = {}
    for path, module in model.named_modules():
        if hasattr(module, "_is_expert_parallel"):
            found[path] = tuple(n for n in ("gate_up_proj", "up_proj", "down_proj") if hasattr(module, n))
        elif names := OWN_LOOP_EXPERTS.get(family, {}).get(type(module).__name__):
            found[path] = names
    return found


def expert_slices(model: nn.Module, path: str, name: str, family: str, expert: int) -> list[torch.Tensor]:
    """Views of one expert's matrices in one parameter: one, or none where each expert has parameters of its own."""
    parameter = model.get_parameter(f"{path}.{name}").data
    if family == "dbrx":
        return [parameter.view(EXPERTS, -1, parameter.shape[1])[expert]]
    if family == "switch_transformers":
        return [parameter] if name.startswith(f"expert_{expert}.") else []
    return [parameter[expert]]


def architecture(family: str) -> type[PreTrainedModel]:
    """The model class that stands for the family."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if name := FAMILIES[family].architecture:
        return getattr(module, name)
    own = [
        c for n, c in inspect.getmembers(module, inspect.isclass) if n == c.__name__ and c.__module__ == module.__name__
    ]
    for ending in ("ForCausalLM", "ForConditionalGeneration"):
        found = [c for c in own if c.__name__.endswith(ending)]
        if len(found) == 1:
            return found[0]
    raise LookupError(f"{family}: name one of {[c.__name__ for c in own if 'For' in c.__name__]}")


def tiny_config(family: str, sizes: Mapping[str, Any] = SMALL) -> PreTrainedConfig:
    """The family's default configuration, shrunk to ``sizes``."""
    return _shrunk(architecture(family).config_class(), FAMILIES[family].overrides, sizes)


def tiny_model(family: str, sizes: Mapping[str, Any] = SMALL) -> PreTrainedModel:
    """A random model of the family in BF16 (modules that the family keeps in FP32 stay so), the same at every call."""
    torch.manual_seed(0)
    model = architecture(family)._from_config(tiny_config(family, sizes), dtype=torch.bfloat16).eval()
    seed = FAMILIES[family].seed
    randomise(model, zlib.crc32(family.encode()) if seed is None else seed)
    return model


def randomise(model: nn.Module, seed: int) -> None:
    """Fill every stored tensor, so that a lost or swapped one shows in the logits.

    Matrices get a spread that keeps activations alive; vectors (norms, biases, router corrections, decays) get noise
    around what the family initialises them to.
    """
    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    for tensor in model.state_dict().values():
        if tensor.data_ptr() in done or tensor.numel() == 0:
            continue
        done.add(tensor.data_ptr())
        noise = torch.randn(tensor.shape, generator=generator)
        if not tensor.is_floating_point():
            _randomise_table(tensor, generator)
        elif tensor.dim() >= 2:
            spread = 0.06 + 0.09 * torch.rand((), generator=generator)
            tensor.copy_(noise * spread * min(1.0, (LONG_ROW / tensor.shape[-1]) ** 0.5))
        else:
            spread = 0.02 if tensor.numel() <= 2 * EXPERTS else 0.1  # a router's correction must not drown its scores
            tensor.copy_(torch.nan_to_num(tensor.float()) + spread * noise)


def _randomise_table(table: torch.Tensor, generator: torch.Generator) -> None:
    """Integer tables map tokens to experts (deepseek_v4): distinct experts in each row."""
    if table.dim() == 2:
        table.copy_(torch.rand((table.shape[0], EXPERTS), generator=generator).argsort(dim=1)[:, : table.shape[1]])


def tiny_inputs(family: str, *, batch: int = 2, tokens: int = TOKENS, seed: int = 7) -> dict[str, torch.Tensor]:
    """Token ids (batch, tokens) without special ones, plus what else the family's forward pass wants."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> torch.Tensor:
        return torch.randint(3, VOCABULARY - SPECIAL_TOKENS, (batch, count), generator=generator)

    inputs = {"input_ids": ids(tokens)}
    if architecture(family).config_class().is_encoder_decoder:
        inputs["decoder_input_ids"] = ids((tokens + 1) // 2)
    extra = {name: torch.tensor(values[:tokens]) for name, values in FAMILIES[family].inputs.items()}
    return inputs | {name: values.expand(batch, -1) for name, values in extra.items()}


@torch.no_grad()
def logits(model: PreTrainedModel, **inputs: torch.Tensor) -> torch.Tensor:
    """Logits (batch, tokens, vocabulary) of one forward pass; a diffusion model draws its noise from a fixed seed."""
    torch.manual_seed(0)
    return model(**inputs).logits


def _shrunk(default: PreTrainedConfig, overrides: Mapping[str, Any], sizes: Mapping[str, Any]) -> PreTrainedConfig:
    return type(default)(**_shrunk_fields(default, overrides, sizes))


def _shrunk_fields(default: PreTrainedConfig, overrides: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor arguments of a small version of ``default``."""
    names = [field.name for field in dataclasses.fields(default) if field.init]
    stored = {name: default.attribute_map.get(name, name) for name in names}
    values = {name: vars(default)[key] for name, key in stored.items() if vars(default).get(key) is not None}
    result: dict[str, Any] = {}
    next_special = VOCABULARY - 1
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            result[name] = _shrunk(value, overrides.get(name, {}), sizes)
        elif TOKEN_ID.match(name) and isinstance(value, int):
            result[name] = next_special
            next_special -= 1
        elif name in sizes and isinstance(value, int) and not isinstance(value, bool):
            result[name] = sizes[name]
        elif name in GROUPED_ROUTING and isinstance(value, int) and value > 1:
            result[name] = GROUPED_ROUTING[name]
    if values.get("num_key_value_heads") == values.get("num_attention_heads"):
        result["num_key_value_heads"] = sizes["num_attention_heads"]
    if values.get("num_hidden_layers") and "num_hidden_layers" not in sizes:
        result.update(_cut_layers(values))
    result.update(
        {name: value for name, value in overrides.items() if not isinstance(result.get(name), PreTrainedConfig)}
    )
    return result


def _cut_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the first layer of each kind, so that every attention and feed-forward variant of the family runs."""
    depth = values["num_hidden_layers"]
    lists = {name: value for name, value in values.items() if isinstance(value, list | tuple) and len(value) == depth}
    kinds = {name: value for name, value in lists.items() if name.endswith(("layer_types", "block_type"))}
    kept: dict[tuple[Any, ...], int] = {}
    for layer in range(depth):
        kept.setdefault(tuple(value[layer] for value in kinds.values()), layer)
    layers = sorted(kept.values())[:MAX_LAYERS] if kinds else [0, 1, 2]
    if len(layers) < 2:
        layers = [0, 1]
    return {"num_hidden_layers": len(layers)} | {name: [value[i] for i in layers] for name, value in lists.items()}
