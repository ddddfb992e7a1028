# SPDX-License-Identifier: Apache-2.0
"""MNIST's files, whole and spoiled."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any, Callable, Dict, Tuple

import numpy as np
import pytest
from common.data_files import DataError
from common.mnist import load

from tests.samples.common.files import digits, spoil
from tools.mnist_sample import write_mnist


@pytest.mark.parametrize("packed", [True, False])
def test_mnist(packed: bool, tmp_path: Path) -> None:
    train, test = digits(20, 28), digits(7, 28, first=50)
    write_mnist(tmp_path, "train", train, packed=packed)
    write_mnist(tmp_path, "t10k", test, packed=packed)
    for read, written in zip(load(tmp_path), (train, test)):
        assert read.x.dtype == np.float32
        np.testing.assert_allclose((read.x[:, 0] + 1.0) * 127.5, written.pixels, atol=1e-4)
        assert (read.x.min(), read.x.max()) == (-1.0, 1.0)
        assert read.t[:, 0].tolist() == written.labels.tolist()


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
NOT_MNIST: Dict[str, Tuple[Callable[[Path], Any], str]] = {
    "missing": (
        lambda folder: (folder / IMAGES).unlink(),
        rf"{IMAGES} is missing: it holds bytes in MNIST's IDX",
    ),
    "swapped": (
        spoil(IMAGES, lambda _: struct.pack(">BBBBi", 0, 0, 8, 1, 0)),
        rf"{IMAGES} does not begin as",
    ),
    "short": (spoil(IMAGES, lambda content: content[:-1]), rf"{IMAGES} has 3151 bytes; its head says 3152"),
    "fewer": (
        spoil(LABELS, lambda content: struct.pack(">BBBBi", 0, 0, 8, 1, 3) + content[8:11]),
        rf"{IMAGES} has 4 images, and .*{LABELS} has 3 labels",
    ),
    "letters": (spoil(LABELS, lambda content: content[:8] + b"\x19abc"), rf"{LABELS} holds the label 99"),
    "larger": (
        spoil(IMAGES, lambda content: struct.pack(">BBBBiii", 0, 0, 8, 3, 4, 14, 56) + content[16:]),
        r"has images of 14 x 56 pixels; MNIST's have 28 x 28",
    ),
    "packed and cut": (
        lambda folder: (
            (folder / f"{LABELS}.gz").write_bytes(gzip.compress((folder / LABELS).read_bytes())[:-9]),
            (folder / LABELS).unlink(),
        ),
        rf"{LABELS}\.gz is no whole gzip file",
    ),
}


@pytest.mark.parametrize("what", NOT_MNIST)
def test_what_is_not_mnist_is_refused(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "mnist"
    folder.mkdir()
    for part in ("train", "t10k"):
        write_mnist(folder, part, digits(4, 28), packed=False)
    change, message = NOT_MNIST[what]
    change(folder)
    with pytest.raises(DataError, match=message):
        load(folder)
