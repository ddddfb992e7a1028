# SPDX-License-Identifier: Apache-2.0
"""Statistics of earlier iterations (`delay=1`)."""

from __future__ import annotations

from typing import AbstractSet, Any, Dict, List, Optional, Sequence, Set, Tuple, Union

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.statistics import ArrayStatistics, pool
from ..core.validation import number
from ..emulation.rounded_storage import RoundedStorage
from ..graph.plan import GraphPlan
from ..kernels.arrays import are_readable, as_float32, stored_dtype
from ..kernels.measurements import Measurements
from ..kernels.scratch import ScratchPool
from .statistics import NOTHING_KNOWN, Findings, KnownStatistics

# The ticket of a measurement that is still running, or its result.
_Measured = Union[int, ArrayStatistics]


class DelayedStatistics:
    """Statistics of earlier iterations, kept unscaled so that they hold when scales change.

    What is asked for while a pass runs is measured for the next one. In the first one nothing is known, so
    that nothing is scaled. A gradient that was not finite leaves what was known before.

    Args:
        plan: the graph.
        measurements: measures arrays; on a GPU without waiting for it.
        pool: where float32 copies of other dtypes go.
        storage: a storage that has seen the arrays already, or None.

    Attributes:
        complete: whether everything that this pass has asked for was known.
    """

    undone = "_gradients", "_data", "_wanted", "_measured", "_answers", "_iteration"

    def __init__(
        self,
        plan: GraphPlan,
        measurements: Measurements,
        pool: ScratchPool,
        storage: Optional[RoundedStorage],
    ) -> None:
        self._plan, self._measurements, self._pool, self._storage = plan, measurements, pool, storage
        self._gradients: Dict[int, ArrayStatistics] = {}
        self._data: Dict[int, ArrayStatistics] = {}
        # The gradients that choices ask for; None: all that are measured, until one has asked.
        self._wanted: Optional[AbstractSet[int]] = None
        # These, and those that somebody only looks at.
        self._measured: AbstractSet[int] = frozenset()
        # What choices see: the same for all batches and retries of an iteration, and on all ranks.
        self._iteration = -1
        self._answers: Tuple[Dict[int, ArrayStatistics], Dict[int, ArrayStatistics]] = {}, {}
        # What this pass measures, with the scale of each gradient.
        self._running: Dict[int, Tuple[_Measured, float]] = {}
        self._running_data: Dict[int, _Measured] = {}
        # What was measured since all ranks exchanged what they know.
        self._new: Tuple[Set[int], Set[int]] = set(), set()
        self.complete = True

    def bind(self, plan: GraphPlan, storage: Optional[RoundedStorage]) -> None:
        """Measure the arrays of this graph from now on."""
        self._plan, self._storage = plan, storage

    def begin(self, iteration: int, *, again: bool) -> None:
        """In a new iteration, answer from what is known now."""
        self.complete = True
        if again or iteration != self._iteration:
            self._iteration = iteration
            self._answers = dict(self._gradients), dict(self._data)

    def known(self) -> Optional[KnownStatistics]:
        """What was known when the iteration began."""
        return KnownStatistics(*self._answers, stored=self._storage is not None)

    def gradient(self, position: int, scale: float) -> ArrayStatistics:
        """What the gradient of an earlier iteration would be with `scale`; this one's is measured."""
        if self._wanted is not None and position not in self._wanted:
            self._wanted, self._measured = self._wanted | {position}, self._measured | {position}
        if position not in self._running or self._running[position][1] != scale:
            self.measure([(position, scale)], [])
        known = self._answers[0].get(position)
        if known is None:
            self.complete = self.complete and position not in self._running
            return NOTHING_KNOWN
        return known.scaled(scale)

    def look_at(self, position: int, scale: float) -> ArrayStatistics:
        """As `gradient`."""
        return self.gradient(position, scale)

    def data(self, position: int) -> ArrayStatistics:
        """The statistics of the data of an earlier iteration; this one's are measured."""
        self.measure([], [position])
        known = self._answers[1].get(position)
        self.complete = self.complete and known is not None
        return NOTHING_KNOWN if known is None else known

    def stored_data(self, position: int) -> Optional[ArrayStatistics]:
        """The statistics of data as an emulated storage has rounded it now; None where there is none."""
        storage = self._storage
        found = None if storage is None else storage.data_statistics(self._plan.keys[position])
        if found is not None:
            self._running_data.setdefault(position, found)
        return found

    def matrices(self, number: int, index: int) -> Tuple[NDArray[Any], NDArray[Any]]:
        """No elements are kept.

        Raises:
            TypeError: always.
        """
        raise TypeError("statistics of earlier iterations hold no elements")

    def measure(self, gradients: Sequence[Tuple[int, float]], data: Sequence[int]) -> None:
        """Start to measure arrays as they are now, all in one call."""
        arrays = [self._plan.all_variables[position].grad for position, _ in gradients]
        found = gradients
        if self._storage is not None or not are_readable(arrays):
            arrays, found = self._left_to_measure(gradients, arrays)
        unseen = [p for p in data if p not in self._running_data and self.stored_data(p) is None]
        arrays += self._readable(unseen)
        if not arrays:
            return
        tickets = self._measurements.measure(arrays)
        self._running.update((position, (ticket, scale)) for (position, scale), ticket in zip(found, tickets))
        self._running_data.update(zip(unseen, tickets[len(found) :]))

    def _left_to_measure(
        self, gradients: Sequence[Tuple[int, float]], arrays: Sequence[nn.NdArray]
    ) -> Tuple[List[nn.NdArray], List[Tuple[int, float]]]:
        """The gradients but for those that a storage has seen, and those that backward has left at zero."""
        keys, storage = self._plan.keys, self._storage
        left, found, nothing = [], [], {}
        for (position, scale), array in zip(gradients, arrays):
            seen = None if storage is None else storage.gradient_statistics(keys[position])
            if seen is not None:
                self._running[position] = seen, scale
            elif stored_dtype(array) is not None:
                left.append(array)
                found.append((position, scale))
            else:
                # Backward has left nothing there, and a choice need not wait for it.
                nothing[position] = NOTHING_KNOWN
        if not nothing.keys() <= self._gradients.keys():
            self._gradients = {**nothing, **self._gradients}
        return left, found

    def measure_weights(self, positions: Sequence[int]) -> None:
        """Start to measure data as it is now, whatever an emulated storage makes of it."""
        self._running_data.update(zip(positions, self._measurements.measure(self._readable(positions))))

    def _readable(self, positions: Sequence[int]) -> List[nn.NdArray]:
        variables = [self._plan.all_variables[position] for position in positions]
        return [as_float32(v.data, self._pool.get(v.shape, "float32", i)) for i, v in enumerate(variables)]

    def measured_before(self) -> Tuple[AbstractSet[int], AbstractSet[int]]:
        """Positions of gradients and of data that choices have asked for."""
        return frozenset(self._gradients) if self._wanted is None else self._measured, self._data.keys()

    def keep(self, gradients: AbstractSet[int], data: AbstractSet[int], looked_at: AbstractSet[int]) -> None:
        """Forget all but what the last choice has asked for or looked at."""
        self._wanted, self._measured = frozenset(gradients), frozenset(gradients | looked_at)
        self._gradients = self._only(0, self._gradients, self._measured)
        self._data = self._only(1, self._data, data)

    def _only(
        self, index: int, known: Dict[int, ArrayStatistics], asked: AbstractSet[int]
    ) -> Dict[int, ArrayStatistics]:
        self._new[index].intersection_update(asked)
        return known if known.keys() <= asked else {p: known[p] for p in known if p in asked}

    def watch(self, arrays: Sequence[nn.NdArray]) -> None:
        """Start to check arrays, all in one call."""
        if arrays:
            self._measurements.watch(arrays)

    def finish(self) -> Findings:
        """Wait for what was measured, and remember it."""
        # Forgotten first: after an interruption no ticket may be left without a measurement.
        gradients, self._running = self._running, {}
        data, self._running_data = self._running_data, {}
        measured, largest, watched_finite = self._measurements.fetch()
        nonfinite: Set[int] = set()
        amax: Dict[int, float] = {}
        new_gradients: Dict[int, ArrayStatistics] = {}
        new_data: Dict[int, ArrayStatistics] = {}
        for position, (one, scale) in gradients.items():
            found = measured[one] if isinstance(one, int) else one
            amax[position] = found.abs_max / scale
            if found.nonfinite:
                nonfinite.add(position)
            elif self._wanted is None or position in self._measured:
                new_gradients[position] = found.scaled(1.0 / scale)
        for position, one in data.items():
            found = measured[one] if isinstance(one, int) else one
            if not found.nonfinite:
                new_data[position] = found
        if new_gradients:
            self._gradients = {**self._gradients, **new_gradients}
            self._new[0].update(new_gradients)
        if new_data:
            self._data = {**self._data, **new_data}
            self._new[1].update(new_data)
        return Findings(nonfinite, amax, largest, watched_finite)

    def state(self, positions: Sequence[int]) -> List[Any]:
        """Per variable its index in `positions`, and what is known of its gradient and its data."""
        found = []
        for index, position in enumerate(positions):
            gradient, data = self._gradients.get(position), self._data.get(position)
            if self._wanted is not None and position not in self._wanted:
                gradient = None
            if gradient is not None or data is not None:
                found.append([index, gradient and list(gradient), data and list(data)])
        return found

    def load_state(self, positions: Sequence[int], state: Sequence[Any]) -> None:
        """Know what `state` returned, here or in another process."""
        gradients = {positions[index]: _loaded(gradient) for index, gradient, _ in state if gradient}
        data = {positions[index]: _loaded(data) for index, _, data in state if data}
        self._gradients, self._data = gradients, data
        self._wanted, self._measured = frozenset(gradients) if state else None, frozenset(gradients)

    def table(self, positions: Sequence[int]) -> Optional[NDArray[np.float64]]:
        """What was measured since the last `adopt`: shape (2, len(positions), fields); else zeros."""
        return np.array(
            [
                [known[p] if p in new else NOTHING_KNOWN for p in positions]
                for known, new in zip((self._gradients, self._data), self._new)
            ],
            np.float64,
        )

    def adopt(self, positions: Sequence[int], tables: NDArray[np.float64]) -> None:
        """Know the statistics of the arrays of all ranks, as if they were one array each."""
        for known, rows in zip((self._gradients, self._data), np.swapaxes(tables, 0, 1)):
            for index in np.flatnonzero(rows[:, :, 0].any(axis=0)).tolist():
                pooled = pool([ArrayStatistics._make(map(float, row)) for row in rows[:, index] if row[0]])
                if pooled is not None:
                    known[positions[index]] = pooled
        self._new = set(), set()


def _loaded(values: Sequence[Any]) -> ArrayStatistics:
    for value in values:
        number("statistics", value)
    return ArrayStatistics(*values)
