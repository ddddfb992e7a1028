# SPDX-License-Identifier: Apache-2.0
"""Statistics of the arrays of this iteration (`delay=0`)."""

from __future__ import annotations

from typing import AbstractSet, Any, Dict, List, Optional, Sequence, Set, Tuple

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.statistics import ArrayStatistics
from ..emulation.rounded_storage import RoundedStorage
from ..graph.plan import GraphPlan
from ..kernels.arrays import are_readable, as_float32, stored_dtype
from ..kernels.interface import Kernels
from ..kernels.scratch import ScratchPool
from .statistics import Findings, KnownStatistics


class ImmediateStatistics:
    """Statistics of the arrays as they are, read when asked for. On a GPU each read waits for the device.

    Args:
        plan: the graph.
        kernels: the kernels that read arrays.
        pool: where float32 copies of other dtypes go.
        storage: a storage that has seen the arrays already, or None.
    """

    undone: Sequence[str] = ()

    def __init__(
        self, plan: GraphPlan, kernels: Kernels, pool: ScratchPool, storage: Optional[RoundedStorage]
    ) -> None:
        self._plan, self._kernels, self._pool, self._storage = plan, kernels, pool, storage
        self._nonfinite: Set[int] = set()
        self._amax: Dict[int, float] = {}
        # Weights that were asked for before; all of them are measured in one call when a pass begins.
        self._weights: Dict[int, None] = {}
        self._known: Dict[int, ArrayStatistics] = {}

    @property
    def complete(self) -> bool:
        """True: arrays are read when they are asked for."""
        return True

    def bind(self, plan: GraphPlan, storage: Optional[RoundedStorage]) -> None:
        """Read the arrays of this graph from now on."""
        self._plan, self._storage = plan, storage

    def gradient(self, position: int, scale: float) -> ArrayStatistics:
        """The statistics of a gradient as it is now."""
        storage, key = self._storage, self._plan.keys[position]
        found = None if storage is None else storage.gradient_statistics(key)
        if found is None:
            array = self._plan.all_variables[position].grad
            if stored_dtype(array) is None:
                return ArrayStatistics.of_zeros(array.size)
            found = self._kernels.statistics(array)
        if found.nonfinite:
            self._nonfinite.add(position)
        self._amax[position] = found.abs_max / scale
        return found

    def data(self, position: int) -> ArrayStatistics:
        """The statistics of a weight or activation."""
        found = self.stored_data(position)
        found = self._known.get(position) if found is None else found
        if found is not None:
            return found
        variable = self._plan.all_variables[position]
        if variable.parent is None:
            self._weights[position] = None
        array = as_float32(variable.data, self._pool.get(variable.shape, "float32"))
        return self._kernels.statistics(array)

    def stored_data(self, position: int) -> Optional[ArrayStatistics]:
        """The statistics of data that an emulated storage has rounded; None where there is none."""
        storage = self._storage
        return None if storage is None else storage.data_statistics(self._plan.keys[position])

    def matrices(self, number: int, index: int) -> Tuple[NDArray[Any], NDArray[Any]]:
        """Output gradient and factor of a layer."""
        node = self._plan.nodes[self._plan.function_keys[number]]
        return node.scalings[index].matrices(node)

    def begin(self, iteration: int, *, again: bool) -> None:
        """Measure the weights that were asked for before, as they are now."""
        weights = [self._plan.all_variables[position].data for position in self._weights]
        if are_readable(weights):
            self._known = dict(zip(self._weights, self._kernels.statistics_all(weights)))

    def known(self) -> Optional[KnownStatistics]:
        """None: arrays are read as the pass runs."""
        return None

    def measure(self, gradients: Sequence[Tuple[int, float]], data: Sequence[int]) -> None:
        """Read gradients as they are now, for what the pass has found."""
        for position, scale in gradients:
            self.gradient(position, scale)

    def measure_weights(self, positions: Sequence[int]) -> None:
        """Do nothing: weights are measured when they are asked for."""

    def measured_before(self) -> Tuple[AbstractSet[int], AbstractSet[int]]:
        """Nothing is remembered."""
        return set(), set()

    def look_at(self, position: int, scale: float) -> ArrayStatistics:
        """As `gradient`."""
        return self.gradient(position, scale)

    def keep(self, gradients: AbstractSet[int], data: AbstractSet[int], looked_at: AbstractSet[int]) -> None:
        """Do nothing: nothing is remembered."""

    def watch(self, arrays: Sequence[nn.NdArray]) -> None:
        """Do nothing: whoever wants to know looks at once."""

    def finish(self) -> Findings:
        """What was read in this pass."""
        found = Findings(self._nonfinite, self._amax, [])
        self._nonfinite, self._amax, self._known = set(), {}, {}
        return found

    def state(self, positions: Sequence[int]) -> List[Any]:
        """An empty list: nothing is remembered."""
        return []

    def load_state(self, positions: Sequence[int], state: Sequence[Any]) -> None:
        """Do nothing: nothing is remembered."""

    def table(self, positions: Sequence[int]) -> Optional[NDArray[np.float64]]:
        """None: nothing is remembered."""
        return None

    def adopt(self, positions: Sequence[int], tables: NDArray[np.float64]) -> None:
        """Do nothing: nothing is remembered."""
