# SPDX-License-Identifier: Apache-2.0
"""What the samples read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.samples.common.files import write_cifar, write_mnist


def test_digits_are_enlarged() -> None:
    from common.digits import enlarged, load

    large = enlarged(16).train
    assert large.x.shape == (1437, 1, 16, 16)
    assert large.x.dtype == np.float32
    # Each scanned pixel is the mean of four: where nothing is cut off, what is between is between.
    np.testing.assert_allclose(large.x.mean(), load().train.x.mean(), atol=0.01)
    np.testing.assert_array_equal(enlarged(8).train.x, load().train.x)


def test_mnist(tmp_path: Path) -> None:
    from common.mnist import load

    write_mnist(tmp_path, "train", 5)
    write_mnist(tmp_path, "t10k", 3)
    train, test = load(tmp_path)
    assert train.x.shape == (5, 1, 28, 28)
    assert test.t.tolist() == [[0], [1], [2]]
    assert train.x[0, 0, 0, 0] == -1.0
    assert train.x[0, 0, 9, 3] == 1.0  # 9 * 28 + 3 is 255


def test_what_is_not_mnist_is_refused(tmp_path: Path) -> None:
    from common.mnist import load

    write_mnist(tmp_path, "train", 1)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"<html>")
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte does not begin as .* IDX format"):
        load(tmp_path)


def test_cifar(tmp_path: Path) -> None:
    from common.cifar import load

    write_cifar(tmp_path)
    train, test = load(tmp_path)
    assert train.x.shape == (10, 3, 32, 32)
    assert train.t[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert test.t[:, 0].tolist() == [5, 5]
    assert (train.x[:, 0] > 2.0).all()
    assert (train.x[:, 1:] < -1.7).all()
    (tmp_path / "test_batch.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"test_batch\.bin is not of CIFAR-10's binary version"):
        load(tmp_path)


def test_shifted_images_are_parts_of_the_old_ones() -> None:
    from common.cifar import shifted

    x = np.arange(2 * 64, dtype=np.float32).reshape(2, 1, 8, 8)
    moved = shifted(x, np.random.default_rng(0), flip=False, most=1)
    assert moved.shape == x.shape
    assert (moved != x).any()
    # Each pixel is what stood at most one place away.
    assert np.abs(moved - x).max() <= 9
    mirrored = shifted(x, np.random.default_rng(0), flip=True, most=0)
    assert all(np.array_equal(a, b) or np.array_equal(a, b[:, :, ::-1]) for a, b in zip(mirrored, x))


def test_image_folder(tmp_path: Path) -> None:
    from common.image_folder import Loader, find, finished

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
    from common.image_folder import Loader, find, finished, make_from_digits

    make_from_digits(tmp_path / "digits", size=12)
    images = find(tmp_path / "digits" / "val")
    assert len(images.files) == 360
    assert images.names == [str(digit) for digit in range(10)]
    loader = Loader(images, 8, crop_at_random=True)
    first, second, other = (finished(loader.start([5, 6], seed)) for seed in ((0, 1), (0, 1), (0, 2)))
    np.testing.assert_array_equal(first, second)
    assert (first != other).any()


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_without_images_is_refused(there: bool, tmp_path: Path) -> None:
    from common.image_folder import find

    with pytest.raises(ValueError, match="has no images"):
        find(tmp_path if there else tmp_path / "missing")


def test_boxes_are_where_the_digits_are() -> None:
    from common.boxes import Box, boxed_scene, overlap
    from common.digits import load

    scene = boxed_scene(load().test, np.random.default_rng(0), 48, 6, noise=0.0)
    assert len(scene.boxes) > 2
    outside = np.ones((48, 48), bool)
    for box in scene.boxes:
        left, top, side = int(box.x - box.size / 2), int(box.y - box.size / 2), int(box.size)
        inside = scene.pixels[0, top : top + side, left : left + side]
        assert inside.max() == 1.0
        outside[top : top + side, left : left + side] = False
        assert all(overlap(box, other) == 0.0 for other in scene.boxes if other is not box)
    assert (scene.pixels[0][outside] == -1.0).all()
    assert overlap(Box(0, 4.0, 4.0, 8.0), Box(0, 8.0, 4.0, 8.0)) == pytest.approx(1 / 3)
