"""The engine: packed experts and dense matrices of one model, within one memory budget."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn, Self

import torch

from zipmoe import _native
from zipmoe.codecs.registry import get_codec
from zipmoe.engine.budget import EXPERT_POOL, MemoryBudget, format_bytes, itemise
from zipmoe.engine.cache_policy import PolicyChoice
from zipmoe.engine.decoded_tensors import DecodedTensors
from zipmoe.engine.dense_loading import load_dense
from zipmoe.engine.dense_tiles import DenseTiles
from zipmoe.engine.early_request import EarlyRequest
from zipmoe.engine.exclusive_access import ExclusiveAccess
from zipmoe.engine.expert_request import ExpertRequest
from zipmoe.engine.fused_compute import FusedCompute
from zipmoe.engine.io_backend import MeasuredReads, ReadSettings, choose_reads
from zipmoe.engine.memory_plan import MemoryPlan
from zipmoe.engine.mode_line import EngineMode
from zipmoe.engine.option_checks import one_of, positive
from zipmoe.engine.pool_memory_plan import PoolMemoryPlan, native_pools, pool_line
from zipmoe.engine.pool_slots import PoolSettings, PoolSlots
from zipmoe.engine.record_catalogue import GroupHandle, RecordCatalogue
from zipmoe.engine.record_errors import named_record_errors, open_error
from zipmoe.engine.rows_on_demand import RowsOnDemand
from zipmoe.engine.statistics import Statistics
from zipmoe.errors import BudgetExceededError, InvalidArgumentError, UnsupportedOperationError
from zipmoe.store.packed_folder import PackedFolder

DECODED_TENSORS = "decoded tensors in use"
VERIFY_MODES = ("always", "first", "never")
IO_MODES = ("auto", "buffered")


class Engine:
    """Serves experts and dense matrices of a packed folder.

    Usable from several threads: a request or an iteration over tiles holds the engine until it ends, others wait. One
    engine belongs to one process and cannot be copied.
    """

    request_observer: Callable[[str, Sequence[int]], None] | None = None
    """Called with the group's path and the ids of every request, while somebody records routing."""

    def __init__(
        self,
        folder: PackedFolder,
        budget: MemoryBudget,
        *,
        verify: str = "always",
        io_threads: int | None = None,
        io_depth: int | None = None,
        measured_reads: MeasuredReads | None = None,
        decode_threads: int | None = None,
        io_mode: str = "auto",
        io_backend: str = "auto",
        instruction_set: str = "",
        policy: str | None = None,
        half_life_steps: float | None = None,
        pools: PoolSettings | PoolSlots | None = None,
        rows_on_demand: Collection[str] = (),
        fused: bool = False,
    ) -> None:
        """Reserve memory, open the files and read the dense matrices.

        Args:
            folder: the packed model.
            budget: what the caller has reserved in it (see ``plan_budget``) is kept; the engine adds its own
                reservations and gives the rest to the expert pool.
            verify: when checksums of records are verified: ``"always"``, ``"first"`` (a record's first read) or
                ``"never"``.
            io_threads, io_depth: reads at a time of the backends ``"threads"`` and ``"uring"``; see ``choose_reads``.
            measured_reads: their defaults.
            decode_threads: threads that decode, the caller included; default: the processors of this process.
            io_mode: ``"auto"`` (direct where possible) or ``"buffered"``.
            io_backend: ``"threads"``, ``"uring"`` (io_uring), or ``"auto"``: what measures best, which is threads.
            instruction_set: of the decoding kernels; default: the widest that is present.
            policy: which experts make room for others, and with pools who goes where: a name of ``policy_names()``.
                Results do not depend on it, only hits and misses do. Default: that of ``PoolSettings``, else
                ``"auto"``: chosen by replay while the model runs.
            half_life_steps: for the policy ``"zipmoe"``, which this makes the default: steps after which an activation
                counts half. Default: that of ``PoolSettings``, else 16.
            pools: experts per sparse layer in the pools F, C, S and E, by what is kept of them in memory. Default: one
                pool of whole records for all layers, as large as the budget allows.
            rows_on_demand: parameters of dense matrices that are kept on disk: ``dense_rows`` reads what it needs
                (see ``looked_up_matrices``). With ``verify="always"`` every page is verified whenever it is read,
                otherwise only at the start.
            fused: compute with packed weights where the codec has kernels for that: ``Engine.fused``.

        Raises:
            BudgetTooSmallError: the budget is below the floor, or too small for the pools.
            PackedFolderError: a file or record is missing, damaged, or contradicts the manifest.
            CodecUnavailableError, InvalidArgumentError: see the message; the latter also if ``"uring"`` was asked for
                and cannot be used.
        """
        self._closed = False
        self._process = os.getpid()
        self._access = ExclusiveAccess()
        self._request: ExpertRequest | None = None
        self.early = EarlyRequest(self)
        """The request to come, if it is known before its experts are needed."""
        self._decode_threads = positive("decode_threads", decode_threads, len(os.sched_getaffinity(0)))
        self._verify = one_of("verify", verify, VERIFY_MODES)
        self._instruction_set = instruction_set or _native.best_instruction_set()
        one_of("instruction_set", self._instruction_set, tuple(_native.instruction_sets()))
        one_of("io_mode", io_mode, IO_MODES)
        self._reads = choose_reads(io_backend, io_threads, io_depth, measured_reads)
        settings = PoolSettings(pools) if isinstance(pools, PoolSlots) else pools
        if settings is not None:
            policy = settings.policy if policy is None else policy
            half_life_steps = settings.half_life_steps if half_life_steps is None else half_life_steps
        self._policy = PolicyChoice.of(policy, half_life_steps)
        self.folder = folder
        self.budget = budget
        manifest = folder.manifest
        self._catalogue = RecordCatalogue(folder.path, manifest)
        codec = get_codec(manifest.codec.name)
        self.fused = FusedCompute(self) if fused and codec.fused else None
        """Products with packed weights; None if they were not asked for, or the codec has no kernels for them."""
        self._on_demand = RowsOnDemand.of(self._catalogue, rows_on_demand)
        self._plan = MemoryPlan.of(
            manifest, self._decode_threads, separable=codec.separable, rows_on_demand=self._on_demand
        )
        self._pools: PoolMemoryPlan | None = None
        if settings is not None:
            self._pools = PoolMemoryPlan.of(manifest.expert_groups, settings, separable=codec.separable)
            wanted = self._pools.wanted_bytes
            self._plan.reserve_fixed(budget, wanted, self._pools.itemise())
            budget.set_reservation(EXPERT_POOL, wanted)
        slots = self._plan.reserve(budget) if self._pools is None else []
        self._on_demand = self._on_demand.reserved(budget.ledger)
        self._native = self._open_native(slots, io_mode, self._reads)
        self._scratch, self._arena = self._map_memory()
        self._scratch_views: dict[tuple[int, int, int], torch.Tensor] = {}
        self._decoded = DecodedTensors(lambda count: self._set_reservation(DECODED_TENSORS, count))
        self._tile_iterations = 0
        self.statistics = Statistics(self._native.counters, read_policy=self._native.policy)
        """Counters, and the clock of the current run."""
        try:
            with named_record_errors(self._catalogue):
                load_dense(self._native)
        except BaseException:
            self.close()
            raise

    def _map_memory(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The scratch buffers, and the arena with the pool F, as BF16 tensors."""
        with torch.inference_mode(False):  # tensors made in that mode would not work outside of it
            scratch = [
                torch.from_numpy(self._native.scratch(index)).view(torch.bfloat16)
                for index in range(len(self._plan.scratch_bytes))
            ]
            arena = torch.from_numpy(self._native.arena()) if self._pools else torch.empty(0, dtype=torch.uint16)
            return scratch, arena.view(torch.bfloat16)

    def _open_native(self, slots: Sequence[int], io_mode: str, reads: ReadSettings) -> _native.Engine:
        class_of_record = [-1] * len(self._catalogue.records)
        for number, shape in enumerate(self._plan.size_classes):
            for group in shape.groups:
                for record in self._catalogue.group_numbers[group]:
                    class_of_record[record] = number
        shapes = [] if self._pools else list(zip(self._plan.size_classes, slots, strict=True))
        try:
            return _native.Engine(
                self._catalogue.table,
                verify=self._verify,
                io_threads=reads.threads,
                io_depth=reads.depth,
                decode_threads=self._decode_threads,
                io_mode=io_mode,
                io_backend=reads.backend,
                instruction_set=self._instruction_set,
                size_classes=[(shape.slot_bytes, count) for shape, count in shapes],
                class_of_record=class_of_record,
                scratch_bytes=list(self._plan.scratch_bytes),
                policy=self._policy.first,
                half_life_steps=self._policy.half_life_steps,
                candidates=self._policy.candidates,
                requests_per_step=max(1, len(self._catalogue.group_numbers)),
                pools=None if self._pools is None else native_pools(self._pools, self._catalogue.group_numbers),
                rows_on_demand=self._on_demand.records,
                keep_row_details=self._on_demand.keeps_details,
            )
        except OSError as error:
            raise open_error(error) from error

    # --- experts

    def group(self, path: str) -> GroupHandle:
        """The expert group of a module path; InvalidArgumentError if there is none."""
        return self._catalogue.group(path)

    def request(
        self,
        group: GroupHandle,
        expert_ids: Sequence[int],
        *,
        ascending: bool = False,
        tokens: Sequence[int] | None = None,
    ) -> ExpertRequest:
        """A sparse layer's need for experts, to be used in a ``with`` block.

        Iterating over it yields each id once, as the expert becomes resident: hits first, then misses (all or a part of
        them had to be read) in the order in which their reads complete; with ``ascending`` strictly by id. An expert
        stays usable until the next one is asked for or the block ends. Each is read at most once, also when there are
        fewer slots than misses.

        Args:
            group: from ``group``.
            expert_ids: ids in any order; repeated ones count once.
            ascending: hand out by ascending id.
            tokens: how many tokens are routed to each id: with pools, reads for long executions come first. The ids
                must be distinct then.

        Raises:
            InvalidArgumentError: an id is out of range, or ``tokens`` does not fit the ids.
            CorruptRecordError, TruncatedShardError, PackedFolderError (while iterating): an expert cannot be read.
            UnsupportedOperationError (at ``with``): the same thread has a request open already.
        """
        distinct = list(dict.fromkeys(expert_ids))
        if tokens is not None and not len(tokens) == len(expert_ids) == len(distinct):
            raise InvalidArgumentError("numbers of tokens are given for distinct experts, one for each")
        if self.request_observer is not None:
            self.request_observer(group.path, distinct)
        return ExpertRequest(self, group, distinct, ascending, list(tokens or ()))

    def matrix(self, group: GroupHandle, expert_id: int, name: str) -> torch.Tensor:
        """A matrix of the expert that the open request handed out last.

        Returns:
            BF16 [rows, columns], 64-byte aligned, in the scratch buffer of this matrix position: valid until a matrix
            of the same position is asked for again. Matrices of different positions of one expert coexist. An expert of
            the pool F is not decoded again: the view is of its slot, valid until the request's next step, not to be
            written to.

        Raises:
            UnsupportedOperationError: the expert is not the one that was handed out last.
            InvalidArgumentError: there is no such matrix.
        """
        position, entry = group.matrix(expert_id, name)
        record = group.records[expert_id]
        with self._exclusive():
            self._require_handed_out(group, expert_id)
            decoded = self._native.decoded_offset(record, position) if self._pools else None
            if decoded is not None:
                return self._decoded_view(decoded, entry.rows, entry.columns)
            with named_record_errors(self._catalogue):
                self._native.decode_to_scratch(record, position, 0, entry.rows, position)
            return self._scratch_view(position, entry.rows, entry.columns)

    def expert_matrix(self, group: GroupHandle, expert_id: int, name: str) -> torch.Tensor:
        """A matrix of any expert, fetched if need be, as a fresh BF16 tensor [rows, columns].

        Raises:
            UnsupportedOperationError: the same thread has a request open that did not hand out this expert last.
            BudgetExceededError: a tensor of this size does not fit into the budget.
            CorruptRecordError, TruncatedShardError, PackedFolderError: the expert cannot be read.
        """
        position, entry = group.matrix(expert_id, name)
        with self._exclusive():
            if self._request is not None:
                self._require_handed_out(group, expert_id)
                return self._decode_fresh(group.records[expert_id], position, entry.rows, entry.columns)
            self._decoded.settle()
            fresh = self._decoded.empty(entry.rows, entry.columns)
            with self.request(group, [expert_id]) as request:
                for _ in request:
                    self._decode_into(fresh, group.records[expert_id], position)
            return fresh

    def _decode_fresh(self, record: int, position: int, rows: int, columns: int) -> torch.Tensor:
        fresh = self._decoded.empty(rows, columns)
        self._decode_into(fresh, record, position)
        return fresh

    def _decode_into(self, target: torch.Tensor, record: int, position: int) -> None:
        with named_record_errors(self._catalogue):
            self._native.decode(record, position, 0, target.shape[0], target.view(torch.uint16).numpy())

    def _require_handed_out(self, group: GroupHandle, expert_id: int) -> None:
        request = self._request
        if request is None or request.group is not group or request.current != expert_id:
            raise UnsupportedOperationError(
                f"expert {expert_id} of {group.path} is not the one that the open request handed out last",
                hint="iterate over engine.request(...), or use expert_matrix outside of a request",
            )

    # --- dense matrices

    def dense_tiles(self, parameter: str) -> DenseTiles:
        """Iterate over a dense matrix in blocks of rows, each decoded into the same scratch buffer.

        Yields:
            (row_begin, row_end, BF16 [row_end - row_begin, columns], 64-byte aligned); the tensor is valid until the
            next step. Matrices of at most 32 MiB come as one tile. Another iteration by the same thread ends this one.

        Raises:
            InvalidArgumentError: not a packed dense matrix.
        """
        self._require_usable()
        return DenseTiles(self, parameter)

    def dense_matrix(self, parameter: str) -> torch.Tensor:
        """A whole dense matrix as a fresh BF16 tensor [rows, columns], reserved in the budget while it lives.

        Raises:
            InvalidArgumentError: not a packed dense matrix.
            BudgetExceededError: it does not fit.
        """
        handle = self._catalogue.dense_matrix(parameter)
        with self._exclusive():
            self._decoded.settle()
            fresh = self._decoded.empty(handle.rows, handle.columns)
            for block, begin, end in zip(handle.blocks, handle.row_begins[:-1], handle.row_begins[1:], strict=True):
                self._decode_into(fresh[begin:end], block, 0)
            return fresh

    def dense_rows(self, parameter: str, rows: torch.Tensor) -> torch.Tensor:
        """Single rows of a dense matrix (embedding look-up).

        Args:
            parameter: name of the parameter.
            rows: int64 [n] on the CPU, each in 0 .. matrix rows - 1, in any order, with repetitions.

        Returns:
            Fresh BF16 [n, columns].

        Raises:
            IndexError: a row number is out of range.
        """
        handle = self._catalogue.dense_matrix(parameter)
        if rows.dtype != torch.int64 or rows.dim() != 1:
            raise InvalidArgumentError(f"row numbers must be int64 [n], not {rows.dtype} {list(rows.shape)}")
        with self._exclusive():
            self._decoded.settle()
            fresh = self._decoded.empty(rows.shape[0], handle.columns)
            with named_record_errors(self._catalogue):
                self._native.gather(handle.blocks, rows.contiguous().numpy(), fresh.view(torch.uint16).numpy())
            return fresh

    def _decoded_view(self, offset: int, rows: int, columns: int) -> torch.Tensor:
        key = (-1 - offset, rows, columns)  # buffers of scratch have the numbers from 0 on
        view = self._scratch_views.get(key)
        if view is None:
            begin = offset // self._arena.element_size()
            view = self._scratch_views[key] = self._arena[begin : begin + rows * columns].view(rows, columns)
        return view

    def _scratch_view(self, index: int, rows: int, columns: int) -> torch.Tensor:
        key = (index, rows, columns)
        view = self._scratch_views.get(key)
        if view is None:
            view = self._scratch_views[key] = self._scratch[index][: rows * columns].view(rows, columns)
        return view

    # --- memory

    def account(self, what: str, count: int) -> None:
        """Make the reservation ``what`` exactly ``count`` bytes in all; the expert pool gives way, down to its floor,
        or grows again.

        To be called before the memory is allocated, outside of requests.

        Args:
            what: name in the ledger, e.g. ``"key-value cache"``.
            count: bytes that it takes from now on, not the difference.

        Raises:
            BudgetExceededError: it does not fit even with the smallest pool; nothing is changed.
        """
        with self._exclusive():
            self._decoded.settle()
            self._set_reservation(what, count)

    def _set_reservation(self, what: str, count: int) -> None:
        growth = count - self.budget.reserved(what)
        lacking = growth - self.budget.free_bytes
        if lacking > 0:
            target = self.budget.reserved(EXPERT_POOL) - lacking
            if target < self._pool_floor_bytes:
                raise BudgetExceededError(
                    f"{what} needs {format_bytes(growth)} more, but the expert pool can give at most "
                    f"{format_bytes(self._spare_bytes())} of the budget of {format_bytes(self.budget.total_bytes)} "
                    f"({itemise(self.budget.ledger)})",
                    hint="give more memory, or use a shorter context",
                )
            if self._request is not None:
                raise UnsupportedOperationError(f"{what} cannot take memory from the expert pool during a request")
            self._resize_pool(target)
        self.budget.set_reservation(what, count)
        if growth < 0 and self._request is None:
            self._resize_pool(self.budget.reserved(EXPERT_POOL) + self.budget.free_bytes)

    @property
    def _pool_floor_bytes(self) -> int:
        return self._plan.pool_floor_bytes if self._pools is None else self._pools.floor_bytes

    def _spare_bytes(self) -> int:
        return self.budget.free_bytes + self.budget.reserved(EXPERT_POOL) - self._pool_floor_bytes

    def _resize_pool(self, reservation_bytes: int) -> None:
        self.early.cancel()
        if self._pools is not None:
            slots = self._pools.slots_within(reservation_bytes)
            if [list(group.experts) for group in slots] != self._native.pool_slots:
                self._native.resize_pools([group.experts for group in slots])
            self.budget.set_reservation(EXPERT_POOL, self._pools.reservation_bytes(slots))
            return
        wanted = self._plan.slots_within(reservation_bytes)
        present = [slots for _, slots in self._native.size_classes]
        changes = [
            (new - old, number) for number, (new, old) in enumerate(zip(wanted, present, strict=True)) if new != old
        ]
        for _, number in sorted(changes):  # what shrinks goes first
            self._native.resize_pool(number, wanted[number])
        self.budget.set_reservation(EXPERT_POOL, self._plan.pool_reservation_bytes(wanted))

    # --- life

    def mode_line(self, mode: str, combine: str) -> str:
        """The line that every run prints first.

        Args:
            mode: numeric mode, ``"fast"`` or ``"exact"``.
            combine: combine order, e.g. ``"grouped_mm"``.
        """
        return EngineMode(
            codec=self.folder.manifest.codec.name,
            instruction_set=self._instruction_set,
            io_mode=self._native.io_mode,
            io_fallback_reason=self._native.fallback_reason,
            uring_refusal=self._native.uring_refusal,
            reads=self._reads,
            decode_threads=self._decode_threads,
            verify=self._verify,
            budget_bytes=self.budget.total_bytes,
            slots=[(slot_bytes, slots) for slot_bytes, slots in self._native.size_classes],
            experts=sum(shape.records for shape in self._plan.size_classes),
            policy=self._policy.describe(self._native.policy()),
            pools=self._describe_pools(),
            pools_origin=self._pools.settings.origin if self._pools else "",
            rows_on_demand_saved_bytes=max(self._on_demand.saved_bytes, 0),
        ).line(mode, combine)

    def _describe_pools(self) -> str:
        if self._pools is None:
            return ""
        slots = [PoolSlots(*group) for group in self._native.pool_slots]
        return pool_line(self._pools, slots, [len(group.records) for group in self._catalogue.groups.values()])

    def close(self) -> None:
        """Stop the threads and give the memory back; idempotent. Tensors in scratch read as zeros from now on."""
        if self._closed or os.getpid() != self._process:
            return
        with self._access:
            self._closed = True
            self._request = None
            self.early.cancel()
            self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: UnsupportedOperationError."""
        raise UnsupportedOperationError("an engine cannot be copied: it owns memory, threads and open files")

    def __reduce__(self) -> NoReturn:
        """Refuse: UnsupportedOperationError."""
        raise UnsupportedOperationError("an engine cannot be pickled: it owns memory, threads and open files")

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the engine, which may have been closed while this thread waited for it."""
        self._require_usable()  # in a forked child nothing may be waited for
        with self._access:
            self._require_usable()
            yield

    def _require_usable(self) -> None:
        if os.getpid() != self._process:
            raise UnsupportedOperationError(
                "the engine belongs to the process that opened it", hint="load the model in the child process"
            )
        if self._closed:
            raise UnsupportedOperationError("the engine is closed")
