# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits: 1797 scans of 8x8 pixels that come with scikit-learn, so nothing is downloaded."""

from __future__ import annotations

from typing import NamedTuple

import nnabla as nn
import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

_TEST_IMAGES = 360
# Which images are tested on must not depend on the seed of a training.
_SPLIT_SEED = 0


class Images(NamedTuple):
    """Scans and what they show.

    Attributes:
        pixels: float32, shape (n, 1, 8, 8), from -1 (paper) to 1 (ink).
        digits: int64, shape (n, 1), 0 to 9.
    """

    pixels: npt.NDArray[np.float32]
    digits: npt.NDArray[np.int64]


class Digits(NamedTuple):
    """The data set: 1437 images to train on, 360 to test on, always the same ones."""

    train: Images
    test: Images


def load() -> Digits:
    """The digits, split once and for all."""
    bunch = load_digits()
    pixels = (bunch.images[:, np.newaxis] / 8.0 - 1.0).astype(np.float32)
    digits = bunch.target[:, np.newaxis].astype(np.int64)
    order = np.random.RandomState(_SPLIT_SEED).permutation(len(pixels))
    test, train = order[:_TEST_IMAGES], order[_TEST_IMAGES:]
    return Digits(Images(pixels[train], digits[train]), Images(pixels[test], digits[test]))


class BatchFeeder:
    """Fills two Variables with the next batch each time it is called; the order depends on the seed alone.

    Args:
        images: what to draw from; each epoch in a new order, its incomplete last batch left out.
        x: gets the pixels; its first axis is the batch size.
        t: gets the digits.
        seed: decides the order.
    """

    def __init__(self, images: Images, x: nn.Variable, t: nn.Variable, seed: int) -> None:
        self.count = 0
        self._images = images
        self._x = x
        self._t = t
        self._random = np.random.RandomState(seed)
        self._order = np.empty(0, dtype=np.int64)

    def __call__(self) -> None:
        size = self.batch_size
        if len(self._order) < size:
            self._order = self._random.permutation(len(self._images.pixels))
        self.feed(self._order[:size])
        self._order = self._order[size:]
        self.count += 1

    @property
    def batch_size(self) -> int:
        """Images in a batch."""
        return int(self._x.shape[0])

    def feed(self, indices: npt.NDArray[np.int64]) -> None:
        """Fill the Variables with the images of these indices, which does not count as a batch."""
        self._x.d = self._images.pixels[indices]
        self._t.d = self._images.digits[indices]
