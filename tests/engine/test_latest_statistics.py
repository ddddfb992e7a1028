# SPDX-License-Identifier: Apache-2.0
"""Statistics of the arrays of a graph, as they were when an iteration began."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss.core.statistics import ArrayStatistics, combine, statistics_of
from nnabla_adaloss.emulation.rounded_storage import NativeStorage
from nnabla_adaloss.engine.latest_statistics import LatestStatistics, StatisticsRequest
from nnabla_adaloss.graph.graph import Graph
from nnabla_adaloss.graph.plan import GraphPlan
from nnabla_adaloss.kernels import CpuKernels
from nnabla_adaloss.kernels.arrays import ScratchPool
from nnabla_adaloss.kernels.measurements import HostMeasurements, Results


class Arrays:
    """A graph with one variable for each list of values, which its data and its gradient hold: leaves, as
    weights are, or activations.
    """

    def __init__(self, *values: Sequence[float], leaves: bool = True) -> None:
        self._leaves = [nn.Variable((len(many),), need_grad=True) for many in values]
        self.variables = self._leaves if leaves else [F.identity(v) for v in self._leaves]
        loss = F.sum(F.concatenate(*self.variables, axis=0) if len(values) > 1 else self.variables[0])
        self.graph = Graph(loss)
        self.plan = GraphPlan(self.graph, names={})
        self.positions: List[int] = [self.graph.positions[hash(v)] for v in self.variables]
        for v, many in zip(self.variables, values):
            v.d = v.g = np.array(many, np.float32)

    def statistics(
        self,
        storage: Any = None,
        measurements: Optional[HostMeasurements] = None,
        request: Optional[StatisticsRequest] = None,
    ) -> LatestStatistics:
        """Statistics for methods that look at everything."""
        everything = frozenset(self.positions)
        return LatestStatistics(
            self.graph,
            self.plan,
            measurements or HostMeasurements(CpuKernels()),
            ScratchPool(),
            storage or NativeStorage(),
            request or StatisticsRequest(everything, everything, frozenset()),
        )


class Recorder(HostMeasurements):
    """Measurements that write down how many arrays came together."""

    def __init__(self) -> None:
        super().__init__(CpuKernels())
        self.together: List[int] = []

    def measure(self, arrays: Sequence[nn.NdArray]) -> List[int]:
        if arrays:
            self.together.append(len(arrays))
        return super().measure(arrays)


def finish(source: LatestStatistics, weights: Mapping[int, float] = {}) -> Dict[int, Tuple[float, bool]]:
    """Largest finite magnitude of each measured gradient, without its scale, and whether all is finite."""
    gradients, _ = source.finish(lambda position: weights.get(position, 1.0))
    return {p: (found.abs_max / scale, found.finite) for p, (found, scale) in gradients.items()}


Known = Tuple[Optional[ArrayStatistics], Optional[ArrayStatistics]]


def known(source: LatestStatistics, position: int, iteration: int = 1) -> Known:
    """What is known of the gradient and of the data when another iteration begins."""
    source.begin(iteration, rerun=False)
    return source.gradient(position), source.data(position)


def test_measurements_are_kept_without_scale_and_loss_weight() -> None:
    arrays = Arrays([1.0, -4.0, 0.0], [2.0, 0.5], [3.0])
    source, (first, second, third) = arrays.statistics(), arrays.positions
    gradients = [(first, 4.0), (second, 2.0), (third, 4.0)]
    source.measure(gradients, [second])
    # What a gradient counts for a component is as it came.
    found = finish(source, {first: 2.0**-20, second: 8.0})
    assert found == {first: (1.0, True), second: (1.0, True), third: (0.75, True)}
    first_known = statistics_of(np.array([2.0**18, -(2.0**20), 0.0]))
    assert known(source, first) == (first_known, None)
    assert known(source, second) == (
        statistics_of(np.array([2.0**-3, 2.0**-5])),
        statistics_of(np.array([2.0, 0.5])),
    )
    # Absent from a batch, it leaves what was known; whether it is finite is told all the same.
    arrays.variables[0].g, arrays.variables[2].g = 7.0, np.inf
    source.measure(gradients, [])
    found = finish(source, {first: 0.0, third: 0.0})
    assert found[first] == (1.75, True)
    assert not found[third][1]
    assert known(source, first, 2)[0] == first_known


def test_choices_of_one_iteration_see_the_same() -> None:
    arrays = Arrays([1.0])
    source, (v,), (position,) = arrays.statistics(), arrays.variables, arrays.positions

    def measure(value: float) -> None:
        v.d = v.g = value
        source.measure([(position, 1.0)], [position])
        finish(source)

    measure(1.0)
    one = known(source, position, 0)
    measure(5.0)  # a micro-batch, or a retry
    assert known(source, position, 0) == one
    # The same batch once more, with what it has shown.
    source.begin(0, rerun=True)
    assert source.gradient(position) == source.data(position) == statistics_of(np.array([5.0]))
    measure(7.0)
    assert known(source, position, 1)[0] == statistics_of(np.array([7.0]))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_nonfinite_gradients_are_reported_once_and_leave_earlier_measurements(bad: float) -> None:
    arrays = Arrays([1.0, 2.0], [3.0])
    source, (v, _), (spoilt, good) = arrays.statistics(), arrays.variables, arrays.positions
    gradients = [(spoilt, 4.0), (good, 4.0)]
    source.measure(gradients, [spoilt])
    finish(source)
    before = known(source, spoilt)
    v.g = v.d = np.array([0.5, bad], np.float32)
    source.measure(gradients, [spoilt])
    found = finish(source)
    # The largest of what is finite is told all the same.
    assert found == {spoilt: (0.125, False), good: (0.75, True)}
    assert known(source, spoilt, 2) == before
    assert finish(source) == {}


def test_requested_arrays_are_kept_and_no_others() -> None:
    arrays = Arrays([1.0], [2.0], [3.0], [4.0])
    of_method, of_data, watched, other = arrays.positions
    request = StatisticsRequest(frozenset({of_method}), frozenset({of_data}), frozenset({watched}))
    source = arrays.statistics(request=request)
    source.measure([(position, 1.0) for position in arrays.positions], [of_data])
    # Whatever is measured counts for components.
    assert [amax for amax, _ in finish(source).values()] == [1.0, 2.0, 3.0, 4.0]
    found = [[one is not None for one in known(source, p)] for p in arrays.positions]
    assert found == [[True, False], [False, True], [True, False], [False, False]]
    # What is only reported is no matter of other ranks, nor of a saved state.
    assert [index for index, _, _ in source.state(arrays.positions)] == [0, 1]
    assert source.message() == {}


def test_a_gradient_that_backward_has_left_at_zero_stays_so_and_is_not_waited_for() -> None:
    arrays = Arrays([1.0], [2.0])
    source, (empty, _) = arrays.statistics(), arrays.variables
    empty.grad.zero()
    source.measure([(position, 4.0) for position in arrays.positions], [])
    assert finish(source) == {arrays.positions[1]: (0.5, True)}
    assert empty.grad.zeroing
    assert known(source, arrays.positions[0]) == (None, None)


def test_a_loaded_state_replaces_all_measurements_of_its_iteration() -> None:
    arrays = Arrays([1.0], leaves=False)
    source, (position,) = arrays.statistics(), arrays.positions
    source.measure([(position, 4.0)], [])
    finish(source)
    state = source.state(arrays.positions)
    arrays.variables[0].g = 5.0
    source.measure([(position, 4.0)], [])
    finish(source)
    source.begin(1, rerun=False)
    source.load(LatestStatistics.read_state(arrays.positions, state), {})
    assert known(source, position) == (statistics_of(np.array([0.25])), None)


class Rank:
    """Products of two activations, each with a layer behind it, by name."""

    def __init__(self, *names: str) -> None:
        losses = []
        for name in names:
            with nn.parameter_scope(name):
                h, other = (PF.affine(nn.Variable((4, 3)), 5, name=own) for own in ("in", "other"))
                h, other = (F.tanh(F.reshape(v, (1, 4, 5))) for v in (h, other))
                product = F.batch_matmul(h, other, transpose_b=True)
                losses.append(F.sum(PF.affine(F.tanh(product), 2, base_axis=2, name="out")))
        self.graph = Graph(F.add_n(*losses))
        self.plan = GraphPlan(self.graph)
        self.layers = self.plan.layer_inputs
        gradients = frozenset(node.outputs[0] for node, _ in self.layers.values())
        factors = frozenset(slot.weight for _, slot in self.layers.values())
        measurements, request = (
            HostMeasurements(CpuKernels()),
            StatisticsRequest(gradients, factors, frozenset()),
        )
        self.source = LatestStatistics(
            self.graph, self.plan, measurements, ScratchPool(), NativeStorage(), request
        )

    def measure(self, values: Mapping[str, float], *, weight: float = 1.0) -> None:
        """Gradients of some products, and what they multiply by, of such values."""
        for name, value in values.items():
            for layer in (product(name), f"{product(name)}:1", f"{name}/out/affine"):
                node, slot = self.layers[layer]
                output, factor = (self.graph.variables[p] for p in (node.outputs[0], slot.weight))
                output.g, factor.d = value, value
                self.source.measure([(node.outputs[0], 4.0)], [slot.weight])
        self.source.finish(lambda position: weight)

    def present(self, layer: str) -> Known:
        """What is known of a layer in this iteration."""
        node, slot = self.layers[layer]
        return self.source.gradient(node.outputs[0]), self.source.data(slot.weight)

    def known(self, layer: str) -> Known:
        """What is known of a layer when another iteration begins."""
        self.source.begin(self.source._iteration + 1, rerun=False)
        return self.present(layer)


def product(name: str) -> str:
    return f"{name}/BatchMatmul"


def test_statistics_of_all_ranks_are_those_of_one_array() -> None:
    """Of the layers that a rank has: what others have besides is no matter of it."""
    ranks = [Rank("a", "b"), Rank("b", "c")]
    ranks[0].measure({"a": 1.0, "b": 1.0})
    ranks[1].measure({"b": 4.0, "c": 8.0}, weight=2.0)
    told = [rank.source.message() for rank in ranks]

    def pooled(columns: int, *values: float) -> Any:
        return combine([statistics_of(np.full((4, columns), value)) for value in values])

    for rank, alone, values in zip(ranks, "ac", ((0.25, 1.0), (1.0, 8.0))):
        before = rank.known(product("b"))
        rank.source.adopt(told)
        assert rank.present(product("b")) == before
        assert rank.known(product("b")) == (pooled(4, 0.25, 0.5), pooled(5, 1.0, 4.0))
        assert rank.known(product(alone)) == (pooled(4, values[0]), pooled(5, values[1]))


def test_ranks_exchange_only_new_measurements() -> None:
    rank = Rank("a", "b")
    for name in "ab":
        rank.measure({name: 1.0})
        told = rank.source.message()
        assert {key.split("/")[0][-1] for key in told} == {name}
        rank.source.adopt([told])
    assert rank.source.message() == {}
    # What no rank has measured stays as it was.
    before = rank.known(product("a"))
    rank.source.adopt([{}, {}])
    assert rank.known(product("a")) == before
    rank.measure({"a": 2.0})
    rank.source.load({}, {})
    assert rank.source.message() == {}


def weights_of(*layers: str) -> LatestStatistics:
    """Statistics of a graph of these layers, which has measured their weights."""
    h = nn.Variable((2, 3), need_grad=True)
    for layer in layers:
        h = PF.affine(h, 3, name=layer)
    graph = Graph(F.mean(h))
    plan = GraphPlan(graph)
    factors = [slot.weight for _, slot in plan.layer_inputs.values()]
    request = StatisticsRequest(frozenset(), frozenset(factors), frozenset())
    measurements = HostMeasurements(CpuKernels())
    found = LatestStatistics(graph, plan, measurements, ScratchPool(), NativeStorage(), request)
    found.measure((), factors)
    found.finish(lambda position: 1.0)
    return found


def test_statistics_of_a_weight_hold_in_other_topologies() -> None:
    before, found = weights_of("a", "b"), weights_of("b", "c")
    b, c = (slot.weight for _, slot in reversed([*found._plan.layer_inputs.values()]))
    found.load({}, before.weights)
    found.begin(1, rerun=False)
    assert (found.data(b), found.data(c)) == (before.weights["b/affine/W"], None)
    assert found.is_incomplete
    # What the present graph has measured is for the next ones, too.
    found.measure((), [b, c])
    found.finish(lambda position: 1.0)
    found.begin(2, rerun=False)
    assert not found.is_incomplete
    assert found.weights.keys() == {f"{name}/affine/W" for name in "abc"}


def test_weights_of_one_name_are_told_apart() -> None:
    arrays = Arrays([1.0], [2.0])
    arrays.plan = GraphPlan(arrays.graph, names={hash(v): "w" for v in arrays.variables})
    source = arrays.statistics()
    source.measure((), arrays.positions)
    finish(source)
    assert [known(source, p)[1] for p in arrays.positions] == [
        statistics_of(np.array(values)) for values in ([1.0], [2.0])
    ]
    assert source.weights == {}


def test_ranks_tell_each_other_weights_where_their_graphs_differ() -> None:
    alone, rank, other = weights_of("a"), weights_of("a", "b"), weights_of("a")
    assert alone.message() == {}
    rank.load({}, weights_of("c").weights)
    assert rank.message() == {}
    b = next(iter(rank._plan.layer_inputs.values()))[1].weight
    rank.measure((), [b])
    rank.finish(lambda position: 1.0)
    told = rank.message()
    assert told.keys() == {"weight b/affine/W"}
    other.adopt([{}, told])
    assert other.weights["b/affine/W"] == rank.weights["b/affine/W"]
    rank.adopt([{}, told])
    assert rank.message() == {}


# What ends a pass early, and what is only checked.


class Interrupted(HostMeasurements):
    interrupt = True

    def fetch(self) -> Results:
        if self.interrupt:
            raise KeyboardInterrupt
        return super().fetch()


def test_an_interruption_leaves_no_ticket_without_a_measurement() -> None:
    """A pass that ends early, even within its own end, spoils nothing for the next one."""
    measurements = Interrupted(CpuKernels())
    arrays = Arrays(*([1.0, 2.0] for _ in range(5)))
    source = arrays.statistics(measurements=measurements)
    source.measure([(position, 1.0) for position in arrays.positions], arrays.positions)
    with pytest.raises(KeyboardInterrupt):
        finish(source)
    measurements.interrupt = False
    arrays.variables[1].g = 7.0
    second = arrays.positions[1]
    source.measure([(second, 1.0)], [])
    assert finish(source) == {second: (7.0, True)}
    assert known(source, second) == (statistics_of(np.array([7.0, 7.0])), None)
