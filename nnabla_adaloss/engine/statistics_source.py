# SPDX-License-Identifier: Apache-2.0
"""Where the engine's decisions take statistics from: this iteration, or the one before."""

from __future__ import annotations

from typing import (
    Any,
    Dict,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Protocol,
    Sequence,
    Set,
    Tuple,
    TypeVar,
    Union,
)

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.statistics import ArrayStatistics, pool
from ..core.validation import number
from ..graph.renaming import Renaming
from ..kernels.arrays import are_readable, as_float32, stored_dtype
from ..kernels.interface import Kernels
from ..kernels.measurements import Measurements
from ..kernels.scratch import ScratchPool
from .emulated_storage import EmulatedStorage

_T = TypeVar("_T")

# What is known of an array before anything is: it asks for no scale and limits none.
NOTHING_KNOWN = ArrayStatistics.of_zeros(0)


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


class ImmediateStatistics:
    """Statistics of the arrays as they are, read when asked for. On a GPU each read waits for the device.

    Args:
        kernels: the kernels that read arrays.
        pool: where float32 copies of other dtypes go.
        storage: a storage that has seen the arrays already, or None.
    """

    def __init__(self, kernels: Kernels, pool: ScratchPool, storage: Optional[EmulatedStorage]) -> None:
        self._kernels = kernels
        self._pool = pool
        self._storage = storage
        self._nonfinite: Set[int] = set()
        self._amax: Dict[int, float] = {}
        # Parameters that were asked for before; all of them are measured in one go when a pass begins.
        self._weights: Dict[int, nn.Variable] = {}
        self._known: Dict[int, ArrayStatistics] = {}

    @property
    def complete(self) -> bool:
        """True: arrays are looked at when they are asked for."""
        return True

    def gradient(self, variable: nn.Variable, key: int, scale: float) -> ArrayStatistics:
        """The statistics of a gradient as it is now."""
        found = self._storage.gradient_statistics(key) if self._storage is not None else None
        if found is None:
            array = variable.grad
            if stored_dtype(array) is None:
                return ArrayStatistics.of_zeros(array.size)
            found = self._kernels.statistics(array)
        if found.nonfinite:
            self._nonfinite.add(key)
        self._amax[key] = found.abs_max / scale
        return found

    def data(self, variable: nn.Variable, key: int) -> ArrayStatistics:
        """The statistics of a weight or activation."""
        found = self._storage.data_statistics(key) if self._storage is not None else None
        found = self._known.get(key) if found is None else found
        if found is not None:
            return found
        if variable.parent is None:
            self._weights[key] = variable
        array = as_float32(variable.data, self._pool.get(variable.shape, "float32"))
        return self._kernels.statistics(array)

    def begin(self, iteration: int, *, anew: bool) -> None:
        """Measure the weights that were asked for before, as they are now."""
        weights = [variable.data for variable in self._weights.values()]
        if are_readable(weights):
            self._known = dict(zip(self._weights, self._kernels.statistics_all(weights)))

    def watch(self, arrays: Sequence[nn.NdArray]) -> None:
        """Do nothing: whoever wants to know looks at once."""

    def measure_weights(self) -> None:
        """Do nothing: weights are measured when they are asked for."""

    def take_over(self, before: StatisticsSource, names: Renaming) -> None:
        """Know which weights `before` was asked for, of those that both graphs have."""
        if isinstance(before, ImmediateStatistics):
            self._weights = {key: v for key, v in before._weights.items() if key in names.kept}

    def finish(self) -> Findings:
        """What was asked for."""
        found = Findings(self._nonfinite, self._amax, [])
        self._nonfinite, self._amax, self._known = set(), {}, {}
        return found

    def state(self, keys: Sequence[int]) -> List[Any]:
        """An empty list: nothing is remembered."""
        return []

    def load_state(self, keys: Sequence[int], state: Sequence[Any]) -> None:
        """Do nothing: nothing is remembered."""

    def table(self, keys: Sequence[int]) -> Optional[NDArray[np.float64]]:
        """None: nothing is remembered."""
        return None

    def adopt(self, keys: Sequence[int], tables: NDArray[np.float64]) -> None:
        """Do nothing: nothing is remembered."""


def _loaded(values: Sequence[Any]) -> ArrayStatistics:
    for value in values:
        number("statistics", value)
    return ArrayStatistics(*values)


def _renamed(known: Mapping[int, _T], keys: Mapping[int, int]) -> Dict[int, _T]:
    return {keys[key]: value for key, value in known.items() if key in keys}


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
