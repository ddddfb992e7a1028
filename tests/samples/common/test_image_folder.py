# SPDX-License-Identifier: Apache-2.0
"""Folders of images by class, whole and spoiled."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Tuple

import numpy as np
import pytest
from common.data_files import DataError
from common.image_folder import Loader, find, finished, load, make_from_digits
from PIL import Image

from tests.samples.common.files import digits, write_image_folder
from tools.mnist_sample import Scans


def test_image_folder(tmp_path: Path) -> None:
    for name, colour in (("cat", (255, 0, 0)), ("ant", (0, 0, 255))):
        (tmp_path / name).mkdir()
        Image.new("RGB", (20, 30), colour).save(tmp_path / name / "1.png")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    images = find(tmp_path)
    assert images.names == ["ant", "cat"]
    assert images.classes == [0, 1]
    for crop_at_random in (False, True):
        loader = Loader(images, 8, crop_at_random=crop_at_random)
        ant, cat = finished(loader.start([0, 1], (3,)))
        assert ant.shape == (3, 8, 8)
        assert (ant[0] < -2.0).all()
        assert (cat[0] > 2.0).all()
        ((x, t),) = loader.batches(2)
        assert x.shape == (2, 3, 8, 8)
        assert t.tolist() == [[0], [1]]


def test_what_is_read_at_random_follows_from_the_seed(tmp_path: Path) -> None:
    make_from_digits(tmp_path / "digits", size=12)
    images = find(tmp_path / "digits" / "val")
    assert len(images.files) == 360
    assert images.names == [str(digit) for digit in range(10)]
    loader = Loader(images, 8, crop_at_random=True)
    first, second, other = (finished(loader.start([5, 6], seed)) for seed in ((0, 1), (0, 1), (0, 2)))
    np.testing.assert_array_equal(first, second)
    assert (first != other).any()


def test_all_kinds_of_images_come_to_the_same(tmp_path: Path) -> None:
    scans = digits(4, 32)
    write_image_folder(tmp_path, Scans(scans.pixels[[0, 0, 0, 0]], scans.labels))
    images = find(tmp_path)
    assert {path.suffix for path in images.files} == {".JPEG", ".jpg", ".png", ".PNG"}
    ((x, _),) = Loader(images, 28, crop_at_random=False).batches(4)
    for one in x[1:]:
        assert np.abs(one - x[0]).mean() < 0.05  # JPEG is not exact


NO_IMAGES: Dict[str, Tuple[Callable[[Path], Any], str]] = {
    "missing": (shutil.rmtree, r"train is missing: it holds a folder for each class, with \.jpg or \.png"),
    "no val": (lambda folder: shutil.rmtree(folder / "val"), r"val is missing"),
    "empty": (
        lambda folder: [path.unlink() for path in (folder / "val").rglob("*.*")],
        r"val has no images: its folders are classes",
    ),
    "other classes": (
        lambda folder: (folder / "val/n00000001").rename(folder / "val/n00000077"),
        r"train and val in .* are not of the same classes: one lacks n00000001",
    ),
}


@pytest.mark.parametrize("what", NO_IMAGES)
def test_what_is_no_folder_of_images_is_refused(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    for part in ("train", "val"):
        write_image_folder(folder / part, Scans(digits(4, 8).pixels, np.arange(4, dtype=np.uint8)))
    change, message = NO_IMAGES[what]
    change(folder)
    with pytest.raises(DataError, match=message):
        load(folder)


@pytest.mark.parametrize("content", [b"no image", b"\x89PNG\r\n\x1a\n", None])
def test_an_image_that_cannot_be_read_is_named(content: Optional[bytes], tmp_path: Path) -> None:
    write_image_folder(tmp_path, digits(1, 32))
    (path,) = find(tmp_path).files
    path.write_bytes(path.read_bytes()[:400] if content is None else content)
    reading = Loader(find(tmp_path), 8, crop_at_random=False).start([0])
    with pytest.raises(DataError, match=rf"{path.name} cannot be read as an image \(.*: take it away"):
        finished(reading)
