"""Codecs of this build by name, and the settings that each of them takes.

The list comes from the native registry (docs/adding_a_codec.md); what is known here besides are the ranges of levels.
"""

from __future__ import annotations

from dataclasses import dataclass

from zipmoe import _native
from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.errors import CodecUnavailableError, InvalidArgumentError

DEFAULT_CODEC = "fx3"
HUFFMAN_LEVEL = "huf"
"""zstd without match finding, entropy coding forced on: the smallest and fastest point for exponents."""
DEFAULT_SHARDS = 4
SHARDS_MAX = 1024
DENSE_SHARD_BYTES = 1 << 20
"""Exponent bytes per shard of a dense matrix, at most (or one row): one row of an embedding then decodes quickly."""


@dataclass(frozen=True)
class CodecInfo:
    """A codec that works in this build."""

    name: str
    separable: bool
    """Exponents and sign-mantissa bytes can live apart: two extents, each useful alone."""
    fused: bool
    """Fixed-length layout: kernels can compute on it without reconstructing the matrix first."""
    section_kinds: tuple[str, ...]
    """Names of the sections of a matrix (and of the extents of a record) in order."""


@dataclass(frozen=True)
class LevelRange:
    """The compression levels of a codec."""

    lowest: int
    highest: int
    default: int
    names: tuple[str, ...] = ()
    """Levels that have a name instead of a number."""

    def describe(self) -> str:
        """For messages: ``1..12``."""
        return ", ".join((f"{self.lowest}..{self.highest}", *self.names))

    def holds(self, number: int) -> bool:
        """Whether the codec takes this number; 0 is no level but what libraries use for their default."""
        return number != 0 and self.lowest <= number <= self.highest


LEVELS = {
    "zstd": LevelRange(-131072, 22, 3, (HUFFMAN_LEVEL,)),
    "lz4hc": LevelRange(1, 12, 9),
}


def codec_names() -> tuple[str, ...]:
    """Names of the codecs that work in this build."""
    return tuple(codec.name for codec in _native.codecs() if not codec.unavailable_reason)


def get_codec(name: str) -> CodecInfo:
    """Return the codec called ``name``.

    Raises :class:`~zipmoe.errors.CodecUnavailableError` when there is none, or when its library was missing.
    """
    hint = f"choose one of: {', '.join(codec_names())}"
    for codec in _native.codecs():
        if codec.name != name:
            continue
        if codec.unavailable_reason:
            raise CodecUnavailableError(f"codec {name!r} is not available: {codec.unavailable_reason}", hint=hint)
        return CodecInfo(codec.name, codec.separable, codec.fused, tuple(codec.section_kinds))
    raise CodecUnavailableError(f"there is no codec {name!r}", hint=hint)


def settings_from_options(codec: str, level: int | str | None = None, shards: int | None = None) -> CodecSettings:
    """Check what a person asked for and fill in the defaults.

    ``level``: a number, its decimal form, or ``"huf"`` for zstd; None for the codec's default. ``shards``: K, the
    number of E-chunk shards of each expert matrix; None for the codec's default (4, or 1 for codecs without shards).
    Raises :class:`~zipmoe.errors.CodecUnavailableError` or :class:`~zipmoe.errors.InvalidArgumentError`.
    """
    info = get_codec(codec)
    return CodecSettings(info.name, _checked_level(info.name, level), _checked_shards(info, shards))


def encode_level(settings: CodecSettings) -> tuple[int, bool]:
    """The arguments ``level`` and ``huffman_only`` of ``_native.encode`` for these settings."""
    if settings.level == HUFFMAN_LEVEL:
        return 0, True
    return int(settings.level or 0), False


def dense_shards(settings: CodecSettings, rows: int, columns: int) -> int:
    """Shards to encode a dense matrix of this shape with.

    That is ``settings.shards``, but at least one per MiB of exponents: a shard is what must be decompressed to reach
    one row of an embedding, and what partial decoding needs as scratch memory. Codecs without shards get 1.
    """
    if not get_codec(settings.name).separable:
        return 1
    rows_per_shard = max(DENSE_SHARD_BYTES // columns, 1)
    return max(settings.shards, -(-rows // rows_per_shard))


def _checked_level(codec: str, level: int | str | None) -> int | str | None:
    levels = LEVELS.get(codec)
    if levels is None:
        if level is not None:
            raise InvalidArgumentError(
                f"codec {codec!r} has no levels, but level {level!r} was asked for", hint="leave it out"
            )
        return None
    if level is None:
        return levels.default
    if level in levels.names:
        return level
    hint = f"{codec} takes {levels.describe()}"
    try:
        number = int(level)
    except ValueError:
        raise InvalidArgumentError(f"{level!r} is not a level of codec {codec!r}", hint=hint) from None
    if not levels.holds(number):
        raise InvalidArgumentError(f"level {number} is out of range for codec {codec!r}", hint=hint)
    return number


def _checked_shards(info: CodecInfo, shards: int | None) -> int:
    if not info.separable:
        if shards not in (None, 1):
            raise InvalidArgumentError(
                f"codec {info.name!r} has no shards, but {shards} were asked for", hint="leave it out"
            )
        return 1
    if shards is None:
        return DEFAULT_SHARDS
    if not 1 <= shards <= SHARDS_MAX:
        raise InvalidArgumentError(f"{shards} shards are out of range", hint=f"a matrix takes 1..{SHARDS_MAX}")
    return shards
