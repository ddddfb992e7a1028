# SPDX-License-Identifier: Apache-2.0
"""Parameter gradients get into their fp32 masters unscaled; what one batch has spoilt stays its own."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScaling, AdaptiveLossScalingUpdater, FormatEmulation
from nnabla_adaloss.engine.leaf_gradients import LeafGradients, LeafSeen, Written, seen_of_leaves
from nnabla_adaloss.graph.node import Node
from nnabla_adaloss.graph.plan import GraphPlan
from nnabla_adaloss.kernels import CpuKernels
from nnabla_adaloss.kernels.measurements import HostMeasurements
from nnabla_adaloss.kernels.scratch import ScratchPool


class Stage:
    """A network with one weight used twice, and its gradients without any scaling."""

    def __init__(self, *, rounded: bool, each: bool) -> None:
        rng = np.random.RandomState(0)
        x = nn.Variable.from_numpy_array(rng.randn(4, 3).astype(np.float32))
        h = F.tanh(PF.affine(x, 3, name="w", rng=rng))
        self.loss = F.mean(PF.affine(F.tanh(PF.affine(h, 3, name="w")), 2, name="head", rng=rng) ** 2)
        self.parameters = nn.get_parameters()
        self.zero()
        self.loss.forward()
        self.loss.backward()
        self.expected = self.gradients()
        self.zero()
        self.plan = GraphPlan(self.loss, adaptive=False)
        self.measurements = HostMeasurements(CpuKernels())
        self.leaves = LeafGradients(
            CpuKernels(), ScratchPool(), self.measurements, rounded=rounded, unscale_each=each
        )
        self.masters = {name: v.grad for name, v in self.parameters.items()}

    def zero(self) -> None:
        for v in self.parameters.values():
            v.grad.zero()

    def gradients(self) -> Dict[str, np.ndarray]:
        return {name: v.g.copy() for name, v in self.parameters.items()}

    def node(self, f: object) -> Node:
        return self.plan.nodes[hash(f)]

    def label(self, written: Written) -> str:
        return self.plan.structure.by_number[written.function].label

    def results(self) -> List[Tuple[Written, float]]:
        return list(zip(self.leaves.written, self.measurements.fetch().largest))

    def backward(self, scale: float, stop_at: Optional[str] = None) -> None:
        seen: List[str] = []

        def pre(f: object) -> None:
            node = self.node(f)
            if not seen and node.leaves:
                self.leaves.take(node, scale, {})
                if node.label == stop_at:
                    seen.append(node.label)

        def post(f: object) -> None:
            if not seen and self.node(f).leaves:
                self.leaves.give_back()

        self.loss.forward()
        self.loss.backward(scale, function_pre_hook=pre, function_post_hook=post)
        if stop_at is None:
            self.leaves.finish()
        else:
            self.leaves.restore()


MODES = pytest.mark.parametrize("rounded", [False, True])
WHEN = pytest.mark.parametrize("each", [False, True])


@MODES
@WHEN
@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**-10])
def test_powers_of_two_come_out_without_a_trace(rounded: bool, each: bool, scale: float) -> None:
    stage = Stage(rounded=rounded, each=each)
    stage.backward(scale)
    for name, gradient in stage.gradients().items():
        expected = stage.expected[name]
        if rounded:  # each contribution on its own, then added: nnabla's kernel adds in another order
            np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-9, err_msg=name)
        else:
            np.testing.assert_array_equal(gradient, expected, err_msg=name)
    assert all(np.isfinite(largest) for _, largest in stage.results())
    assert stage.masters == {name: v.grad for name, v in stage.parameters.items()}


@MODES
@WHEN
def test_scales_that_are_no_powers_of_two_come_out_to_rounding(rounded: bool, each: bool) -> None:
    stage = Stage(rounded=rounded, each=each)
    stage.backward(1000.0)
    for name, gradient in stage.gradients().items():
        np.testing.assert_allclose(gradient, stage.expected[name], rtol=1e-5, atol=1e-8, err_msg=name)


@MODES
@WHEN
def test_gradients_are_added_to_what_is_there(rounded: bool, each: bool) -> None:
    stage = Stage(rounded=rounded, each=each)
    for v in stage.parameters.values():
        v.g = 0.25
    stage.backward(64.0)
    stage.backward(16.0)
    for name, gradient in stage.gradients().items():
        np.testing.assert_allclose(
            gradient, 0.25 + 2 * stage.expected[name], rtol=1e-6, atol=1e-7, err_msg=name
        )


@MODES
@WHEN
@pytest.mark.parametrize("label", ["head/affine", "w/affine", "w/affine[1]"])
def test_giving_up_puts_every_master_back(rounded: bool, each: bool, label: str) -> None:
    stage = Stage(rounded=rounded, each=each)
    for v in stage.parameters.values():
        v.g = 0.25
    stage.backward(64.0, stop_at=label)
    assert stage.masters == {name: v.grad for name, v in stage.parameters.items()}
    stage.leaves.restore()
    assert stage.masters == {name: v.grad for name, v in stage.parameters.items()}


@MODES
@WHEN
def test_infinities_are_found_with_the_layer(rounded: bool, each: bool) -> None:
    stage = Stage(rounded=rounded, each=each)
    head = stage.parameters["head/affine/b"]
    head.g = np.inf
    stage.backward(8.0)
    labels = [stage.label(written) for written, largest in stage.results() if largest == np.inf]
    assert labels == ["head/affine"]


@MODES
@WHEN
def test_what_is_written_comes_with_its_largest_magnitude(rounded: bool, each: bool) -> None:
    stage = Stage(rounded=rounded, each=each)
    stage.backward(64.0)
    positions = stage.plan.positions
    alone = {(stage.label(w), w.leaf): largest for w, largest in stage.results() if w.alone}
    head = positions[hash(stage.parameters["head/affine/W"])]
    assert alone["head/affine", head] == np.abs(stage.expected["head/affine/W"]).max()
    # Written into the master itself, the second use of a weight cannot be told from the first.
    assert ("w/affine", positions[hash(stage.parameters["w/affine/W"])]) in alone or not rounded
    assert len(alone) == (6 if rounded else 4)


@WHEN
def test_what_is_written_nowhere_stays_lazily_zero(each: bool) -> None:
    stage = Stage(rounded=True, each=each)
    node = next(n for n in stage.plan.nodes.values() if n.label == "head/affine")
    stage.leaves.take(node, 8.0, {})
    stage.leaves.give_back()
    stage.leaves.finish()
    assert all(v.grad.zeroing for v in node.leaves)


def test_what_functions_write_is_told_apart_where_each_is_by_itself_else_as_a_sum_for_the_first() -> None:
    v = nn.Variable((2,), need_grad=True)

    def entry(leaf: int, function: int, scale: float, *, alone: bool) -> Written:
        return Written(leaf, function, v, v.grad, v.grad, scale, alone)

    rounded = [entry(0, 7, 2.0, alone=True), entry(1, 6, 2.0, alone=True), entry(0, 5, 8.0, alone=True)]
    told = [LeafSeen(0, 7, 3.0, 2.0), LeafSeen(1, 6, 1.0, 2.0), LeafSeen(0, 5, math.inf, 8.0)]
    assert seen_of_leaves(rounded, [3.0, 1.0, math.inf]) == told
    added = [entry(0, 7, 2.0, alone=True), entry(1, 6, 2.0, alone=True), entry(0, 5, 8.0, alone=False)]
    # With another scale a sum counts for who has added: the first component's scale says nothing about it.
    assert seen_of_leaves(added, [3.0, 1.0, 4.0]) == [
        LeafSeen(0, 7, 3.0, 2.0),
        LeafSeen(1, 6, 1.0, 2.0),
        LeafSeen(0, 5, 4.0, 8.0),
    ]
    alike = [*added[:2], entry(0, 5, 2.0, alone=False)]
    assert seen_of_leaves(alike, [3.0, 1.0, 4.0]) == [LeafSeen(0, 7, 4.0, 2.0), LeafSeen(1, 6, 1.0, 2.0)]
    # What an earlier batch has left in a gradient is not told apart either, and is no matter of this one.
    assert seen_of_leaves([entry(0, 7, 2.0, alone=False)] * 2, [3.0, 5.0]) == []


class FineTuning:
    """A head that is trained on layers that no solver has, and on an input whose gradient somebody wants."""

    def __init__(self) -> None:
        nn.clear_parameters()
        rng = np.random.RandomState(0)
        self.x, self.weight = nn.Variable((4, 3), need_grad=True), nn.Variable((1,))
        h = F.tanh(PF.affine(F.tanh(PF.affine(self.x, 5, name="one", rng=rng)), 5, name="two", rng=rng))
        self.loss = F.mean(
            PF.affine(h, 2, name="head", rng=rng) ** 2 * F.broadcast(F.reshape(self.weight, (1, 1)), (4, 2))
        )
        self.parameters = nn.get_parameters()
        self.solver = S.Sgd(0.01)
        self.solver.set_parameters({n: v for n, v in self.parameters.items() if n.startswith("head")})
        self.x.grad.zero()

    def feed(self, weight: float) -> None:
        self.x.d = np.random.default_rng(1).standard_normal(self.x.shape)
        self.weight.d = weight


@pytest.mark.parametrize("options", [{}, {"on_overflow": "next"}, {"accum_grad": 2}])
@pytest.mark.parametrize("storage", [None, "float16"])
def test_a_skipped_batch_is_not_told_of_the_next_ones(storage: Optional[str], options: Any) -> None:
    n, size = FineTuning(), options.get("accum_grad", 1)
    weights = iter(np.repeat([1.0, 1.0, np.nan, 1.0, 1.0, np.nan, 1.0], size))
    updater = AdaptiveLossScalingUpdater(
        n.solver,
        n.loss,
        lambda: n.feed(next(weights)),
        storage=storage,
        on_nonfinite_loss="skip",
        **options,
    )
    results = [updater.update() for _ in range(7)]
    assert [r.updated for r in results] == [True, True, False, True, True, False, True]
    assert [bool(r.nonfinite_layers) for r in results] == [not r.updated for r in results]
    assert results[2].nonfinite_layers == results[5].nonfinite_layers
    assert updater.scaling.found_inf == []
    assert np.isnan(n.parameters["one/affine/W"].g).all()


@pytest.mark.parametrize("storage", [None, "float16"])
def test_elements_that_are_finite_are_summed_on(storage: Optional[str]) -> None:
    """One infinity in a gradient: the others are what they would have been without it."""
    sums = []
    for spoilt in (False, True):
        n = FineTuning()
        scaling = AdaptiveLossScaling(n.loss if storage is None else FormatEmulation(n.loss, storage))
        gradient = n.parameters["one/affine/W"].grad
        gradient.fill(0.5)
        for batch in range(4):
            if spoilt and batch == 1:
                gradient.data[0, 0] = np.inf
            n.solver.zero_grad()
            n.feed(1.0)
            scaling.forward()
            scaling.backward(None)
            if batch > 1:
                assert scaling.found_inf == []
        sums.append(gradient.data.copy())
    assert np.isinf(sums[1][0, 0])
    np.testing.assert_allclose(sums[1].flat[1:], sums[0].flat[1:], rtol=1e-6)
