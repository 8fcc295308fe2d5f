"""The last routing trace that a model was planned with, kept beside the profiles in the user's cache.

Routing belongs to the model, not to the codec that it is packed with: all packed folders of one model share a trace.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from zipmoe.errors import ZipMoEError
from zipmoe.planning.folder_plan import check_trace
from zipmoe.planning.trace import RoutingTrace, read_trace, write_trace
from zipmoe.profiling.profile_store import profiles_folder
from zipmoe.store.durable_files import clear_write_errors
from zipmoe.store.manifest import Manifest


def kept_trace_path(manifest: Manifest) -> Path:
    """Where the trace of this model is kept; it need not exist."""
    digest = hashlib.sha256(manifest.source_fingerprint.encode()).hexdigest()[:12]
    return profiles_folder().parent / "traces" / f"{digest}.jsonl.gz"


def usable_kept_trace(manifest: Manifest, note: Callable[[str], None]) -> RoutingTrace | None:
    """The kept trace of this model; None if there is none, or if ``note`` was told why it cannot be used."""
    kept = kept_trace_path(manifest)
    if not kept.is_file():
        return None
    try:
        trace = read_trace(kept)
        check_trace(trace, manifest)
    except ZipMoEError as error:
        note(f"note: the kept trace {str(kept)!r} is not used: {error}")
        return None
    return trace


def keep_trace(trace: RoutingTrace, manifest: Manifest) -> Path:
    """Keep a trace for later runs of this model; the file is complete or not there.

    Raises:
        NotEnoughDiskError: the disk is full.
    """
    path = kept_trace_path(manifest)
    with clear_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{os.getpid()}-{path.name}")
    try:
        write_trace(written, trace)
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)
    return path
