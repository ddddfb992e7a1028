# SPDX-License-Identifier: Apache-2.0
"""The scales of a pass as they are applied: every gradient carries that of its component in the end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest

from nnabla_adaloss.core.schedule import Rescale, ScaleSchedule
from tests.worlds import random_structures as graphs

pytestmark = pytest.mark.any_context


def affine(x: nn.Variable, name: str, width: int = 5) -> nn.Variable:
    return PF.affine(x, width, name=name)


class Graph(graphs.Graph):
    """A graph that never runs, with scales for its components, in their order."""

    def __init__(self, loss: nn.Variable, *scales: float, given_scale: Any = None) -> None:
        super().__init__(loss)
        assert len(scales) == len(self.components.names)
        self.schedule = self.chosen(scales, given_scale)

    def chosen(
        self, scales: Sequence[float], given_scale: Any = None, weights: Tuple[float, ...] = ()
    ) -> ScaleSchedule:
        ones = (1.0,) * len(scales)
        return ScaleSchedule(self.structure.nodes, self.components, scales, given_scale, weights or ones)

    def loaded(
        self, scales: Sequence[float], given_scale: Any, weights: Any, is_merged: bool
    ) -> ScaleSchedule:
        assert not is_merged
        return self.chosen(scales, given_scale, weights)

    def step(self, label: str) -> Any:
        (node,) = (n for n in self.structure.nodes if n.label == label)
        return self.schedule.steps[node.number]


@pytest.mark.parametrize(("loss_scale", "descendants"), [(2.0**14, 2.0**20), (2.0**14, 2.0**10)])
def test_a_mean_multiplies_before_it_only_as_much_as_one_element_holds(
    loss_scale: float, descendants: float
) -> None:
    y = affine(nn.Variable((4, 3)), "a")
    mean = F.mean(y)
    loss = mean * 0.5
    n = Graph(loss, loss_scale, loss_scale, descendants)
    step, factor = n.step("a/affine/Mean"), descendants / loss_scale
    before, after = Rescale(n.position(mean), factor), Rescale(n.position(y), factor)
    assert (step.before, step.after) == (((), (after,)) if factor > 1.0 else ((before,), ()))


@pytest.mark.parametrize("descendants", [2.0**20, 2.0**10])
def test_backward_starts_with_the_scale_of_the_first_function(descendants: float) -> None:
    y = affine(nn.Variable((4, 3)), "a")
    loss = F.mean(y)
    n = Graph(loss, 2.0**14, descendants)
    for in_float in (False, True):
        numbers = frozenset(node.number for node in n.structure.nodes if node.separates and in_float)
        schedule = replace(n.schedule, float_scalars=numbers)
        through = descendants if in_float else min(descendants, 2.0**14)
        assert schedule.seed_scale == schedule.scales[n.position(loss)] == through
        after = [rescale for step in schedule.steps.values() for rescale in (*step.before, *step.after)]
        assert after == ([] if through == descendants else [Rescale(n.position(y), descendants / through)])
        # What was chosen for it is what is told.
        assert schedule.component_scales[n.components.root] == 2.0**14


def test_functions_in_float_take_the_scale_of_their_successors() -> None:
    means = [F.mean(affine(nn.Variable((4, 3)), name)) for name in "ab"]
    n = Graph((means[0] + means[1]) * 0.5, *[2.0**14] * 3, 2.0**20, 2.0**18)
    descendants = [n.schedule.scales[n.position(mean.parent.inputs[0])] for mean in means]
    assert sorted(descendants) == [2.0**18, 2.0**20]
    numbers = frozenset(node.number for node in n.structure.nodes if node.separates)
    schedule = replace(n.schedule, float_scalars=numbers)
    assert [schedule.scales[n.position(mean)] for mean in means] == descendants
    # Where two meet, the smaller one is what is handed on.
    changed = [rescale for step in schedule.steps.values() for rescale in (*step.before, *step.after)]
    assert changed == [Rescale(n.position(means[descendants.index(2.0**20)]), 4.0)]
    # What is far away is multiplied in between: all factors are float32.
    far = replace(schedule, component_scales=[2.0**14] * 3 + [2.0**100, 2.0**-80])
    assert {far.arriving_scales[n.position(mean)] for mean in means} == {2.0**74, 2.0**-46}


def test_the_scale_of_the_loss_is_the_given_one_or_that_behind_its_scalars() -> None:
    loss = F.mean(affine(nn.Variable((4, 3)), "a")) * 0.5
    scales = 2.0**14, 2.0**13, 2.0**20
    assert Graph(loss, *scales).schedule.loss_scale == 2.0**20
    assert Graph(loss, *scales, given_scale=2.0**14).schedule.loss_scale == 2.0**14
    several = affine(F.tanh(affine(nn.Variable((4, 3)), "a")), "b")
    assert Graph(several, 8.0, 4.0).schedule.loss_scale == 8.0


def test_the_scale_of_the_loss_is_that_of_one_that_is_present_in_the_batch() -> None:
    means = [F.mean(affine(nn.Variable((4, 3)), name)) for name in "ab"]
    n = Graph(means[0] * 0.5 + means[1] * 2.0, *[2.0**i for i in range(6)])
    descendants = [n.components.of[n.position(mean.parent.inputs[0])] for mean in means]
    for absent in (0, 1):
        weights = tuple(float(index != descendants[absent]) for index in range(6))
        schedule = n.chosen(n.schedule.component_scales, None, weights)
        assert schedule.loss_scale == 2.0 ** descendants[1 - absent]
        assert [schedule.loss_weight_of(n.position(mean.parent.inputs[0])) for mean in means] == [
            float(index != absent) for index in range(2)
        ]


def test_a_leaf_that_a_clipping_layer_reads_too_has_the_scale_of_its_component_elsewhere() -> None:
    """A function that is not linear writes its gradient without a scale; the alpha of others is their own."""
    clips = graphs.node(2, [1], [], leaves=[4, 5], layers={4: 5}, clips=True)
    multiplies = graphs.node(1, [2], [], leaves=[4, 6], layers={4: 6})
    drawn = graphs.Drawn([graphs.node(3, [0], [1, 2]), clips, multiplies], [2] * 7)
    components = drawn.components()
    scales = [2.0**10] * len(components.names)
    scales[components.of[4]] = 2.0**14
    schedule = ScaleSchedule(drawn.nodes, components, scales, None, (1.0,) * len(scales))
    assert [schedule.steps[number].alphas for number in (2, 1)] == [(1.0,), (16.0,)]
