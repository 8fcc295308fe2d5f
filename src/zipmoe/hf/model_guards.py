"""Operations of a loaded model that touch its weights: they work on packed weights, or say why they cannot.

The loaded model (and every sub-model) gets a dynamic class: the same name and module, with the methods below in front.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import nn

from zipmoe.engine.budget import DENSE, EXPERT_POOL, SCRATCH, UNPACKED
from zipmoe.engine.engine import Engine
from zipmoe.errors import UnsupportedOperationError
from zipmoe.hf.combine_order import combine_order, resolve_experts_implementation
from zipmoe.hf.compiled_calls import is_compiled_call
from zipmoe.hf.configuration import ZipMoEConfig
from zipmoe.hf.dynamic_class import dynamic_class
from zipmoe.hf.engine_opening import WIDENED, widened_bytes
from zipmoe.hf.engine_slot import refuse_copy, refuse_gradients
from zipmoe.hf.expert_parameter import ExpertParameter
from zipmoe.hf.families.switch_transformers import ExpertLinear
from zipmoe.hf.fused_steps import FusedSteps, count_fused_steps
from zipmoe.hf.last_positions import LastPositions
from zipmoe.hf.layer_stack import LayersAhead
from zipmoe.hf.lazy_weight import LazyWeight
from zipmoe.hf.look_ahead import LookAheadChain
from zipmoe.hf.next_token_look_ahead import NextTokenLookAhead
from zipmoe.hf.packed_module import PackedModule, require_exact_conversion
from zipmoe.hf.packed_products import why_experts_are_decoded
from zipmoe.hf.saving import push_folder, save_packed_folder
from zipmoe.hf.thread_placement import thread_notes
from zipmoe.store.packed_folder import PackedFolder

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    # The classes below stand before a PreTrainedModel in a dynamic class. Importing it here would start the import of
    # Transformers' model loading, at whose end this package is registered, in the middle of this package's own import.
    PreTrainedModel = nn.Module


_UPLOAD_OPTIONS = ("commit_message", "private", "token", "revision", "create_pr")


class PackedSubModel(PreTrainedModel):  # type: ignore[misc]
    """A sub-model of a packed model."""

    _zipmoe_last_positions_of_caller: LastPositions | None = None
    _zipmoe_layers_ahead: LayersAhead | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As ``forward``, without recording gradients: decoded weights do not live long enough for a backward pass.

        Raises:
            UnsupportedOperationError: an input requires a gradient.
        """
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                refuse_gradients(value)
        ahead = self._zipmoe_layers_ahead
        with torch.no_grad():
            if ahead is not None and not is_compiled_call():
                return ahead.call(self, self._call_base, args, kwargs)
            return self._call_base(*args, **kwargs)

    def _call_base(self, *args: Any, **kwargs: Any) -> Any:
        last_positions = self._zipmoe_last_positions_of_caller
        if last_positions is None:
            return super().__call__(*args, **kwargs)
        return last_positions.call_base(super().__call__, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first parameter, packed or not, as in plain Transformers."""
        return next(dtype for dtype in _parameter_dtypes(self) if dtype.is_floating_point)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        require_exact_conversion(fn, self.dtype)  # before anything is converted
        return super()._apply(fn, recurse)

    def float(self, *args: Any) -> Any:
        """Compute in float32: every BF16 weight is widened exactly when it is decoded."""
        return self.to(torch.float32)

    def half(self, *args: Any) -> NoReturn:
        """Raises UnsupportedOperationError: float16 does not hold every BF16 weight."""
        self.to(torch.float16)
        raise AssertionError("unreachable")

    def train(self, mode: bool = True) -> Any:
        """Only ``train(False)``: packed weights have no gradients (UnsupportedOperationError)."""
        if mode:
            raise UnsupportedOperationError(
                "a packed model is for inference: its weights have no gradients",
                hint="train the original checkpoint and pack the result",
            )
        return super().train(False)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Module:
        """Works if the number of tokens stays, or if the embeddings are not packed."""
        embeddings: Any = self.get_input_embeddings()
        unchanged = new_num_tokens in (None, embeddings.weight.shape[0]) and not args and not kwargs
        if unchanged:
            return cast(nn.Module, embeddings)
        if any(isinstance(m, PackedModule) for m in (embeddings, self.get_output_embeddings())):
            raise UnsupportedOperationError(
                "the token embeddings of a packed model cannot be resized: they are compressed",
                hint="resize them in the original checkpoint and pack it again",
            )
        resized: nn.Module = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        return resized

    def set_experts_implementation(self, experts_implementation: str | dict[str, str]) -> None:
        """Switch the combine order: "grouped_mm", "eager", or "zipmoe" for the family's default.

        Raises:
            UnsupportedOperationError: any other implementation.
        """
        if isinstance(experts_implementation, dict):
            resolved: Any = {k: resolve_experts_implementation(self, v) for k, v in experts_implementation.items()}
        else:
            resolved = resolve_experts_implementation(self, experts_implementation)
        super().set_experts_implementation(resolved)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Number of parameters, packed ones included (they are never trainable)."""
        count: int = super().num_parameters(only_trainable=only_trainable, exclude_embeddings=exclude_embeddings)
        return count if only_trainable else count + sum(_packed_parameter_counts(self, exclude_embeddings))


class PackedModel(PackedSubModel):
    """The model that ``from_pretrained`` returns."""

    zipmoe_engine: Engine
    zipmoe_mode: str
    zipmoe_look_ahead: LookAheadChain | None = None
    zipmoe_next_token: NextTokenLookAhead | None = None
    zipmoe_last_positions: LastPositions | None = None
    _zipmoe_folder: PackedFolder
    _zipmoe_cpus: Sequence[int] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a sub-model; where few positions' logits are asked for, the last layer may compute only those."""
        last_positions = self.zipmoe_last_positions
        if last_positions is None:
            return super().__call__(*args, **kwargs)
        return last_positions.call_model(self, super().__call__, args, kwargs)

    def zipmoe_mode_line(self) -> str:
        """What runs: codec, mode, combine order, instruction set, I/O backend, budget, pool, which parts of a decode
        step are one call of the native core, what the last layer leaves out, look-ahead and threads.
        """
        order = combine_order(self.config.get_text_config()._experts_implementation)
        parts = [self.zipmoe_engine.mode_line(self._what_runs(), order.value)]
        steps = self.zipmoe_fused_steps()
        if steps.any():
            parts.append(f"steps in one call each: {steps}")
        if self.zipmoe_last_positions is not None and self.dtype == torch.bfloat16:
            parts += filter(None, [self.zipmoe_last_positions.describe()])
        if self.zipmoe_look_ahead is not None:
            parts.append(self.zipmoe_look_ahead.describe())
        if self.zipmoe_next_token is not None:
            parts += filter(None, [self.zipmoe_next_token.describe()])
        return "; ".join([*parts, *thread_notes(self._zipmoe_cpus)])

    def zipmoe_fused_steps(self) -> FusedSteps:
        """How many modules the native core computes in one call each, as the model is now (mode ``fast``). All are
        compared with the family's own code at their first use, and given back to it if they differ.
        """
        return count_fused_steps(self) if self.dtype == torch.bfloat16 else FusedSteps()

    def _what_runs(self) -> str:
        """The numeric mode that was asked for, and what it runs where that is something else."""
        if self.zipmoe_mode != "fast":
            return str(self.zipmoe_mode)
        if self.zipmoe_engine.fused is None:
            return "fast (computed as exact: nothing computes on this codec's packed form)"
        if self.dtype != torch.bfloat16:
            return f"fast (computed as exact: the kernels take BF16, not {str(self.dtype).removeprefix('torch.')})"
        reason = why_experts_are_decoded(self, self._zipmoe_folder.manifest)
        decoded = f", experts decoded because {reason}" if reason else ""
        return f"fast ({self.zipmoe_engine.fused.what_runs()}{decoded})"

    def dequantize(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises UnsupportedOperationError: the unpacked model is the original checkpoint."""
        raise UnsupportedOperationError(
            "a packed model is not unpacked in memory: no weight was changed, so that nothing would be gained",
            hint="load the original checkpoint with plain Transformers",
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        target, present = require_exact_conversion(fn, self.dtype), self.dtype
        if target == torch.float32 and present != torch.float32:
            tensors = (*self.parameters(), *self.buffers())
            wide = sum(t.numel() * (4 if t.is_floating_point() else t.element_size()) for t in tensors)
            self.zipmoe_engine.account(UNPACKED, wide)
            self.zipmoe_engine.account(WIDENED, widened_bytes(self._zipmoe_folder.manifest))
        return super()._apply(fn, recurse)

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Copy the packed folder, with this model's generation configuration.

        Args:
            save_directory: where to; created if it does not exist.
            push_to_hub: upload the copy afterwards, to ``repo_id`` or the folder's name.
            kwargs: ``repo_id``, ``commit_message``, ``private``, ``token``, ``revision``, ``create_pr`` for the upload.
                Options about how to write weights do not apply and are ignored.

        Raises:
            UnsupportedOperationError: other weights are given (``state_dict``).
        """
        if kwargs.get("state_dict") is not None:
            raise UnsupportedOperationError(
                "a packed model saves its packed weights only, not a given state_dict",
                hint="save the original model and pack it again",
            )
        save_packed_folder(self._zipmoe_folder, Path(save_directory))
        if self.can_generate():
            self.generation_config.save_pretrained(save_directory)
        if push_to_hub:
            options = {key: kwargs[key] for key in _UPLOAD_OPTIONS if key in kwargs}
            push_folder(Path(save_directory), kwargs.get("repo_id", Path(save_directory).name), **options)

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of the unpacked tensors, and of the memory that the engine holds for the packed ones."""
        unpacked: int = super().get_memory_footprint(return_buffers)
        return unpacked + sum(self.zipmoe_engine.budget.reserved(name) for name in (DENSE, SCRATCH, EXPERT_POOL))


def guard_model(model: Any, folder: PackedFolder, engine: Engine, settings: ZipMoEConfig) -> None:
    """Give ``model`` and its sub-models the methods of this file, and ``model`` its engine."""
    import transformers

    for module in list(model.modules()):
        if isinstance(module, transformers.PreTrainedModel) and module is not model:
            _guard(module, PackedSubModel)
    _guard(model, PackedModel)
    model.zipmoe_engine = engine
    model.zipmoe_mode = settings.resolved_mode()
    model._zipmoe_folder = folder
    model._zipmoe_cpus = settings.cpus


def _guard(model: Any, guards: type[PackedSubModel]) -> None:
    # The name stays: Transformers derives the architecture from it.
    original = type(model)
    model.__class__ = dynamic_class(original.__name__, (guards, original), original)


def _parameter_dtypes(model: nn.Module) -> Iterator[torch.dtype]:
    """Dtypes of the parameters in the order of the module tree; a module's packed ones before its others."""
    for module in model.modules():
        yield from (held.dtype for held in _packed_of(module))
        yield from (parameter.dtype for parameter in module.parameters(recurse=False))


def _packed_of(module: nn.Module) -> Iterator[LazyWeight | ExpertParameter]:
    if isinstance(module, PackedModule | ExpertLinear):
        yield module.weight
    yield from (value for value in vars(module).values() if isinstance(value, ExpertParameter))


def _packed_parameter_counts(model: nn.Module, exclude_embeddings: bool) -> Iterator[int]:
    seen: set[str] = set()
    for module in model.modules():
        excluded = exclude_embeddings and isinstance(module, nn.Embedding)
        for held in _packed_of(module):
            if held.zipmoe_parameter not in seen and not excluded:
                yield held.numel()
            seen.add(held.zipmoe_parameter)  # tied matrices count once
