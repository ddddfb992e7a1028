# SPDX-License-Identifier: Apache-2.0
"""A schedule stays in use while its scales are neither too large nor much too small."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss.core.layer_scale import Constraints
from nnabla_adaloss.core.power_of_two import floor_power_of_two
from nnabla_adaloss.core.statistics import ArrayStatistics, statistics_of
from nnabla_adaloss.engine.choosing import PassStart, ScaleChoice, choose
from nnabla_adaloss.engine.component_scales import ComponentPass
from nnabla_adaloss.engine.layer_alphas import AlphasByComponent
from nnabla_adaloss.engine.loss_section import MeasuredScale
from nnabla_adaloss.engine.renewal import Limits, still_serves
from nnabla_adaloss.engine.schedule import ScaleSchedule
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

    def serves(self, schedule: ScaleSchedule, scales: Sequence[Optional[float]]) -> bool:
        return still_serves(schedule, self.pass_with(scales), self.known(), LIMITS)


SCALES = (2.0**4, 2.0**8, 2.0**8, 2.0**12)


@pytest.mark.parametrize("which", range(len(SCALES)))
@pytest.mark.parametrize(
    ("room", "serves"), [(0.5, False), (1.0, True), (2.0, True), (4.0, True), (8.0, False)]
)
def test_until_a_scale_is_too_large_or_more_than_two_bits_too_small(
    room: float, serves: bool, which: int
) -> None:
    net, scales = Net(2.0**-4), list(SCALES)
    schedule = net.chosen(scales)
    assert schedule.components == scales
    scales[which] *= room
    assert net.serves(schedule, scales) == serves


@pytest.mark.parametrize(("before", "now", "serves"), [(None, None, True), (8.0, None, True)])
def test_what_nothing_is_known_of_asks_for_nothing(
    before: Optional[float], now: Optional[float], serves: bool
) -> None:
    net = Net()
    net.gradients[net.position(net.y)] = ArrayStatistics.of_zeros(20)
    schedule = net.chosen([8.0, 8.0, before])
    assert net.serves(schedule, [8.0, 8.0, now]) == serves


def test_a_component_that_is_measured_for_the_first_time_calls_for_a_choice() -> None:
    net = Net()
    schedule = net.chosen([8.0, 8.0, 8.0])
    without = schedule.__class__(**{**schedule.__dict__, "components": [8.0, 8.0, None]})
    assert net.serves(schedule, [8.0, 8.0, 8.0])
    assert not net.serves(without, [8.0, 8.0, 8.0])


def elements(net: Net) -> Tuple[int, List[float]]:
    """Position of the loss, and scales with which it is as large as it may be, before it is spread."""
    return net.position(net.loss), [2.0**4, 2.0**20, 2.0**26]


@pytest.mark.parametrize(("gradient", "serves"), [(0.5, True), (0.125, True), (1.0, False), (0.0625, False)])
def test_while_the_gradient_of_a_single_element_fits(gradient: float, serves: bool) -> None:
    net = Net()
    loss, scales = elements(net)
    schedule = net.chosen(scales)
    assert schedule.scales[loss] == floor_power_of_two(U_MAX / 0.5)
    assert schedule.scales[net.position(net.y)] == 2.0**20
    net.gradients[loss] = one(gradient)
    assert net.serves(schedule, scales) == serves


@pytest.mark.parametrize(("weight", "serves"), [(2.0**-20, True), (2.0**9, True), (2.0**10, False)])
def test_while_the_scaled_copies_of_weights_fit(weight: float, serves: bool) -> None:
    net = Net()
    _, scales = elements(net)
    schedule = net.chosen(scales)
    assert schedule.layer_scales == {"b/affine": 2.0**6}
    net.data = dict.fromkeys(net.data, one(weight))
    assert net.serves(schedule, scales) == serves


def test_a_single_element_that_is_held_down_by_the_one_before_has_no_more_room() -> None:
    """The gradient of the mean is the loss weight times that of the loss, which cannot be raised as far."""
    net = Net(2.0**-20)
    root = net.position(net.loss)
    net.gradients[root] = one(1.0)
    scales = [2.0**13, 2.0**33, 2.0**35, 2.0**35]
    schedule = net.chosen(scales)
    held = net.component(net.plan.all_variables[net.structure.nodes[0].inputs[0]])
    assert schedule.components is not None
    assert schedule.components[held] == 2.0**15
    assert net.serves(schedule, scales)
