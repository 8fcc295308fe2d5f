"""Read-ahead of the disk: the setting that mapped models live and die by.

A fault on a mapped page reads this much. Experts are scattered, so that a large value reads what nobody asked for and a
small one reads in small pieces: mapped baselines differ by 2 to 3 times, and are to be quoted in their better setting.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zipmoe.errors import InvalidArgumentError


def read_ahead_kib(path: Path, root: Path = Path("/")) -> int | None:
    """Read-ahead of the disk below ``path`` in KiB; None where the file system has no block device of its own."""
    setting = _setting(path, root)
    return int(setting.read_text()) if setting is not None else None


@contextmanager
def changed_read_ahead(path: Path, kib: int, root: Path = Path("/")) -> Iterator[None]:
    """Set the read-ahead of the disk below ``path`` to ``kib`` KiB, and restore it.

    Raises:
        InvalidArgumentError: there is no such setting, or no right to change it.
    """
    setting = _setting(path, root)
    if setting is None:
        raise InvalidArgumentError(f"{str(path)!r} lies on no block device with a read-ahead setting")
    before = setting.read_text().strip()
    try:
        setting.write_text(f"{kib}\n")
    except OSError as error:
        raise InvalidArgumentError(
            f"the read-ahead of the disk could not be set to {kib} KiB: {error.strerror}",
            hint="run as root, or leave out --read-ahead-kib",
        ) from error
    try:
        yield
    finally:
        setting.write_text(f"{before}\n")


def _setting(path: Path, root: Path) -> Path | None:
    number = os.stat(path).st_dev  # noqa: PTH116 - next to os.major and os.minor
    device = (root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if (device / "partition").exists():  # the queue belongs to the whole disk
        device = device.parent
    setting = device / "queue" / "read_ahead_kb"
    return setting if setting.is_file() else None
