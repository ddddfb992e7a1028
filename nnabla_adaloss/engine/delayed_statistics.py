# SPDX-License-Identifier: Apache-2.0
"""Statistics of the arrays of the iteration before."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple, TypeVar, Union

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.statistics import ArrayStatistics, pool
from ..core.validation import number
from ..graph.renaming import Renaming
from ..kernels.arrays import as_float32, stored_dtype
from ..kernels.measurements import Measurements
from ..kernels.scratch import ScratchPool
from .emulated_storage import EmulatedStorage
from .statistics_source import Findings, StatisticsSource

_T = TypeVar("_T")

# What is known of an array before anything is: it asks for no scale and limits none.
NOTHING_KNOWN = ArrayStatistics.of_zeros(0)


class DelayedStatistics:
    """Statistics of the iteration before, kept unscaled so that they hold when scales change.

    What is asked for is measured for the next iteration. Nothing is known in the first one, so that it
    scales nothing. A gradient that was not finite leaves what was known before.

    Args:
        measurements: measures arrays; on a GPU without waiting for it.
        pool: where float32 copies of other dtypes go.
        storage: a storage that has seen the arrays already, or None.
    """

    def __init__(
        self, measurements: Measurements, pool: ScratchPool, storage: Optional[EmulatedStorage]
    ) -> None:
        self._measurements = measurements
        self._pool = pool
        self._storage = storage
        self._gradients: Dict[int, ArrayStatistics] = {}
        self._data: Dict[int, ArrayStatistics] = {}
        # What is answered from: the same for all micro-batches and retries of an iteration, and on all ranks.
        self._iteration = -1
        self._answers: Tuple[Dict[int, ArrayStatistics], Dict[int, ArrayStatistics]] = {}, {}
        # What was asked for in this iteration: the ticket of a measurement or its result, and the scale.
        self._asked: Dict[int, Tuple[Union[int, ArrayStatistics], float]] = {}
        self._asked_data: Dict[int, Union[int, ArrayStatistics]] = {}
        self._complete = True
        # Parameters that were asked for since they were last measured together, those that were measured
        # since an update, and whether that was before the iteration began.
        self._weights: Dict[int, nn.Variable] = {}
        self._measured: Set[int] = set()
        self._ahead = False

    @property
    def complete(self) -> bool:
        """Whether the iteration before has measured all that was asked for in this pass."""
        return self._complete

    def begin(self, iteration: int, *, anew: bool) -> None:
        """In a new iteration, answer from what is known now."""
        self._complete = True
        if iteration != self._iteration and not self._ahead:
            self.measure_weights()
        self._ahead = False
        if anew or iteration != self._iteration:
            self._iteration = iteration
            self._answers = dict(self._gradients), dict(self._data)

    def gradient(self, variable: nn.Variable, key: int, scale: float) -> ArrayStatistics:
        """What the gradient of the iteration before would be with `scale`."""
        seen = self._storage.gradient_statistics(key) if self._storage is not None else None
        array = variable.grad
        if seen is not None:
            self._asked[key] = seen, scale
        elif stored_dtype(array) is not None:
            self._asked[key] = self._measurements.measure([array])[0], scale
        known = self._answers[0].get(key)
        if known is None:
            self._complete = self._complete and key not in self._asked
            return NOTHING_KNOWN
        return known.scaled(scale)

    def data(self, variable: nn.Variable, key: int) -> ArrayStatistics:
        """The statistics of the weight of the iteration before."""
        seen = self._storage.data_statistics(key) if self._storage is not None else None
        if seen is not None:
            # As it is stored; the parameter itself is another array, and is not measured ahead.
            self._asked_data.setdefault(key, seen)
        else:
            if key not in self._asked_data and key not in self._measured:
                self._measure_data({key: variable})
            if variable.parent is None:
                self._measured.add(key)
                self._weights[key] = variable
        known = self._answers[1].get(key)
        self._complete = self._complete and known is not None
        return NOTHING_KNOWN if known is None else known

    def measure_weights(self) -> None:
        """Start to measure all weights at once, before forward makes copies of them in other types."""
        weights, self._weights = self._weights, {}
        self._measured = set(weights)
        self._ahead = True
        self._measure_data(weights)

    def _measure_data(self, variables: Mapping[int, nn.Variable]) -> None:
        pool = self._pool
        arrays = [
            as_float32(v.data, pool.get(v.shape, "float32", i)) for i, v in enumerate(variables.values())
        ]
        self._asked_data.update(zip(variables, self._measurements.measure(arrays)))

    def watch(self, arrays: Sequence[nn.NdArray]) -> None:
        """Start to look at arrays, all at once."""
        self._measurements.watch(arrays)

    def take_over(self, before: StatisticsSource, names: Renaming) -> None:
        """Know what `before` does, and fetch what it has started to measure."""
        if not isinstance(before, DelayedStatistics):
            return
        keys = names.variables
        self._gradients, self._data = _renamed(before._gradients, keys), _renamed(before._data, keys)
        self._answers = _renamed(before._answers[0], keys), _renamed(before._answers[1], keys)
        self._asked_data = _renamed(before._asked_data, keys)
        # Others than the weights that both graphs have are looked at when they are asked for.
        self._weights = {key: v for key, v in before._weights.items() if key in names.kept}
        self._measured = before._measured & names.kept
        self._iteration, self._ahead = before._iteration, before._ahead
        before._asked_data, before._weights, before._measured = {}, {}, set()

    def finish(self) -> Findings:
        """Wait for what was measured and make it known; return what was found to be not finite."""
        # Forgotten first: after an interruption no ticket may be left without a measurement.
        gradients, self._asked = self._asked, {}
        data, self._asked_data = self._asked_data, {}
        measured, largest, watched_finite = self._measurements.fetch()
        nonfinite: Set[int] = set()
        amax: Dict[int, float] = {}
        for key, (asked, scale) in gradients.items():
            found = measured[asked] if isinstance(asked, int) else asked
            amax[key] = found.abs_max / scale
            if found.nonfinite:
                nonfinite.add(key)
            else:
                self._gradients[key] = found.scaled(1.0 / scale)
        for key, asked in data.items():
            found = measured[asked] if isinstance(asked, int) else asked
            if not found.nonfinite:
                self._data[key] = found
        return Findings(nonfinite, amax, largest, watched_finite)

    def state(self, keys: Sequence[int]) -> List[Any]:
        """Per variable its index in `keys` and what is known of its gradient and its data."""
        found = []
        for index, key in enumerate(keys):
            gradient, data = self._gradients.get(key), self._data.get(key)
            if gradient is not None or data is not None:
                found.append([index, gradient and list(gradient), data and list(data)])
        return found

    def load_state(self, keys: Sequence[int], state: Sequence[Any]) -> None:
        """Know what `state` returned, here or in another process."""
        gradients = {keys[index]: _loaded(gradient) for index, gradient, _ in state if gradient}
        data = {keys[index]: _loaded(data) for index, _, data in state if data}
        self._gradients, self._data = gradients, data

    def table(self, keys: Sequence[int]) -> Optional[NDArray[np.float64]]:
        """What is known of gradients and data, shape (2, len(keys), fields); zeros for nothing."""
        rows = [[known.get(key, NOTHING_KNOWN) for key in keys] for known in (self._gradients, self._data)]
        return np.array(rows, np.float64)

    def adopt(self, keys: Sequence[int], tables: NDArray[np.float64]) -> None:
        """Know the statistics of the arrays of all ranks, as if they were one array each."""
        for known, rows in zip((self._gradients, self._data), np.swapaxes(tables, 0, 1)):
            for index, key in enumerate(keys):
                pooled = pool([ArrayStatistics._make(map(float, row)) for row in rows[:, index] if row[0]])
                if pooled is not None:
                    known[key] = pooled


def _loaded(values: Sequence[Any]) -> ArrayStatistics:
    for value in values:
        number("statistics", value)
    return ArrayStatistics(*values)


def _renamed(known: Mapping[int, _T], keys: Mapping[int, int]) -> Dict[int, _T]:
    return {keys[key]: value for key, value in known.items() if key in keys}
