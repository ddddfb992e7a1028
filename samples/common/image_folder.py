# SPDX-License-Identifier: Apache-2.0
"""Folder of images by class, the layout of ImageNet: train/CLASS/*.jpg and val/CLASS/*.jpg."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from .data_files import DataError
from .digits import Examples, enlarged

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]

_SUFFIXES = {".jpg", ".jpeg", ".png"}
# Mean and deviation of ImageNet's training images, for each colour from 0 to 1.
_MEAN = np.array([0.485, 0.456, 0.406], np.float32).reshape(3, 1, 1)
_DEVIATION = np.array([0.229, 0.224, 0.225], np.float32).reshape(3, 1, 1)


class ImageFolder(NamedTuple):
    """Files, and the numbers of their classes in alphabetical order."""

    files: List[Path]
    classes: List[int]
    names: List[str]


def load(folder: Path) -> Tuple[ImageFolder, ImageFolder]:
    """Find the images for training in `train` and those for testing in `val`, of the same classes.

    Raises:
        DataError: there are none, or their classes differ.
    """
    train, val = find(folder / "train"), find(folder / "val")
    other = set(train.names) ^ set(val.names)
    if other:
        raise DataError(f"train and val in {folder} are not of the same classes: one lacks {min(other)}")
    return train, val


def find(folder: Path) -> ImageFolder:
    """Find the images below a folder.

    Raises:
        DataError: there are none.
    """
    if not folder.is_dir():
        raise DataError(
            f"{folder} is missing: it holds a folder for each class, with .jpg or .png files in it"
        )
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    files, classes = [], []
    for number, name in enumerate(names):
        found = sorted(path for path in (folder / name).iterdir() if path.suffix.lower() in _SUFFIXES)
        files += found
        classes += [number] * len(found)
    if not files:
        raise DataError(f"{folder} has no images: its folders are classes, with .jpg or .png files in them")
    return ImageFolder(files, classes, names)


class Loader:
    """Reads batches in threads; the next one while the network processes this one.

    Args:
        images: the files.
        size: side of the network's input, in pixels.
        crop_at_random: crop a random part, mirroring half of them, instead of the middle.
        mirror: True if mirrored images keep their class.
        threads: number of threads.
    """

    def __init__(
        self, images: ImageFolder, size: int, *, crop_at_random: bool, mirror: bool = True, threads: int = 4
    ) -> None:
        self._images, self._size = images, size
        self._crop_at_random, self._mirror = crop_at_random, mirror
        self._pool = ThreadPoolExecutor(threads)

    def start(self, chosen: Sequence[int], seed: Tuple[int, ...] = ()) -> List[Future[Floats]]:
        """Start reading these images."""
        return [self._pool.submit(self._read, int(index), (*seed, int(index))) for index in chosen]

    def batches(self, size: int) -> Iterator[Tuple[Floats, Indices]]:
        """Yield all images in whole batches."""
        count = len(self._images.files)
        for start in range(0, count - size + 1, size):
            chosen = range(start, start + size)
            yield finished(self.start(chosen)), self.classes(chosen)

    def classes(self, chosen: Sequence[int]) -> Indices:
        """Classes of these images, shape (n, 1)."""
        return np.array([[self._images.classes[index]] for index in chosen])

    def _read(self, index: int, seed: Tuple[int, ...]) -> Floats:
        path = self._images.files[index]
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except (OSError, SyntaxError) as error:  # Pillow's errors for truncated files and other formats
            raise DataError(
                f"{path} cannot be read as an image ({error}): take it away, or fetch it again"
            ) from None
        box, mirrored = self._middle(image), False
        if self._crop_at_random:
            random = np.random.default_rng(seed)
            box, mirrored = _random_box(image, random), self._mirror and bool(random.integers(2))
        small = image.resize((self._size, self._size), Image.Resampling.BILINEAR, box=box)
        pixels = np.asarray(small, np.float32).transpose(2, 0, 1) / 255.0
        return (pixels[:, :, ::-1] if mirrored else pixels) / _DEVIATION - _MEAN / _DEVIATION

    def _middle(self, image: Image.Image) -> Tuple[float, float, float, float]:
        side = 0.875 * min(image.size)
        left, top = (image.width - side) / 2, (image.height - side) / 2
        return left, top, left + side, top + side


def finished(started: Sequence[Future[Floats]]) -> Floats:
    """Wait for the images whose reading was started."""
    return np.stack([future.result() for future in started])


def _random_box(image: Image.Image, random: np.random.Generator) -> Tuple[float, float, float, float]:
    side = random.uniform(0.6, 1.0) * min(image.size)
    left, top = random.uniform(0, image.width - side), random.uniform(0, image.height - side)
    return left, top, left + side, top + side


def make_from_digits(folder: Path, size: int = 72) -> None:
    """Write scikit-learn's digits as such a folder, unless it exists."""
    if folder.exists():
        return
    unfinished = folder.with_name(folder.name + ".unfinished")
    for part, examples in zip(("train", "val"), enlarged(size)):
        _write(unfinished / part, examples)
    unfinished.rename(folder)


def _write(folder: Path, examples: Examples) -> None:
    for number, (pixels, (digit,)) in enumerate(zip(examples.x, examples.t)):
        path = folder / str(digit) / f"{number:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.uint8(127.5 * (1.0 - pixels[0]))).save(path)
