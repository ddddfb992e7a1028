# SPDX-License-Identifier: Apache-2.0
"""CIFAR-10's files, whole and spoiled; images that are moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, Tuple

import numpy as np
import pytest
from common.cifar import load, shifted
from common.data_files import DataError

from tests.samples.common.files import digits, spoil, write_cifar


def test_cifar(tmp_path: Path) -> None:
    scans = digits(12, 32)
    write_cifar(tmp_path, scans)
    train, test = load(tmp_path)
    assert (train.x.shape, test.x.shape) == ((10, 3, 32, 32), (2, 3, 32, 32))
    assert [*train.t[:, 0], *test.t[:, 0]] == scans.labels.tolist()
    ink, paper = scans.pixels[:10] == 255, scans.pixels[:10] == 0
    for colour, (of_ink, of_paper) in enumerate([(2.0588, -1.9889), (-1.9807, -1.9807), (-1.7076, 2.1154)]):
        np.testing.assert_allclose(train.x[:, colour][ink], of_ink, atol=1e-4)
        np.testing.assert_allclose(train.x[:, colour][paper], of_paper, atol=1e-4)


NOT_CIFAR: Dict[str, Tuple[Callable[[Path], Any], str]] = {
    "missing": (
        lambda folder: (folder / "data_batch_3.bin").unlink(),
        r"data_batch_3\.bin is missing: it holds images of CIFAR-10's binary version, 3073 bytes each",
    ),
    "empty": (spoil("data_batch_1.bin", lambda _: b""), r"data_batch_1\.bin has 0 bytes"),
    "cut short": (spoil("data_batch_2.bin", lambda content: content[:-1]), r"_2\.bin has 6145 bytes"),
    "others": (spoil("data_batch_5.bin", lambda content: b"c" + content[1:]), r"_5\.bin holds the label 99"),
}


@pytest.mark.parametrize("what", NOT_CIFAR)
def test_what_is_not_cifar_is_refused(what: str, tmp_path: Path) -> None:
    write_cifar(tmp_path, digits(12, 32))
    change, message = NOT_CIFAR[what]
    change(tmp_path)
    with pytest.raises(DataError, match=message):
        load(tmp_path)


def test_shifted_images_are_parts_of_the_old_ones() -> None:
    x = np.arange(2 * 64, dtype=np.float32).reshape(2, 1, 8, 8)
    moved = shifted(x, np.random.default_rng(0), flip=False, most=1)
    assert moved.shape == x.shape
    assert (moved != x).any()
    # Each pixel is what stood at most one place away.
    assert np.abs(moved - x).max() <= 9
    mirrored = shifted(x, np.random.default_rng(0), flip=True, most=0)
    assert all(np.array_equal(a, b) or np.array_equal(a, b[:, :, ::-1]) for a, b in zip(mirrored, x))
