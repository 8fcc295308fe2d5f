"""The worker that runs our engine does as its job says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zipmoe.bench.measurement import read_output
from zipmoe.bench.workers.worker_protocol import Job


@pytest.mark.parametrize("threads", [1, 3])
def test_all_threads_are_as_many_as_the_job_says(tiny_packed: Path, threads: int) -> None:
    job = Job(str(tiny_packed), (((1, 2, 3),),), 2, threads, 8 * 10**9, {"mode": None})
    command = [sys.executable, "-m", "zipmoe.bench.workers.packed_model"]
    done = subprocess.run(command, input=job.to_json(), capture_output=True, text=True, check=True)
    output = read_output(done.stdout)
    assert output.done and output.loaded is not None
    assert f" decoding with {threads} thread{'s' if threads > 1 else ''};" in output.loaded["mode_line"]
