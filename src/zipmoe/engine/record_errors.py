"""Failures of the native engine as errors that name file and tensor."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from zipmoe import _native
from zipmoe.engine.record_catalogue import RecordCatalogue
from zipmoe.errors import CorruptRecordError, MissingShardError, PackedFolderError, TruncatedShardError

_COPY_HINT = "copy or download the folder again; `zipmoe verify` finds all damage"


@contextmanager
def named_record_errors(catalogue: RecordCatalogue) -> Iterator[None]:
    """Translate native record errors raised inside into CorruptRecordError, TruncatedShardError or
    PackedFolderError.
    """
    try:
        yield
    except _native.RecordError as error:
        raise record_error(catalogue, *error.args) from None


def record_error(catalogue: RecordCatalogue, fault: str, number: int, message: str) -> PackedFolderError:
    """The error for one record that could not be read."""
    where = f"{catalogue.records[number].name!r} in {str(catalogue.file_path(number))!r}"
    if fault == "truncated":
        return TruncatedShardError(f"{where}: {message}", hint=_COPY_HINT)
    if fault == "read_failed":
        return PackedFolderError(f"{where}: {message}", hint="the disk or the network file system reports an error")
    return CorruptRecordError(f"{where} is damaged: {message}", hint=_COPY_HINT)


def open_error(error: OSError) -> PackedFolderError:
    """The error for a file that could not be opened."""
    if error.errno == errno.ENOENT:
        return MissingShardError(str(error.strerror), hint=_COPY_HINT)
    return PackedFolderError(str(error.strerror), hint="check the permissions of the folder")
