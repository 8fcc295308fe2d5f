"""Everything that can go wrong and that a caller may want to tell apart.

Each message says what was asked, what is wrong and, in ``hint``, what to do about it. The command line prints the
message as one line, the hint as a second one, and exits with ``exit_code``.
"""


class ZipMoEError(Exception):
    """Base of all errors that ZipMoE raises on purpose."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class InvalidArgumentError(ZipMoEError):
    """An argument is malformed or out of range."""

    exit_code = 2


class CodecUnavailableError(InvalidArgumentError):
    """The codec does not exist, or its library was missing when ZipMoE was built."""


class CheckpointError(ZipMoEError):
    """The source folder cannot be packed."""

    exit_code = 2


class NotACheckpointError(CheckpointError):
    """The folder does not exist or holds no readable Hugging Face safetensors checkpoint."""


class DamagedCheckpointError(CheckpointError):
    """A file of the source checkpoint is missing, truncated or contradicts its index."""


class NotAMixtureOfExpertsError(CheckpointError):
    """The model has no experts, or none that are stored in BF16."""


class UnsupportedCheckpointError(CheckpointError):
    """The checkpoint is already quantised, or its family cannot be run bit for bit."""


class AlreadyPackedError(CheckpointError):
    """The source is itself a packed folder."""


class PackMismatchError(CheckpointError):
    """The destination holds an interrupted pack made with other parameters or from another source."""


class InterruptedPackError(ZipMoEError):
    """A person stopped the pack; what is there remains for the next one."""

    exit_code = 130


class NotEnoughDiskError(ZipMoEError):
    """The destination's file system has too little free space."""

    exit_code = 2


class PackedFolderError(ZipMoEError):
    """A packed folder is not intact."""


class NotAPackedFolderError(PackedFolderError):
    """The folder does not exist or has no ZipMoE manifest."""

    exit_code = 2


class UnfinishedPackError(PackedFolderError):
    """The folder holds the remains of an interrupted pack."""

    exit_code = 2


class ManifestError(PackedFolderError):
    """The manifest cannot be read, has an unknown version, or contradicts itself or the model."""


class MissingShardError(PackedFolderError):
    """A file that the manifest names is not there."""


class TruncatedShardError(PackedFolderError):
    """A file is shorter or longer than the manifest says."""


class CorruptRecordError(PackedFolderError):
    """The bytes of a record do not match their checksum, or are not a valid encoding."""


class BudgetError(ZipMoEError):
    """Base of the errors about the memory budget."""

    exit_code = 2


class BudgetTooSmallError(BudgetError):
    """The budget is below the floor; the message itemises what the floor consists of."""

    def __init__(self, message: str, *, floor_bytes: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.floor_bytes = floor_bytes


class BudgetExceededError(BudgetError):
    """A reservation at run time does not fit into what is left of the budget."""


class UnsupportedOperationError(ZipMoEError):
    """A Transformers operation that a packed model cannot perform without breaking its promise."""


class MemoryLimitUnavailableError(ZipMoEError):
    """No control group with a memory limit can be made here."""

    exit_code = 2
