# SPDX-License-Identifier: Apache-2.0
"""What is known of the arrays of a graph, and what each iteration measures of them."""

from __future__ import annotations

import math
from typing import (
    AbstractSet,
    Any,
    Callable,
    Dict,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)

import nnabla as nn

from ..core.statistics import ArrayStatistics, pool
from ..emulation.rounded_storage import NativeStorage
from ..graph.plan import GraphPlan
from ..graph.structure import GraphStructure
from ..kernels.arrays import are_readable, as_float32, stored_dtype
from ..kernels.measurements import Measurements
from ..kernels.scratch import ScratchPool

# Elements that a share holds at least, if there are as many.
_LEAST = 2**16

# The ticket of a measurement that is still running, or its result.
_Measured = Union[int, ArrayStatistics]


class Findings(NamedTuple):
    """What a pass has measured. Variables go by position."""

    nonfinite: Set[int]  # those whose gradients were not finite
    amax: Dict[int, float]  # the largest finite magnitude of each measured gradient, divided by its scale
    largest: List[float]  # of each gradient that was unscaled, in their order; infinity: it was not finite
    state_finite: Optional[bool] = None  # whether the watched arrays are finite; None: none was watched


class Wanted(NamedTuple):
    """Positions of the variables whose statistics are asked for."""

    gradients: AbstractSet[int]  # those that methods look at
    data: AbstractSet[int]
    watched: AbstractSet[int]  # gradients that are only reported


class Statistics:
    """Statistics of gradients, by position, divided by scale and loss weight, and of data, by `~position`.
    Choices see what was known when the iteration began: the same on all ranks.
    """

    undone = "_known", "_answers", "_iteration"

    def __init__(
        self,
        plan: GraphPlan,
        measurements: Measurements,
        pool: ScratchPool,
        storage: NativeStorage,
        wanted: Wanted,
    ) -> None:
        self._plan, self._measurements, self._pool, self._storage = plan, measurements, pool, storage
        self.wanted = wanted
        self._known: Dict[int, ArrayStatistics] = {}
        self._answers = self._known
        self._iteration = -1
        # What this pass measures, with the scale of each.
        self._running: Dict[int, Tuple[_Measured, float]] = {}
        # What was measured since all ranks exchanged what they know.
        self._new: Set[int] = set()

    def bind(self, plan: GraphPlan, storage: NativeStorage) -> None:
        self._plan, self._storage = plan, storage

    def begin(self, iteration: int, *, again: bool) -> None:
        """In a new iteration, or again in one, answer from what is known now."""
        if again or iteration != self._iteration:
            self._iteration, self._answers = iteration, self._known

    def gradient(self, position: int) -> Optional[ArrayStatistics]:
        """What is known of a gradient, divided by its scale and its loss weight."""
        return self._answers.get(position)

    def data(self, position: int) -> Optional[ArrayStatistics]:
        return self._answers.get(~position)

    @property
    def lacks_weights(self) -> bool:
        """Whether any weight that is wanted was not measured."""
        kept = self._plan.structure.described.kept
        return any(p in kept and ~p not in self._answers for p in self.wanted.data)

    def measure(self, gradients: Sequence[Tuple[int, float]], data: Sequence[int]) -> None:
        """Start to measure arrays as they are now, all in one call; gradients go with their scales."""
        arrays = [self._plan.all_variables[position].grad for position, _ in gradients]
        found = [*gradients]
        if self._storage.rounds or not are_readable(arrays):
            arrays, found = self._left_to_measure(gradients, arrays)
        unseen = [p for p in data if ~p not in self._running and not self._has_seen(p)]
        arrays += self._readable(unseen)
        if not arrays:
            return
        found += [(~position, 1.0) for position in unseen]
        tickets = self._measurements.measure(arrays)
        self._running.update((key, (ticket, scale)) for (key, scale), ticket in zip(found, tickets))

    def _has_seen(self, position: int) -> bool:
        """Take over what an emulated storage knows of data, as it has rounded it."""
        found = self._storage.data_statistics(self._plan.keys[position])
        if found is not None:
            self._running[~position] = found, 1.0
        return found is not None

    def _left_to_measure(
        self, gradients: Sequence[Tuple[int, float]], arrays: Sequence[nn.NdArray]
    ) -> Tuple[List[nn.NdArray], List[Tuple[int, float]]]:
        """The gradients but for those that a storage has seen, and those that backward has left at zero."""
        keys, storage = self._plan.keys, self._storage
        left, found = [], []
        for (position, scale), array in zip(gradients, arrays):
            seen = storage.gradient_statistics(keys[position])
            if seen is not None:
                self._running[position] = seen, scale
            elif stored_dtype(array) is not None:
                left.append(array)
                found.append((position, scale))
        return left, found

    def measure_weights(self, positions: Sequence[int]) -> None:
        """Start to measure data as it is now, whatever an emulated storage makes of it."""
        tickets = self._measurements.measure(self._readable(positions))
        self._running.update((~position, (ticket, 1.0)) for position, ticket in zip(positions, tickets))

    def _readable(self, positions: Sequence[int]) -> List[nn.NdArray]:
        variables = [self._plan.all_variables[position] for position in positions]
        return [as_float32(v.data, self._pool.get(v.shape, "float32", i)) for i, v in enumerate(variables)]

    def watch(self, arrays: Sequence[nn.NdArray]) -> None:
        if arrays:
            self._measurements.watch(arrays)

    def finish(self, weight_of: Callable[[int], float]) -> Findings:
        """Wait for what was measured, and remember it; gradients with a loss weight of 0 tell nothing."""
        # Forgotten first: after an interruption no ticket may be left without a measurement.
        running, self._running = self._running, {}
        measured, largest, state_finite = self._measurements.fetch()
        nonfinite: Set[int] = set()
        amax: Dict[int, float] = {}
        new: Dict[int, ArrayStatistics] = {}
        for key, (one, scale) in running.items():
            found = measured[one] if isinstance(one, int) else one
            if key >= 0:
                amax[key] = found.abs_max / scale
                if found.nonfinite:
                    nonfinite.add(key)
            if found.nonfinite:
                continue
            if key < 0:
                new[key] = found
            elif key in self.wanted.gradients or key in self.wanted.watched:
                weight = weight_of(key)
                if weight:
                    new[key] = found.scaled(1.0 / (scale * weight))
        if new:
            self._known = {**self._known, **new}
            self._new.update(new)
        return Findings(nonfinite, amax, largest, state_finite)

    def state(self, positions: Sequence[int]) -> List[Any]:
        """Per variable its index in `positions`, and what is known of its gradient and its data."""
        found = []
        for index, position in enumerate(positions):
            gradient = self._known.get(position) if position in self.wanted.gradients else None
            data = self._known.get(~position)
            if gradient is not None or data is not None:
                found.append([index, gradient and list(gradient), data and list(data)])
        return found

    def load_state(self, positions: Sequence[int], state: Sequence[Any]) -> None:
        """Know what `state` returned, here or in another process."""
        self._known = {
            key: ArrayStatistics.loaded(values)
            for index, gradient, data in state
            for key, values in ((positions[index], gradient), (~positions[index], data))
            if values
        }
        self._answers, self._iteration, self._new = {}, -1, set()

    @property
    def _shared(self) -> Dict[str, int]:
        """What ranks tell each other, by name: they have the same weights, but not the same activations."""
        weights = self._plan.structure.described.kept
        found: Dict[str, int] = {}
        for layer, (node, slot) in self._plan.structure.layer_slots.items():
            if node.outputs[0] in self.wanted.gradients:
                found[f"{layer} gradient"] = node.outputs[0]
            if slot.factor in self.wanted.data and slot.factor not in weights:
                found[f"{layer} factor"] = ~slot.factor
        return found

    def shared(self) -> Dict[str, Sequence[float]]:
        """What was measured since the last `adopt`, by names that mean the same on all ranks."""
        return {name: list(self._known[key]) for name, key in self._shared.items() if key in self._new}

    def adopt(self, told: Sequence[Mapping[str, Sequence[float]]]) -> None:
        """Know the statistics of the arrays of all ranks, as if they were one array each."""
        self._known, self._new = {**self._known}, set()
        for name, key in self._shared.items():
            rows = (one.get(name) for one in told)
            pooled = pool([ArrayStatistics._make(row) for row in rows if row is not None])
            if pooled is not None:
                self._known[key] = pooled


class Share(NamedTuple):
    """What one iteration measures. Variables go by position."""

    gradients: Sequence[int]
    weights: Sequence[int]
    activations: Sequence[int]  # that layers multiply by: nnabla frees them in backward
    leaves: AbstractSet[int]  # whose gradients, which every pass looks at, count for the components
    last: bool  # whether everything has been measured when the pass ends


def shares_of(
    structure: GraphStructure, gradients: AbstractSet[int], data: AbstractSet[int], count: int
) -> List[Share]:
    """Divide what is measured into `count` shares, one for each iteration: its gradients stay in memory."""
    sizes = [math.prod(shape) for shape in structure.described.shapes]
    wanted = [p for p in structure.gradients if p in gradients and p not in structure.roots]
    known_again = structure.described.kept.keys()
    kept = _divided(wanted, sizes, count)
    weights = _divided(sorted(data & known_again), sizes, count)
    activations = _divided(sorted(data - known_again), sizes, count)
    written = dict.fromkeys(leaf for node in structure.nodes for leaf in node.leaves)
    leaves = _divided(list(written), sizes, count)
    return [
        Share(*parts[:3], frozenset(parts[3]), number == count - 1)
        for number, parts in enumerate(zip(kept, weights, activations, leaves))
    ]


def _divided(positions: Sequence[int], sizes: Sequence[int], count: int) -> List[List[int]]:
    """Positions in so many lists, of which the last ones have about the same size, and the others nothing."""
    # A call costs more than to measure what is small.
    used = min(count, max(1, sum(sizes[position] for position in positions) // _LEAST))
    lists: List[List[int]] = [[] for _ in range(used)]
    filled = [0] * used
    for position in sorted(positions, key=lambda p: (-sizes[p], p)):
        smallest = filled.index(min(filled))
        lists[smallest].append(position)
        filled[smallest] += max(sizes[position], 1)
    return [[] for _ in range(count - used)] + lists
