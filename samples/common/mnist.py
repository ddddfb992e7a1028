# SPDX-License-Identifier: Apache-2.0
"""MNIST's own files."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .digits import Data, Examples


def load(folder: Path) -> Data:
    """MNIST from its four files, compressed or not: x of shape (n, 1, 28, 28), from -1 to 1."""
    return Data(_examples(folder, "train"), _examples(folder, "t10k"))


def _examples(folder: Path, part: str) -> Examples:
    images = _array(folder, f"{part}-images-idx3-ubyte", 3)
    labels = _array(folder, f"{part}-labels-idx1-ubyte", 1)
    x = (images[:, np.newaxis] / 127.5 - 1.0).astype(np.float32)
    return Examples(x, labels[:, np.newaxis].astype(np.int64))


def _array(folder: Path, name: str, axes: int) -> npt.NDArray[np.uint8]:
    packed = folder / f"{name}.gz"
    content = gzip.decompress(packed.read_bytes()) if packed.exists() else (folder / name).read_bytes()
    # Two zeros, 8 for bytes, the number of axes; then the length of each in four bytes.
    if content[:4] != bytes((0, 0, 8, axes)):
        raise ValueError(f"{folder / name} does not begin as a file of bytes with {axes} axes in IDX format")
    shape = np.frombuffer(content, ">i4", axes, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)
