"""Types of the native core (native/bindings)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# --- codecs (native/bindings/codec_bindings.cpp) ---

class CodecDescription:
    @property
    def name(self) -> str: ...
    @property
    def separable(self) -> bool: ...
    @property
    def fused(self) -> bool: ...
    @property
    def section_kinds(self) -> list[str]: ...
    @property
    def unavailable_reason(self) -> str: ...

def instruction_sets() -> list[str]: ...
def best_instruction_set() -> str: ...
def codecs() -> list[CodecDescription]: ...
def encode(
    codec: str, weights: npt.NDArray[np.uint16], level: int = 0, huffman_only: bool = False, shards: int = 1
) -> tuple[list[tuple[str, npt.NDArray[np.uint8]]], list[int]]: ...
def validate(
    codec: str, rows: int, columns: int, sections: Sequence[npt.NDArray[np.uint8]], shard_bytes: Sequence[int]
) -> None: ...
def decode(
    codec: str,
    rows: int,
    columns: int,
    sections: Sequence[npt.NDArray[np.uint8]],
    shard_bytes: Sequence[int],
    row_begin: int,
    row_end: int,
    out: npt.NDArray[np.uint16],
    instruction_set: str = "",
) -> None: ...
def split(weights: npt.NDArray[np.uint16]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]: ...
def recombine(
    exponent: npt.NDArray[np.uint8],
    sign_mantissa: npt.NDArray[np.uint8],
    out: npt.NDArray[np.uint16],
    instruction_set: str = "",
) -> None: ...
def xxh3_64(bytes: npt.NDArray[np.uint8]) -> int: ...
