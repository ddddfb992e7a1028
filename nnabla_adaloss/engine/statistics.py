# SPDX-License-Identifier: Apache-2.0
"""Where decisions about scales take statistics from."""

from __future__ import annotations

from typing import AbstractSet, Any, Dict, List, Mapping, NamedTuple, Optional, Protocol, Sequence, Set, Tuple

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.statistics import ArrayStatistics
from ..emulation.rounded_storage import RoundedStorage
from ..graph.plan import GraphPlan
from ..undo import Undoable

NOTHING_KNOWN = ArrayStatistics.of_zeros(0)
"""Statistics of an array before it was measured: they ask for no scale and limit none."""


class Findings(NamedTuple):
    """What a pass has measured. Variables go by position.

    Attributes:
        nonfinite: variables whose gradients were not finite.
        amax: the largest finite magnitude of each measured gradient, divided by its scale.
        largest: the largest magnitude of each gradient that the source's own measurements unscaled, in the
            order in which they were given; infinity where it was not finite.
        watched_finite: whether the arrays that were watched are finite; None: none was.
    """

    nonfinite: Set[int]
    amax: Dict[int, float]
    largest: List[float]
    watched_finite: Optional[bool] = None


class Statistics(Protocol):
    """Statistics of gradients and data, by position of the variable: all that choosing scales asks for."""

    @property
    def complete(self) -> bool:
        """Whether everything that was asked for was known."""

    def gradient(self, position: int, scale: float) -> ArrayStatistics:
        """The statistics of a gradient that carries `scale`."""

    def look_at(self, position: int, scale: float) -> ArrayStatistics:
        """The same, for whoever watches: nothing is chosen by it."""

    def data(self, position: int) -> ArrayStatistics:
        """The statistics of a weight or activation."""

    def stored_data(self, position: int) -> Optional[ArrayStatistics]:
        """The statistics of data that an emulated storage has rounded; None where there is none."""

    def matrices(self, number: int, index: int) -> Tuple[NDArray[Any], NDArray[Any]]:
        """Output gradient and factor of a layer, for methods that look at single elements."""


class KnownStatistics:
    """Statistics measured in earlier iterations. Nothing is read from any array.

    Args:
        gradients: those of unscaled gradients.
        data: those of weights and activations.
        stored: whether an emulated storage has rounded the data.

    Attributes:
        complete: whether everything that was asked for was known.
        asked: positions of the gradients, and of the data, that were asked for.
        looked_at: positions of gradients that were only looked at, for whoever watches.

    Example:
        >>> import numpy as np
        >>> from nnabla_adaloss.core import statistics_of
        >>> known = KnownStatistics({3: statistics_of(np.array([0.5]))}, {})
        >>> known.gradient(3, 8.0).abs_max, known.complete
        (4.0, True)
        >>> known.gradient(4, 8.0).count, known.complete
        (0, False)
    """

    def __init__(
        self,
        gradients: Mapping[int, ArrayStatistics],
        data: Mapping[int, ArrayStatistics],
        *,
        stored: bool = False,
    ) -> None:
        self._gradients, self._data, self._stored = gradients, data, stored
        self.complete = True
        self.asked: Tuple[Set[int], Set[int]] = set(), set()
        self.looked_at: Set[int] = set()

    def gradient(self, position: int, scale: float) -> ArrayStatistics:
        """The statistics of a gradient, as they would be with `scale`."""
        self.asked[0].add(position)
        known = self._gradients.get(position)
        if known is None:
            self.complete = False
            return NOTHING_KNOWN
        return known.scaled(scale)

    def look_at(self, position: int, scale: float) -> ArrayStatistics:
        """The statistics of a gradient, as they would be with `scale`, if they are known."""
        self.looked_at.add(position)
        return self._gradients.get(position, NOTHING_KNOWN).scaled(scale)

    def data(self, position: int) -> ArrayStatistics:
        """The statistics of a weight or activation."""
        self.asked[1].add(position)
        known = self._data.get(position)
        if known is None:
            self.complete = False
            return NOTHING_KNOWN
        return known

    def stored_data(self, position: int) -> Optional[ArrayStatistics]:
        """The statistics of data that an emulated storage has rounded; None where there is none."""
        return self.data(position) if self._stored else None

    def matrices(self, number: int, index: int) -> Tuple[NDArray[Any], NDArray[Any]]:
        """No elements are kept.

        Raises:
            TypeError: always.
        """
        raise TypeError("statistics of earlier iterations hold no elements")


class StatisticsSource(Statistics, Undoable, Protocol):
    """Measures the arrays of one graph."""

    def bind(self, plan: GraphPlan, storage: Optional[RoundedStorage]) -> None:
        """Measure the arrays of this graph from now on; it has the topology of the one before."""

    def begin(self, iteration: int, *, again: bool) -> None:
        """Begin a pass that chooses scales; those of one iteration see the same statistics.

        Args:
            iteration: number of the iteration.
            again: use what the passes of this iteration have measured all the same.
        """

    def known(self) -> Optional[KnownStatistics]:
        """What scales can be chosen from before the pass begins; None: arrays are read as the pass runs."""

    def measure(self, gradients: Sequence[Tuple[int, float]], data: Sequence[int]) -> None:
        """Measure arrays as they are now, for later choices.

        Args:
            gradients: positions, each with the scale that the gradient carries.
            data: positions of weights and activations.
        """

    def measure_weights(self, positions: Sequence[int]) -> None:
        """Measure weights right after an update, before forward converts them to other dtypes."""

    def measured_before(self) -> Tuple[AbstractSet[int], AbstractSet[int]]:
        """Positions of gradients and of data that choices have asked for."""

    def keep(self, gradients: AbstractSet[int], data: AbstractSet[int], looked_at: AbstractSet[int]) -> None:
        """Forget all but what the last choice has asked for or looked at: nobody needs the rest again."""

    def watch(self, arrays: Sequence[nn.NdArray]) -> None:
        """Check arrays together with what the pass measures, where that saves a wait: see `Findings`."""

    def finish(self) -> Findings:
        """End a pass; return what it has measured."""

    def state(self, positions: Sequence[int]) -> List[Any]:
        """What is remembered, as plain lists; variables go by index in `positions`."""

    def load_state(self, positions: Sequence[int], state: Sequence[Any]) -> None:
        """Remember what `state` returned, here or in another process."""

    def table(self, positions: Sequence[int]) -> Optional[NDArray[np.float64]]:
        """What was measured since the last `adopt`, as an array; None when nothing is ever remembered."""

    def adopt(self, positions: Sequence[int], tables: NDArray[np.float64]) -> None:
        """Remember the statistics of all ranks' arrays together, from their tables."""
