# SPDX-License-Identifier: Apache-2.0
"""Latest statistics of a graph's arrays, for the next choice of scales."""

from __future__ import annotations

from collections import Counter
from copy import copy
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
from ..graph.graph import Graph
from ..graph.plan import GraphPlan
from ..kernels.arrays import are_readable, as_float32, stored_dtype
from ..kernels.measurements import Measurements, Results
from ..kernels.scratch import ScratchPool

_Key = Union[int, str]

GradientStatistics = Mapping[int, Tuple[ArrayStatistics, float]]
"""Statistics of the gradients measured in a pass, by position, each with its scale."""


# Suffix of the names of weights in messages between ranks.
_WEIGHT = " weight"


class StatisticsRequest(NamedTuple):
    """Positions of the variables whose statistics are needed."""

    gradients: AbstractSet[int]  # gradients that methods use
    data: AbstractSet[int]
    watched: AbstractSet[int]  # gradients that are only reported


class _Pending(NamedTuple):
    """Weights measured after an update, which become known with the next pass; savepoints keep it."""

    keys: Sequence[Optional[_Key]]  # None: of another topology, and ignored
    tickets: List[int]  # of measurements that have not been fetched
    statistics: List[ArrayStatistics]

    def fetch(self, measurements: Measurements) -> Results:
        """Wait for all measurements of the pass and return them; those of these weights become known."""
        # Cleared first: after an interruption no ticket may remain without a measurement.
        tickets = [*self.tickets]
        self.tickets.clear()
        results = measurements.fetch()
        self.statistics.extend([results.statistics[ticket] for ticket in tickets])
        return results

    @property
    def by_key(self) -> Dict[_Key, ArrayStatistics]:
        """Statistics that have been fetched."""
        return {key: one for key, one in zip(self.keys, self.statistics) if key is not None}


class LatestStatistics:
    """Statistics of gradients, divided by scale and loss weight, and of data, for the next choice.

    Their keys: a gradient's position p; of data the parameter's name, or ~p without one.

    Args:
        measurements: runs the kernels, whose results `finish` fetches.
        pool: scratch arrays for data that must be read as float32.
        wanted: the variables to measure.
    """

    undone = "_known", "_iteration", "_pending"

    def __init__(
        self,
        graph: Graph,
        plan: GraphPlan,
        measurements: Measurements,
        pool: ScratchPool,
        storage: NativeStorage,
        wanted: StatisticsRequest,
    ) -> None:
        self._graph, self._plan, self._storage = graph, plan, storage
        self._measurements, self._pool = measurements, pool
        self.wanted = wanted
        # Names of parameters, by position, except ambiguous ones.
        counts = Counter(name for _, name in plan.described.kept.values())
        self._names = {p: n for p, (_, n) in plan.described.kept.items() if n is not None and counts[n] == 1}
        # Parameters by name, as graphs of other topologies read them, too; other data by `~position`.
        self._known: Dict[_Key, ArrayStatistics] = {}
        # Choices use the statistics at the start of the iteration, equal on all ranks.
        self._answers = self._known
        self._iteration = -1
        # Measurements of gradients in this pass, each with its scale, and of data: tickets of results, or
        # finished results.
        self._running: Dict[int, Tuple[Union[int, ArrayStatistics], float]] = {}
        self._data: Dict[_Key, Union[int, ArrayStatistics]] = {}
        self._pending = _Pending((), [], [])
        # Keys measured since the last exchange between ranks.
        self._new: Set[_Key] = set()

    def for_graph(self, graph: Graph, plan: GraphPlan, storage: NativeStorage) -> LatestStatistics:
        """Adapt to another graph of the topology."""
        adapted = copy(self)
        adapted._graph, adapted._plan, adapted._storage = graph, plan, storage
        return adapted

    def go_on_from(self, before: LatestStatistics) -> None:
        """Take over the measurements of weights that were started with the previous topology."""
        keys = [key if isinstance(key, str) else None for key in before._pending.keys]
        self._pending = before._pending._replace(keys=keys)

    def begin(self, iteration: int, *, rerun: bool) -> None:
        """Answer from the present statistics, in a new iteration or for a repeat."""
        if rerun or iteration != self._iteration:
            self._iteration, self._answers = iteration, self._known

    def gradient(self, position: int) -> Optional[ArrayStatistics]:
        """Statistics of a gradient, divided by its scale and its loss weight; None if unknown."""
        return self._answers.get(position)

    def data(self, position: int) -> Optional[ArrayStatistics]:
        return self._answers.get(self._key(position))

    def _key(self, position: int) -> _Key:
        return self._names.get(position, ~position)

    @property
    def is_incomplete(self) -> bool:
        """True if a needed weight, or all gradients that methods use, are unmeasured."""
        kept, known, gradients = self._plan.described.kept, self._answers, self.wanted.gradients
        return any(p in kept and self._key(p) not in known for p in self.wanted.data) or (
            bool(gradients) and gradients.isdisjoint(known)
        )

    @property
    def weights(self) -> Dict[str, ArrayStatistics]:
        """Statistics of parameters, by name."""
        return {key: statistics for key, statistics in self._known.items() if isinstance(key, str)}

    def measure(self, gradients: Sequence[Tuple[int, float]], data: Sequence[int]) -> None:
        """Start measuring the arrays' present contents, all in one call; gradients with their scales."""
        if not (gradients or data):
            return
        arrays = [self._graph.variables[position].grad for position, _ in gradients]
        remaining = [*gradients]
        if self._storage.rounds or not are_readable(arrays):
            arrays, remaining = self._left_to_measure(gradients, arrays)
        started = {*self._data, *self._pending.keys}
        unmeasured = [p for p in data if self._key(p) not in started and not self._take_rounded(p)]
        arrays += self._readable(unmeasured)
        if not arrays:
            return
        tickets = self._measurements.measure(arrays)
        self._running.update((p, (ticket, scale)) for (p, scale), ticket in zip(remaining, tickets))
        self._data.update(zip(map(self._key, unmeasured), tickets[len(remaining) :]))

    def _take_rounded(self, position: int) -> bool:
        """Take over the statistics of data that an emulated storage has rounded; False if it has not."""
        statistics = self._storage.data_statistics(self._graph.keys[position])
        if statistics is not None:
            self._data[self._key(position)] = statistics
        return statistics is not None

    def _left_to_measure(
        self, gradients: Sequence[Tuple[int, float]], arrays: Sequence[nn.NdArray]
    ) -> Tuple[List[nn.NdArray], List[Tuple[int, float]]]:
        """Take over gradients that a storage has measured; return the others that backward has written."""
        keys, storage = self._graph.keys, self._storage
        left, remaining = [], []
        for (position, scale), array in zip(gradients, arrays):
            statistics = storage.gradient_statistics(keys[position])
            if statistics is not None:
                self._running[position] = statistics, scale
            elif stored_dtype(array) is not None:
                left.append(array)
                remaining.append((position, scale))
        return left, remaining

    def measure_weights(self, positions: Sequence[int]) -> None:
        """Start measuring weights after an update, before they are rounded; known after the next pass."""
        if not positions:
            return
        tickets = self._measurements.measure(self._readable(positions))
        self._pending = _Pending(list(map(self._key, positions)), tickets, [])

    def _readable(self, positions: Sequence[int]) -> List[nn.NdArray]:
        variables = [self._graph.variables[position] for position in positions]
        return [as_float32(v.data, self._pool.get(v.shape, "float32", i)) for i, v in enumerate(variables)]

    def watch(self, arrays: Sequence[nn.NdArray], loss: Optional[nn.NdArray]) -> None:
        """Start checking that arrays are finite, and that the loss is not NaN."""
        self._measurements.watch(arrays, loss)

    def finish(self, weight_of: Callable[[int], float]) -> Tuple[GradientStatistics, Results]:
        """Wait for the results of a pass and remember them, except gradients with a loss weight of 0; return
        the measured gradients, and all results.
        """
        # Cleared first: after an interruption no ticket may remain without a measurement. In place, as graphs
        # of one topology share these dicts.
        running, data, pending = {**self._running}, {**self._data}, self._pending
        self._running.clear()
        self._data.clear()
        self._pending = _Pending((), [], [])
        results = pending.fetch(self._measurements)
        gradients: Dict[int, Tuple[ArrayStatistics, float]] = {}
        new: Dict[_Key, ArrayStatistics] = {}
        for position, (ticket, scale) in running.items():
            statistics = results.statistics[ticket] if isinstance(ticket, int) else ticket
            gradients[position] = statistics, scale
            looked_at = position in self.wanted.gradients or position in self.wanted.watched
            weight = 0.0 if statistics.nonfinite or not looked_at else weight_of(position)
            if weight:
                new[position] = statistics.scaled(1.0 / (scale * weight))
        for key, ticket in (*pending.by_key.items(), *data.items()):
            statistics = results.statistics[ticket] if isinstance(ticket, int) else ticket
            if not statistics.nonfinite:
                new[key] = statistics
        if new:
            self._known = {**self._known, **new}
            self._new.update(new)
        return gradients, results

    def state(self, positions: Sequence[int]) -> List[Any]:
        """Export for `loaded`, in whose graph positions may differ: index in `positions`, and statistics of
        gradient and data, of each variable that has any.
        """
        rows = []
        for index, position in enumerate(positions):
            gradient = self._known.get(position) if position in self.wanted.gradients else None
            data = self._known.get(self._key(position))
            if gradient is not None or data is not None:
                rows.append([index, gradient and list(gradient), data and list(data)])
        return rows

    @property
    def pending(self) -> Dict[str, List[float]]:
        """Weights measured after an update, which become known with the next pass, by name."""
        self._pending.fetch(self._measurements)
        return {key: [*one] for key, one in self._pending.by_key.items() if isinstance(key, str)}

    @staticmethod
    def loaded(positions: Sequence[int], state: Sequence[Any]) -> Dict[int, ArrayStatistics]:
        """Read statistics from a `state` of this or another process, for `load`."""
        return {
            key: ArrayStatistics.loaded(values)
            for index, gradient, data in state
            for key, values in ((positions[index], gradient), (~positions[index], data))
            if values
        }

    def load(
        self,
        known: Mapping[int, ArrayStatistics],
        weights: Mapping[str, ArrayStatistics],
        pending: Optional[Mapping[str, ArrayStatistics]] = None,
    ) -> None:
        """Replace all statistics; `weights` are newer, `pending` ones, if any, count after a pass."""
        statistics = {self._key(~key) if key < 0 else key: one for key, one in known.items()}
        statistics.update(weights)
        self._known, self._answers, self._iteration, self._new = statistics, {}, -1, set()
        if pending is not None:
            self._pending = _Pending([*pending], [], [*pending.values()])

    @property
    def _shared(self) -> Dict[str, _Key]:
        """Keys of statistics to exchange, by common name: ranks have equal weights, but other activations."""
        weights = self._plan.described.kept
        shared: Dict[str, _Key] = {}
        for layer, (node, layer_input) in self._plan.layer_inputs.items():
            if node.outputs[0] in self.wanted.gradients:
                shared[f"{layer} gradient"] = node.outputs[0]
            if layer_input.weight in self.wanted.data and layer_input.weight not in weights:
                shared[f"{layer} factor"] = ~layer_input.weight
        return shared

    def shared(self) -> Dict[str, Sequence[float]]:
        """Measurements since the last `adopt`, by names that are common to all ranks."""
        shared = self._shared
        message: Dict[str, Sequence[float]] = {
            n: list(self._known[k]) for n, k in shared.items() if k in self._new
        }
        weights = [name for name in self._new if isinstance(name, str)]
        # Weights of other graphs are known, too: ranks may have run different graphs, and measured others.
        if weights and not self.weights.keys() <= {*self._names.values()}:
            message.update((name + _WEIGHT, list(self._known[name])) for name in sorted(weights))
        return message

    def adopt(self, messages: Sequence[Mapping[str, Sequence[float]]]) -> None:
        """Take over the `shared` statistics of all ranks, in one order, combined as if the arrays were one;
        choices use them from the next `begin` on.
        """
        self._known, self._new = {**self._known}, set()
        # All ranks have the same weights: the last one wins, on each of them.
        weights = {name: row for one in messages for name, row in one.items() if name.endswith(_WEIGHT)}
        for name, values in weights.items():
            self._known[name[: -len(_WEIGHT)]] = ArrayStatistics._make(values)
        for name, key in self._shared.items():
            rows = (one.get(name) for one in messages)
            pooled = pool([ArrayStatistics._make(row) for row in rows if row is not None])
            if pooled is not None:
                self._known[key] = pooled
