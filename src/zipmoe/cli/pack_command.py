"""``zipmoe pack``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from zipmoe.cli.progress import byte_progress, talk
from zipmoe.engine.byte_quantity import format_bytes


def pack_command(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Folder of a BF16 checkpoint, or organisation/model on the hub")
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="New folder for the packed model")],
    codec: Annotated[str, typer.Option(help="fx3, zstd, lz4 or lz4hc")] = "fx3",
    level: Annotated[
        str | None,
        typer.Option(
            help="Compression level: zstd -131072..22 or 'huf' (Huffman coding only) [default: 3], "
            "lz4hc 1..12 [default: 9]"
        ),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(help="Pieces into which the exponents of each expert matrix are cut (not for fx3) [default: 4]"),
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Encoders at work at once [default: one per core]")] = None,
) -> None:
    """Pack a checkpoint losslessly; run again after an interruption, it continues where it was."""
    from zipmoe.codecs.registry import settings_from_options
    from zipmoe.errors import InterruptedPackError
    from zipmoe.store.worker_count import worker_count

    parsed_level = _parse_level(level)
    settings = settings_from_options(codec, parsed_level, shards)
    worker_count(jobs)

    from zipmoe.checkpoint.source import resolve_source
    from zipmoe.store.pack import PackProgress, pack

    folder = resolve_source(source)
    began: float | None = None
    resumed = total = 0
    try:
        with byte_progress() as bar:

            def report(progress: PackProgress) -> None:
                nonlocal began, resumed, total
                began = began or time.monotonic()  # the first report comes when the plan is made
                resumed, total = progress.resumed_bytes, progress.total_bytes
                bar.update(progress.done_bytes, progress.total_bytes, progress.stage)

            manifest = pack(folder, destination, settings, jobs=jobs, report=report)
    except KeyboardInterrupt:
        raise InterruptedPackError(
            "interrupted", hint="run the same command again and it continues where it was"
        ) from None
    seconds = time.monotonic() - (began or time.monotonic())
    packed = sum(entry.bytes for entry in manifest.files.values())
    left = sum(reason.bytes for reason in manifest.unpacked)
    experts = sum(len(group.records) for group in manifest.expert_groups)
    if resumed:
        talk(f"continued an interrupted pack: {format_bytes(resumed)} were already there")
    talk(
        f"packed {_count(experts, 'expert', 'experts')} in "
        f"{_count(len(manifest.expert_groups), 'layer', 'layers')} and "
        f"{_count(len(manifest.dense), 'dense matrix', 'dense matrices')} "
        f"with {settings.name}: {format_bytes(manifest.source_bytes)} -> {format_bytes(packed)} "
        f"(ratio {packed / manifest.source_bytes:.4f}) in {seconds:.1f} s, "
        f"{(total - resumed) / 1e6 / max(seconds, 1e-9):.0f} MB/s"
    )
    talk(f"left as they are: {format_bytes(left)} (zipmoe inspect says why)")
    typer.echo(destination)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _parse_level(level: str | None) -> int | str | None:
    if level is None or level == "huf":
        return level
    try:
        return int(level)
    except ValueError:
        from zipmoe.errors import InvalidArgumentError

        raise InvalidArgumentError(
            f"--level {level!r} is neither a number nor 'huf'", hint="for example: --codec zstd --level 3"
        ) from None
