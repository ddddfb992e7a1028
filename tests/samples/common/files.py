# SPDX-License-Identifier: Apache-2.0
"""Writes images in the formats that their makers describe, byte by byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import numpy as np
from common.digits import enlarged
from PIL import Image

from tools.mnist_sample import Scans


def digits(count: int, size: int, first: int = 0) -> Scans:
    """Some of scikit-learn's digits, enlarged."""
    x, t = enlarged(size).train
    chosen = slice(first, first + count)
    return Scans(np.uint8(np.round((x[chosen, 0] + 1.0) * 127.5)), t[chosen, 0].astype(np.uint8))


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
