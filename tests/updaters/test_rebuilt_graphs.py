# SPDX-License-Identifier: Apache-2.0
"""Graphs that are built anew, and batches that change their size, train as one graph that stays."""

from __future__ import annotations

import gc
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScaling,
    AdaptiveLossScalingUpdater,
    FormatEmulation,
    GraphPlan,
    Recorder,
)
from nnabla_adaloss.core.layer_record import Reason
from tests.worlds.monitors import Records
from tests.worlds.networks import two_layers
from tests.worlds.tampering import Tampering
from tests.worlds.trainings import AS_THE_BASELINE, METHODS, Loop, updater_of
from tests.worlds.values import assert_equal, constant, data, snapshot

pytestmark = pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")

Head = Callable[[nn.Variable], nn.Variable]


def normalized(x: nn.Variable) -> nn.Variable:
    h = F.tanh(PF.batch_normalization(PF.affine(x, 6, name="a"), name="bn"))
    return F.mean(PF.affine(h, 4, name="b") ** 2)


def shared(x: nn.Variable) -> nn.Variable:
    h = x
    for _ in range(3):
        h = F.tanh(PF.affine(h, 5, name="again"))
    return F.mean(PF.affine(h, 4, name="b") ** 2)


def small_weight(x: nn.Variable) -> nn.Variable:
    h = F.relu(PF.affine(x, 6, name="a"), inplace=True)
    return F.mean(PF.affine(F.tanh(PF.affine(h, 6, name="b")), 4, name="c") ** 2) * 1e-6


def clipped(x: nn.Variable) -> nn.Variable:
    h = PF.affine(x, 6, name="a")
    h = F.clip_grad_by_value(h, F.constant(-1e-3, h.shape), F.constant(1e-3, h.shape))
    return F.mean(PF.affine(F.tanh(h), 4, name="b") ** 2)


def computed_weight(x: nn.Variable) -> nn.Variable:
    """What is swapped for a scaled copy is another array in each graph."""
    h = F.tanh(PF.affine(x, 6, name="a"))
    h = F.tanh(PF.affine(h, 6, name="b", apply_w=lambda w: w * 2.0**-6))
    return F.mean(PF.affine(h, 4, name="c") ** 2)


NETWORKS = [normalized, shared, small_weight, clipped, computed_weight]


class Training:
    """A network that is trained on random numbers, on one graph or on graphs that are built anew; how each
    backward came to its scales is in `passes`, with which plan in `plans`.
    """

    def __init__(
        self, *networks: Head, rebuilt: bool = True, batches: Tuple[int, ...] = (4,), **options: Any
    ) -> None:
        nn.clear_parameters()
        self._rng, self._fed = np.random.default_rng(3), 0
        self._networks, self._batches, self._rebuilt = networks, batches, rebuilt
        self.passes: List[str] = []
        self.plans: List[GraphPlan] = []
        for network in networks:
            loss = self._build(network, batches[0])
        self.updater = updater_of(loss, self._feed, S.Momentum(0.02), **{"storage": None, **options})

    def _build(self, network: Head, batch: int) -> nn.Variable:
        nn.seed(0)
        self._x = nn.Variable((batch, 5))
        return network(self._x)

    def _feed(self) -> None:
        if self._rebuilt:
            network = self._networks[self._fed % len(self._networks)]
            batch = self._batches[self._fed % len(self._batches)]
            self.updater.loss = self._build(network, batch)
        self._fed += 1
        self._x.d = self._rng.standard_normal(self._x.shape)

    def run(self, iterations: int) -> None:
        for _ in range(iterations):
            assert self.updater.update().updated
            self.passes.append(self.updater.scaling.result.kind)
            self.plans.append(self.updater.scaling.plan)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("storage", "delay"), [(None, 0), ("float16", 0), ("float16", 1)])
@pytest.mark.parametrize("network", NETWORKS)
def test_no_bit_is_another_than_with_one_graph(
    network: Head, storage: Optional[str], delay: int, method: str
) -> None:
    config = AdaLossConfig(loss_scale_method=method, delay=delay)
    found: List[Any] = []
    for rebuilt in (False, True):
        training = Training(network, rebuilt=rebuilt, storage=storage, config=config)
        training.run(12)
        trained = {name: value.tobytes() for name, value in snapshot().items()}
        layer_scales, state = training.updater.scaling.layer_scales, training.updater.scaling.state_dict()
        found.append((training.passes, trained, layer_scales, state))
    assert found[0] == found[1]
    # The first plan is made for the graph that the updater was made with.
    assert len({id(plan) for plan in training.plans}) == 1


@pytest.mark.parametrize("assigned", [False, True])
def test_an_unused_loss_that_is_replaced_hands_its_state_on(assigned: bool) -> None:
    """And a scale that is assigned right after another loss is used at once."""
    found = []
    for replaced in (0, 1, 2):
        training = Training(normalized, rebuilt=False, config=AdaLossConfig(measure_every=8))
        training.run(4)
        for _ in range(replaced):
            training.updater.loss = training._build(normalized, 4)
        if assigned:
            training.updater.scale = 16.0
        training.run(3)
        found.append((training.passes, training.updater.scaling.state_dict()))
    assert found[0] == found[1] == found[2]
    assert found[0][0][-3:] == ["measuring" if assigned else "hookless", "hookless", "hookless"]


def test_an_overflow_drops_the_schedules_of_all_loss_weights() -> None:
    training = Training(normalized, clipped)
    training.run(6)
    assert training.passes[-2:] == ["hookless", "hookless"]
    training.updater.scaling.restart(8.0)
    training.run(4)
    # Each is measured once; what they have in common goes by name.
    assert training.passes[-4:] == ["measuring", "measuring", "hookless", "hookless"]


def test_a_state_that_is_loaded_leaves_nothing_of_graphs_that_took_turns() -> None:
    config = AdaLossConfig(loss_scale_method="approx_range", delay=1)
    training = Training(normalized, clipped, config=config)
    training.run(5)
    state = training.updater.state_dict()
    training.run(4)
    graph = training.updater.scaling._graph
    assert any(one.statistics for one in graph._others)
    training.updater.load_state_dict(state)
    assert not any(one.statistics or one.schedules.entries for one in graph._others)
    training.run(2)


def test_no_more_than_sixteen_kinds_of_graphs_are_remembered() -> None:
    def recurrent(steps: int) -> Head:
        def network(x: nn.Variable) -> nn.Variable:
            h = x
            for _ in range(steps):
                h = F.tanh(PF.affine(h, 5, name="a"))
            return F.mean(h**2)

        return network

    training = Training(*[recurrent(steps) for steps in range(1, 21)])
    training.run(41)
    # And the present one.
    assert len(training.updater.scaling._graph._others) == 15


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("delay", [0, 1])
def test_graphs_of_other_shapes_share_the_schedule(method: str, delay: int) -> None:
    config = AdaLossConfig(loss_scale_method=method, delay=delay)
    training = Training(small_weight, batches=(4, 7, 1, 5), config=config)
    training.run(34)
    # What follows from shapes is found out for each.
    assert len({id(plan) for plan in training.plans}) > 2
    assert not training.updater.scaling._graph._others
    calibrated = training.passes[-16:]
    assert calibrated.count("measuring") == (2 if delay == 0 else 0)
    assert calibrated.count("hookless") == (14 if delay == 0 else 16)


class Passes(Tampering):
    """Something in a graph that can be seen to go away with it."""

    def changed(self, g: np.ndarray) -> np.ndarray:
        return g


@pytest.mark.parametrize("options", [{}, {"storage": "float16"}, {"storage": "fp8_hybrid"}], ids=str)
def test_no_graph_is_kept_but_the_last(options: Dict[str, Any]) -> None:
    seen: List[Any] = []

    def network(x: nn.Variable) -> nn.Variable:
        function = Passes()
        seen.append(weakref.ref(function))
        return F.mean(PF.affine(function(PF.affine(x, 6, name="a")), 4, name="b") ** 2)

    training = Training(network, network, batches=(4, 7), **options)
    gc.collect()
    gc.disable()  # Activations are large, and must not wait for it.
    try:
        for _ in range(12):
            training.updater.update()
            alive = [function for function in seen if function() is not None]
            assert len(alive) <= 1
    finally:
        gc.enable()


@pytest.mark.parametrize("storage", [None, "float16"])
def test_scaled_activations_of_many_lengths_are_not_kept(storage: Optional[str]) -> None:
    def scores(x: nn.Variable) -> nn.Variable:
        rows = F.reshape(PF.affine(x, 5, name="a"), (1, *x.shape))
        weights = F.softmax(F.batch_matmul(rows, rows * 2.0, transpose_b=True))
        return F.mean(F.batch_matmul(weights, rows) ** 2) * 1e-6

    config = AdaLossConfig(loss_scale_method="approx_range", use_bound=False, measure_every=1)
    lengths = tuple(range(2, 42))
    training = Training(scores, batches=lengths, config=config, storage=storage)
    training.run(len(lengths))
    # Of the last two graphs, some for each.
    assert 0 < len(training.updater.scaling._graph.pool) < 20


@pytest.mark.parametrize(
    ("options", "rebuilt"),
    [
        ({}, False),
        ({}, True),
        ({"storage": "fp8_hybrid"}, True),
        ({"accum_grad": 2}, True),
        ({"monitors": [Recorder()]}, True),
        ({"config": AdaLossConfig(measure_every=1)}, True),
        ({"config": AdaLossConfig(delay=0)}, True),
        (AS_THE_BASELINE, True),
    ],
)
def test_updates_leave_no_garbage(options: Dict[str, Any], rebuilt: bool) -> None:
    x, updaters = data(4, 5), []

    def feed() -> None:
        if rebuilt and updaters:
            updaters[0].loss = normalized(x)

    updaters.append(updater_of(normalized(x), feed, **options))
    for _ in range(10):
        updaters[0].update()
    gc.collect()
    # What other tests left behind may take several rounds: nnabla lets go of Python's objects in between.
    gc.freeze()
    gc.disable()
    try:
        for _ in range(10):
            updaters[0].update()
        assert gc.collect() == 0
    finally:
        gc.enable()


WIDTH = 5
ITERATIONS = 12


def attention(x: nn.Variable) -> nn.Variable:
    h = PF.affine(x, 8, base_axis=2, name="in")
    q, k, v = (PF.affine(h, 8, base_axis=2, name=name) for name in "qkv")
    h = h + F.batch_matmul(F.softmax(F.batch_matmul(q, k, transpose_b=True)), v)
    h = PF.layer_normalization(h, batch_axis=(0, 1), name="norm")
    return F.mean(PF.affine(F.relu(h), 3, base_axis=2, name="out") ** 2)


class Sentences(Loop):
    """Random sentences of random lengths in batches of random size."""

    def __init__(self, *, rebuilt: bool = False, input_gradient: bool = False) -> None:
        nn.random.set_parameter_seed(0)
        super().__init__(attention, (2, 6, WIDTH), rebuilt=rebuilt, need_grad=input_gradient)

    def feed(self) -> None:
        shape = int(self.rng.integers(1, 6)), int(self.rng.integers(2, 9)), WIDTH
        if self.rebuilt:
            self.x = nn.Variable(shape, need_grad=self.x.need_grad)
        else:
            self.x.reset_shape(shape, True)
        super().feed()
        self.x.grad.zero()


def test_a_shape_that_changes_before_the_first_update_is_noticed() -> None:
    sentences = Sentences()
    updater = AdaptiveLossScalingUpdater(sentences.solver, sentences.loss)
    for length in (9, 4):
        sentences.x.reset_shape((2, length, WIDTH), True)
        sentences.x.d = 1.0
        updater.update()
        nodes = updater.scaling.plan.nodes
        fan_in = {s.scaled.fan_in for n in nodes if n.type_name == "BatchMatmul" for s in n.layer_inputs}
        assert fan_in == {float(length), 8.0}


def test_records_of_held_scales_are_of_the_shapes_of_their_batch() -> None:
    sentences = Sentences(rebuilt=True)
    monitor = Records()
    records = monitor.records
    lengths: List[int] = []

    def feed() -> None:
        sentences.feed()
        lengths.append(sentences.x.shape[1])
        updater.loss = sentences.loss

    updater = AdaptiveLossScalingUpdater(sentences.solver, sentences.loss, feed, monitors=[monitor])
    for _ in range(12):
        updater.update()
    held = [r for r in records if r.reason is Reason.HELD and r.layer == "v/affine/BatchMatmul:1"]
    assert len(held) > 8
    # The values' gradient sums over the queries: as many as the sentence is long.
    first = records[0].iteration
    assert [r.fan_in for r in held] == [float(lengths[r.iteration - first]) for r in held]


@pytest.mark.parametrize(
    "options",
    [
        *({"loss_scale_method": method, "delay": delay} for method in METHODS for delay in (0, 1)),
        {"loss_scale_method": "fixed", "fixed_loss_scale": 2.0, "use_bound": False},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
@pytest.mark.parametrize(
    ("rebuilt", "input_gradient", "accum_grad"), [(False, False, 2), (False, True, 1), (True, True, 2)]
)
def test_no_bit_is_another(
    rebuilt: bool, input_gradient: bool, accum_grad: int, options: Dict[str, Any]
) -> None:
    plain = Sentences(rebuilt=rebuilt, input_gradient=input_gradient)
    expected = plain.plainly(ITERATIONS, accum_grad)
    scaled = Sentences(rebuilt=rebuilt, input_gradient=input_gradient)
    found = scaled.updated(ITERATIONS, accum_grad=accum_grad, config=AdaLossConfig(**options))
    assert_equal(found, expected)
    np.testing.assert_array_equal(scaled.x.g, plain.x.g)


def test_graphs_that_take_turns_are_all_known() -> None:
    training = Training(normalized, clipped)
    training.run(32)
    assert len({id(plan) for plan in training.plans}) == 2
    # Each measures for itself, and chooses before it runs.
    assert training.passes[8:].count("hookless") == len(training.passes[8:])


def test_graphs_that_share_each_iteration_are_all_measured_in_time() -> None:
    training = Training(normalized, clipped, accum_grad=2)
    training.run(24)
    windows = training.updater.scaling.components.next_memory().state_dict()["windows"]
    # One entry of the first iteration, and one of each eight.
    assert {pushed for pushed, _ in windows.values()} == {4}
    # The second one of each iteration holds its scales, too.
    assert training.updater.scaling._graph.current().schedules.entries


@pytest.mark.parametrize("clear_buffer", [True, False])
def test_gradients_that_stay_readable_are_unscaled_in_a_graph_that_is_known(clear_buffer: bool) -> None:
    x, before = constant(np.ones((4, 5))), None
    for iteration in range(6):
        h = F.tanh(PF.affine(x, 6, name="a"))
        # Not so when the graph was planned.
        h.persistent = iteration > 2
        loss = F.mean(PF.affine(F.tanh(PF.affine(h, 6, name="b")), 4, name="c") ** 2)
        loss.forward()
        loss.backward()
        native = h.g.copy()
        scaling = AdaptiveLossScaling(loss)
        if before is not None:
            scaling.go_on_from(before)
        scaling.forward(clear_no_need_grad=clear_buffer)
        scaling.backward(clear_buffer=clear_buffer)
        if h.persistent or not clear_buffer:
            np.testing.assert_array_equal(h.g, native)
            assert scaling.scale_of(h) != 1.0
        before = scaling
    assert scaling.result.kind == "hookless"


def test_an_engine_with_other_scales_is_not_gone_on_from() -> None:
    loss = normalized(nn.Variable((4, 5)))
    other = AdaptiveLossScaling(loss, AdaLossConfig(u_min=1e-3))
    with pytest.raises(ValueError, match="same config"):
        AdaptiveLossScaling(loss).go_on_from(other)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("ran_before", [(False, True), (True, False)])
def test_held_scales_of_a_state_serve_a_graph_that_has_run_forward(
    ran_before: Tuple[bool, bool], delay: int
) -> None:
    """Whether a graph ran forward before the updater was made, when saving or when loading, is all one."""

    def start(ran: bool) -> Tuple[Dict[str, nn.Variable], Any]:
        nn.clear_parameters()
        x = data(4, 3)

        def feed() -> None:
            updater.loss = two_layers(x)

        loss = two_layers(x)
        if ran:
            loss.forward()
        updater = updater_of(loss, feed, config=AdaLossConfig(measure_every=8, delay=delay))
        return nn.get_parameters(), updater

    parameters, updater = start(ran_before[0])
    for _ in range(4):
        updater.update()
    assert updater.scaling.can_measure_more
    state, values = updater.state_dict(), {name: v.d.copy() for name, v in parameters.items()}
    expected = []
    for _ in range(6):
        updater.update()
        expected.append((updater.scaling.result.kind, updater.state_dict()))

    parameters, updater = start(ran_before[1])
    for name, value in values.items():
        parameters[name].d = value
    updater.load_state_dict(state)
    for last_pass, wanted in expected:
        updater.update()
        assert updater.scaling.result.kind == last_pass
        assert updater.state_dict() == wanted


@pytest.mark.parametrize("storage", ["float16", None])
def test_data_whose_gradient_is_wanted_may_be_another_leaf_in_each_graph(storage: Optional[str]) -> None:
    """No graph is taken for another topology, and each leaf gets its own gradient."""

    def trained(*, rebuilt: bool) -> List[Any]:
        nn.clear_parameters()
        rng, found = np.random.RandomState(0), []
        loss = x = None

        def feed() -> None:
            nonlocal loss, x
            if rebuilt or loss is None:
                x = nn.Variable((8, 6), need_grad=True)
                h = F.tanh(PF.affine(x, 5, name="a", rng=np.random.RandomState(1)))
                loss = F.mean(PF.affine(h, 4, name="b", rng=np.random.RandomState(2)) ** 2)
            x.d = rng.randn(8, 6)
            x.grad.zero()

        feed()
        updater = updater_of(loss, lambda: (feed(), setattr(updater, "loss", loss)), storage=storage)
        for _ in range(20):
            assert updater.update().updated
            found.append([x.g.copy(), *(v.d.copy() for v in nn.get_parameters().values())])
        assert not updater.scaling._graph.states_of_other_topologies
        assert updater.scaling.result.kind == "hookless"
        return found

    np.testing.assert_equal(trained(rebuilt=True), trained(rebuilt=False))


@pytest.mark.parametrize("stored", [False, True])
def test_a_graph_in_another_storage_is_refused_before_anything_is_changed(stored: bool) -> None:
    def built(emulated: bool) -> Any:
        loss = shared(data(4, 5))
        return FormatEmulation(loss, "float16") if emulated else loss

    updater = updater_of(built(stored), solver=S.Sgd(0.1), storage=None)
    updater.update()
    before, scales = updater.loss, updater.scaling.layer_scales
    with pytest.raises(ValueError, match="^loss has another storage than the loss before: wrap each"):
        updater.loss = built(not stored)
    assert updater.loss is before
    assert updater.scaling.layer_scales == scales
    updater.loss = built(stored)
    assert updater.update().updated


def test_a_loss_that_a_hook_assigns_takes_over_the_iteration() -> None:
    found = []
    for rebuilds in (False, True):
        nn.clear_parameters()
        x = data(4, 3)
        updater = updater_of(two_layers(x), solver=S.Sgd(0.1))
        if rebuilds:
            updater.on_gradients = lambda solver, u=updater, x=x: setattr(u, "loss", two_layers(x))
        for _ in range(3):
            updater.update()
        found.append(updater.scaling.components)
    assert found[0] == found[1]
