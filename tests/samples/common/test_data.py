# SPDX-License-Identifier: Apache-2.0
"""Digits, scenes, batches; MNIST's and CIFAR-10's files and folders of images, whole and spoiled."""

from __future__ import annotations

import gzip
import shutil
import struct
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Tuple

import numpy as np
import pytest
from common import cifar, image_folder, mnist
from common.boxes import Box, boxed_scene, overlap
from common.data_files import DataError
from common.digits import enlarged, load
from common.discrepancy import discrepancy
from common.feeder import Feeder, in_epochs
from common.image_folder import Loader, find, finished
from PIL import Image

from tests.samples.common.files import digits, spoil, write_cifar, write_image_folder
from tools.mnist_sample import Scans, write_mnist


@pytest.mark.parametrize("packed", [True, False])
def test_mnist(packed: bool, tmp_path: Path) -> None:
    train, test = digits(20, 28), digits(7, 28, first=50)
    write_mnist(tmp_path, "train", train, packed=packed)
    write_mnist(tmp_path, "t10k", test, packed=packed)
    for read, written in zip(mnist.load(tmp_path), (train, test)):
        assert read.x.dtype == np.float32
        np.testing.assert_allclose((read.x[:, 0] + 1.0) * 127.5, written.pixels, atol=1e-4)
        assert (read.x.min(), read.x.max()) == (-1.0, 1.0)
        assert read.t[:, 0].tolist() == written.labels.tolist()


def test_cifar(tmp_path: Path) -> None:
    scans = digits(12, 32)
    write_cifar(tmp_path, scans)
    train, test = cifar.load(tmp_path)
    assert (train.x.shape, test.x.shape) == ((10, 3, 32, 32), (2, 3, 32, 32))
    assert [*train.t[:, 0], *test.t[:, 0]] == scans.labels.tolist()
    ink, paper = scans.pixels[:10] == 255, scans.pixels[:10] == 0
    for colour, (of_ink, of_paper) in enumerate([(2.0588, -1.9889), (-1.9807, -1.9807), (-1.7076, 2.1154)]):
        np.testing.assert_allclose(train.x[:, colour][ink], of_ink, atol=1e-4)
        np.testing.assert_allclose(train.x[:, colour][paper], of_paper, atol=1e-4)


def test_shifted_images_are_parts_of_the_old_ones() -> None:
    x = np.arange(2 * 64, dtype=np.float32).reshape(2, 1, 8, 8)
    moved = cifar.shifted(x, np.random.default_rng(0), flip=False, most=1)
    assert moved.shape == x.shape
    assert (moved != x).any()
    # Each pixel is what stood at most one place away.
    assert np.abs(moved - x).max() <= 9
    mirrored = cifar.shifted(x, np.random.default_rng(0), flip=True, most=0)
    assert all(np.array_equal(a, b) or np.array_equal(a, b[:, :, ::-1]) for a, b in zip(mirrored, x))


def test_image_folder(tmp_path: Path) -> None:
    for name, colour in (("cat", (255, 0, 0)), ("ant", (0, 0, 255))):
        (tmp_path / name).mkdir()
        Image.new("RGB", (20, 30), colour).save(tmp_path / name / "1.png")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    images = find(tmp_path)
    assert (images.names, images.classes) == (["ant", "cat"], [0, 1])
    for crop_at_random in (False, True):
        loader = Loader(images, 8, crop_at_random=crop_at_random)
        ant, cat = finished(loader.start([0, 1], (3,)))
        assert ant.shape == (3, 8, 8)
        assert (ant[0] < -2.0).all()
        assert (cat[0] > 2.0).all()
        ((x, t),) = loader.batches(2)
        assert (x.shape, t.tolist()) == ((2, 3, 8, 8), [[0], [1]])


def test_random_reads_follow_from_the_seed(tmp_path: Path) -> None:
    image_folder.make_from_digits(tmp_path / "digits", size=12)
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


def small_mnist(folder: Path) -> None:
    for part in ("train", "t10k"):
        write_mnist(folder, part, digits(4, 28), packed=False)


def small_cifar(folder: Path) -> None:
    write_cifar(folder, digits(12, 32))


def small_folders(folder: Path) -> None:
    for part in ("train", "val"):
        write_image_folder(folder / part, Scans(digits(4, 8).pixels, np.arange(4, dtype=np.uint8)))


WHOLE: Dict[str, Tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "mnist": (small_mnist, mnist.load),
    "cifar": (small_cifar, cifar.load),
    "image folder": (small_folders, image_folder.load),
}
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def remove(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("mnist", remove(IMAGES), rf"{IMAGES} is missing: it holds bytes in MNIST's IDX"),
        ("mnist", spoil(IMAGES, lambda _: struct.pack(">BBBBi", 0, 0, 8, 1, 0)), "ubyte does not begin as"),
        ("mnist", spoil(IMAGES, lambda all: all[:-1]), rf"{IMAGES} has 3151 bytes; its head says 3152"),
        (
            "mnist",
            spoil(LABELS, lambda all: struct.pack(">BBBBi", 0, 0, 8, 1, 3) + all[8:11]),
            rf"{IMAGES} has 4 images, and .*{LABELS} has 3 labels",
        ),
        ("mnist", spoil(LABELS, lambda all: all[:8] + b"\x19abc"), rf"{LABELS} holds the label 99"),
        (
            "mnist",
            spoil(IMAGES, lambda all: struct.pack(">BBBBiii", 0, 0, 8, 3, 4, 14, 56) + all[16:]),
            r"has images of 14 x 56 pixels; MNIST's have 28 x 28",
        ),
        (
            "mnist",
            lambda folder: (
                (folder / f"{LABELS}.gz").write_bytes(gzip.compress((folder / LABELS).read_bytes())[:-9]),
                (folder / LABELS).unlink(),
            ),
            rf"{LABELS}\.gz is no whole gzip file",
        ),
        ("cifar", remove("data_batch_3.bin"), r"_3\.bin is missing: it holds images of CIFAR-10's binary"),
        ("cifar", spoil("data_batch_2.bin", lambda all: all[:-1]), r"_2\.bin has 6145 bytes"),
        ("cifar", spoil("data_batch_5.bin", lambda all: b"c" + all[1:]), r"_5\.bin holds the label 99"),
        (
            "image folder",
            lambda folder: shutil.rmtree(folder / "train"),
            r"train is missing: it holds a folder for each class, with \.jpg or \.png",
        ),
        (
            "image folder",
            lambda folder: [path.unlink() for path in (folder / "val").rglob("*.*")],
            r"val has no images: its folders are classes",
        ),
        (
            "image folder",
            lambda folder: (folder / "val/n00000001").rename(folder / "val/n00000077"),
            r"train and val in .* are not of the same classes: one lacks n00000001",
        ),
    ],
)
def test_corrupted_states_are_refused(
    kind: str, change: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    write, load = WHOLE[kind]
    write(tmp_path)
    load(tmp_path)
    change(tmp_path)
    with pytest.raises(DataError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"no image", b"\x89PNG\r\n\x1a\n", None])
def test_an_image_that_cannot_be_read_is_named(content: Optional[bytes], tmp_path: Path) -> None:
    write_image_folder(tmp_path, digits(1, 32))
    (path,) = find(tmp_path).files
    path.write_bytes(path.read_bytes()[:400] if content is None else content)
    reading = Loader(find(tmp_path), 8, crop_at_random=False).start([0])
    with pytest.raises(DataError, match=rf"{path.name} cannot be read as an image \(.*: take it away"):
        finished(reading)


def test_digits_are_enlarged() -> None:
    large = enlarged(16).train
    assert large.x.shape == (1437, 1, 16, 16)
    assert large.x.dtype == np.float32
    # Each scanned pixel is the mean of four: where nothing is cut off, what is between is between.
    np.testing.assert_allclose(large.x.mean(), load().train.x.mean(), atol=0.01)
    np.testing.assert_array_equal(enlarged(8).train.x, load().train.x)


def test_a_batch_that_cannot_be_filled_is_refused() -> None:
    assert len(in_epochs(8, 8, seed=0, number=5)) == 8
    with pytest.raises(DataError, match="a batch of 9 cannot be filled: there are 8 examples"):
        in_epochs(8, 9, seed=0, number=0)


def test_boxes_are_where_the_digits_are() -> None:
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


def test_the_distance_of_a_distribution_to_itself_is_small() -> None:
    random = np.random.RandomState(0)
    a, b = random.randn(300, 4).astype(np.float32), random.randn(300, 4).astype(np.float32)
    assert discrepancy(a, b) < 0.05 < discrepancy(a, b + 1.0) < discrepancy(a, b + 3.0)
    assert np.isnan(discrepancy(np.full_like(a, np.nan), b))
    many = 1.0 + random.randn(700, 64).astype(np.float16)  # whose sums do not fit into float16
    assert 0.0 < discrepancy(many, -many) < 2.0


def test_an_epoch_shows_each_example_once() -> None:
    epochs = [np.concatenate([in_epochs(10, 3, 0, 3 * epoch + n) for n in range(3)]) for epoch in (0, 1)]
    for epoch in epochs:
        assert len(set(epoch)) == 9
        assert set(epoch) < set(range(10))
    assert list(epochs[0]) != list(epochs[1])


def test_a_batch_follows_from_its_number_alone() -> None:
    found = []
    feed = Feeder(lambda number: found.append(list(in_epochs(10, 4, 7, number))))
    for _ in range(6):
        feed()
    assert feed.count == 6
    feed.count = 3
    feed()
    assert found[-1] == found[3]
    assert list(in_epochs(10, 4, 8, 3)) != found[3]
