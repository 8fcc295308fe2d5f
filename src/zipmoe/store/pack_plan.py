"""What ``pack`` will do with every tensor of a checkpoint, decided before a byte is written."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zipmoe.checkpoint.conversion_plan import ConversionPlan, LoadUnit, plan_conversion
from zipmoe.checkpoint.expert_modules import ExpertLayout, ExpertModules, find_expert_groups
from zipmoe.checkpoint.expert_reader import acts_on_each_expert, check_parameter_shape
from zipmoe.checkpoint.source import SourceCheckpoint
from zipmoe.codecs.bfloat16_fields import BFLOAT16_BYTES
from zipmoe.errors import DamagedCheckpointError, NotAMixtureOfExpertsError, UnsupportedCheckpointError
from zipmoe.store.manifest import DENSE_BLOCK_BYTES, RECORD_PREFIX, UnpackedReason

MIN_DENSE_BYTES = 64 << 10
"""Dense matrices below this many bytes of BF16 are left as they are: packing them saves nothing that matters."""


@dataclass(frozen=True)
class ExpertRecordPlan:
    """One expert of one group."""

    name: str
    group: ExpertModules
    expert: int

    @property
    def source_bytes(self) -> int:
        """Bytes of BF16 that the record replaces."""
        return sum(rows * columns for rows, columns in self.group.slice_shapes) * BFLOAT16_BYTES


@dataclass(frozen=True)
class DenseBlockPlan:
    """Rows ``begin`` up to ``end`` of one dense matrix."""

    name: str
    parameter: str
    key: str
    begin: int
    end: int
    columns: int

    @property
    def source_bytes(self) -> int:
        """Bytes of BF16 that the record replaces."""
        return (self.end - self.begin) * self.columns * BFLOAT16_BYTES


RecordPlan = ExpertRecordPlan | DenseBlockPlan


@dataclass(frozen=True)
class DensePlan:
    """One dense matrix."""

    parameter: str
    tied_parameters: tuple[str, ...]
    rows: int
    columns: int
    blocks: tuple[DenseBlockPlan, ...]


@dataclass(frozen=True)
class PackPlan:
    """Every checkpoint tensor is packed, copied or ignored by the model; nothing else can happen to it."""

    groups: tuple[ExpertModules, ...]
    tied_paths: dict[str, tuple[str, ...]]
    """For the path of a group, paths of other experts modules that are tied to it."""
    expert_units: dict[str, LoadUnit]
    """Conversion unit of each expert parameter, by full parameter name."""
    dense: tuple[DensePlan, ...]
    plain_keys: tuple[str, ...]
    unpacked: tuple[UnpackedReason, ...]
    ignored_keys: tuple[str, ...]

    def records(self) -> list[RecordPlan]:
        """All records in the order in which they are written."""
        experts: list[RecordPlan] = [
            ExpertRecordPlan(f"{RECORD_PREFIX}{group.path}.{expert}", group, expert)
            for group in self.groups
            for expert in range(group.num_experts)
        ]
        return experts + [block for matrix in self.dense for block in matrix.blocks]


@dataclass
class _Copies:
    """Tensors left as they are, with the reason for each."""

    keys: list[str] = field(default_factory=list)
    reasons: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, keys: tuple[str, ...], reason: str) -> None:
        self.keys.extend(keys)
        self.reasons[reason].extend(keys)


def meta_model(source: SourceCheckpoint) -> Any:
    """The checkpoint's model on the meta device: all module shapes, no memory.

    Raises:
        UnsupportedCheckpointError: Transformers does not know the architecture.
    """
    import transformers
    from transformers import AutoConfig

    try:  # False: never ask on the terminal whether to run code of the checkpoint
        config = AutoConfig.from_pretrained(source.folder, trust_remote_code=False)
    except Exception as error:  # configurations are classes of a hundred families, each with checks of its own
        raise UnsupportedCheckpointError(
            f"Transformers {transformers.__version__} cannot read the configuration of {str(source.folder)!r}: "
            f"{_first_line(error)}",
            hint="a newer Transformers may know this model; remote code is not supported",
        ) from error
    names = source.config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    architecture = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(architecture, type) and hasattr(architecture, "_from_config")):
        raise UnsupportedCheckpointError(
            f"Transformers {transformers.__version__} has no class for the architecture {names or 'none given'}",
            hint="a newer Transformers may know this model; remote code is not supported",
        )
    try:
        with torch.device("meta"):
            return architecture._from_config(config, dtype=torch.bfloat16)
    except Exception as error:  # whatever the family's constructor makes of numbers that do not fit together
        raise UnsupportedCheckpointError(
            f"Transformers {transformers.__version__} cannot build {name} from the configuration of "
            f"{str(source.folder)!r}: {_first_line(error)}",
            hint="config.json is damaged, or of another model",
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [repr(error)]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def plan_pack(model: Any, source: SourceCheckpoint, *, min_dense_bytes: int = MIN_DENSE_BYTES) -> PackPlan:
    """Decide for every tensor of ``source`` how it is stored.

    Raises:
        NotAMixtureOfExpertsError: no experts, or none in BF16.
        UnsupportedCheckpointError: the family is refused, or expert tensors are missing from the checkpoint.
    """
    groups = find_expert_groups(model)
    if not groups:
        raise NotAMixtureOfExpertsError(
            f"{type(model).__name__} has no experts: {str(source.folder)!r} is not a Mixture-of-Experts model",
            hint="ZipMoE packs MoE checkpoints such as Qwen-MoE, Mixtral, DeepSeek, OLMoE",
        )
    conversion = plan_conversion(model, source.tensors)
    unit_of_target = {target: unit for unit in conversion.units for target in unit.targets}
    copies = _Copies()
    ties = _tie_groups(model)
    untied, tied_paths = _resolve_tied_groups(groups, unit_of_target, ties)
    packed_groups = _choose_groups(model, untied, unit_of_target, source, copies)
    if not packed_groups:
        raise NotAMixtureOfExpertsError(
            f"no expert of {str(source.folder)!r} is stored in BF16: nothing to pack",
            hint="ZipMoE packs BF16 weights and never converts; use the BF16 release of this model",
        )
    expert_units = {name: unit_of_target[name] for group in packed_groups for name in group.parameter_names()}
    expert_targets = {name for group in groups for name in group.parameter_names()}
    dense = _choose_dense(model, conversion, source, expert_targets, min_dense_bytes, copies, groups, ties)
    copies.add(conversion.unexpected_keys, "unknown to the model (Transformers ignores it with a warning)")
    reasons = tuple(
        UnpackedReason(reason, len(keys), sum(source.tensors[k].bytes for k in keys))
        for reason, keys in copies.reasons.items()
        if keys
    )
    return PackPlan(
        tuple(packed_groups),
        tied_paths,
        expert_units,
        tuple(dense),
        tuple(copies.keys),
        reasons,
        conversion.ignored_keys,
    )


def _resolve_tied_groups(
    groups: list[ExpertModules], unit_of_target: dict[str, LoadUnit], ties: dict[str, frozenset[str]]
) -> tuple[list[ExpertModules], dict[str, tuple[str, ...]]]:
    """Take out the groups that the checkpoint holds only under the names of another group."""
    present = [g for g in groups if all(name in unit_of_target for name in g.parameter_names())]
    untied: list[ExpertModules] = []
    tied_paths: dict[str, tuple[str, ...]] = {}
    for group in groups:
        origin = None
        if group not in present:
            origin = next((other for other in present if _is_tied(group, other, ties)), None)
        if origin is None:
            untied.append(group)
        else:
            tied_paths[origin.path] = (*tied_paths.get(origin.path, ()), group.path)
    return untied, tied_paths


def _is_tied(group: ExpertModules, origin: ExpertModules, ties: dict[str, frozenset[str]]) -> bool:
    pairs = list(zip(group.parameter_names(), origin.parameter_names(), strict=False))
    same_kind = (group.parameters, group.num_experts) == (origin.parameters, origin.num_experts)
    return same_kind and all(theirs in ties.get(ours, ()) for ours, theirs in pairs)


def _choose_groups(
    model: Any,
    groups: list[ExpertModules],
    unit_of_target: dict[str, LoadUnit],
    source: SourceCheckpoint,
    copies: _Copies,
) -> list[ExpertModules]:
    chosen = []
    seen: set[int] = set()
    for group in groups:
        names = list(group.parameter_names())
        if missing := [name for name in names if name not in unit_of_target]:
            raise UnsupportedCheckpointError(
                f"{str(source.folder)!r} has no weights for {missing[0]!r}",
                hint="the checkpoint is incomplete, or config.json belongs to another model",
            )
        units = {id(unit_of_target[name]): unit_of_target[name] for name in names}
        for unit in units.values():
            _check_complete(unit, source)
            _check_fits(model, unit, source, group)
        dtypes = {source.tensors[key].dtype for unit in units.values() for key in unit.keys}
        if dtypes == {"BF16"}:
            chosen.append(group)
            continue
        for identity, unit in units.items():
            if identity not in seen:
                copies.add(unit.keys, f"experts in {', '.join(sorted(dtypes))} instead of BF16")
        seen |= units.keys()
    return chosen


def _check_complete(unit: LoadUnit, source: SourceCheckpoint) -> None:
    """Every projection of the unit has as many experts as the others."""
    counts = {len(keys) for keys in unit.sources.values()}
    if len(counts) > 1:
        most, least = (pick(unit.sources.items(), key=lambda item: len(item[1])) for pick in (max, min))
        raise DamagedCheckpointError(
            f"{str(source.folder)!r} has {len(least[1])} tensors like {least[1][0]!r} but {len(most[1])} like "
            f"{most[1][0]!r}: some experts are missing",
            hint="download the checkpoint again, or finish the download",
        )


def _check_fits(model: Any, unit: LoadUnit, source: SourceCheckpoint, group: ExpertModules) -> None:
    """As many experts as the model has: neither may one be missing, nor may surplus ones be dropped silently."""
    first = unit.targets[0]
    if unit.converter is None:
        if len(unit.keys) > 1:
            raise DamagedCheckpointError(
                f"{str(source.folder)!r} holds {first!r} under several names: {', '.join(map(repr, unit.keys))}",
                hint="delete all but one of them",
            )
        check_parameter_shape(model, first, source.tensors[unit.only_key].shape)
        return
    if group.layout is not ExpertLayout.STACKED or not acts_on_each_expert(unit):
        return  # converted whole: the reader checks what comes out
    experts = model.get_parameter(first).shape[0]
    wanted = experts * len(unit.targets)
    for keys in unit.sources.values():
        stacked = len(keys) == 1 and wanted > 1
        found = (source.tensors[keys[0]].shape or (0,))[0] if stacked else len(keys)
        if found != (experts if stacked else wanted):
            raise DamagedCheckpointError(
                f"{str(source.folder)!r} has {found} experts in tensors like {keys[0]!r}, but the model has "
                f"{experts if stacked else wanted}",
                hint="config.json and the weights do not belong together, or the download is incomplete",
            )


def _choose_dense(
    model: Any,
    conversion: ConversionPlan,
    source: SourceCheckpoint,
    expert_targets: set[str],
    min_dense_bytes: int,
    copies: _Copies,
    groups: list[ExpertModules],
    ties: dict[str, frozenset[str]],
) -> list[DensePlan]:
    dense = []
    present = {unit.targets[0] for unit in conversion.units}
    for unit in conversion.units:
        if expert_targets.intersection(unit.targets):
            continue
        reason = _reason_to_copy(model, unit, source, min_dense_bytes, groups)
        tied = tuple(sorted(ties.get(unit.targets[0], frozenset()) - {unit.targets[0]}))
        if reason is None and any(not _is_plain_matrix_module(model, name) for name in tied):
            reason = "tied to a parameter that is not a matrix"
        if reason is not None:
            copies.add(unit.keys, reason)
            continue
        key = unit.only_key
        rows, columns = source.tensors[key].shape
        free_ties = tuple(name for name in tied if name not in present)
        dense.append(DensePlan(unit.targets[0], free_ties, rows, columns, _blocks(unit.targets[0], key, rows, columns)))
    return dense


def _blocks(parameter: str, key: str, rows: int, columns: int) -> tuple[DenseBlockPlan, ...]:
    rows_per_block = max(1, DENSE_BLOCK_BYTES // (columns * BFLOAT16_BYTES))
    if rows_per_block > 1024:
        rows_per_block -= rows_per_block % 1024
    count = -(-rows // rows_per_block)
    begins = [i * rows_per_block for i in range(count)]
    if count > 1 and rows - begins[-1] < min(1024, rows_per_block):  # no sliver: kernels differ for very few rows
        begins[-1] = begins[-2] + (rows - begins[-2] + 1) // 2
    ends = [*begins[1:], rows]
    return tuple(
        DenseBlockPlan(f"{RECORD_PREFIX}{parameter}" + (f".{i}" if count > 1 else ""), parameter, key, b, e, columns)
        for i, (b, e) in enumerate(zip(begins, ends, strict=True))
    )


def _tie_groups(model: Any) -> dict[str, frozenset[str]]:
    """For every tied parameter, all parameters that share its weights."""
    members: dict[str, set[str]] = {}
    for target, origin in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        union = members.get(target, {target}) | members.get(origin, {origin})
        for name in union:
            members[name] = union
    return {name: frozenset(union) for name, union in members.items()}


def _is_plain_matrix_module(model: Any, parameter: str) -> bool:
    path, _, leaf = parameter.rpartition(".")
    module = model.get_submodule(path)
    return leaf == "weight" and isinstance(module, nn.Linear | nn.Embedding)


def _reason_to_copy(
    model: Any, unit: LoadUnit, source: SourceCheckpoint, min_dense_bytes: int, groups: list[ExpertModules]
) -> str | None:
    target = unit.targets[0]
    infos = [source.tensors[key] for key in unit.keys]
    if any(info.dtype != "BF16" for info in infos):
        return "not BF16"
    if any(len(info.shape) != 2 or 0 in info.shape for info in infos):
        return "not a matrix (norms, biases, buffers)"
    if sum(info.bytes for info in infos) < min_dense_bytes:
        return f"smaller than {min_dense_bytes >> 10} KiB"
    if unit.converter is None and len(infos) > 1:
        return "stored under several names"
    if not _is_plain_matrix_module(model, target):
        return "not the weight of a linear layer or an embedding"
    path = target.removesuffix(".weight")
    module = model.get_submodule(path)
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "embedding with max_norm, which changes its own weights"
    if unit.converter is not None:
        return "rebuilt by Transformers while loading (split or fused projections)"
    if module.weight.dtype != torch.bfloat16 or _kept_in_float32(model, target):
        return "kept in float32 by the model"
    if isinstance(module, nn.Linear) and _is_router(path, module, groups):
        return "router"
    if tuple(module.weight.shape) != infos[0].shape:
        return "another shape than the module's"
    return None


def _kept_in_float32(model: Any, parameter: str) -> bool:
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(torch.bfloat16)
    return bool(plan) and build_glob_alternation(list(plan))[0].search(parameter) is not None


def _is_router(path: str, module: nn.Linear, groups: list[ExpertModules]) -> bool:
    return any(
        module.out_features == group.num_experts and path.startswith(f"{group.path.rpartition('.')[0]}.")
        for group in groups
    )
