# SPDX-License-Identifier: Apache-2.0
"""Scales are chosen from numbers alone; a pass that chooses as it runs comes to the same."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Any, Dict, Optional, Sequence, Tuple

import hypothesis.strategies as st
import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling
from nnabla_adaloss.core.layer_scale import Constraints
from nnabla_adaloss.core.power_of_two import floor_power_of_two
from nnabla_adaloss.core.statistics import ArrayStatistics, statistics_of
from nnabla_adaloss.engine.choosing import LossSection, PassStart, ScaleChoice, ScaleChooser, choose
from nnabla_adaloss.engine.component_pass import ComponentPass
from nnabla_adaloss.engine.immediate_statistics import ImmediateStatistics
from nnabla_adaloss.engine.layer_alphas import AlphasByComponent, AlphasByMethod, AlphasOfOne
from nnabla_adaloss.engine.loss_section import FixedScale, MeasuredScale, OneScale
from nnabla_adaloss.engine.schedule import Rescale, ScaleSchedule
from nnabla_adaloss.engine.statistics import KnownStatistics
from nnabla_adaloss.graph.plan import GraphPlan
from nnabla_adaloss.kernels import CpuKernels, NNablaAdaLoss
from nnabla_adaloss.kernels.scratch import ScratchPool
from tests.engine.random_graphs import Network, networks

U_MAX, S0 = 65504.0, 8.0
START = PassStart(0, 0, S0, S0)


class Graph:
    """A graph that never ran, and numbers for its arrays.

    Args:
        loss: the loss.
        magnitude: of every element of every gradient, unscaled, and of every weight.
        others: of single gradients.
    """

    def __init__(
        self, loss: nn.Variable, magnitude: float = 0.5, others: Optional[Dict[nn.Variable, float]] = None
    ) -> None:
        self.plan = GraphPlan(loss)
        self.structure = self.plan.structure
        self.gradients = {p: one(magnitude) for p in self.structure.gradients}
        for v, own in (others or {}).items():
            self.gradients[self.position(v)] = one(own)
        self.data = {slot.factor: one(magnitude) for node in self.structure.nodes for slot in node.slots}

    def position(self, variable: nn.Variable) -> int:
        return self.plan.positions[hash(variable)]

    def chosen(
        self, method: Any = None, section: Optional[LossSection] = None, **config: Any
    ) -> Tuple[ScaleChooser, KnownStatistics]:
        """What is chosen by a method; None: no layer is scaled."""
        known = KnownStatistics(self.gradients, self.data)
        alphas: Any = AlphasOfOne()
        if method is not None:
            chosen = AdaLossConfig(loss_scale_method=method, use_bound=False, **config)
            ada_loss = NNablaAdaLoss(chosen, CpuKernels())
            alphas = AlphasByMethod(ada_loss, Constraints(weight_max=U_MAX))
        choice = ScaleChoice(section or OneScale(S0), alphas)
        return choose(self.structure, choice, known, START, U_MAX), known

    def scales(self, chooser: ScaleChooser, *variables: nn.Variable) -> Sequence[float]:
        scales = chooser.schedule().scales
        return [scales[self.position(v)] for v in variables]


def one(magnitude: float) -> ArrayStatistics:
    return statistics_of(np.array([magnitude, -magnitude]))


def affine(x: nn.Variable, name: str, width: int = 5) -> nn.Variable:
    return PF.affine(x, width, name=name)


def test_each_layer_raises_what_leaves_it() -> None:
    x = nn.Variable((4, 3), need_grad=True)
    h = affine(x, "a")
    t = F.tanh(h)
    y = affine(t, "b")
    loss = F.sum(y)
    graph = Graph(loss)
    chooser, known = graph.chosen("fixed", fixed_loss_scale=4.0)
    schedule = chooser.schedule()
    assert known.complete
    assert graph.scales(chooser, loss, y, t, h, x) == [8.0, 8.0, 32.0, 32.0, 128.0]
    assert schedule.layer_scales == {"b/affine": 4.0, "a/affine": 4.0}
    assert schedule.accumulated_scales == {"b/affine": 32.0, "a/affine": 128.0}
    assert (schedule.seed, schedule.loss_scale, schedule.matched) == (8.0, 8.0, 0)
    # What only passes a scale on has no step.
    assert [step.scale for step in schedule.steps.values()] == [8.0, 32.0]
    assert not any(step.before or step.after for step in schedule.steps.values())
    assert [layer for layer, _, _ in chooser.decided] == ["b/affine", "a/affine"]


@pytest.mark.parametrize("magnitude", [2.0**-20, 2.0**-12, 0.5])
def test_alphas_follow_from_the_numbers(magnitude: float) -> None:
    h = affine(nn.Variable((4, 3)), "a")
    graph = Graph(F.sum(affine(F.tanh(h), "b", 7)), others={})
    y = graph.structure.nodes[1].outputs[0]
    graph.gradients[y] = one(magnitude)
    chooser, _ = graph.chosen("approx_range", n_uf_threshold=1e-3, u_min=2.0**-24, u_max=U_MAX)
    # Uniform magnitudes: sigma of a product is theirs times sqrt(K / 2), with K = 7; weights are 0.5.
    sigma = S0 * magnitude * 0.5 * (7 / 2) ** 0.5
    wanted = max(1.0, 2.0**-24 / (NormalDist().inv_cdf((1.0 + 1e-3) / 2.0) * sigma))
    assert chooser.schedule().layer_scales == {"b/affine": floor_power_of_two(wanted)}
    assert (wanted > 1.0) == (magnitude < 2.0**-12)


def residual() -> Tuple[nn.Variable, nn.Variable, nn.Variable]:
    h = affine(nn.Variable((4, 5)), "a")
    branch = affine(h, "b")
    return h, branch, F.sum(h + branch)


def test_branches_are_brought_to_the_larger_scale_where_there_is_room() -> None:
    h, branch, loss = residual()
    graph = Graph(loss)
    chooser, _ = graph.chosen("fixed", fixed_loss_scale=4.0)
    schedule = chooser.schedule()
    assert graph.scales(chooser, branch, h) == [8.0, 32.0]
    assert schedule.matched == 1
    rescales = [one for step in schedule.steps.values() for one in (*step.before, *step.after)]
    assert rescales == [Rescale(graph.position(h), 4.0)]
    assert schedule.layer_scales == {"b/affine": 4.0}


def test_where_there_is_none_the_layer_gives_way() -> None:
    h, branch, loss = residual()
    # With 4 times its scale the shortcut's gradient would not fit.
    graph = Graph(loss, others={h: 4000.0})
    chooser, _ = graph.chosen("fixed", fixed_loss_scale=4.0)
    assert graph.scales(chooser, branch, h) == [8.0, 8.0]
    assert chooser.schedule().matched == 0
    assert chooser.schedule().layer_scales == {"b/affine": 1.0}


def test_outputs_of_one_function_are_brought_to_one_scale() -> None:
    x = affine(nn.Variable((4, 6)), "a", 6)
    first, second = F.split(F.reshape(x, (4, 2, 3), inplace=False), axis=1)
    graph = Graph(F.sum(affine(first, "b")) + F.sum(second))
    chooser, _ = graph.chosen("fixed", fixed_loss_scale=4.0)
    assert graph.scales(chooser, first, second, x) == [32.0, 32.0, 32.0]
    assert chooser.schedule().matched == 1
    rescales = [r for step in chooser.schedule().steps.values() for r in step.before]
    assert rescales == [Rescale(graph.position(second), 4.0)]


def test_what_a_small_loss_weight_shrinks_is_raised_behind_it() -> None:
    y = affine(nn.Variable((4, 3)), "a")
    total = F.sum(y)
    loss = total * 2.0**-20
    graph = Graph(loss, 2.0**-20, {loss: 1.0})
    chooser, known = graph.chosen(section=FixedScale(S0))
    assert known.complete
    # What arrives at the layer is at most S0, as it would be with a weight of 1.
    assert graph.scales(chooser, y) == [S0 * 2.0**20]
    assert chooser.schedule().seed == S0
    assert chooser.lift == 2.0**20
    without, _ = graph.chosen()
    assert graph.scales(without, y) == [S0]


def test_what_clips_sees_unscaled_gradients() -> None:
    h = affine(nn.Variable((4, 3)), "a")
    clipped = F.clip_grad_by_norm(h, 0.5)
    y = affine(clipped, "b")
    graph = Graph(F.sum(y))
    chooser, _ = graph.chosen("fixed", fixed_loss_scale=4.0)
    assert graph.scales(chooser, y, clipped, h) == [8.0, 1.0, 8.0]
    rescales = [(s.before, s.after) for s in chooser.schedule().steps.values() if s.before or s.after]
    assert rescales == [((Rescale(graph.position(clipped), 1 / 32),), (Rescale(graph.position(h), 8.0),))]


@pytest.mark.parametrize("missing", ["gradient", "weight", "nothing"])
def test_what_is_not_known_is_told(missing: str) -> None:
    graph = Graph(F.sum(affine(F.tanh(affine(nn.Variable((4, 3)), "a")), "b")))
    (node,) = [n for n in graph.structure.nodes if n.label == "b/affine"]
    if missing == "gradient":
        del graph.gradients[node.outputs[0]]
    if missing == "weight":
        del graph.data[node.slots[0].factor]
    assert graph.chosen("approx_range")[1].complete == (missing == "nothing")


def test_where_no_layer_is_scaled_nothing_is_asked() -> None:
    graph = Graph(residual()[2])
    graph.gradients, graph.data = {}, {}
    chooser, known = graph.chosen()
    assert known.complete
    assert set(chooser.schedule().scales.values()) == {S0}


def test_each_component_carries_its_own_scale_and_nothing_is_matched() -> None:
    h, branch, _ = residual()
    joined = h + branch
    y = affine(F.tanh(joined), "c")
    loss = F.mean(y)
    graph = Graph(loss, 2.0**-10, {loss: 1.0})
    components = graph.structure.components(by_layer=True)
    scales = [2.0 ** (3 + 4 * index) for index in range(len(components.names))]
    of = ComponentPass(components, scales)
    root = graph.position(loss)
    choice = ScaleChoice(MeasuredScale(of, root, S0, U_MAX), AlphasByComponent(of, Constraints()), of)
    known = KnownStatistics(graph.gradients, graph.data)
    chooser = choose(graph.structure, choice, known, START, U_MAX)
    schedule = chooser.schedule()
    assert known.complete
    assert schedule.matched == 0
    assert schedule.components == scales
    for v in (y, joined, branch, h):
        assert graph.scales(chooser, v) == [scales[components.of[graph.position(v)]]]
    into, out = (scales[components.of[graph.position(v)]] for v in (y, joined))
    assert schedule.layer_scales == {"c/affine": out / into, "b/affine": 1.0}


def test_components_that_follow_each_other_get_one_scale_where_it_serves_all() -> None:
    t = F.tanh(affine(nn.Variable((4, 3)), "a"))
    u = F.tanh(affine(t, "b"))
    y = affine(u, "c")
    loss = F.mean(y)
    graph = Graph(loss, 2.0**-10, {loss: 1.0})
    of = ComponentPass(graph.structure.components(by_layer=True), [8.0, 64.0, 32.0, 512.0])
    of.level()
    # That of the loss alone costs nothing to change.
    assert of.scales == [8.0, 32.0, 32.0, 512.0]
    choice = ScaleChoice(
        MeasuredScale(of, graph.position(loss), S0, U_MAX), AlphasByComponent(of, Constraints())
    )
    chooser = choose(graph.structure, choice, KnownStatistics(graph.gradients, graph.data), START, U_MAX)
    assert graph.scales(chooser, loss, y, u, t) == [8.0, 32.0, 32.0, 512.0]
    assert chooser.schedule().layer_scales == {"c/affine": 1.0, "b/affine": 16.0}


@pytest.mark.parametrize("looks", [False, True])
def test_gradients_whose_scales_are_known_are_looked_at_for_reports_alone(looks: bool) -> None:
    x = nn.Variable((4, 3), need_grad=True)
    t = F.tanh(affine(x, "a"))
    graph = Graph(F.sum(affine(t, "b")))
    components = graph.structure.components(by_layer=True)
    scales = [S0 * 16.0**index for index in range(len(components.names))]
    of = ComponentPass(components, scales)
    choice = ScaleChoice(OneScale(S0), AlphasByComponent(of, Constraints(), looks=looks), of)
    known = KnownStatistics({}, graph.data)
    chooser = choose(graph.structure, choice, known, START, U_MAX)
    assert graph.scales(chooser, t, x) == [scales[components.of[graph.position(v)]] for v in (t, x)]
    # Nothing is chosen by what is only looked at: to know it is not waited for.
    assert known.complete
    assert bool(known.looked_at) == looks


# What is chosen before a pass is what the pass itself would have chosen.

METHODS = ("approx_range", "amax_history")


def statistics_of_all(scaling: AdaptiveLossScaling) -> KnownStatistics:
    """Those of every array, measured without any scale."""
    structure, loss = scaling.plan.structure, scaling.variable
    arrays = ImmediateStatistics(scaling.plan, CpuKernels(), ScratchPool(), None)
    loss.forward()
    data = {slot.factor: arrays.data(slot.factor) for node in structure.nodes for slot in node.slots}
    loss.backward()
    gradients = {p: arrays.gradient(p, 1.0) for p in structure.gradients}
    # nnabla does not keep what backward begins with.
    gradients.update((root, statistics_of(np.ones(1))) for root in structure.roots)
    return KnownStatistics(gradients, data)


def chosen_before(
    scaling: AdaptiveLossScaling, scale: Optional[float], known: KnownStatistics
) -> ScaleSchedule:
    planned, runner = scaling._graph.prepared(), scaling._runner
    start = PassStart(scaling.iteration, 0, scale, runner.start_scale(scale))
    choice = runner._scheduler._choice(planned, start, runner._begin_components(planned, start))
    return choose(planned.plan.structure, choice, known, start, scaling.config.range.u_max).schedule()


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    networks,
    st.sampled_from(METHODS),
    st.sampled_from([None, 1.0, 256.0]),
    st.sampled_from([1.0, 2.0**-20]),
    st.sampled_from([2.0**-24, 2.0**-8]),
)
def test_a_pass_that_chooses_as_it_runs_comes_to_the_same(
    network: Network, method: str, scale: Optional[float], weight: float, u_min: float
) -> None:
    config = AdaLossConfig(
        loss_scale_method=method, dtype="float32", u_min=u_min, u_max=U_MAX, delay=0, measure_every=1
    )
    scaling = AdaptiveLossScaling(network.loss * weight, config)

    def zero() -> None:
        for leaf in network.leaves.values():
            leaf.grad.zero()

    for _ in range(3):
        zero()
        known = statistics_of_all(scaling)
        before = chosen_before(scaling, scale, known)
        assert known.complete
        zero()
        scaling.forward()
        scaling.backward(scale)
        assert scaling.last_pass == "choosing"
        assert scaling._last is not None
        found = scaling._last.schedule
        assert replace(before, components=None) == replace(found, components=None)
        # Those of which nothing was known are measured by then.
        for own, live in zip(before.components or (), found.components or ()):
            assert own is None or own == live
        scaling.after_update()
