"""Finds the last layer of a model after whose sparse block nothing looks at another position than its own.

The block must lie in the last of the base model's layers, and what the code of that layer, of the base model and of the
whole model does afterwards must be known: arithmetic, modules that have shown on a few rows that they keep positions
apart, and the choice of the positions whose logits are asked for. What is not known is not found, and computed in full.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zipmoe.hf.compiled_calls import is_compiled
from zipmoe.hf.mentioned_names import code_after
from zipmoe.hf.module_parts import ModuleParts, called_once, family_forward, has_known_code, is_called_as_known, places
from zipmoe.hf.packed_experts import PackedExperts
from zipmoe.hf.quiet_modules import HOOKS, hooks_of_all_modules

_LAYERS = "layers"
_ATTENTION = "self_attn"
_KNOWN_IN_LAYER = {
    *("residual_multiplier", "attn_alpha_factor", "attn_beta_factor", "mlp_alpha_factor", "mlp_beta_factor"),
    *("isinstance", "tuple", "float", "to", "dtype"),
}
_KNOWN_IN_BASE = {
    *("config", "num_hidden_layers", "layer_types", "layers_block_type", "enumerate", "isinstance", "dict"),
    *("MoeModelOutputWithPast", "BaseModelOutputWithPast"),
}
_KNOWN_IN_MODEL = {
    *("last_hidden_state", "slice_logits_to_keep", "hidden_states", "attentions", "router_logits", "cache"),
    *("past_key_values", "MoeCausalLMOutputWithPast", "CausalLMOutputWithPast", "config", "vocab_size"),
    *("loss_function", "load_balancing_loss_func", "output_router_logits", "router_aux_loss_coef"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "to", "device", "float", "torch", "tanh"),
    *("logit_scale", "logits_scaling", "final_logit_softcapping"),
}
"""What the code mentions afterwards, beside modules. Loss and balance are computed for labels only."""

_KNOWN_HOOKS = ("zipmoe.", "transformers.utils.output_capturing")
"""Modules whose hooks are no reason to compute all positions: our own, and those that Transformers leaves behind when
hidden states were asked for, which record in calls that ask for them.
"""


@dataclass(frozen=True)
class LastLayer:
    """Where the last sparse block of a model lies. Modules are not kept alive."""

    base_name: str
    block_name: str
    """Among the last layer's children."""
    attention_name: str | None
    """Of the layer's attention, if nothing after that looks at other positions either."""
    layer: weakref.ref[nn.Module]
    block: weakref.ref[nn.Module]
    in_layer: Mapping[str, weakref.ref[nn.Module]]
    """Children of the layer through which hidden states go afterwards."""
    in_base: Mapping[str, weakref.ref[nn.Module]]
    """Children of the base model through which they go then."""
    forwards: tuple[Callable[..., Any], ...]
    """Of the classes of the model, its base model, the layer and the block."""
    parts: ModuleParts
    """Of the layer."""
    later_code: tuple[Any, ...]
    """Of the children of the base model, in their order."""

    def is_as_found(self, model: Any) -> bool:
        """Whether ``model`` still has these parts and their code, calls each of them once, and nobody looks at what
        passes between them.

        Hooks of the earlier layers and somebody else's code in them count as well: they may call the last one for what
        they are given.
        """
        base = model._modules.get(self.base_name)
        layers = None if base is None else base._modules.get(_LAYERS)
        layer, block = self.layer(), self.block()
        if not layers or layer is None or block is None:
            return False
        if sum(each is layer for each in layers) != 1 or layers[-1] is not layer:
            return False
        if layer._modules.get(self.block_name) is not block or any(hooks_of_all_modules()):
            return False
        parts = (model, base, layer, block)
        if any(type(part).forward is not known for part, known in zip(parts, self.forwards, strict=True)):
            return False
        if "forward" in vars(model) or any(map(_is_foreign, vars(model)["_forward_pre_hooks"].values())):
            return False
        if is_compiled(model) or not is_called_as_known(model):
            return False
        if nn.Module.__call__ is not nn.Module._wrapped_call_impl:
            return False
        for holder, children in ((layer, self.in_layer), (base, self.in_base)):
            if any(holder._modules.get(name) is not child() for name, child in children.items()):
                return False
        if any(
            family_forward(base._modules[name]) is not code
            for name, code in zip(self.in_base, self.later_code, strict=True)
        ):
            return False
        if not self.parts.are_those_of(layer):
            return False
        return self._is_called_once_and_unseen(base, layer, block)

    def _is_called_once_and_unseen(self, base: nn.Module, layer: Any, block: nn.Module) -> bool:
        everything = [*places(base)]
        once = [layer, block]
        if self.attention_name is not None:
            once.append(layer._modules[self.attention_name])
        if not called_once(once, everything) or not all(map(_is_quiet, everything)):
            return False
        of_layer = {*layer.modules()}
        return all(each in of_layer or has_known_code(each) for each in everything)

    def is_attention(self, module: nn.Module) -> bool:
        """Whether ``module`` is the layer's attention, and not a copy of it."""
        layer = self.layer()
        return (
            layer is not None and self.attention_name is not None and layer._modules.get(self.attention_name) is module
        )


def find_last_layer(model: Any) -> LastLayer | None:
    """The last sparse block of ``model``, whose weights are there, if it is safe to give it some positions only."""
    base_name = model.base_model_prefix
    base = model._modules.get(base_name)
    layers = None if base is None else base._modules.get(_LAYERS)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        return None
    layer: Any = layers[-1]
    blocks = [
        name
        for name, child in layer.named_children()
        if any(isinstance(grandchild, PackedExperts) for grandchild in child.children())
    ]
    if len(blocks) != 1:
        return None
    output = model.get_output_embeddings()
    heads = {name for name, child in model.named_children() if child is output and isinstance(child, nn.Linear)}
    after_base = code_after(type(model).forward, base_name)
    after_layers = code_after(type(base).forward, _LAYERS)
    if after_base is None or after_layers is None or after_base.slices or after_layers.slices > 1 or len(heads) != 1:
        return None
    if not {"slice_logits_to_keep", *heads} <= after_base.names <= _KNOWN_IN_MODEL | heads:
        return None
    width = output.in_features
    in_base = _kept_apart(base, after_layers.names - _KNOWN_IN_BASE, width)
    after_block = _after_child(layer, blocks[0], width)
    if in_base is None or after_block is None:
        return None
    if not all(map(has_known_code, layer.modules())):
        return None
    after_attention = _after_child(layer, _ATTENTION, width, blocks[0])
    block = layer._modules[blocks[0]]
    return LastLayer(
        base_name,
        blocks[0],
        None if after_attention is None else _ATTENTION,
        weakref.ref(layer),
        weakref.ref(block),
        after_block | (after_attention or {}),
        in_base,
        tuple(type(part).forward for part in (model, base, layer, block)),
        ModuleParts(layer),
        tuple(family_forward(base._modules[name]) for name in in_base),
    )


def _after_child(layer: Any, name: str, width: int, *later: str) -> dict[str, weakref.ref[nn.Module]] | None:
    """What comes after a child of a layer, beside ``later``, if it is known and keeps positions apart."""
    after = code_after(family_forward(layer), name)
    if after is None or after.slices or not after.names.issuperset(later):
        return None
    return _kept_apart(layer, after.names - _KNOWN_IN_LAYER - {*later}, width)


def _kept_apart(module: Any, names: frozenset[str], width: int) -> dict[str, weakref.ref[nn.Module]] | None:
    """Children of these names, if all are some that keep positions apart."""
    children = {name: module._modules.get(name) for name in names}
    if not all(isinstance(child, nn.Module) and keeps_positions_apart(child, width) for child in children.values()):
        return None
    return {name: weakref.ref(child) for name, child in children.items()}


def keeps_positions_apart(module: Any, width: int) -> bool:
    """Whether a module's output for the last positions does not depend on what it is given for others.

    Args:
        module: takes BF16 (sequences, positions, width), and gives as many positions.
        width: of the hidden states.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((2, 5, width), generator=generator).to(torch.bfloat16)
    poisoned = rows.clone()
    poisoned[:, :-2] = torch.nan
    with torch.inference_mode():
        try:
            found, expected = module.forward(poisoned), module.forward(rows)  # no calls: hooks are not to see this
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return False  # it wants something else
    if not isinstance(found, torch.Tensor) or found.shape[:2] != rows.shape[:2]:
        return False
    return torch.equal(found[:, -2:], expected[:, -2:])


def _is_quiet(module: nn.Module) -> bool:
    """Whether a call of a module runs its class's ``forward``, and else nothing but our own hooks."""
    own = vars(module)
    if "forward" in own or is_compiled(module) or not is_called_as_known(module):
        return False
    for name in HOOKS:
        hooks = own.get(name)
        if hooks is None or (hooks and any(map(_is_foreign, hooks.values()))):
            return False  # what has no dict of hooks is not Python's
    return True


def _is_foreign(hook: Any) -> bool:
    return not str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(_KNOWN_HOOKS)
