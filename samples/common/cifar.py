# SPDX-License-Identifier: Apache-2.0
"""CIFAR-10's own files: the binary version."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

import numpy as np
import numpy.typing as npt

from .data_files import DataError, read
from .digits import Data, Examples

_BYTES = 1 + 3 * 32 * 32
# Mean and deviation of the 50000 training images, for each colour.
_MEAN = np.array([125.3, 123.0, 113.9], np.float32).reshape(1, 3, 1, 1)
_DEVIATION = np.array([63.0, 62.1, 66.7], np.float32).reshape(1, 3, 1, 1)


def load(folder: Path) -> Data:
    """Load CIFAR-10 from data_batch_1.bin to data_batch_5.bin and test_batch.bin: x of shape (n, 3, 32, 32).

    Raises:
        DataError: a file is missing, or is not in CIFAR-10's binary version.
    """
    train = _examples([folder / f"data_batch_{number}.bin" for number in range(1, 6)])
    return Data(train, _examples([folder / "test_batch.bin"]))


def _examples(files: Sequence[Path]) -> Examples:
    rows = np.concatenate([_rows(file) for file in files])
    x = (rows[:, 1:].reshape(-1, 3, 32, 32) - _MEAN) / _DEVIATION
    return Examples(x.astype(np.float32), rows[:, :1].astype(np.int64))


def _rows(file: Path) -> npt.NDArray[np.uint8]:
    """Read rows of a label and the pixels of an image, shape (n, 3073)."""
    content = read(file, f"images of CIFAR-10's binary version, {_BYTES} bytes each")
    if not content or len(content) % _BYTES:
        raise DataError(
            f"{file} has {len(content)} bytes, which is no multiple of {_BYTES}: it is cut short, or not of "
            "CIFAR-10's binary version"
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, _BYTES)
    if rows[:, 0].max() > 9:
        raise DataError(f"{file} holds the label {rows[:, 0].max()}: CIFAR-10's are 0 to 9")
    return rows


def shifted(x: np.ndarray, random: np.random.Generator, *, flip: bool, most: int = 4) -> np.ndarray:
    """Shift images by up to `most` pixels each way and mirror half of them, as usual for CIFAR."""
    padded = np.pad(x, ((0, 0), (0, 0), (most, most), (most, most)), mode="edge")
    moved = np.empty_like(x)
    size = x.shape[-1]
    for number, (top, left) in enumerate(random.integers(0, 2 * most + 1, (len(x), 2))):
        image = padded[number, :, top : top + size, left : left + size]
        moved[number] = image[:, :, ::-1] if flip and random.random() < 0.5 else image
    return moved
