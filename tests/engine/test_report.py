# SPDX-License-Identifier: Apache-2.0
"""What a pass has found: how large gradients are, and where an overflow began."""

from __future__ import annotations

from typing import List, Optional, Sequence, Set

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, FormatEmulation
from nnabla_adaloss.engine import slices
from nnabla_adaloss.engine.report import first_overflow, suspected_predecessors
from tests.worlds import random_structures as graphs
from tests.worlds.networks import layers, mlp
from tests.worlds.passes import run, settle
from tests.worlds.tampering import Gate
from tests.worlds.values import FLOAT, constant

pytestmark = pytest.mark.any_context


class Graph(graphs.Graph):
    """A graph that never runs; what was found goes by variable, and by layer for gradients of parameters."""

    def of(self, *variables: nn.Variable) -> List[int]:
        return list(map(self.index, variables))

    def overflowed(self, *bad: nn.Variable, biases: Sequence[str] = ()) -> Optional[int]:
        layers, of = [f"{layer}/affine" for layer in biases], self.components.of
        of_biases = {n.number: of[n.outputs[0]] for n in self.structure.nodes if n.label in layers}
        return first_overflow(self.structure, self.components, {self.position(v) for v in bad}, of_biases)

    def unseen(self, overflowed: nn.Variable, *seen: nn.Variable) -> Set[int]:
        return suspected_predecessors(self.components, self.of(overflowed)[0], {*self.of(*seen)})


class Chain(Graph):
    """A mean and two layers: three components, and that of data nobody wants a gradient of."""

    def __init__(self) -> None:
        self.h = PF.affine(nn.Variable((2, 3)), 3, name="first")
        self.out = PF.affine(F.tanh(self.h), 3, name="second")
        self.loss = F.mean(self.out)
        super().__init__(self.loss)


def test_the_first_overflow_in_backward_order_is_told() -> None:
    n = Chain()
    of_loss, of_out, of_h = n.of(n.loss, n.out, n.h)
    assert n.overflowed() is None
    assert n.overflowed(biases=["first"]) == n.overflowed(n.h) == of_h
    assert n.overflowed(biases=["first", "second"]) == n.overflowed(n.h, n.out, biases=["first"]) == of_out
    assert n.overflowed(n.loss, n.out, biases=["second"]) == of_loss


def test_unmeasured_predecessors_of_an_overflow_are_suspected() -> None:
    """Attention has no weights of its own: an overflow of its scores shows in the layers that make them."""
    x = nn.Variable((2, 3, 4))
    q, k, v = (PF.affine(x, 4, base_axis=2, name=name) for name in "qkv")
    scores = F.softmax(F.batch_matmul(q, k, transpose_b=True))
    mixed = F.batch_matmul(scores, v)
    out = PF.affine(mixed, 4, base_axis=2, name="out")
    n = Graph(F.mean(out))
    assert n.unseen(q, out) == {*n.of(scores, mixed)}
    assert n.unseen(q, out, mixed) == {*n.of(scores)}
    # The scalar before the top layer is no suspect.
    assert n.unseen(out) == set()
    # Two layers beside a shortcut: what is between them comes before what is around them, and behind it.
    inner = F.tanh(PF.affine(x, 4, base_axis=2, name="inner"))
    merged = Graph(
        F.mean(F.tanh(inner) + PF.affine(F.tanh(PF.affine(inner, 4, base_axis=2)), 4, base_axis=2))
    )
    between = next(edge.successor for edge in merged.components.edges if edge.layer is not None)
    assert suspected_predecessors(merged.components, between, set()) == {*merged.of(inner)}


# What the engine reports.


def test_an_overflow_is_told_by_the_function_where_it_began() -> None:
    h = F.tanh(PF.affine(constant(np.ones((2, 3))), 3, name="first"))
    loss = F.sum(PF.affine(h, 3, name="second"))
    nn.get_parameters()["second/affine/W"].d = 60000.0
    scaling = AdaptiveLossScaling(FormatEmulation(loss, "float16"))
    run(scaling, 8.0)
    result = scaling.result
    assert result.component == "first/affine/Tanh"
    assert list(result.found_inf) == ["first/affine/Tanh", "first/affine"]
    assert repr(result).startswith(
        "PassReport(kind='measuring', found_inf=['first/affine/Tanh', 'first/affine'],"
    )
    # At a lower scale all are finite.
    run(scaling, 2.0**-8)
    assert scaling.result.component is None


def test_layers_of_an_overflow_are_all_told_whatever_the_slice_has_measured() -> None:
    """A weight of one layer tells of it, also while other output gradients are known to be infinite."""
    with nn.context_scope(FLOAT):  # half precision does not hold the weights below
        h = constant(np.ones((64, 8)))
        for index in range(5):
            h = F.relu(PF.affine(h, 128, name=f"layer{index}"))
        loss = F.mean(h**2.0)
    parameters = nn.get_parameters()
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(measure_every=4))
    settle(scaling, 0, None)
    for name, factor in ("layer4/affine/W", 1e38), ("layer3/affine/W", 1e-20):
        parameters[name].d = factor * parameters[name].d
    measured = set()
    for iteration in range(1, 9):
        run(scaling, None, iteration=iteration)
        layers = [name for name in scaling.found_inf if not name.endswith("ReLU")]
        assert layers == [f"layer{index}/affine" for index in (3, 2, 1, 0)]
        measured.add(tuple(scaling.found_inf))
    assert len(measured) > 1  # slices differ


@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("method", ["amax_history", "approx_range", "fixed"])
def test_the_batch_once_more_may_tell_more_unless_all_was_measured_or_nothing_ever_is(
    method: str, scale: Optional[float]
) -> None:
    h = PF.affine(constant(np.ones((2, 3))), 3, name="only")
    # With one scale for all that was given, nothing is measured.
    constant_scale = method == "fixed" and scale is not None
    for loss in (F.mean(h), F.mean(PF.affine(h, 2, name="last"))):
        scaling = AdaptiveLossScaling(loss, AdaLossConfig(method))
        for measured in (True, False):
            settle(scaling, scaling.iteration, scale)
            assert scaling.can_measure_more == (not (measured or constant_scale))


@pytest.mark.parametrize("merged", [False, True])
def test_an_overflow_with_a_given_s0_lowers_the_loss_gradient_for_its_batch(merged: bool) -> None:
    h = PF.affine(constant(np.ones((2, 3))), 3, name="first")
    inner = PF.affine(F.tanh(h), 3, name="inner")
    # Of a loss of several elements a layer may lead back to the component.
    loss = h + PF.affine(F.tanh(inner), 3, name="outer") if merged else inner
    scaling = AdaptiveLossScaling(FormatEmulation(loss, "float16"))
    seed = np.full(loss.shape, 100.0, np.float32)
    for again, scale, overflows in ((False, 8.0, False), (True, 8.0, False), (True, 1024.0, True)):
        run(scaling, scale, grad=seed, iteration=0, rerun=again)
        assert bool(scaling.found_inf) == overflows
    assert scaling.result.measurements.overflowed == scaling.result.schedule.components.root
    assert scaling.after_overflow()
    run(scaling, 1024.0, grad=seed, iteration=0, rerun=True)
    assert not scaling.found_inf
    assert scaling.loss_scale == 1024.0 / 2.0**4
    # The next batch has S0 again.
    run(scaling, 8.0, grad=seed, iteration=1)
    assert scaling.loss_scale == 8.0


@pytest.mark.parametrize("method", ["amax_history", "fixed"])
def test_a_lower_s0_alone_helps_one_scale_for_all(method: str) -> None:
    h = PF.affine(constant(np.ones((2, 3))), 3, name="first")
    loss = F.sum(PF.affine(F.tanh(h), 3, name="second")) * 2.0**10
    scaling = AdaptiveLossScaling(FormatEmulation(loss, "float16"), AdaLossConfig(method))
    run(scaling, 2.0**8)
    if method == "fixed":
        # Loss weights are not looked at, either.
        assert {*scaling.result.schedule.component_scales} == {2.0**8}
        assert scaling.found_inf
        assert not scaling.after_overflow()
    else:
        assert not scaling.found_inf


def test_an_overflow_before_a_clipping_function_is_not_blamed_on_its_successor() -> None:
    gate, ends = Gate(), [F.constant(bound, (4, 6)) for bound in (-1.0, 1.0)]
    descendants = layers(6)
    clipped = F.clip_grad_by_value(descendants, *ends)
    loss = F.mean(PF.affine(gate(clipped), 3, name="last") ** 2)
    scaling = AdaptiveLossScaling(FormatEmulation(loss, "float16"), AdaLossConfig(delay=0, measure_every=1))
    settle(scaling)
    gate.factor = 2.0**30
    run(scaling, iteration=1)
    result = scaling.result
    assert result.kind == "measuring"
    components, positions = result.schedule.components, scaling.graph.positions
    of_clipped, of_behind = (components.of[positions[hash(v)]] for v in (clipped, descendants))
    assert of_clipped != of_behind
    assert result.component == components.names[of_clipped]


def test_an_infinity_that_a_function_clips_shows_in_a_pass_that_measures_all() -> None:
    with nn.context_scope(FLOAT):  # the storage is emulated
        bounds = [F.constant(bound, (4, 6)) for bound in (-1.0, 1.0)]
        clipped = F.clip_grad_by_value(layers(6), *bounds)
        scaling = AdaptiveLossScaling(FormatEmulation(F.sum(clipped * 1e5)))
    # Below the largest float16 on arrival, at this scale; multiplied by 1 / scale it is infinite.
    run(scaling, 0.5)
    assert scaling.scale_of(clipped) == 1.0
    assert scaling.found_inf == ["layer0/affine/ClipGradByValue"]
    assert scaling.result.nonfinite == set()


def test_a_pass_that_measures_a_slice_tells_of_no_other_component(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "_LEAST", 1)
    scaling = AdaptiveLossScaling(mlp(), AdaLossConfig(measure_every=4))
    told = []
    for iteration in range(9):
        settle(scaling, iteration)
        told.append({*scaling.result.measurements.amax})
    everything, *slice_by_slice = told
    of_leaves = set().union(*scaling.result.schedule.components.leaves.values())
    assert of_leaves < everything
    for cycle in (slice_by_slice[:4], slice_by_slice[4:]):
        assert set().union(*cycle) == everything
        # Every pass unscales all leaves; in half all of them count, else when it is the turn of their slice.
        assert all(of_leaves <= found for found in cycle) == scaling.plan.nodes[-1].half


def test_sums_of_batches_count_for_no_component() -> None:
    rng = np.random.RandomState(0)
    h = F.tanh(PF.affine(constant(np.full((4, 3), 50.0)), 4, name="frozen", rng=rng) * 0.01)
    loss = F.mean(PF.affine(h, 2, name="trained", rng=rng) ** 2)
    trained = {name: one for name, one in nn.get_parameters().items() if name.startswith("trained")}
    config = AdaLossConfig(delay=0, measure_every=1)
    scaling = AdaptiveLossScaling(loss, config=config, parameters=trained)
    weight = nn.get_parameters()["frozen/affine/W"]
    sums, amaxes = [], []
    for iteration in range(3):
        for one in trained.values():
            one.grad.zero()
        scaling.forward()
        scaling.backward(8.0, iteration=iteration)
        sums.append(np.abs(weight.g).max())
        amaxes.append(scaling.result.measurements.amax)
    assert sums[2] == pytest.approx(3 * sums[0])
    assert amaxes == [amaxes[0]] * 3
