"""The codecs that are measured, each with the parameters that it is measured with."""

from __future__ import annotations

from dataclasses import dataclass

from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.codecs.registry import HUFFMAN_LEVEL, codec_names, get_codec, settings_from_options


@dataclass(frozen=True)
class OperatingPoint:
    """A codec with parameters, under the key that results are filed under."""

    key: str
    """The codec's name for the folder's own settings and for the defaults of other codecs; else ``zstd huf``."""
    settings: CodecSettings
    separable: bool
    of_folder: bool
    """Whether the folder is packed with exactly this."""


def operating_points(folder: CodecSettings) -> tuple[OperatingPoint, ...]:
    """The folder's own settings, and every other codec of this build with its default ones (zstd: two of them).

    Shards are the folder's, or a codec's default if the folder's codec has none, so that c is comparable.
    """
    separable = get_codec(folder.name).separable
    shards = folder.shards if separable else None
    points = [OperatingPoint(folder.name, folder, separable, True)]
    for name in codec_names():
        info = get_codec(name)
        levels: tuple[str | None, ...] = (None, HUFFMAN_LEVEL) if name == "zstd" else (None,)
        for level in levels:
            settings = settings_from_options(name, level, shards if info.separable else None)
            if settings == folder:
                continue
            taken = {point.key for point in points}
            key = name if level is None and name not in taken else f"{name} {settings.level}"
            points.append(OperatingPoint(key, settings, info.separable, False))
    return tuple(points)
