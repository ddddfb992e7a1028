# SPDX-License-Identifier: Apache-2.0
"""What is found to be chosen again is what `choose` comes to."""

from __future__ import annotations

from dataclasses import replace
from typing import List, Optional, Sequence

import hypothesis.strategies as st
import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest
from hypothesis import given

from nnabla_adaloss.core.layer_scale import Constraints
from nnabla_adaloss.core.statistics import ArrayStatistics, statistics_of
from nnabla_adaloss.engine.choosing import PassStart, ScaleChoice, choose
from nnabla_adaloss.engine.component_pass import ComponentPass
from nnabla_adaloss.engine.layer_alphas import AlphasByComponent
from nnabla_adaloss.engine.loss_section import MeasuredScale
from nnabla_adaloss.engine.schedule import ScaleSchedule
from nnabla_adaloss.engine.scheduler import Limits, would_be_chosen
from nnabla_adaloss.engine.statistics import KnownStatistics
from nnabla_adaloss.graph.plan import GraphPlan

pytestmark = pytest.mark.any_context

U_MAX = 65504.0
LIMITS = Limits(Constraints(weight_max=U_MAX), U_MAX, None)


def one(magnitude: float) -> ArrayStatistics:
    return statistics_of(np.array([magnitude, -magnitude]))


class Net:
    """Two layers and a loss with a weight, and numbers for their arrays; nothing runs."""

    def __init__(self, weight: float = 1.0) -> None:
        self.t = F.tanh(PF.affine(nn.Variable((4, 3)), 5, name="a"))
        self.y = PF.affine(self.t, 5, name="b")
        self.loss = F.mean(self.y) if weight == 1.0 else F.mean(self.y) * weight
        self.plan = GraphPlan(self.loss)
        self.structure = self.plan.structure
        self.gradients = {p: one(0.5) for p in self.structure.gradients}
        self.data = {slot.factor: one(0.5) for node in self.structure.nodes for slot in node.slots}

    def position(self, v: nn.Variable) -> int:
        return self.plan.positions[hash(v)]

    def component(self, v: nn.Variable) -> int:
        return self.structure.components(by_layer=True).of[self.position(v)]

    def pass_with(self, scales: Sequence[Optional[float]]) -> ComponentPass:
        return ComponentPass(self.structure.components(by_layer=True), scales)

    def known(self) -> KnownStatistics:
        return KnownStatistics(self.gradients, self.data, stored=True)

    def chosen(self, scales: Sequence[Optional[float]]) -> ScaleSchedule:
        of = self.pass_with(scales)
        section = MeasuredScale(of, self.structure.roots[0], 8.0, U_MAX)
        choice = ScaleChoice(section, AlphasByComponent(of, LIMITS.constraints), of)
        return choose(self.structure, choice, self.known(), PassStart(0, 0, None, 8.0), U_MAX).schedule()

    def again(self, schedule: ScaleSchedule, scales: Sequence[Optional[float]]) -> bool:
        return would_be_chosen(schedule, self.pass_with(scales), self.known(), LIMITS)


# With a loss weight: the loss, its mean, and what is before and behind the second layer.
SCALES = [2.0**12, 2.0**8, 2.0**8, 2.0**12]


def test_where_nothing_has_changed() -> None:
    net = Net(2.0**-4)
    schedule = net.chosen(SCALES)
    assert schedule.components == SCALES
    assert net.again(schedule, SCALES)


@pytest.mark.parametrize("which", range(len(SCALES)))
@pytest.mark.parametrize("other", [0.5, 2.0, None])
def test_not_where_a_component_gets_another_scale(which: int, other: Optional[float]) -> None:
    net = Net(2.0**-4)
    schedule = net.chosen(SCALES)
    changed: List[Optional[float]] = list(SCALES)
    changed[which] = None if other is None else SCALES[which] * other
    assert not net.again(schedule, changed)


# Of a mean: the loss gradient is as large as it may be, before it spreads over elements with room for more.
AT_THE_END_OF_THE_RANGE = [2.0**14, 2.0**20, 2.0**26]


@pytest.mark.parametrize("gradient", [0.0, 0.5, 2.0**10])
def test_a_single_element_is_raised_as_far_as_its_window_leaves_room(gradient: float) -> None:
    net = Net()
    loss = net.position(net.loss)
    # What it was in one batch alone says nothing.
    net.gradients[loss] = one(gradient)
    schedule = net.chosen(AT_THE_END_OF_THE_RANGE)
    assert schedule.scales[loss] == 2.0**14
    assert schedule.scales[net.position(net.y)] == 2.0**20
    assert net.again(schedule, AT_THE_END_OF_THE_RANGE)


def test_a_single_element_that_was_only_seen_absent_is_not_raised() -> None:
    net = Net(2.0**-4)
    mean = net.structure.nodes[0].inputs[0]
    net.gradients[mean] = one(0.0)
    schedule = net.chosen([2.0**12, None, 2.0**20, 2.0**22])
    # Nobody knows how large it is when it comes back; what it spreads over gets the rest.
    assert schedule.scales[mean] == 2.0**12
    assert schedule.scales[net.position(net.y)] == 2.0**20


@pytest.mark.parametrize(("weight", "same"), [(2.0**-20, True), (2.0**9, True), (2.0**10, False)])
def test_not_where_a_scaled_copy_of_a_weight_leaves_its_range(weight: float, same: bool) -> None:
    net = Net()
    schedule = net.chosen(AT_THE_END_OF_THE_RANGE)
    assert schedule.layer_scales == {"b/affine": 2.0**6}
    net.data = dict.fromkeys(net.data, one(weight))
    assert net.again(schedule, AT_THE_END_OF_THE_RANGE) == same


def test_a_single_element_that_is_held_down_by_the_one_before_changes_nothing() -> None:
    """The gradient of the mean is the loss weight times that of the loss, which cannot be raised as far."""
    net = Net(2.0**-20)
    net.gradients[net.position(net.loss)] = one(1.0)
    scales = [2.0**13, 2.0**33, 2.0**35, 2.0**35]
    schedule = net.chosen(scales)
    held = net.component(net.plan.all_variables[net.structure.nodes[0].inputs[0]])
    assert schedule.components is not None
    assert schedule.components[held] == 2.0**13
    assert net.again(schedule, scales)


def test_scales_that_are_given_are_chosen_each_time() -> None:
    net = Net()
    schedule = net.chosen(SCALES[:3])
    assert net.again(schedule, SCALES[:3])
    assert not net.again(replace(schedule, fixed_scale=8.0), SCALES[:3])
    assert not net.again(replace(schedule, matched=1), SCALES[:3])


scales_of_components = st.lists(
    st.one_of(st.none(), st.integers(-4, 40).map(lambda e: 2.0**e)), min_size=4, max_size=4
)
magnitudes = st.integers(-12, 16).map(lambda e: 2.0**e)


@given(st.data(), scales_of_components, magnitudes, magnitudes)
def test_what_would_be_chosen_is_chosen(
    data: st.DataObject, scales: List[Optional[float]], gradient: float, weight: float
) -> None:
    net = Net(2.0**-4)
    root = net.position(net.loss)
    net.gradients[root], net.data = one(gradient), dict.fromkeys(net.data, one(weight))
    schedule = net.chosen(scales)
    # Mostly the same, so that it is not always the first look that tells.
    later = [data.draw(st.sampled_from([s, s, s, s, None if s is None else 2.0 * s])) for s in scales]
    net.gradients[root] = one(data.draw(st.sampled_from([gradient, gradient, 2.0 * gradient])))
    net.data = dict.fromkeys(net.data, one(data.draw(st.sampled_from([weight, 4.0 * weight]))))
    if net.again(schedule, later):
        assert net.chosen(later) == schedule
