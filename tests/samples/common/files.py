# SPDX-License-Identifier: Apache-2.0
"""Small files in the formats that their makers describe, byte by byte."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np


def write_mnist(folder: Path, part: str, count: int) -> None:
    """MNIST's two files of a part: pixels count up, and so do labels."""
    pixels = bytes(np.arange(count * 28 * 28, dtype=np.uint64).astype(np.uint8))
    images = struct.pack(">BBBBiii", 0, 0, 8, 3, count, 28, 28) + pixels
    (folder / f"{part}-images-idx3-ubyte").write_bytes(images)
    labels = struct.pack(">BBBBi", 0, 0, 8, 1, count) + bytes(range(count))
    (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))


def write_cifar(folder: Path) -> None:
    """CIFAR-10's six files of two red images each, whose labels are the number of the file."""
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        row = bytes([number]) + bytes([255]) * 1024 + bytes(2048)
        (folder / f"{name}.bin").write_bytes(row * 2)
