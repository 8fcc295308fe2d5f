"""How many reads at a time the disk of a folder wants, from its kept profile."""

from __future__ import annotations

from zipmoe.engine.io_backend import MeasuredReads
from zipmoe.hf.configuration import ZipMoEConfig
from zipmoe.profiling.profile_store import look_up_profile
from zipmoe.store.packed_folder import PackedFolder


def measured_reads(folder: PackedFolder, settings: ZipMoEConfig) -> MeasuredReads | None:
    """What the engine shall take where the caller chose nothing.

    None without a profile that may be used here, and for reads through the page cache, of which nothing was measured. A
    process that is kept on some CPUs needs one that was measured on as many (``taskset -c``).
    """
    if settings.io_mode != "auto" or settings.io_threads is not None or settings.io_depth is not None:
        return None
    kept = look_up_profile(folder)
    if kept is None or kept.profile is None or kept.doubts:
        return None
    return MeasuredReads(
        kept.profile.best_concurrent_reads, f"measured best on {kept.profile.measured_at:%Y-%m-%d %H:%M}"
    )
