# SPDX-License-Identifier: Apache-2.0
"""Where the engine's decisions take statistics from."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Protocol, Sequence, Set

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.statistics import ArrayStatistics
from ..graph.renaming import Renaming


class Findings(NamedTuple):
    """What a pass has found.

    Attributes:
        nonfinite: keys of the variables whose gradients were seen not to be finite.
        amax: the largest finite magnitude of each gradient that was asked for, divided by its scale, by key.
        largest: the largest magnitude of each gradient that the source's own measurements unscaled, in the
            order in which they were given; infinity where it was not finite.
        watched_finite: whether the arrays that were watched are finite; None: nobody has looked.
    """

    nonfinite: Set[int]
    amax: Dict[int, float]
    largest: List[float]
    watched_finite: Optional[bool] = None


class StatisticsSource(Protocol):
    """Statistics of gradients and weights, by variable key."""

    @property
    def complete(self) -> bool:
        """Whether all that was asked for in this pass was known."""

    def gradient(self, variable: nn.Variable, key: int, scale: float) -> ArrayStatistics:
        """The statistics of a gradient as it is now, carrying `scale`."""

    def data(self, variable: nn.Variable, key: int) -> ArrayStatistics:
        """The statistics of a weight or activation."""

    def begin(self, iteration: int, *, anew: bool) -> None:
        """Begin a pass; passes of one iteration share a number, and with it what they are told.

        Args:
            iteration: number of the iteration.
            anew: tell what is known by now all the same.
        """

    def watch(self, arrays: Sequence[nn.NdArray]) -> None:
        """Look at arrays with what the pass measures, where that saves a wait: `Findings.watched_finite`."""

    def measure_weights(self) -> None:
        """Look at the weights right after an update, where that is better than within the next pass."""

    def take_over(self, before: StatisticsSource, names: Renaming) -> None:
        """Know what is known of a graph before that was built alike."""

    def finish(self) -> Findings:
        """End a pass; return what was found to be not finite."""

    def state(self, keys: Sequence[int]) -> List[Any]:
        """What is remembered of the variables `keys`, as plain lists."""

    def load_state(self, keys: Sequence[int], state: Sequence[Any]) -> None:
        """Remember what `state` returned, here or in another process."""

    def table(self, keys: Sequence[int]) -> Optional[NDArray[np.float64]]:
        """What is remembered of the variables `keys` as an array; None when nothing ever is."""

    def adopt(self, keys: Sequence[int], tables: NDArray[np.float64]) -> None:
        """Remember the statistics of all ranks' arrays together, from their tables."""
