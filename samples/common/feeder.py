# SPDX-License-Identifier: Apache-2.0
"""Batches that follow from their number alone, so that a training can go on where it was."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable

import numpy as np
import numpy.typing as npt

from .data_files import DataError

Indices = npt.NDArray[np.int64]


class Feeder:
    """A data feeder that knows how many batches it has fed.

    Args:
        fill: puts the batch of this number, from 0, into the input Variables.

    Attributes:
        count: batches that were fed; the number of the next one.
    """

    def __init__(self, fill: Callable[[int], Any]) -> None:
        self.count = 0
        self._fill = fill

    def __call__(self) -> None:
        self._fill(self.count)
        self.count += 1


def batches(examples: int, size: int) -> int:
    """How many batches an epoch has.

    Raises:
        DataError: not one can be filled.
    """
    if size > examples:
        raise DataError(f"a batch of {size} cannot be filled: there are {examples} examples to train on")
    return examples // size


def in_epochs(examples: int, size: int, seed: int, number: int) -> Indices:
    """Which examples are in a batch: each epoch in a new order, its incomplete last batch left out."""
    epoch, batch = divmod(number, batches(examples, size))
    return _order(examples, seed, epoch)[batch * size : (batch + 1) * size]


@lru_cache(maxsize=2)
def _order(examples: int, seed: int, epoch: int) -> Indices:
    return np.random.default_rng((seed, epoch)).permutation(examples)
