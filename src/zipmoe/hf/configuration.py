"""``ZipMoEConfig``: the ``quantization_config`` of a packed folder, and what a caller may choose when loading it.

Two keys live in config.json (``quant_method``, ``format_version``). The others are loading attributes: given by the
caller, else by the environment (``ZIPMOE_MEMORY``, ``ZIPMOE_MODE``), else the default.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from zipmoe.checkpoint.source import QUANT_METHOD
from zipmoe.engine.cache_policy import checked_pair
from zipmoe.engine.cpu_affinity import parse_cpus
from zipmoe.engine.engine import IO_MODES, VERIFY_MODES
from zipmoe.engine.io_backend import IO_BACKENDS
from zipmoe.engine.option_checks import one_of
from zipmoe.engine.pool_slots import PoolSettings, PoolSlots
from zipmoe.engine.rows_on_demand import EMBEDDING_PLACES
from zipmoe.errors import InvalidArgumentError, ManifestError
from zipmoe.store.manifest import FORMAT_VERSION
from zipmoe.store.packed_folder import PackedFolder

MODES = ("fast", "exact")
PLANNED_POOLS = "plan"
"""``pools``: let the planner divide the memory."""
NO_POOLS = "none"
"""``pools``: the single pool, as without the argument."""
_LOADING_ATTRIBUTES = (
    "memory",
    "mode",
    "context_tokens",
    "verify",
    "io_mode",
    "io_threads",
    "io_depth",
    "io_backend",
    "decode_threads",
    "cpus",
    "pools",
    "trace",
    "policy",
    "half_life_steps",
    "embedding",
    "early_routing",
    "look_ahead",
    "fused_steps",
    "last_positions",
)


class ZipMoEConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How to load a packed folder.

    Args:
        memory: budget for everything that the process keeps, e.g. ``"4GB"`` or bytes. Default: ``ZIPMOE_MEMORY``,
            else the smallest of physical memory and the control group's limits, less a reserve.
        mode: ``"fast"`` or ``"exact"``. Default: ``ZIPMOE_MODE``, else ``"fast"``.
        context_tokens: tokens (over all sequences of a batch) for which key-value cache is reserved at start.
            Default: the model's context length, at most 2048. A longer context takes from the expert pool.
        verify: when checksums of records are verified: ``"always"`` (each read), ``"first"`` or ``"never"``.
        io_mode: ``"auto"`` (reads past the page cache where the file system can) or ``"buffered"`` (through it; nothing
            is left behind there).
        io_threads: threads that read from disk, of the backend ``"threads"``. Default: what ``zipmoe profile`` found
            best for this folder's disk, else the engine's.
        io_depth: blocks that io_uring reads at a time, of the backend ``"uring"``. Default: likewise.
        io_backend: ``"threads"``, ``"uring"`` (io_uring) or ``"auto"``, as the engine's.
        decode_threads: threads that decode. Default: the engine's.
        cpus: CPUs that every thread of the process is kept on from loading on, torch's included, e.g. ``"0-3,6"`` or
            ``[0, 1]``. Default: those that the process may use anyway. A profile is of a machine with as many cores as
            they may use: ``taskset -c 0-3,6 zipmoe profile`` measures for it.
        pools: experts per sparse layer that are kept decoded (F), compressed (C), with their SM-chunks only (S) and
            with their E-chunks only (E), e.g. ``"F=0,C=12,S=8,E=0"``, or the engine's ``PoolSettings``; ``"plan"``:
            what the planner chooses for this budget with the kept profile of machine and folder. Default, and
            ``"none"``: one pool of compressed experts for all layers, as large as the budget allows. The latter also
            where the planner cannot choose; a line on standard error says why.
        trace: file of recorded routing to plan with. Default: the one that ``zipmoe plan`` kept for this model.
        policy: which experts make room for others, and with pools who goes where: ``"zipmoe"`` (decayed activation
            counts), ``"lru"``, ``"lfu"``, ``"lfuda"``, ``"fifo"``, ``"marking"``, or ``"auto"``: whichever of them
            (and of some half-lives) is found best while the model runs; results do not depend on it. Default: that of
            ``PoolSettings``, else ``"auto"``.
        half_life_steps: for the policy ``"zipmoe"``, which this makes the default: steps (passes of the model) after
            which an activation counts half. Default: that of ``PoolSettings``, else 16.
        embedding: where tables are kept that are only looked up: ``"on-demand"`` (on disk, and the rows of the tokens
            at hand are read, which leaves more memory to experts), ``"resident"``, or ``"auto"`` (default): resident
            where all experts have room beside them.
        early_routing: where a block computes its shared expert before it routes, ask the router first, so that experts
            are read meanwhile. Results do not depend on it.
        look_ahead: while a layer of a step or of a prompt computes, read in idle disk time what the next layer's router
            would choose now; while a token is chosen, what the first layer's router would choose for the likeliest one.
            In passes that ask for most experts of every layer, those of the first layer are read as the pass begins.
            Takes two experts' memory from the pool; the mode line says whether it is in effect. Results do not depend
            on it. Default: wherever that is possible, which takes a single pool of experts, not all of which have room.
        fused_steps: in the mode ``"fast"``, compute attention, feed-forward networks, norms and routers by one call of
            the native core each (docs/compute.md, "Steps and prompts"), where it can. ``False`` leaves them to the
            family's own code, whose products the native core computes one by one: for comparisons.
        last_positions: in the mode ``"fast"``, let the last layer of a prompt compute only the positions whose logits
            are asked for (``logits_to_keep``, which ``generate`` gives), where nothing looks at the others
            (docs/compute.md, "The last layer of a prompt"). ``False`` computes all of them.
        quant_method: ``"zipmoe"``, as config.json says.
        format_version: version of the packed folder, as config.json says.

    Raises:
        InvalidArgumentError: unknown key or value, or a half-life with a policy that has none.
        ManifestError: unknown ``format_version``.
    """

    def __init__(
        self,
        memory: str | int | None = None,
        mode: str | None = None,
        context_tokens: int | None = None,
        verify: str = "always",
        io_mode: str = "auto",
        io_threads: int | None = None,
        io_depth: int | None = None,
        io_backend: str = "auto",
        decode_threads: int | None = None,
        cpus: str | Sequence[int] | None = None,
        pools: str | PoolSlots | PoolSettings | None = None,
        trace: str | Path | None = None,
        policy: str | None = None,
        half_life_steps: float | None = None,
        embedding: str = "auto",
        early_routing: bool = True,
        look_ahead: bool | None = None,
        fused_steps: bool = True,
        last_positions: bool = True,
        quant_method: str = QUANT_METHOD,
        format_version: int = FORMAT_VERSION,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise InvalidArgumentError(
                f"quantization_config has unknown keys: {', '.join(sorted(unknown))}",
                hint=f"known are quant_method, format_version, {', '.join(_LOADING_ATTRIBUTES)}",
            )
        if quant_method != QUANT_METHOD:
            raise InvalidArgumentError(f"quant_method is {quant_method!r}, expected {QUANT_METHOD!r}")
        if format_version != FORMAT_VERSION:
            raise ManifestError(
                f"the folder has format version {format_version!r}, this ZipMoE reads version {FORMAT_VERSION}",
                hint="install the ZipMoE that packed it, or pack the original checkpoint again",
            )
        self.quant_method = quant_method
        self.format_version = format_version
        self.memory = memory
        self.mode = mode
        self.context_tokens = _positive("context_tokens", context_tokens)
        self.verify = one_of("verify", verify, VERIFY_MODES)
        self.io_mode = one_of("io_mode", io_mode, IO_MODES)
        self.io_threads = _positive("io_threads", io_threads)
        self.io_depth = _positive("io_depth", io_depth)
        self.io_backend = one_of("io_backend", io_backend, IO_BACKENDS)
        self.decode_threads = _positive("decode_threads", decode_threads)
        self.cpus = None if cpus is None else parse_cpus(cpus)
        self.pools = _parse_pools(pools)
        self.trace = trace
        if trace is not None and self.pools != PLANNED_POOLS:
            raise InvalidArgumentError("a trace is for planning", hint=f'give pools="{PLANNED_POOLS}" with it')
        checked_pair(policy or (pools.policy if isinstance(pools, PoolSettings) else None), half_life_steps)
        self.policy = policy
        self.half_life_steps = half_life_steps
        self.embedding = one_of("embedding", embedding, EMBEDDING_PLACES)
        self.early_routing = _true_or_false("early_routing", early_routing)
        self.look_ahead = None if look_ahead is None else _true_or_false("look_ahead", look_ahead)
        self.fused_steps = _true_or_false("fused_steps", fused_steps)
        self.last_positions = _true_or_false("last_positions", last_positions)
        self.opened_folder: PackedFolder | None = None
        if mode is not None:
            one_of("mode", mode, MODES)

    def open_folder(self, path: Path) -> PackedFolder:
        """The packed folder at ``path``: what the caller has opened, if it is that, else opened and checked now.

        Raises:
            NotAPackedFolderError, PackedFolderError: as ``PackedFolder.open``.
        """
        opened, self.opened_folder = self.opened_folder, None
        return opened if opened is not None and opened.path.samefile(path) else PackedFolder.open(path)

    def get_loading_attributes(self) -> dict[str, Any]:
        """What the caller chose; Transformers copies it over the folder's own configuration."""
        chosen = {name: getattr(self, name) for name in _LOADING_ATTRIBUTES}
        return chosen if self.opened_folder is None else chosen | {"opened_folder": self.opened_folder}

    def resolved_memory(self) -> str | int | None:
        """The budget: argument, else ``ZIPMOE_MEMORY``, else None (the engine's default)."""
        return self.memory if self.memory is not None else os.environ.get("ZIPMOE_MEMORY")

    def resolved_mode(self) -> str:
        """The mode: argument, else ``ZIPMOE_MODE``, else ``"fast"``."""
        if self.mode is not None:
            return self.mode
        return one_of("ZIPMOE_MODE", os.environ.get("ZIPMOE_MODE", "fast"), MODES)

    def to_dict(self) -> dict[str, Any]:
        """The part that belongs into config.json."""
        return {"quant_method": self.quant_method, "format_version": self.format_version}


def _parse_pools(pools: str | PoolSlots | PoolSettings | None) -> str | PoolSlots | PoolSettings | None:
    """Slots; or ``PLANNED_POOLS``; or None for the single pool."""
    if not isinstance(pools, str) or pools == PLANNED_POOLS:
        return pools
    return None if pools == NO_POOLS else PoolSlots.parse(pools)


def _true_or_false(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} is {value!r}", hint="give True or False")
    return value


def _positive(name: str, value: int | None) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise InvalidArgumentError(f"{name} is {value!r}", hint="give a positive whole number")
    return value
