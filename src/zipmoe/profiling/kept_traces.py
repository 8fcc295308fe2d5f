"""The last routing trace that a model was planned with, kept beside the profiles in the user's cache.

Routing belongs to the model, not to the codec that it is packed with: all packed folders of one model share a trace.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from zipmoe.planning.trace import RoutingTrace, write_trace
from zipmoe.profiling.profile_store import profiles_folder
from zipmoe.store.manifest import Manifest


def kept_trace_path(manifest: Manifest) -> Path:
    """Where the trace of this model is kept; it need not exist."""
    digest = hashlib.sha256(manifest.source_fingerprint.encode()).hexdigest()[:12]
    return profiles_folder().parent / "traces" / f"{digest}.jsonl.gz"


def keep_trace(trace: RoutingTrace, manifest: Manifest) -> Path:
    """Keep a trace for later runs of this model; the file is complete or not there."""
    path = kept_trace_path(manifest)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{os.getpid()}-{path.name}")
    try:
        write_trace(written, trace)
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)
    return path
