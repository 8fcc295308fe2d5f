"""Where published routing traces lie, if they do: they are not part of the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("ZIPMOE_TRACES") or Path(__file__).parents[3] / "shared" / "traces")
needs_traces = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no routing traces in {FOLDER} (ZIPMOE_TRACES)")
