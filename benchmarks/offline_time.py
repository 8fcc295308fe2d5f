"""The offline cost: how long packing takes and how small the result is, per codec (ZipMoE paper, table 3).

Every operating point packs the same checkpoint, whose files are in the page cache, into a new folder; then every tensor
is decoded again and compared with the source bit for bit.

Run: python benchmarks/offline_time.py MODEL --work DIR

MODEL is a checkpoint of real expert shapes (``make-model --layers 1`` will do). Measurements can be made in parts
(--only): results of other parts are kept in the JSON.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from replayed_models import task_progress
from result_document import add_result_options, earlier_results, table, this_machine, write_results

from zipmoe.checkpoint.source import SourceCheckpoint
from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.codecs.registry import settings_from_options
from zipmoe.store.pack import pack
from zipmoe.store.pack_plan import meta_model
from zipmoe.store.packed_folder import PackedFolder
from zipmoe.store.verify import verify

POINTS: dict[str, tuple[str, int | str | None]] = {
    "fx3": ("fx3", None),
    "zstd-huf": ("zstd", "huf"),
    "zstd-3": ("zstd", 3),
    "lz4": ("lz4", None),
    "lz4hc-9": ("lz4hc", 9),
}


def warm(model: Path) -> None:
    """Read the checkpoint once and import what packing needs, so that the first operating point pays for neither."""
    meta_model(SourceCheckpoint(model))
    buffer = bytearray(8 << 20)
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def one_pack(model: Path, folder: Path, settings: CodecSettings, jobs: int | None) -> dict[str, Any]:
    """Pack into a new folder, which is deleted afterwards.

    Returns:
        Seconds of packing (planning and writing durably included) and of the comparison with the source, bytes before
        and after, number of matrices that were compared.
    """
    try:
        began = time.monotonic()
        manifest = pack(model, folder, settings, jobs=jobs)
        packed = time.monotonic()
        verification = verify(PackedFolder.open(folder), against=model, jobs=jobs)
        verified = time.monotonic()
        return {
            "pack_seconds": packed - began,
            "verify_seconds": verified - packed,
            "source_bytes": manifest.source_bytes,
            "packed_bytes": sum(entry.bytes for entry in manifest.files.values()),
            "matrices_compared": verification.matrices_compared,
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def tables_of(points: dict[str, Any]) -> str:
    """Medians over the rounds."""
    rows = []
    for label in POINTS:
        if label not in points:
            continue
        rounds = points[label]["rounds"]
        seconds = statistics.median(one["pack_seconds"] for one in rounds)
        check = statistics.median(one["verify_seconds"] for one in rounds)
        first = rounds[0]
        rows.append(
            [
                label,
                f"{first['source_bytes'] / 1e9:.3f}",
                f"{seconds:.1f}",
                f"{first['source_bytes'] / seconds / 1e6:.0f}",
                f"{first['packed_bytes'] / first['source_bytes']:.4f}",
                f"{first['matrices_compared']} matrices equal in {check:.1f} s",
            ]
        )
    header = ["codec", "BF16 GB", "pack s", "MB/s", "packed / BF16", "decode check against the source"]
    return "\n" + table(header, rows)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="checkpoint to pack")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="the packed folder is made in here")
    parser.add_argument("--only", nargs="+", choices=list(POINTS), default=list(POINTS), help="operating points")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, help="encoders at work at once [default: one per core]")
    add_result_options(parser, "offline_time")
    arguments = parser.parse_args()
    points = earlier_results(arguments.json, "points")
    warm(arguments.model)
    rounds: dict[str, list[dict[str, Any]]] = {label: [] for label in arguments.only}
    with task_progress("packing", arguments.rounds * len(arguments.only)) as tasks:
        for _ in range(arguments.rounds):
            for label in arguments.only:
                folder = arguments.work / f"offline-time-{os.getpid()}"
                settings = settings_from_options(*POINTS[label])
                rounds[label].append(one_pack(arguments.model, folder, settings, arguments.jobs))
                tasks.finished(label)
    points |= {label: {"rounds": of_label} for label, of_label in rounds.items()}
    tables = tables_of(points)
    print(tables)
    report = {"machine": this_machine(), "points": points}
    write_results(arguments.json, arguments.document, "Offline time (table 3)", report, tables)


if __name__ == "__main__":
    main()
