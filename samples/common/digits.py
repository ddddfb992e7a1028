# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits: 1797 scans of 8x8 pixels that come with scikit-learn, without a download."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import nnabla as nn
import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

_TEST_IMAGES = 360
# The choice of test images must not depend on the seed of a training.
_SPLIT_SEED = 0


class Examples(NamedTuple):
    """Inputs and their targets, with first axes of the same length.

    Attributes:
        x: float32; of digits, shape (n, 1, 8, 8), from -1 (paper) to 1 (ink).
        t: int64; of digits, shape (n, 1), 0 to 9.
    """

    x: npt.NDArray[np.float32]
    t: npt.NDArray[np.int64]


class Data(NamedTuple):
    """Examples for training and for testing."""

    train: Examples
    test: Examples


@cache
def load() -> Data:
    """Load the digits: 1437 images for training, 360 for testing, always the same ones."""
    bunch = load_digits()
    x = (bunch.images[:, np.newaxis] / 8.0 - 1.0).astype(np.float32)
    t = bunch.target[:, np.newaxis].astype(np.int64)
    order = np.random.RandomState(_SPLIT_SEED).permutation(len(x))
    test, train = order[:_TEST_IMAGES], order[_TEST_IMAGES:]
    return Data(Examples(x[train], t[train]), Examples(x[test], t[test]))


def enlarged(size: int) -> Data:
    """Load the digits with `size` x `size` pixels, by bilinear interpolation."""
    at = np.clip((np.arange(size) + 0.5) * 8 / size - 0.5, 0.0, 7.0)
    below = np.minimum(at.astype(np.int64), 6)
    share = (at - below).astype(np.float32)

    def larger(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        rows = x[:, :, below] * (1 - share)[:, np.newaxis] + x[:, :, below + 1] * share[:, np.newaxis]
        return rows[..., below] * (1 - share) + rows[..., below + 1] * share

    train, test = load()
    return Data(train._replace(x=larger(train.x)), test._replace(x=larger(test.x)))


class BatchFeeder:
    """Fills two Variables with the next batch at each call; the order depends on the seed alone.

    Args:
        examples: the source; each epoch in a new order, without its incomplete last batch.
        x: receives the inputs; its first axis is the batch size.
        t: receives the targets.
        seed: determines the order.
    """

    def __init__(self, examples: Examples, x: nn.Variable, t: nn.Variable, seed: int) -> None:
        self.count = 0
        self._examples = examples
        self._x = x
        self._t = t
        self._random = np.random.RandomState(seed)
        self._order = np.empty(0, dtype=np.int64)

    def __call__(self) -> None:
        size = self.batch_size
        if len(self._order) < size:
            self._order = self._random.permutation(len(self._examples.x))
        self.feed(self._order[:size])
        self._order = self._order[size:]
        self.count += 1

    @property
    def batch_size(self) -> int:
        """Examples in a batch."""
        return int(self._x.shape[0])

    def feed(self, indices: npt.NDArray[np.int64]) -> None:
        """Fill the Variables with the examples of these indices, without counting a batch."""
        self._x.d = self._examples.x[indices]
        self._t.d = self._examples.t[indices]
