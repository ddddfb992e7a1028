# SPDX-License-Identifier: Apache-2.0
"""Graphs that were rewired are prepared as if they had been built so."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, FormatEmulation, Precision
from tests.worlds.passes import run, settle
from tests.worlds.values import FLOAT, HALF, assert_equal, constant, data, gradients

Loss = nn.Variable
Rewire = Callable[[], None]
RNG = np.random.RandomState


def affine(x: nn.Variable, name: str, width: int = 4) -> nn.Variable:
    return PF.affine(x, width, name=name, rng=RNG(ord(name[0])))


def batch() -> nn.Variable:
    return data(3, 4)


def end(h: nn.Variable) -> Loss:
    return F.mean(affine(h, "z", 2) ** 2)


def in_the_middle() -> Tuple[Loss, Rewire]:
    x = batch()
    h = F.tanh(affine(x, "a"))
    return end(h), lambda: h.rewire_on(F.sigmoid(affine(x, "c")))


def on_something_deeper_beside_another_branch() -> Tuple[Loss, Rewire]:
    # The branch comes before what is rewired in backward, and behind it when that is deeper.
    x = batch()
    a = affine(x, "a")
    h, branch = F.tanh(a), affine(F.sigmoid(F.tanh(affine(a, "b"))), "d")
    loss = end(h + branch)

    def rewire() -> None:
        deep = a
        for name in "efghi":
            deep = F.tanh(affine(deep, name))
        h.rewire_on(deep)

    return loss, rewire


def by_a_function_behind_a_fan_out() -> Tuple[Loss, Rewire]:
    h = affine(batch(), "a")
    loss = end(F.tanh(h) + affine(F.sigmoid(h), "b"))

    def rewire() -> None:
        before = nn.Variable(h.shape)
        before.rewire_on(h)
        h.rewire_on(F.relu(before))

    return loss, rewire


def at_an_input_that_needs_a_gradient_now() -> Tuple[Loss, Rewire]:
    x = nn.Variable((3, 4))
    loss = end(F.tanh(affine(x, "a")))
    return loss, lambda: x.rewire_on(F.tanh(affine(batch(), "c")))


def at_an_input_of_nothing_that_is_trained() -> Tuple[Loss, Rewire]:
    x = nn.Variable((3, 4))
    fixed = data(4, 4, seed=1)
    loss = F.mean(F.tanh(F.affine(F.tanh(x), fixed)) ** 2)
    return loss, lambda: x.rewire_on(F.tanh(affine(batch(), "c")))


def at_the_loss() -> Tuple[Loss, Rewire]:
    h = F.tanh(affine(batch(), "a"))
    loss = end(h)
    return loss, lambda: loss.rewire_on(F.mean(affine(h, "c", 2) ** 2))


def to_what_needs_no_gradient() -> Tuple[Loss, Rewire]:
    h = F.tanh(affine(batch(), "a"))
    return end(h), lambda: h.rewire_on(F.tanh(batch() * 2.0))


CASES = [
    in_the_middle,
    on_something_deeper_beside_another_branch,
    by_a_function_behind_a_fan_out,
    at_an_input_that_needs_a_gradient_now,
    at_an_input_of_nothing_that_is_trained,
    at_the_loss,
    to_what_needs_no_gradient,
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


def visited_backward(loss: Loss) -> List[int]:
    """The functions in nnabla's own order."""
    order: List[int] = []
    loss.forward()
    loss.backward(function_pre_hook=lambda f: order.append(hash(f)))
    return order


def every_third(**changes: Any) -> AdaLossConfig:
    """A method that scales, with passes that measure and passes that do not."""
    return AdaLossConfig(
        loss_scale_method="abs_range", use_bound=False, measure_every=3, dtype="float16", **changes
    )


@cases
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("updates_before", [0, 1, 4])
def test_a_rewired_graph_is_right_at_once(case: Any, delay: int, updates_before: int) -> None:
    loss, rewire = case()
    if updates_before and loss.need_grad:
        scaling = AdaptiveLossScaling(loss, every_third(delay=delay))
        for iteration in range(updates_before):
            settle(scaling, iteration)
        rewire()
    else:
        rewire()
        scaling = AdaptiveLossScaling(loss, every_third(delay=delay))
    passes, found = [], []
    for iteration in range(updates_before, updates_before + 4):
        passes.append(settle(scaling, iteration))
        found.append(gradients())
    # It is read before its first forward as after it.
    again = AdaptiveLossScaling(loss, every_third(delay=delay)).plan
    assert [hash(scaling.graph.functions[node.number]) for node in again.nodes] == visited_backward(loss)
    assert scaling.plan.described == again.described
    expected = run(loss, clear=True)
    for one in found:
        assert_equal(one, expected)
    assert ["hookless"] in passes


def test_a_function_whose_need_for_a_gradient_only_forward_finds_out() -> None:
    x, fixed = nn.Variable((2, 3)), nn.Variable((3, 3))
    x.d, fixed.d = 1.0, 0.5
    h = F.affine(x, fixed)
    h.need_grad = True
    loss = F.mean(h**2)
    x.need_grad = True
    scaling = AdaptiveLossScaling(loss)
    for _ in range(2):
        scaling.forward()
        x.grad.zero()
        scaling.backward()
        assert (x.g != 0.0).all()


def test_another_shape_is_noticed_of_data_alone() -> None:
    x, w = nn.Variable((2, 3)), nn.Variable((1, 3), need_grad=True)
    prepared = AdaptiveLossScaling(F.sum(x * w), parameters={"w": w})._graph.current()
    w.reset_shape((1, 5), force=True)
    assert not prepared.reshaped
    x.reset_shape((4, 3), force=True)
    assert prepared.reshaped
    assert prepared.graph.is_current


@pytest.mark.parametrize("given", [8.0, None])
def test_nothing_is_measured_if_every_scale_is_given(given: Optional[float]) -> None:
    h = F.tanh(PF.affine(nn.Variable((2, 3)), 3, name="a"))
    scaling = AdaptiveLossScaling(F.mean(PF.affine(h, 3, name="b") ** 2), AdaLossConfig("fixed"))
    measured = 0
    for iteration in range(16):
        scaling.forward()
        scaling.backward(given, iteration=iteration)
        measured += bool(scaling.result.measurements.amax)
        scaling.after_update()
    assert bool(measured) == (given is None)


def test_a_graph_of_a_known_topology_goes_on_with_its_statistics_and_schedule() -> None:
    def engine(depth: int) -> AdaptiveLossScaling:
        h = batch()
        for name in "abc"[:depth]:
            h = F.tanh(affine(h, name))
        return AdaptiveLossScaling(end(h), AdaLossConfig("approx_range", measure_every=4))

    first, other, again = engine(2), engine(1), engine(2)
    for iteration in range(2):
        settle(first, iteration)
    known = first.state_dict()
    other.go_on_from(first)
    settle(other, 2)
    again.go_on_from(other)
    for state in (known, found := again.state_dict(), measured := other.state_dict()):
        # All was measured, which ends the cycle of the network.
        state["schedule"] = state["schedule"]["chosen"]
    for part in ("statistics", "schedule"):
        assert found[part] == known[part] != measured[part]


def test_a_graph_that_is_built_again_with_another_constant_has_its_loss_weight() -> None:
    scaling = AdaptiveLossScaling(end(F.tanh(affine(batch(), "a"))) * 2.0**-3)
    settle(scaling)
    for iteration, exponent in enumerate((-40, 5, -3), 1):
        again = AdaptiveLossScaling(end(F.tanh(affine(batch(), "a"))) * 2.0**exponent)
        again.go_on_from(scaling)
        settle(again, iteration)
        assert again.result.schedule.loss_weights[-1] == 2.0**exponent
        scaling = again


def test_steps_for_loss_weights_are_kept_as_long_as_their_schedule() -> None:
    weight = constant(1.0)
    scaling = AdaptiveLossScaling(end(affine(batch(), "a")) * weight, AdaLossConfig(measure_every=99))
    prepared, planned = scaling._graph.current(), []
    for iteration, exponent in enumerate((0, 0, 1, 2, *range(3, 80))):
        weight.d = 2.0**exponent
        settle(scaling, iteration)
        planned.append({*prepared.steps})
    assert len(planned[3]) == 3
    in_use = [schedule for _, schedule in prepared.schedules.entries.values()]
    assert planned[-1] == {tuple(schedule.component_scales) for schedule in in_use}
    assert len(planned[-1]) == len(in_use) == 64


# Functions of one element whose gradients are float32, however everything else is stored.


def in_float(loss: Any, **options: Any) -> Set[str]:
    scaling = AdaptiveLossScaling(loss, **options)
    settle(scaling)
    prepared = scaling._graph.current()
    structure = prepared.plan
    return {structure.by_number[number].type_name for number in prepared.float_scalars}


def two_losses(context: nn.Context = FLOAT) -> nn.Variable:
    """Two means, one with a loss weight; the last addition is in float32 in any case."""
    with nn.context_scope(context):
        h = F.tanh(affine(batch(), "a"))
        first, second = F.mean(affine(h, "b", 2) ** 2), F.mean(F.sigmoid(affine(h, "c", 2))) * 2.0**-9
    with nn.context_scope(FLOAT):
        return first + second


AT_THE_LOSS = {"Mean", "MulScalar", "Add2"}


def test_all_functions_at_the_loss_pass_on_float_in_a_float_context() -> None:
    assert in_float(two_losses()) == AT_THE_LOSS
    assert in_float(F.sum(affine(batch(), "a"))) == {"Sum"}
    # What clips hands no scale on.
    clipped = F.clip_grad_by_norm(F.mean(affine(batch(), "a") ** 2) * 0.5, 1e-3)
    assert in_float(clipped * 2.0) == {"MulScalar", "Mean"}


def test_values_computed_and_read_in_float_are_left_in_half_precision() -> None:
    assert in_float(FormatEmulation(two_losses(), "float16")) == set()
    assert in_float(FormatEmulation(two_losses(), "float16", float_tail=True)) == AT_THE_LOSS
    # The means are in half, and read by a sum that is not: what is computed in float is all of them or this.
    assert in_float(two_losses(HALF)) == AT_THE_LOSS
    assert in_float(two_losses(HALF), float_tail=False) == {"Add2"}
    with nn.context_scope(HALF):
        h = F.mean(affine(batch(), "a") ** 2)
    with nn.context_scope(FLOAT):
        assert in_float(h * 2.0**-9, float_tail=False) == {"MulScalar"}


def shared() -> Loss:
    h = F.tanh(affine(batch(), "a"))
    return end(F.tanh(affine(F.tanh(affine(h, "s")), "s")))


@pytest.mark.parametrize(
    "method", ["approx_range", "abs_range", "fixed", "element_wise_range", "amax_history"]
)
def test_nothing_is_merged_if_a_method_decides_for_each_layer(method: str) -> None:
    scaling = AdaptiveLossScaling(shared(), AdaLossConfig(method))
    for iteration in range(2):
        settle(scaling, iteration)
    assert scaling.result.schedule.is_merged == (method == "amax_history")
    merged = scaling.plan.merged
    assert len(merged.components.names) < len(merged.of)


def test_a_graph_that_is_built_again_shares_the_plan() -> None:
    first, again = AdaptiveLossScaling(shared()), AdaptiveLossScaling(shared())
    for iteration in range(2):
        settle(first, iteration)
    again.go_on_from(first)
    settle(again, 2)
    assert again.result.kind == "hookless"
    assert again.plan is first.plan
    assert_equal(gradients(), run(again.variable))


def test_a_graph_that_is_built_again_leaves_the_one_before_as_it_was() -> None:
    first, again = AdaptiveLossScaling(shared()), AdaptiveLossScaling(shared())
    settle(first, 0)
    before = first._graph.current()
    again.go_on_from(first)
    now = again._graph.current()
    position = before.plan.gradients[-1]
    for prepared, value in ((before, 3.0), (now, 5.0)):
        prepared.graph.variables[position].g = value
    for prepared, value in ((before, 3.0), (now, 5.0)):
        prepared.statistics.measure([(position, 1.0)], ())
        measured, _ = prepared.statistics.finish(lambda _: 1.0)
        assert measured[position][0].abs_max == value


def test_slices_are_divided_by_the_sizes_of_the_graph_in_use() -> None:
    def engine(batch: int) -> AdaptiveLossScaling:
        h = F.tanh(PF.affine(F.tanh(PF.affine(data(batch, 8), 64, name="a")), 8, name="b"))
        return AdaptiveLossScaling(F.mean(h**2))

    def slices(scaling: AdaptiveLossScaling) -> Any:
        return [settle(scaling, iteration) and scaling._graph.current()._slices for iteration in range(9)][-1]

    small, large = engine(4), engine(2048)
    of_small = slices(small)
    large.go_on_from(small)
    assert slices(large) == slices(engine(2048)) != of_small


# Ranges of gradients, where layers have different formats.


@pytest.mark.parametrize("narrow", ["a", "b", "c"])
def test_the_narrowest_format_of_a_component_is_its_range(narrow: str) -> None:
    h = batch()
    # The sums connect what follows several layers.
    for name in "abc":
        h = h + F.tanh(affine(h, name))
    loss = F.mean(h)

    def prepared_in(storage: Dict[str, str]) -> Any:
        return AdaptiveLossScaling(FormatEmulation(loss, storage))._graph.current()

    # A single element has 16 bits in any case.
    eight = prepared_in({f"{narrow}/*": "float8_e5m2", "*": "float8_e4m3"})
    assert eight.u_maxes[eight.components.root] == 65504.0
    prepared = prepared_in({f"{narrow}/*": "float8_e4m3", "*": "float16"})
    found: Dict[int, Set[float]] = {}
    for position, index in prepared.components.of.items():
        if index not in prepared.components.scalar_components:
            found.setdefault(index, set()).add(prepared.range_of(position).u_max)
    assert any(each == {448.0, 65504.0} for each in found.values())
    assert {index: prepared.u_maxes[index] for index in found} == {i: min(each) for i, each in found.items()}


def test_a_scaled_weight_stays_in_the_formats_of_its_own_layer() -> None:
    h = constant(np.ones((2, 3)))
    for name in "abcd":
        h = F.tanh(PF.affine(h * 1e-2, 3, name=name, with_bias=False))
    for v in nn.get_parameters().values():
        v.d = 100.0
    # What layer c hands on is stored as what it reads, which is in the formats of layer b.
    storage = {"b/*": Precision("float16", "float8_e4m3"), "d/*": Precision("float8_e4m3", "float16")}
    emulation = FormatEmulation(F.mean(h) * 1e-6, {**storage, "*": "float16"})
    scaling = AdaptiveLossScaling(emulation, AdaLossConfig("fixed", fixed_loss_scale=16.0, delay=0))
    for again in (False, True):
        scaling.forward()
        scaling.backward(1.0, iteration=0, rerun=again)
    # 400 is in the range of float8_e4m3, 1600 is not: what c and d leave undone, b makes up for.
    assert [scaling.layer_scales[f"{name}/affine"] for name in "bcd"] == [64.0, 4.0, 4.0]


def test_a_leaf_that_forward_writes_is_described_by_its_writer() -> None:
    x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
    mean = nn.Variable.from_numpy_array(np.zeros((1, 3)))
    read_first = F.sum(F.mul_scalar(mean, 0.5))
    h = PF.affine(x, 3, name="a")
    beta, gamma, variance = (nn.Variable.from_numpy_array(np.full((1, 3), size)) for size in (0.0, 1.0, 1.0))
    y = F.batch_normalization(h, beta, gamma, mean, variance, batch_stat=True)
    descriptions = AdaptiveLossScaling(read_first + F.sum(y**2)).state_descriptions
    assert descriptions[hash(mean.data)] == "a/affine/BatchNormalization writes a Variable of shape (1, 3)"
