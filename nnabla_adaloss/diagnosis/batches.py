# SPDX-License-Identifier: Apache-2.0
"""A few batches, kept so that each can be run as often as it takes."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..graph.reading import GraphReading, read_graph
from .target import Target


class Batches:
    """What a feeder has fed, each time that it was called.

    A feeder may rebuild the graph for each batch and assign it to its updater. The graph of the first
    batch is the one that is looked at. Batches of graphs that are built alike are run through it; those of
    others, such as sentences of another length, are left out.

    Args:
        target: the feeder, and how often it is called. Without one there is a single batch: what is there.
        names: names of parameters, by variable key.

    Attributes:
        loss: the loss of the first batch.
        fed: keys of the leaves that data is fed to: those that do not hold the same in all batches, and all
            that a feeder may fill where there is one batch only.
    """

    def __init__(self, target: Target, names: Mapping[int, str]) -> None:
        self._kept: List[Dict[int, NDArray[Any]]] = []
        self._inputs: Dict[int, nn.Variable] = {}
        self.loss: nn.Variable = target.loss()
        described = None
        for index in range(target.batches):
            if target.feeder is not None:
                target.feeder()
            loss = target.loss()
            if index and hash(loss) == hash(self.loss):
                inputs = self._inputs
            else:
                reading = read_graph(loss)
                inputs = _fed(reading, names)
                if not index:
                    self.loss, self._inputs = loss, inputs
                    described = reading.description(names)
                elif reading.description(names) != described:
                    continue
            self._kept.append({position: np.array(v.d) for position, v in inputs.items()})
        self.fed = {hash(v) for position, v in self._inputs.items() if self._is_fed(position)}

    def __len__(self) -> int:
        return len(self._kept)

    def feed(self, index: int) -> None:
        """Put batch `index` where it was fed."""
        for position, v in self._inputs.items():
            v.d = self._kept[index][position]

    def _is_fed(self, position: int) -> bool:
        first, *others = (kept[position] for kept in self._kept)
        return not others or any(not np.array_equal(first, other, equal_nan=True) for other in others)


def _fed(reading: GraphReading, names: Mapping[int, str]) -> Dict[int, nn.Variable]:
    """The leaves that a feeder may fill, by position."""
    return {
        position: v
        for position, v in reading.leaves.items()
        if not v.need_grad or reading.keys[position] not in names
    }
