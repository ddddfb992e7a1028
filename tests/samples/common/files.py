# SPDX-License-Identifier: Apache-2.0
"""Writes images in the formats that their makers describe, byte by byte."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any, Callable, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image


class Scans(NamedTuple):
    """Images and what is on them.

    Attributes:
        pixels: uint8, shape (n, height, width); 255 is ink.
        labels: uint8, shape (n,).
    """

    pixels: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.uint8]


def digits(count: int, size: int, first: int = 0) -> Scans:
    """Some of scikit-learn's digits, enlarged."""
    from common.digits import enlarged

    x, t = enlarged(size).train
    chosen = slice(first, first + count)
    return Scans(np.uint8(np.round((x[chosen, 0] + 1.0) * 127.5)), t[chosen, 0].astype(np.uint8))


def write_mnist(folder: Path, part: str, scans: Scans, *, packed: bool) -> None:
    """MNIST's two files of a part, in IDX format: big-endian lengths, then bytes."""
    pixels, labels = scans
    images = struct.pack(">BBBBiii", 0, 0, 8, 3, *pixels.shape) + pixels.tobytes()
    for name, content in (
        (f"{part}-images-idx3-ubyte", images),
        (f"{part}-labels-idx1-ubyte", struct.pack(">BBBBi", 0, 0, 8, 1, len(labels)) + labels.tobytes()),
    ):
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)


def write_cifar(folder: Path, scans: Scans) -> None:
    """CIFAR-10's six files, each with a share of images of 32x32: a label, then red, green, blue.

    What is ink is red, what is paper is blue.
    """
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    for name, pixels, labels in zip(names, np.array_split(scans.pixels, 6), np.array_split(scans.labels, 6)):
        colours = np.stack([pixels, np.zeros_like(pixels), 255 - pixels], axis=1).reshape(len(labels), -1)
        (folder / name).write_bytes(np.column_stack([labels, colours]).astype(np.uint8).tobytes())


def write_image_folder(folder: Path, scans: Scans) -> None:
    """A file in `CLASS/` for each: in turn a colour JPEG, a grey one, a PNG, and one with transparency."""
    ways = (("RGB", "JPEG"), ("L", "jpg"), ("L", "png"), ("RGBA", "PNG"))
    for number, (pixels, label) in enumerate(zip(scans.pixels, scans.labels)):
        mode, suffix = ways[number % 4]
        path = folder / f"n{label:08d}" / f"{number:08d}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(255 - pixels).convert(mode).save(path)


def spoil(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    """What makes of a file in a folder another one."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))
