"""Makes the ``demo`` package of this repository importable, wherever pytest is started."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
