# SPDX-License-Identifier: Apache-2.0
"""MNIST's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Tuple

import numpy as np
import numpy.typing as npt

from .data_files import DataError, read
from .digits import Data, Examples

_IMAGE = 28, 28


def load(folder: Path) -> Data:
    """Load MNIST from its four files, compressed or not: x of shape (n, 1, 28, 28), from -1 to 1.

    Raises:
        DataError: a file is missing, or is not in MNIST's format.
    """
    return Data(_examples(folder, "train"), _examples(folder, "t10k"))


def _examples(folder: Path, part: str) -> Examples:
    images, labels = folder / f"{part}-images-idx3-ubyte", folder / f"{part}-labels-idx1-ubyte"
    pixels, digits = _array(images, _IMAGE), _array(labels, ())
    if len(pixels) != len(digits):
        raise DataError(f"{images} has {len(pixels)} images, and {labels} has {len(digits)} labels")
    if not len(digits):
        raise DataError(f"{labels} holds no labels")
    if digits.max() > 9:
        raise DataError(f"{labels} holds the label {digits.max()}: MNIST's are digits, 0 to 9")
    x = (pixels[:, np.newaxis] / 127.5 - 1.0).astype(np.float32)
    return Examples(x, digits[:, np.newaxis].astype(np.int64))


def _array(path: Path, item: Tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Read the bytes of a file in IDX format, shape (n, *item)."""
    content = read(path, "bytes in MNIST's IDX format (.gz will do)")
    axes = 1 + len(item)
    # Two zeros, 8 for bytes, the number of axes; then the length of each in four bytes.
    head = 4 + 4 * axes
    if content[:4] != bytes((0, 0, 8, axes)) or len(content) < head:
        raise DataError(f"{path} does not begin as a file of bytes with {axes} axes in IDX format")
    shape = tuple(np.frombuffer(content, ">i4", axes, 4).tolist())
    if shape[1:] != item:
        raise DataError(f"{path} has images of {shape[1]} x {shape[2]} pixels; MNIST's have 28 x 28")
    if len(content) != head + int(np.prod(shape)):
        raise DataError(f"{path} has {len(content)} bytes; its head says {head + int(np.prod(shape))}")
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)
