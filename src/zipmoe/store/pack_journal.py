"""The journal of a pack in progress: what has been written durably, so that an interrupted run can go on.

One JSON object per line. The first line identifies the pack (source, codec, layout); every other line is a finished
record. A line is written only after the record's bytes are on the device. The journal is deleted when the manifest
has been written.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from zipmoe.errors import PackMismatchError
from zipmoe.store.durable_files import flush_directory, flush_to_device
from zipmoe.store.manifest import JOURNAL_NAME, Record
from zipmoe.store.structured_json import StructureError, from_json, to_json


class PackJournal:
    """Opens (or begins) the journal of ``folder`` and holds its lock until ``close``.

    Args:
        folder: the destination.
        identity: everything that must be equal for an interrupted pack to be continued.

    Raises:
        PackMismatchError: the folder holds an interrupted pack with another identity, or is being packed right now.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.path = folder / JOURNAL_NAME
        self._file = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise PackMismatchError(
                f"another process is packing into {str(folder)!r} right now",
                hint="wait for it, or choose another folder",
            ) from error
        self._pending: list[bytes] = []
        self.records: list[Record] = self._read(folder, identity)

    def _read(self, folder: Path, identity: dict[str, Any]) -> list[Record]:
        self._file.seek(0)
        text = self._file.read()
        complete = text[: text.rfind(b"\n") + 1]  # a torn last line was never acknowledged
        lines = complete.splitlines()
        if not lines:
            self._file.truncate(0)
            self._append([json.dumps(identity, sort_keys=True).encode()])
            flush_directory(folder)
            return []
        try:
            found = json.loads(lines[0])
            if not isinstance(found, dict):
                raise StructureError("its first line is not a JSON object")
            records = [from_json(Record, json.loads(line)) for line in lines[1:]]
        except (ValueError, RecursionError) as error:
            raise PackMismatchError(
                f"the journal {str(self.path)!r} of an interrupted pack is damaged: {error}",
                hint=f"delete {str(folder)!r} and pack again",
            ) from error
        for key, value in identity.items():
            if found.get(key) != value:
                raise PackMismatchError(
                    f"{str(folder)!r} holds an interrupted pack with another {key.replace('_', ' ')}: "
                    f"{found.get(key)!r} there, {value!r} now",
                    hint="repeat the command with the earlier options to continue it, or delete the folder",
                )
        self._file.truncate(len(complete))
        return records

    def note(self, record: Record) -> None:
        """Remember a record that is written but perhaps not on the device yet."""
        self._pending.append(json.dumps(to_json(record)).encode())

    def commit(self) -> None:
        """Acknowledge all noted records; the caller has flushed their bytes."""
        self._append(self._pending)
        self._pending = []

    def _append(self, lines: list[bytes]) -> None:
        self._file.seek(0, os.SEEK_END)
        self._file.write(b"".join(line + b"\n" for line in lines))
        flush_to_device(self._file)

    def close(self) -> None:
        """Release the lock; the journal stays."""
        self._file.close()

    def delete(self) -> None:
        """Remove the journal: the pack is finished."""
        self.path.unlink(missing_ok=True)
        self._file.close()
        flush_directory(self.path.parent)
