"""``zipmoe.load``: a packed folder to a Transformers model in one call."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import transformers

from zipmoe.checkpoint.source import QUANT_METHOD
from zipmoe.errors import InvalidArgumentError, NotAPackedFolderError
from zipmoe.hf.configuration import ZipMoEConfig
from zipmoe.hf.registration import register
from zipmoe.store.packed_folder import PackedFolder


def load(
    folder: str | Path | PackedFolder,
    memory: str | int | None = None,
    mode: str | None = None,
    experts_implementation: str | None = None,
    **from_pretrained_kwargs: Any,
) -> Any:
    """Load a packed folder with the class that its config.json names.

    Args:
        folder: packed folder, or name of a repository on the Hugging Face hub that holds one; if it has been opened,
            and thereby checked, already, that is not done again.
        memory: budget for everything that the process keeps, e.g. ``"4GB"``; see ``ZipMoEConfig``.
        mode: ``"fast"`` (default) or ``"exact"``.
        experts_implementation: combine order, ``"grouped_mm"`` (default) or ``"eager"``.
        from_pretrained_kwargs: passed on to ``from_pretrained`` (``dtype``, ``attn_implementation``, ...); an explicit
            ``quantization_config`` stands in the place of ``memory`` and ``mode``.

    Returns:
        The ``PreTrainedModel``; its engine is ``model.zipmoe_engine``.

    Raises:
        NotAPackedFolderError: the folder does not exist or is not packed.
        BudgetTooSmallError: the budget is below the model's floor.
        InvalidArgumentError: ``memory`` or ``mode`` beside a ``quantization_config``, or one of them is malformed.
    """
    register()
    settings = from_pretrained_kwargs.pop("quantization_config", None)
    if settings is None:
        settings = ZipMoEConfig(memory=memory, mode=mode)
    elif memory is not None or mode is not None:
        raise InvalidArgumentError(
            "memory and mode were given beside a quantization_config, which has its own",
            hint="give them to the ZipMoEConfig",
        )
    if isinstance(folder, PackedFolder):
        settings.opened_folder = folder
        folder = folder.path
    config = _read_config(folder, from_pretrained_kwargs)
    if experts_implementation is not None:
        from_pretrained_kwargs["experts_implementation"] = experts_implementation
    model_class = getattr(transformers, config.architectures[0])
    with warnings.catch_warnings():
        # Transformers says that only our loading attributes are taken from the argument: that is what is wanted.
        warnings.filterwarnings("ignore", message="You passed `quantization_config`")
        return model_class.from_pretrained(folder, quantization_config=settings, **from_pretrained_kwargs)


_CONFIG_KEYS = ("revision", "cache_dir", "token", "local_files_only", "subfolder", "force_download", "proxies")


def _read_config(folder: str | Path, kwargs: dict[str, Any]) -> Any:
    path = Path(folder)
    if path.exists() and not (path / kwargs.get("subfolder", "") / "config.json").is_file():
        raise NotAPackedFolderError(f"{folder} holds no config.json", hint="pack a checkpoint: zipmoe pack SRC DST")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **{k: kwargs[k] for k in _CONFIG_KEYS if k in kwargs})
    except (OSError, ValueError) as error:
        raise NotAPackedFolderError(f"{folder} cannot be loaded: {error}") from error
    if (getattr(config, "quantization_config", None) or {}).get("quant_method") != QUANT_METHOD:
        raise NotAPackedFolderError(f"{folder} is not a packed folder", hint=f"pack it first: zipmoe pack {folder} DST")
    return config
