"""BF16 tensors as the native core takes them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def bfloat16_words(tensor: torch.Tensor) -> npt.NDArray[np.uint16]:
    """The same memory as uint16 array of the same shape.

    Args:
        tensor: BF16, on the CPU, that requires no gradients (else ``detach`` it).
    """
    words: npt.NDArray[np.uint16] = tensor.view(torch.uint16).numpy()
    return words
