# SPDX-License-Identifier: Apache-2.0
"""Batches that depend on their number alone, so that a training can be resumed."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable

import numpy as np
import numpy.typing as npt

from .data_files import DataError

Indices = npt.NDArray[np.int64]


class Feeder:
    """Data feeder that counts its batches.

    Args:
        fill: puts the batch of this number, from 0, into the input Variables.

    Attributes:
        count: number of fed batches, and the number of the next one.
    """

    def __init__(self, fill: Callable[[int], Any]) -> None:
        self.count = 0
        self._fill = fill

    def __call__(self) -> None:
        self._fill(self.count)
        self.count += 1


def batches(examples: int, size: int) -> int:
    """Number of batches in an epoch.

    Raises:
        DataError: not even one can be filled.
    """
    if size > examples:
        raise DataError(f"a batch of {size} cannot be filled: there are {examples} examples to train on")
    return examples // size


def in_epochs(examples: int, size: int, seed: int, number: int) -> Indices:
    """Choose the examples of a batch: each epoch in a new order, without its incomplete last batch."""
    epoch, batch = divmod(number, batches(examples, size))
    return _order(examples, seed, epoch)[batch * size : (batch + 1) * size]


@lru_cache(maxsize=2)
def _order(examples: int, seed: int, epoch: int) -> Indices:
    return np.random.default_rng((seed, epoch)).permutation(examples)
