# SPDX-License-Identifier: Apache-2.0
"""Latest statistics of a graph's arrays, for the next choice of scales."""

from __future__ import annotations

from collections import Counter
from copy import copy
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import nnabla as nn

from ..core.statistics import ArrayStatistics, combine
from ..emulation.rounded_storage import NativeStorage
from ..graph.graph import Graph
from ..graph.plan import GraphPlan
from ..kernels.arrays import ScratchPool, as_float32, stored_dtype
from ..kernels.measurements import Measurements, Results

_Key = Union[int, str]

GradientStatistics = Mapping[int, Tuple[ArrayStatistics, float]]
"""Statistics of the gradients measured in a pass, by position, each with its scale."""

# Prefixes of names in messages between ranks.
_GRADIENT, _ACTIVATION, _WEIGHT = "gradient ", "activation ", "weight "


class StatisticsRequest(NamedTuple):
    """Positions of the variables whose statistics are needed."""

    gradients: FrozenSet[int]  # gradients that methods use
    data: FrozenSet[int]  # weights, also those of products of activations
    watched: FrozenSet[int]  # gradients that are only reported


class _PendingWeights(NamedTuple):
    """Weights measured after an update, which become known with the next pass."""

    keys: Sequence[Optional[_Key]]  # None: of another topology, and ignored
    tickets: List[int]  # of measurements that have not been fetched
    statistics: List[ArrayStatistics]  # those that have been fetched, in the order of the keys

    def fetch(self, measurements: Measurements) -> Results:
        """Wait for all measurements of the pass and return them; add these weights' to `statistics`."""
        # Cleared first, also in savepoints: after an interruption none may remain without a measurement.
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
    """Statistics of gradients, divided by scale and loss weight, and of data, for the next choice."""

    undone = "_latest", "_iteration", "_pending"  # by a `savepoint`

    def __init__(
        self,
        graph: Graph,
        plan: GraphPlan,
        measurements: Measurements,
        pool: ScratchPool,
        storage: NativeStorage,
        request: StatisticsRequest,
    ) -> None:
        self._graph, self._plan, self._storage = graph, plan, storage
        self._measurements, self._pool = measurements, pool
        self.request = request
        # Names of parameters, by position, except ambiguous ones.
        names = {position: name for position, (_, name) in plan.described.kept.items() if name is not None}
        counts = Counter(names.values())
        self._names = {position: name for position, name in names.items() if counts[name] == 1}
        # Key of a gradient: its position. Of data: the name, valid in all topologies, or else `~position`.
        self._latest: Dict[_Key, ArrayStatistics] = {}
        # Choices use those at the start of the iteration, equal on all ranks; in a rerun the present ones.
        self._at_start = self._latest
        self._iteration = -1  # of the last `begin`
        # Measurements of this pass, tickets or finished ones: of gradients, with their scales, and of data.
        self._running: Dict[int, Tuple[Union[int, ArrayStatistics], float]] = {}
        self._data: Dict[_Key, Union[int, ArrayStatistics]] = {}
        self._pending = _PendingWeights((), [], [])
        # Keys measured since the last exchange between ranks.
        self._new: FrozenSet[_Key] = frozenset()

    def for_graph(self, graph: Graph, plan: GraphPlan, storage: NativeStorage) -> LatestStatistics:
        """Adapt to another graph of the topology."""
        # The copy is shallow: both share the dicts of measurements that are running.
        adapted = copy(self)
        adapted._graph, adapted._plan, adapted._storage = graph, plan, storage
        return adapted

    def go_on_from(self, before: LatestStatistics) -> None:
        """Take over the measurements of weights that were started with the previous topology."""
        # Names are valid in all topologies, positions only in their own.
        keys = [key if isinstance(key, str) else None for key in before._pending.keys]
        self._pending = before._pending._replace(keys=keys)

    def begin(self, iteration: int, *, rerun: bool) -> None:
        """Let choices use the present statistics, in a new iteration or a rerun."""
        if rerun or iteration != self._iteration:
            self._iteration, self._at_start = iteration, self._latest

    def gradient(self, position: int) -> Optional[ArrayStatistics]:
        """Statistics of a gradient, divided by its scale and its loss weight; None if unknown."""
        return self._at_start.get(position)

    def data(self, position: int) -> Optional[ArrayStatistics]:
        return self._at_start.get(self._key(position))

    def _key(self, position: int) -> _Key:
        """Key of a variable's data."""
        return self._names.get(position, ~position)

    @property
    def is_incomplete(self) -> bool:
        """True if all must be measured: a needed parameter, or every gradient of methods, is unmeasured."""
        kept, gradients = self._plan.described.kept, self.request.gradients
        return any(p in kept and self._key(p) not in self._at_start for p in self.request.data) or (
            bool(gradients) and gradients.isdisjoint(self._at_start)
        )

    @property
    def weights(self) -> Dict[str, ArrayStatistics]:
        """Statistics of parameters, by name."""
        return {key: statistics for key, statistics in self._latest.items() if isinstance(key, str)}

    def measure(self, gradients: Sequence[Tuple[int, float]], data: Sequence[int]) -> None:
        """Start measuring gradients, given with their scales, and data, in one call, as they are now.

        Gradients that nothing has written are left out.
        """
        if not (gradients or data):
            return
        keys, variables, storage = self._graph.keys, self._graph.variables, self._storage
        unmeasured = []
        for position, scale in gradients:
            rounded = storage.gradients.get(keys[position])
            if rounded is not None:
                self._running[position] = rounded.statistics, scale
            elif stored_dtype(variables[position].grad) is not None:
                unmeasured.append((position, scale))
        unmeasured_data = []
        for position in data:
            key, rounded = self._key(position), storage.data.get(keys[position])
            if key in self._data or key in self._pending.keys:
                continue  # measured in this pass, or after the last update
            if rounded is not None:
                self._data[key] = rounded.statistics
            else:
                unmeasured_data.append(position)
        arrays = [variables[position].grad for position, _ in unmeasured] + self._readable(unmeasured_data)
        if not arrays:
            return
        tickets = self._measurements.measure(arrays)
        self._running.update((p, (ticket, scale)) for (p, scale), ticket in zip(unmeasured, tickets))
        self._data.update(zip(map(self._key, unmeasured_data), tickets[len(unmeasured) :]))

    def measure_weights(self, positions: Sequence[int]) -> None:
        """Start measuring weights after an update, before the next forward rounds them to half."""
        if not positions:
            return
        tickets = self._measurements.measure(self._readable(positions))
        self._pending = _PendingWeights(list(map(self._key, positions)), tickets, [])

    def _readable(self, positions: Sequence[int]) -> List[nn.NdArray]:
        """Data at each of these positions as kernels can read it: in a float32 copy where needed."""
        variables = [self._graph.variables[position] for position in positions]
        return [as_float32(v.data, self._pool.get(v.shape, "float32", i)) for i, v in enumerate(variables)]

    def finish(self, loss_weight_of: Callable[[int], float]) -> Tuple[GradientStatistics, Results]:
        """Wait for a pass's results, remember those for choices; return the gradients', and all results."""
        # Tickets are cleared first: an interruption must leave none without a measurement. Both dicts are
        # cleared in place, as graphs of one topology share them; remembered statistics are replaced, as
        # savepoints hold the former ones.
        running, data, pending = {**self._running}, {**self._data}, self._pending
        self._running.clear()
        self._data.clear()
        self._pending = _PendingWeights((), [], [])
        results = pending.fetch(self._measurements)
        gradients: Dict[int, Tuple[ArrayStatistics, float]] = {}
        new: Dict[_Key, ArrayStatistics] = {}
        remembered = self.request.gradients | self.request.watched
        for position, (measured, scale) in running.items():
            statistics = results.statistics[measured] if isinstance(measured, int) else measured
            gradients[position] = statistics, scale
            # The rest serve components' amaxes only. Zeros of inactive ones would hide earlier gradients.
            unused = statistics.nonfinite or position not in remembered
            loss_weight = 0.0 if unused else loss_weight_of(position)
            if loss_weight:
                new[position] = statistics.scaled(1.0 / (scale * loss_weight))
        for key, one in (*pending.by_key.items(), *data.items()):
            statistics = results.statistics[one] if isinstance(one, int) else one
            if not statistics.nonfinite:
                new[key] = statistics
        if new:
            self._latest = {**self._latest, **new}
            self._new = self._new.union(new)
        return gradients, results

    def state(self, positions: Sequence[int]) -> List[Any]:
        """Export rows for `loaded`: index in `positions`, statistics of the gradient, and of the data."""
        # Indices, as positions may differ in another graph; not gradients that are only watched.
        rows = []
        for index, position in enumerate(positions):
            gradient = self._latest.get(position) if position in self.request.gradients else None
            data = self._latest.get(self._key(position))
            if gradient is not None or data is not None:
                rows.append([index, gradient and list(gradient), data and list(data)])
        return rows

    @property
    def pending_weights(self) -> Dict[str, List[float]]:
        """Weights measured after an update, which become known with the next pass, by name."""
        self._pending.fetch(self._measurements)
        return {key: [*one] for key, one in self._pending.by_key.items() if isinstance(key, str)}

    @staticmethod
    def loaded(positions: Sequence[int], state: Sequence[Any]) -> Dict[int, ArrayStatistics]:
        """Read statistics from rows of a `state`: a gradient's by its position, data's by `~position`."""
        return {
            key: ArrayStatistics.loaded(values)
            for index, gradient, data in state
            for key, values in ((positions[index], gradient), (~positions[index], data))
            if values
        }

    def load(
        self,
        statistics: Mapping[int, ArrayStatistics],
        weights: Mapping[str, ArrayStatistics],
        pending: Optional[Mapping[str, ArrayStatistics]] = None,
    ) -> None:
        """Replace all statistics; `weights` are newer, `pending` known after a pass (None: as they are)."""
        # Keys of data are negative: ~position.
        latest = {self._key(~key) if key < 0 else key: one for key, one in statistics.items()}
        latest.update(weights)
        self._latest, self._at_start, self._iteration, self._new = latest, {}, -1, frozenset()
        if pending is not None:
            self._pending = _PendingWeights([*pending], [], [*pending.values()])

    @property
    def _exchanged(self) -> Dict[str, _Key]:
        """Keys of gradients and activations, by names for all ranks, which have the same parameters."""
        parameters = self._plan.described.kept
        exchanged: Dict[str, _Key] = {}
        for layer, (node, layer_input) in self._plan.layer_inputs.items():
            if node.outputs[0] in self.request.gradients:
                exchanged[_GRADIENT + layer] = node.outputs[0]
            if layer_input.weight in self.request.data and layer_input.weight not in parameters:
                exchanged[_ACTIVATION + layer] = ~layer_input.weight
        return exchanged

    def shared(self) -> Dict[str, Sequence[float]]:
        """Measurements since the last `adopt`, by names that are common to all ranks."""
        new = {name: key for name, key in self._exchanged.items() if key in self._new}
        message: Dict[str, Sequence[float]] = {name: list(self._latest[key]) for name, key in new.items()}
        weights = [name for name in self._new if isinstance(name, str)]
        # Weights are equal on all ranks, and not sent, unless some of other graphs are known: ranks may have
        # run different graphs then, and measured others.
        if weights and not self.weights.keys() <= {*self._names.values()}:
            message.update((_WEIGHT + name, list(self._latest[name])) for name in sorted(weights))
        return message

    def adopt(self, messages: Sequence[Mapping[str, Sequence[float]]]) -> None:
        """Adopt the `shared` statistics of all ranks, in order, combined as if their arrays were one."""
        self._latest, self._new = {**self._latest}, frozenset()
        # All ranks have the same weights: the last one wins, on each of them.
        for name, row in (item for message in messages for item in message.items()):
            if name.startswith(_WEIGHT):
                self._latest[name[len(_WEIGHT) :]] = ArrayStatistics._make(row)
        for name, key in self._exchanged.items():
            rows = (one.get(name) for one in messages)
            combined = combine([ArrayStatistics._make(row) for row in rows if row is not None])
            if combined is not None:
                self._latest[key] = combined
