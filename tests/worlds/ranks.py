# SPDX-License-Identifier: Apache-2.0
"""A rank of a training on several."""

from __future__ import annotations

from typing import Any, Callable, List, Sequence, Tuple

import nnabla as nn
import numpy as np


class Pair:
    """A communicator of two ranks: what the other one adds to an array follows from ours; of itself it tells
    what we tell.

    Args:
        other: that; by default the other rank has nothing but zeros.
        size: 1 for a rank that is alone.

    Attributes:
        asked: the iteration, the name and the number of arrays of each message.
        shapes: of all arrays that were summed.
    """

    rank, iteration = 0, 0

    def __init__(self, other: Callable[[np.ndarray], Any] = lambda own: 0.0, size: int = 2) -> None:
        self._other, self.size = other, size
        self.asked: List[Tuple[int, str, int]] = []
        self.shapes: List[Tuple[int, ...]] = []

    def all_reduce(self, arrays: Sequence[nn.NdArray], division: bool = False, inplace: bool = False) -> None:
        self.asked.append((self.iteration, "all_reduce", len(arrays)))
        for array in arrays if self.size > 1 else ():
            self.shapes.append(array.shape)
            own = array.data
            told = own.ndim == 2 and len(own) == self.size and own[0].any() and not own[1].any()
            with np.errstate(over="ignore"):
                array.data = own + (own[::-1] if told else self._other(own))

    def bcast(self, arrays: Sequence[nn.NdArray], src: int, inplace: bool = False) -> None:
        self.asked.append((self.iteration, "bcast", len(arrays)))
