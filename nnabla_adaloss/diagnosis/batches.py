# SPDX-License-Identifier: Apache-2.0
"""A few batches, kept so that each can be run as often as it takes."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from .target import Target


class Batches:
    """What a feeder has fed, each time that it was called.

    Args:
        target: the feeder, and how often it is called. Without one there is a single batch: what is there.
        inputs: the leaves that a feeder may fill, by key.
    """

    def __init__(self, target: Target, inputs: Mapping[int, nn.Variable]) -> None:
        self._inputs = inputs
        self._kept: List[Dict[int, NDArray[Any]]] = []
        for _ in range(target.batches):
            if target.feeder is not None:
                target.feeder()
            self._kept.append({key: np.array(v.d) for key, v in inputs.items()})

    def __len__(self) -> int:
        return len(self._kept)

    def feed(self, index: int) -> None:
        """Put batch `index` where it was fed."""
        for key, v in self._inputs.items():
            v.d = self._kept[index][key]
