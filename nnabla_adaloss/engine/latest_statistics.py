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
_Measured = Union[int, ArrayStatistics]  # ticket of a running measurement, or its result

GradientStatistics = Mapping[int, Tuple[ArrayStatistics, float]]
"""Statistics of the gradients measured in a pass, by position, each with its scale."""

# Prefixes of names in messages between ranks.
_GRADIENT, _ACTIVATION, _WEIGHT = "gradient ", "activation ", "weight "


class StatisticsRequest(NamedTuple):
    """Positions of the variables whose statistics are needed."""

    gradients: FrozenSet[int]  # gradients that methods use
    data: FrozenSet[int]  # weights, also those of products of activations
    watched: FrozenSet[int]  # gradients that are only reported


class LatestStatistics:
    """Statistics of gradients, divided by scale and loss weight, and of data, for the next choice."""

    undone = "_latest", "_iteration"  # restored from a `savepoint`

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
        # Names of parameters, by position; a name of several would mix their statistics, and is left out.
        parameters = plan.described.kept
        uses = Counter(name for _, name in parameters.values())
        self._names = {p: name for p, (_, name) in parameters.items() if name is not None and uses[name] == 1}
        # Key of a gradient: its position. Of data: the name, valid in all topologies, or else `~position`.
        self._latest: Dict[_Key, ArrayStatistics] = {}
        # For choices: `_latest` at the start of the iteration (then equal on all ranks) or of the rerun.
        self._at_start = self._latest
        self._iteration = -1  # of the last `begin`
        # Measurements of this pass: of gradients, by position, with their scales; and of data.
        self._gradients: Dict[int, Tuple[_Measured, float]] = {}
        self._data: Dict[_Key, _Measured] = {}
        # Keys measured since the last exchange between ranks.
        self._new: FrozenSet[_Key] = frozenset()

    def for_graph(self, graph: Graph, plan: GraphPlan, storage: NativeStorage) -> LatestStatistics:
        """Adapt to another graph of the topology."""
        # A shallow copy: the dicts of running measurements stay shared, as `Measurements` itself is.
        adapted = copy(self)
        adapted._graph, adapted._plan, adapted._storage = graph, plan, storage
        return adapted

    def begin(self, iteration: int, *, rerun: bool) -> None:
        """Let choices use the present statistics, if this begins an iteration or a rerun."""
        if rerun or iteration != self._iteration:
            self._iteration, self._at_start = iteration, self._latest

    def gradient(self, position: int) -> Optional[ArrayStatistics]:
        """Statistics of a gradient, divided by its scale and its loss weight; None if unknown."""
        return self._at_start.get(position)

    def data(self, position: int) -> Optional[ArrayStatistics]:
        """Statistics of a variable's data; None if unknown."""
        return self._at_start.get(self._key(position))

    def _key(self, position: int) -> _Key:
        """Key of a variable's data."""
        return self._names.get(position, ~position)

    @property
    def is_incomplete(self) -> bool:
        """True if all arrays must be measured before the next choice."""
        parameters, gradients = self._plan.described.kept, self.request.gradients
        if any(self._key(p) not in self._at_start for p in self.request.data if p in parameters):
            return True
        # Some gradients may be missing for long, as those of a branch with loss weight 0; not all.
        return bool(gradients) and gradients.isdisjoint(self._at_start)

    @property
    def weights(self) -> Dict[str, ArrayStatistics]:
        """Statistics of parameters, by name."""
        return {key: statistics for key, statistics in self._latest.items() if isinstance(key, str)}

    def measure(self, gradients: Sequence[Tuple[int, float]], data: Sequence[int]) -> None:
        """Start measuring written gradients, given with their scales, and data, in one call."""
        if not (gradients or data):
            return
        keys, variables, storage = self._graph.keys, self._graph.variables, self._storage
        # An emulated storage has measured the arrays that it has rounded.
        unmeasured = []
        for position, scale in gradients:
            rounded = storage.gradients.get(keys[position])
            if rounded is not None:
                self._gradients[position] = rounded.statistics, scale
            elif stored_dtype(variables[position].grad) is not None:
                unmeasured.append((position, scale))
        unmeasured_data = []
        for position in data:
            key, rounded = self._key(position), storage.data.get(keys[position])
            if rounded is not None:
                self._data[key] = rounded.statistics
            else:
                unmeasured_data.append(position)
        arrays = [variables[position].grad for position, _ in unmeasured] + self._readable(unmeasured_data)
        if not arrays:
            return
        tickets = self._measurements.measure(arrays)
        self._gradients.update((p, (ticket, scale)) for (p, scale), ticket in zip(unmeasured, tickets))
        self._data.update(zip(map(self._key, unmeasured_data), tickets[len(unmeasured) :]))

    def _readable(self, positions: Sequence[int]) -> List[nn.NdArray]:
        """Data at each of these positions as kernels can read it: in a float32 copy where needed."""
        variables = [self._graph.variables[position] for position in positions]
        return [as_float32(v.data, self._pool.get(v.shape, "float32", i)) for i, v in enumerate(variables)]

    def finish(self, loss_weight_of: Callable[[int], float]) -> Tuple[GradientStatistics, Results]:
        """Wait for a pass's results, remember those for choices; return the gradients', and all results."""
        # Emptied before waiting: after an interruption, a ticket in them would be read from the next results.
        # In place: graphs of one topology share them.
        measured_gradients, measured_data = {**self._gradients}, {**self._data}
        self._gradients.clear()
        self._data.clear()
        results = self._measurements.fetch()
        new: Dict[_Key, ArrayStatistics] = {}
        for key, measured in measured_data.items():
            statistics = results.statistics[measured] if isinstance(measured, int) else measured
            if not statistics.nonfinite:
                new[key] = statistics
        gradients: Dict[int, Tuple[ArrayStatistics, float]] = {}
        # Other gradients are measured for the amaxes of components only.
        remembered = self.request.gradients | self.request.watched
        for position, (measured, scale) in measured_gradients.items():
            statistics = results.statistics[measured] if isinstance(measured, int) else measured
            gradients[position] = statistics, scale
            if position in remembered and not statistics.nonfinite:
                loss_weight = loss_weight_of(position)
                # Zeros of an inactive component do not replace earlier gradients.
                if loss_weight:
                    new[position] = statistics.scaled(1.0 / (scale * loss_weight))
        if new:
            # A new dict, as a savepoint refers to the former one.
            self._latest = {**self._latest, **new}
            self._new = self._new.union(new)
        return gradients, results

    def state(self, positions: Sequence[int]) -> List[Any]:
        """Export rows for `read_state`: index in `positions`, statistics of a used gradient, and of data."""
        # Older states lack the wiring: their graph may have numbered variables otherwise, in the same order.
        rows = []
        for index, position in enumerate(positions):
            gradient = self._latest.get(position) if position in self.request.gradients else None
            data = self._latest.get(self._key(position))
            if gradient is not None or data is not None:
                rows.append([index, gradient and list(gradient), data and list(data)])
        return rows

    @staticmethod
    def read_state(positions: Sequence[int], state: Sequence[Any]) -> Dict[int, ArrayStatistics]:
        """Read statistics from rows of a `state`: a gradient's by its position, data's by `~position`."""
        return {
            key: ArrayStatistics.from_list(values)
            for index, gradient, data in state
            for key, values in ((positions[index], gradient), (~positions[index], data))
            if values
        }

    def load(self, statistics: Mapping[int, ArrayStatistics], weights: Mapping[str, ArrayStatistics]) -> None:
        """Replace all statistics; `weights` replace those in `statistics`."""
        latest = {self._key(~key) if key < 0 else key: one for key, one in statistics.items()}
        latest.update(weights)
        self._latest, self._at_start, self._iteration, self._new = latest, {}, -1, frozenset()

    @property
    def _message_keys(self) -> Dict[str, _Key]:
        """Keys of gradients and activations, by names for all ranks, which have the same parameters."""
        parameters = self._plan.described.kept
        keys: Dict[str, _Key] = {}
        for layer, (node, layer_input) in self._plan.layer_inputs.items():
            if node.outputs[0] in self.request.gradients:
                keys[_GRADIENT + layer] = node.outputs[0]
            if layer_input.weight in self.request.data and layer_input.weight not in parameters:
                keys[_ACTIVATION + layer] = ~layer_input.weight
        return keys

    def message(self) -> Dict[str, Sequence[float]]:
        """Message to other ranks: measurements since the last `adopt`, by names that all ranks have."""
        message: Dict[str, Sequence[float]] = {
            name: list(self._latest[key]) for name, key in self._message_keys.items() if key in self._new
        }
        weights = [name for name in self._new if isinstance(name, str)]
        # Weights are equal on all ranks, but ranks that run different graphs measure different ones. A rank
        # that knows only those of its graph (`_names`) need not send them.
        if weights and not self.weights.keys() <= {*self._names.values()}:
            message.update((_WEIGHT + name, list(self._latest[name])) for name in sorted(weights))
        return message

    def adopt(self, messages: Sequence[Mapping[str, Sequence[float]]]) -> None:
        """Adopt the statistics in the `message`s of all ranks, in order, combined as if arrays were one."""
        self._latest, self._new = {**self._latest}, frozenset()
        # Weights are equal on all ranks; so are statistics, as each rank takes the last message with one.
        for name, row in (item for message in messages for item in message.items()):
            if name.startswith(_WEIGHT):
                self._latest[name[len(_WEIGHT) :]] = ArrayStatistics._make(row)
        for name, key in self._message_keys.items():
            combined = combine([ArrayStatistics._make(one[name]) for one in messages if name in one])
            if combined is not None:
                self._latest[key] = combined
