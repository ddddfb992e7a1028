# SPDX-License-Identifier: Apache-2.0
"""Statistics of the arrays of this iteration."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Set

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.statistics import ArrayStatistics
from ..graph.renaming import Renaming
from ..kernels.arrays import are_readable, as_float32, stored_dtype
from ..kernels.interface import Kernels
from ..kernels.scratch import ScratchPool
from .emulated_storage import EmulatedStorage
from .statistics_source import Findings, StatisticsSource


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
