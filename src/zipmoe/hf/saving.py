"""Copying a packed folder: what ``save_pretrained`` does, as no weight has changed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from zipmoe.errors import InvalidArgumentError
from zipmoe.store.durable_files import durable_writer
from zipmoe.store.manifest import MANIFEST_NAME
from zipmoe.store.packed_folder import PackedFolder

_COPY_BYTES = 16 << 20


def save_packed_folder(folder: PackedFolder, destination: Path) -> None:
    """Copy every file of ``folder`` to ``destination``; the manifest last, so that an interrupted copy is recognisable.

    Side files in subfolders (chat templates) go along.

    Saving into the folder itself leaves it as it is.

    Raises:
        InvalidArgumentError: ``destination`` is a file.
    """
    if destination.exists() and not destination.is_dir():
        raise InvalidArgumentError(f"{str(destination)!r} is a file", hint="give the name of a folder")
    destination.mkdir(parents=True, exist_ok=True)
    if destination.resolve() == folder.path.resolve():
        return
    (destination / MANIFEST_NAME).unlink(missing_ok=True)
    # Of subfolders only what the pack put there: other copies of the folder may lie below it.
    side_files = [folder.path / name for name in folder.manifest.sidecar_files]
    files = {path for path in [*folder.path.iterdir(), *side_files] if path.is_file() and path.name != MANIFEST_NAME}
    for path in [*sorted(files), folder.path / MANIFEST_NAME]:
        target = destination / path.relative_to(folder.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as source, durable_writer(target) as copy:
            shutil.copyfileobj(source, copy, _COPY_BYTES)


def push_folder(folder: Path, repo_id: str, **options: Any) -> None:
    """Upload ``folder`` to the Hugging Face hub, with options of ``HfApi.create_repo`` and ``upload_folder``."""
    from huggingface_hub import HfApi

    api = HfApi(token=options.pop("token", None))
    repository = api.create_repo(repo_id, private=options.pop("private", None), exist_ok=True).repo_id
    api.upload_folder(repo_id=repository, folder_path=folder, **options)
