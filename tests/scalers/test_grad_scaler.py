# SPDX-License-Identifier: Apache-2.0
"""Loops of one's own, in PyTorch's words."""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

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
    GradScaler,
    LossScaleWarning,
)
from tests.worlds.interruptions import Interrupt, Moments, Training
from tests.worlds.monitors import Records
from tests.worlds.networks import two_layers
from tests.worlds.passes import run
from tests.worlds.tampering import Gate
from tests.worlds.trainings import METHODS, Loop, scaler_step, solver_of, updater_of
from tests.worlds.values import FLOAT, HALF, assert_equal, constant, data, gradients, snapshot
from tests.worlds.warned import silent

ignores_warnings = pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")


class Net:
    """A small net with a scaler; its batches may hold a NaN, or multiply the loss by a factor."""

    def __init__(self, weight: float = 1.0, **options: Any) -> None:
        nn.clear_parameters()
        self._rng = np.random.default_rng(0)
        self.x, self._t, self._factor = nn.Variable((8, 6)), nn.Variable((8, 1)), nn.Variable((1, 1))
        h = F.relu(PF.affine(self.x, 16, name="fc1", rng=np.random.RandomState(0)))
        h = PF.batch_normalization(h, name="bn")
        y = PF.affine(h, 3, name="fc2", rng=np.random.RandomState(1))
        self.loss = F.mean(F.softmax_cross_entropy(y, self._t) * self._factor) * weight
        self.solver = solver_of(S.Momentum(0.05 / weight))
        self.scaler = GradScaler(self.solver, **{"storage": "float16", **options})

    def feed(self, *, nan: bool = False, factor: float = 1.0) -> None:
        self._factor.d = factor
        self.x.d, self._t.d = self._rng.standard_normal(self.x.shape), self._rng.integers(0, 3, (8, 1))
        if nan:
            self.x.d[0, 0] = np.nan

    def backward(self, **what: Any) -> None:
        self.feed(**what)
        backward(self.scaler, [self.solver], self.loss)

    def iterate(self, **what: Any) -> bool:
        self.feed(**what)
        return scaler_step(self.scaler, self.solver, self.loss)


def backward(
    scaler: GradScaler, solvers: Sequence[Any], *losses: nn.Variable, together: bool = False
) -> None:
    """Add up the gradients of these losses: forward and backward in turn, or forward of all `together`."""
    for solver in solvers:
        solver.zero_grad()
    for group in (losses,) if together else zip(losses):
        for loss in group:
            scaler.forward(loss)
        for loss in group:
            scaler.backward(loss)


def iterate(
    scaler: GradScaler, solvers: Sequence[Any], *losses: nn.Variable, together: bool = False
) -> List[bool]:
    """One iteration of several solvers; which of them have updated their parameters."""
    backward(scaler, solvers, *losses, together=together)
    updated = [scaler.step(solver) for solver in solvers]
    scaler.update()
    return updated


def test_monitors_receive_the_layers_of_each_loss() -> None:
    monitor = Records()
    n = Net(monitors=[monitor])
    for _ in range(2):
        assert n.iterate()
    assert {(record.layer, record.iteration) for record in monitor.records} == {
        ("fc2/affine", i) for i in (1, 2)
    }
    assert n.scaler.scaling(n.loss).layer_scales == {"fc2/affine": monitor.records[-1].alpha}


@pytest.mark.parametrize("method", METHODS)
def test_the_first_batch_has_its_scale_already(method: str) -> None:
    n = Net(1e-8, config=AdaLossConfig(loss_scale_method=method))
    n.backward()
    found = gradients()["fc1/affine/W"]
    expected = run(n.loss)["fc1/affine/W"]
    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)
    assert n.scaler.scaling(n.loss).loss_scale > 2.0**30


def test_gradients_are_clipped_unscaled() -> None:
    n = Net(1e-6)
    for _ in range(2):
        n.backward()
        n.scaler.unscale_(n.solver)
        before = gradients()["fc2/affine/W"]
        n.solver.clip_grad_by_norm(1e-9)
        assert 1e-9 < np.linalg.norm(before) < 1e-5
        np.testing.assert_allclose(np.linalg.norm(gradients()["fc2/affine/W"]), 1e-9, rtol=1e-3)
        assert n.scaler.step(n.solver)
        n.scaler.update()


@pytest.mark.parametrize("method", ["approx_range", None])
def test_an_overflow_skips_the_step_and_lowers_the_scale_at_fault(method: Optional[str]) -> None:
    n = Net(config=AdaLossConfig(loss_scale_method=method))
    assert all(n.iterate() for _ in range(3))
    before, scale = snapshot(), n.scaler.get_scale()
    assert not n.iterate(factor=2.0**5)
    assert_equal(snapshot(), before)
    assert (n.scaler.steps, n.scaler.skipped_steps) == (3, 1)
    assert n.scaler.cause.startswith("overflow, first in ")
    assert n.iterate(factor=2.0**5)
    assert scale / 32.0 <= n.scaler.get_scale() <= scale / 16.0


def test_nan_in_the_data_lowers_no_scale_and_leaves_nothing_behind() -> None:
    n = Net()
    assert all(n.iterate() for _ in range(2))
    before, components = snapshot(), n.scaler.scaling(n.loss).components
    measured = components.next_memory().state_dict()
    with pytest.warns(LossScaleWarning, match=r"step skipped in iteration 3: fc1/affine \(Affine\) reads an"):
        assert not n.iterate(nan=True)
    assert_equal(snapshot(), before)
    assert components.next_memory().state_dict() == measured
    assert n.iterate()


def test_a_batch_that_no_scale_helps_teaches_nothing() -> None:
    """Its gradients are NaN, and the loss is finite: the root of a row of zeros."""
    x, z, rng = nn.Variable((8, 4)), nn.Variable((8, 4)), np.random.RandomState(0)
    loss = F.mean(F.sum(PF.affine(x, 6, name="a", rng=rng, with_bias=False) ** 2, axis=1) ** 0.5)
    loss = loss + F.mean(PF.affine(z, 2, name="z", rng=rng) ** 2)
    solver = solver_of()
    scaler = GradScaler(solver, storage="float16")
    memories = []
    # The first one lowers scales, until it is known that these do not help.
    for bad in (False, False, True, False, False, True, False):
        memories.append(scaler.scaling(loss).components.memory)
        x.d = rng.uniform(0.5, 1.0, x.shape) * [[float(not bad)], *[[1.0]] * 7]
        z.d = 8.0 if bad else 1.0
        assert scaler_step(scaler, solver, loss) != bad
    assert memories[6] == memories[5]


def test_an_iteration_with_nan_in_the_data_of_one_loss_teaches_nothing_about_another() -> None:
    gate, inputs, losses, solvers = Gate(), [data(8, 4, seed=seed) for seed in range(2)], [], []
    for x, name in zip(inputs, ("first", "second")):
        losses.append(F.mean(gate(F.tanh(PF.affine(x, 3, name=name))) ** 2))
        own = {key: v for key, v in nn.get_parameters().items() if key.startswith(name)}
        solvers.append(solver_of(S.Sgd(0.1), own))
    scaler, learned = GradScaler(*solvers, config=AdaLossConfig(measure_every=1)), []
    for gate.factor, inputs[0].d[0, 0] in ((1.0, 1.0), (1.0, 1.0), (2.0**10, np.nan)):
        found = iterate(scaler, solvers, *losses)
        learned.append([loss["components"] for loss in scaler.state_dict()["losses"]])
    assert found == [False, True]
    assert learned[-1] == learned[-2] != learned[0]


def with_a_logarithm(x: nn.Variable, scope: str) -> Tuple[nn.Variable, nn.Variable]:
    """A loss, and a number whose logarithm is added to it: of a negative one its gradients are finite."""
    positive = constant([1.0])
    with nn.parameter_scope(scope):
        return two_layers(x) + F.sum(F.log(positive)), positive


@pytest.mark.parametrize("storage", [None, "float16", "native"])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("unscales", [False, True])
def test_a_step_of_a_loss_that_is_nan_is_skipped_though_its_gradients_are_finite(
    unscales: bool, before: int, storage: Optional[str]
) -> None:
    with nn.context_scope(HALF if storage == "native" else FLOAT):
        loss, positive = with_a_logarithm(data(4, 3), "a")
        solver = solver_of(S.Sgd(0.1))
        scaler = GradScaler(solver, storage=None if storage == "native" else storage)

        def updated() -> bool:
            backward(scaler, [solver], loss)
            if unscales:
                scaler.unscale_(solver)
            found = scaler.step(solver)
            scaler.update()
            return found

        assert all(updated() for _ in range(before))
        parameters, scale = snapshot(), scaler.get_scale() if before else None
        positive.d = -1.0
        with pytest.warns(LossScaleWarning, match=r"Log \(Log\) .*: this is not a gradient overflow"):
            assert not updated()
        assert_equal(snapshot(), parameters)
        assert scaler.cause.startswith("Log (Log) computes 1 infinity or NaN")
        positive.d = 1.0
        assert updated()
        assert scale is None or scaler.get_scale() == scale
        assert (scaler.steps, scaler.skipped_steps) == (before + 1, 1)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_a_loss_that_is_nan_skips_the_steps_of_those_that_it_depends_on(together: bool, shared: bool) -> None:
    x = data(4, 3)
    h = F.tanh(PF.affine(x, 3, name="shared")) if shared else x
    (loss, positive), (other, _) = with_a_logarithm(h, "a"), with_a_logarithm(h, "b")
    named = nn.get_parameters()
    solvers = S.Sgd(0.1), S.Sgd(0.1)
    solvers[0].set_parameters({name: v for name, v in named.items() if name.startswith("a/")})
    solvers[1].set_parameters({name: v for name, v in named.items() if not name.startswith("a/")})
    scaler = GradScaler(*solvers, storage="float16")
    assert iterate(scaler, solvers, loss, other, together=together) == [True, True]
    positive.d = -1.0
    with pytest.warns(LossScaleWarning, match=r"Log \(Log\)"):
        assert iterate(scaler, solvers, loss, other, together=together) == [False, not shared]
    positive.d = 1.0
    assert iterate(scaler, solvers, loss, other, together=together) == [True, True]


@ignores_warnings
@pytest.mark.parametrize("first", [False, True])
def test_one_of_two_added_batches_may_have_a_loss_that_is_nan(first: bool) -> None:
    loss, positive = with_a_logarithm(data(4, 3), "a")
    solver = solver_of(S.Sgd(0.1))
    scaler = GradScaler(solver, storage="float16")
    updated = []
    for bad in (False, True, False):
        solver.zero_grad()
        for batch in (True, False):
            positive.d = -1.0 if bad and batch == first else 1.0
            scaler.forward(loss)
            scaler.backward(loss)
        updated.append(scaler.step(solver))
        scaler.update()
    assert updated == [True, False, True]
    assert scaler.cause.startswith("Log (Log)")


def test_clipping_does_not_hide_a_nan() -> None:
    n = Net(storage=None)
    n.backward(nan=True)
    n.scaler.unscale_(n.solver)
    for v in nn.get_parameters().values():
        v.g = 0.0
    with pytest.warns(LossScaleWarning, match="reads an input"):
        assert not n.scaler.step(n.solver)


def test_a_backward_after_unscaling_is_looked_at_by_the_step() -> None:
    n = Net()
    assert n.iterate()
    before = snapshot()
    n.backward()
    n.scaler.unscale_(n.solver)
    n.feed(nan=True)
    n.scaler.forward(n.loss)
    n.scaler.backward(n.loss)
    with pytest.warns(LossScaleWarning, match=r"fc1/affine \(Affine\) reads an input"):
        assert not n.scaler.step(n.solver)
    n.scaler.update()
    assert_equal(snapshot(), before)
    n.backward()
    n.scaler.unscale_(n.solver)
    n.scaler.forward(n.loss)
    n.scaler.backward(n.loss)
    assert n.scaler.step(n.solver)


@pytest.mark.parametrize("bad", [False, True])
def test_a_step_may_be_left_out_after_unscaling(bad: bool) -> None:
    n = Net()
    assert n.iterate()
    scale, before = n.scaler.get_scale(), snapshot()
    n.backward(factor=2.0**5 if bad else 1.0)
    n.scaler.unscale_(n.solver)
    n.scaler.update()
    assert_equal(snapshot(), before)
    assert (n.scaler.steps, n.scaler.skipped_steps) == (1, int(bad))
    # What has overflowed is lowered, as by a step.
    assert n.iterate(factor=2.0**5 if bad else 1.0)
    assert (n.scaler.get_scale() < scale) is bad


@ignores_warnings
@pytest.mark.parametrize("first", [{"factor": 2.0**5}, {"nan": True}])
def test_the_first_of_two_batches_that_are_added_is_found_to_be_the_cause(first: Dict[str, Any]) -> None:
    n = Net()
    assert n.iterate()
    updated = []
    for _ in range(4):
        n.backward(**first)
        n.feed()
        n.scaler.forward(n.loss)
        n.scaler.backward(n.loss)
        updated.append(n.scaler.step(n.solver))
        n.scaler.update()
    if "nan" in first:
        assert updated == [False] * 4
        assert n.scaler.cause.startswith("fc1/affine (Affine) reads an input")
    else:
        assert updated == [False, True, True, True]


@ignores_warnings
@pytest.mark.parametrize("delay", [None, 0])
@pytest.mark.parametrize("bad", [2.0**10, np.nan])
@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("index", [0, 1])
def test_the_batch_that_overflowed_is_found_among_two_losses(
    index: int, one_by_one: bool, bad: float, delay: Optional[int]
) -> None:
    gates, losses = (Gate(), Gate()), []
    for gate, name in zip(gates, ("fc1", "fc2")):
        losses.append(F.mean(gate(F.tanh(PF.affine(data(8, 4), 3, name=name))) ** 2))
    solver = solver_of(S.Sgd(0.0))
    scaler = GradScaler(solver, storage="float16", config=AdaLossConfig(delay=delay))
    updated, causes = [], []
    for _ in range(5):
        solver.zero_grad()
        for gates[index].factor in (bad if updated else 1.0, 1.0):
            for group in zip(losses) if one_by_one else (losses,):
                for loss in group:
                    scaler.forward(loss)
                for loss in group:
                    scaler.backward(loss)
        updated.append(scaler.step(solver))
        scaler.update()
        causes += [] if updated[-1] else [scaler.cause]
    assert all(cause.startswith(f"overflow, first in fc{index + 1}") for cause in causes)
    assert updated[-1] is (bad == 2.0**10)


@pytest.mark.parametrize("delay", [None, 0])
def test_the_first_of_two_batches_is_the_cause_after_the_users_own_forward(
    delay: Optional[int],
) -> None:
    n = Net(storage=None, config=AdaLossConfig(delay=delay))
    assert n.iterate()
    n.solver.zero_grad()
    for nan in (True, False):
        n.feed(nan=nan)
        n.loss.forward()
        n.scaler.backward(n.loss)
    with pytest.warns(LossScaleWarning, match="reads an input"):
        assert not n.scaler.step(n.solver)


@ignores_warnings
@pytest.mark.parametrize("delay", [None, 0])
def test_a_batch_added_to_one_that_overflowed_counts_for_solvers_that_step(delay: Optional[int]) -> None:
    x, weights = nn.Variable((2, 1)), [nn.Variable((1, 1), need_grad=True) for _ in range(2)]
    # The gradient of a root is infinite at 0.
    loss = F.mean(F.affine(x, weights[0]) ** 0.5) + F.mean(F.affine(constant(np.ones((2, 1))), weights[1]))
    solvers = [S.Sgd(0.0) for _ in weights]
    for solver, weight in zip(solvers, weights):
        weight.d = 1.0
        solver.set_parameters({"w": weight})
    scaler = GradScaler(*solvers, config=AdaLossConfig(delay=delay))
    for first, updated in ((1.0, [True, True]), (0.0, [False, True])):
        for solver in solvers:
            solver.zero_grad()
        for x.d in (first, 1.0):
            scaler.forward(loss)
            scaler.backward(loss)
        assert weights[1].g.item() == 2.0
        assert [scaler.step(solver) for solver in solvers] == updated
        scaler.update()


def test_a_batch_added_to_one_that_overflowed_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeats could not save the step."""
    x, w = nn.Variable((2, 1)), nn.Variable((1, 1), need_grad=True)
    w.d, solver = 1.0, S.Sgd(0.0)
    solver.set_parameters({"w": w})
    loss = F.mean(F.affine(x, w) ** 0.5)  # the gradient of a root is infinite at 0
    scaler = GradScaler(solver, config=AdaLossConfig(delay=0))
    passes: List[int] = []
    backward = AdaptiveLossScaling.backward

    def counted(*arguments: Any, **keywords: Any) -> Any:
        passes[-1] += 1
        return backward(*arguments, **keywords)

    monkeypatch.setattr(AdaptiveLossScaling, "backward", counted)
    x.d = 0.0
    for _ in range(2):
        passes.append(0)
        scaler.forward(loss)
        scaler.backward(loss)
    assert not scaler.step(solver)
    assert passes[0] > 2 >= passes[1]


def test_calls_in_the_wrong_order_are_refused() -> None:
    n = Net()
    scaler, solver = n.scaler, n.solver

    def refused(call: Callable[..., Any], *arguments: Any, told: str) -> None:
        with pytest.raises(RuntimeError, match=told):
            call(*arguments)

    for _ in range(2):
        refused(scaler.step, solver, told=r"step\(\) before backward")
        refused(scaler.unscale_, solver, told=r"unscale_\(\) before backward")
        refused(scaler.update, told=r"update\(\) has nothing to do")
        n.feed()
        n.loss.forward()
        refused(scaler.backward, n.loss, told="forward did not run in storage='float16'")
        n.backward()
        scaler.unscale_(solver)
        refused(scaler.unscale_, solver, told=r"unscale_\(\) has already been called")
        assert scaler.step(solver)
        refused(scaler.unscale_, solver, told=r"unscale_\(\) is being called after step")
        refused(scaler.step, solver, told=r"step\(\) has already been called")
        with pytest.raises(ValueError, match="not among the 1 given to GradScaler"):
            scaler.step(S.Sgd(0.1))
        scaler.update()


@pytest.mark.parametrize(
    ("solvers", "error", "message"),
    [
        (lambda s: [], ValueError, "needs a solver"),
        (lambda s: [s, s], ValueError, r"solvers\[1\] is given twice"),
        (lambda s: [s, 3], TypeError, r"solvers\[1\] must be an nnabla solver; int has no update"),
        (lambda s: [S.Sgd(0.1)], ValueError, r"solvers\[0\] has no parameters"),
    ],
)
def test_refused(solvers: Callable[[Any], Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        GradScaler(*solvers(Net().solver))


def gan() -> Tuple[Tuple[nn.Variable, nn.Variable], Tuple[Any, Any]]:
    """Two losses with a solver each; the weights of the losses differ by 1e6."""
    z, real = data(16, 4), data(16, 2) + 2.0

    def discriminate(v: nn.Variable) -> nn.Variable:
        return PF.affine(F.leaky_relu(PF.affine(v, 16, name="d/fc1")), 1, name="d/fc2")

    fake = PF.affine(F.leaky_relu(PF.affine(z, 16, name="g/fc1")), 2, name="g/fc2")
    score = discriminate(fake)
    loss_g = F.mean(F.sigmoid_cross_entropy(score, F.constant(1, score.shape))) * 1e-6
    detached = discriminate(fake.get_unlinked_variable(need_grad=False))
    loss_d = F.mean(
        F.sigmoid_cross_entropy(discriminate(real), F.constant(1, score.shape))
        + F.sigmoid_cross_entropy(detached, F.constant(0, score.shape))
    )
    return (loss_g, loss_d), solvers_of({"g": 1e4, "d": 0.01})


def solvers_of(rates: Dict[str, float]) -> Tuple[Any, Any]:
    """A solver for the parameters of each scope."""
    solvers = []
    for scope, rate in rates.items():
        with nn.parameter_scope(scope):
            solvers.append(solver_of(S.Sgd(rate)))
    return solvers[0], solvers[1]


@pytest.mark.parametrize("once", [True, False])
def test_two_losses_with_a_solver_each(once: bool) -> None:
    losses, solvers = gan()
    scaler = GradScaler(*solvers, storage="float16")
    engines = set()
    for _ in range(4):
        for loss, solver in zip(losses, solvers):
            solver.zero_grad()
            scaler.forward(loss)
            scaler.backward(loss)
            engines.add(id(scaler.scaling(loss)))
            assert scaler.step(solver)
            if not once or solver is solvers[1]:
                scaler.update()
    assert len(engines) == 2
    last = scaler.get_scale()
    assert scaler.get_scale(losses[0]) > 1e4 * last
    assert last == scaler.get_scale() == scaler.get_scale(losses[1])


def test_an_overflow_of_one_solver_does_not_stop_the_other() -> None:
    losses, (solver_g, solver_d) = gan()
    scaler = GradScaler(solver_g, solver_d)
    backward(scaler, (solver_g, solver_d), *losses)
    next(iter(solver_g.get_parameters().values())).g = np.inf
    with pytest.warns(LossScaleWarning, match="no backward has left them so"):
        assert not scaler.step(solver_g)
    assert scaler.step(solver_d)
    scaler.update()
    assert (scaler.steps, scaler.skipped_steps) == (1, 1)


def test_solvers_that_share_a_loss_skip_for_one_cause() -> None:
    x = data(8, 4)
    loss = F.mean(PF.affine(F.tanh(PF.affine(x, 8, name="fc1")), 3, name="fc2") ** 2)
    solvers = solvers_of({"fc1": 0.1, "fc2": 0.1})
    scaler = GradScaler(*solvers)
    x.d[0, 0] = np.nan
    backward(scaler, solvers, loss)
    with pytest.warns(LossScaleWarning, match="fc1/affine"):
        assert not scaler.step(solvers[0])
    with silent():
        assert not scaler.step(solvers[1])
    assert scaler.cause.startswith("fc1/affine (Affine) reads an input")


def test_a_bad_batch_of_one_solver_leaves_the_gradients_of_another() -> None:
    x = data(8, 4)
    h = F.relu(PF.affine(x, 8, name="fc1"))  # it lets no NaN through
    loss = F.mean(PF.affine(h, 3, name="fc2") ** 2)
    first, second = solvers_of({"fc1": 0.1, "fc2": 0.1})
    scaler = GradScaler(first, second)
    good, bad = x.d.copy(), x.d.copy()
    bad[0, 0] = np.nan

    def sums(forward: Any, backward: Any) -> Any:
        first.zero_grad()
        second.zero_grad()
        for x.d in (good, bad):
            forward(loss)
            backward(loss)
        return gradients()

    expected = sums(nn.Variable.forward, nn.Variable.backward)
    sums(scaler.forward, scaler.backward)
    with pytest.warns(LossScaleWarning, match="fc1/affine"):
        assert not scaler.step(first)
    for name, v in second.get_parameters().items():
        np.testing.assert_array_equal(v.g, expected[f"fc2/{name}"])
    assert scaler.step(second)
    scaler.update()


@ignores_warnings
@pytest.mark.parametrize("at_once", [False, True])
def test_a_bad_batch_of_one_loss_leaves_the_activations_that_another_shares(at_once: bool) -> None:
    """Also where each loss has its step at once, before the backward of the next one."""
    factor = constant(np.ones((8, 1)))
    shared = F.tanh(PF.affine(data(8, 4), 6, name="fc1"))
    # Another draw in each forward; nnabla's dropout hands gradients of one loss on to the next, NaN included.
    h = shared + F.rand(shape=shared.shape)
    y = PF.affine(h, 3, name="fc3", with_bias=False)
    losses = F.mean((PF.affine(h, 3, name="fc2") * factor) ** 2), F.sum(y) * 1.0
    # Backward of the second loss reads both after that of the first has cleared its buffers.
    h.persistent = shared.persistent = True
    solvers = solvers_of({"fc1": 0.0, "fc3": 0.0})
    scaler = GradScaler(*solvers)
    for factor.d in (1.0, np.nan):
        for solver in solvers:
            solver.zero_grad()
        for loss in losses:
            scaler.forward(loss)
        activations, updated = h.d.copy(), []
        for loss, solver in zip(losses, solvers):
            scaler.backward(loss)
            updated += [scaler.step(solver)] if at_once else []
        found = nn.get_parameters()["fc3/affine/W"].g.copy()
        updated += [] if at_once else [scaler.step(solver) for solver in solvers]
        assert not scaler.cause or ("finite" in scaler.cause) is at_once
        scaler.update()
    assert updated == [False, True]
    assert scaler.cause.startswith("fc2/affine/Mul2 (Mul2) reads an input")
    np.testing.assert_allclose(found, np.repeat(activations.sum(0)[:, None], 3, 1), rtol=1e-5)


@ignores_warnings
@pytest.mark.parametrize("storage", [None, "float16"])
def test_an_overflow_of_one_loss_is_none_of_another_that_adds_to_the_same_gradients(
    storage: Optional[str],
) -> None:
    gate, h = Gate(), F.tanh(PF.affine(data(8, 4), 3, name="trunk"))
    losses = [F.mean(function(PF.affine(h, 3)) ** 2) for function in (gate, F.identity)]
    solver = solver_of(S.Sgd(0.0))
    scaler, scales, updated = GradScaler(solver, storage=storage), [], []
    for gate.factor in (1.0, 1.0, np.inf, 1.0):
        backward(scaler, [solver], *losses)
        found = [scaler.scaling(loss).found_inf for loss in losses]
        assert [bool(layers) for layers in found] == [gate.factor == np.inf, False]
        scales.append(scaler.scaling(losses[1]).scale_of(h))
        updated.append(scaler.step(solver))
        scaler.update()
    assert updated == [True, True, False, True]
    assert len(set(scales)) == 1


def rebuilt(size: int) -> nn.Variable:
    return two_layers(data(size, 3, seed=size)) * 1e-6


def test_a_rebuilt_graph_continues_with_the_measurements() -> None:
    rebuilt(4)
    solver = solver_of(S.Sgd(0.01))
    scaler = GradScaler(solver, storage="float16")
    scales = []
    for size in (4, 4, 6, 4, 3):  # the size of a batch makes no other network
        loss = rebuilt(size)
        assert scaler_step(scaler, solver, loss)
        scales.append(scaler.get_scale(loss))
    # Scales are held for batches of all sizes.
    (state,) = scaler.state_dict()["losses"]
    assert {pushed for pushed, _ in state["components"]["windows"].values()} == {1}
    assert min(scales) > 2.0**20


def test_no_more_than_a_few_networks_are_remembered() -> None:
    def deep(depth: int) -> nn.Variable:
        h = constant(np.ones((2, 3)))
        for _ in range(depth):
            h = F.tanh(PF.affine(h, 3, name="rnn"))
        return F.mean(h**2)

    deep(1)
    solver = solver_of(S.Sgd(0.01))
    scaler = GradScaler(solver)
    for depth in range(1, 13):
        scaler_step(scaler, solver, deep(depth))
    assert len(scaler.state_dict()["losses"]) == 8


@pytest.mark.parametrize("seen", [False, True])
def test_a_copy_by_its_state_goes_on_as_the_original(seen: bool) -> None:
    n = Net(1e-7)
    for _ in range(6):
        n.iterate()
    expected = snapshot()
    n = Net(1e-7)
    for _ in range(3):
        n.iterate()
    state = json.loads(json.dumps(n.scaler.state_dict()))
    n.scaler = GradScaler(n.solver, storage="float16")
    if seen:
        n.scaler.scaling(n.loss)
    n.scaler.load_state_dict(state)
    assert n.scaler.state_dict()["losses"] == state["losses"]
    for _ in range(3):
        n.iterate()
    assert_equal(snapshot(), expected)
    assert n.scaler.steps == 6


@pytest.mark.parametrize("count", [2, 10])
def test_a_copy_remembers_the_losses_that_the_original_would(count: int) -> None:
    """More than are remembered, too."""

    def unrolled(number: int) -> nn.Variable:
        h = data(4, 3, seed=number)
        for _ in range(1 + number % count):
            h = F.tanh(PF.affine(h, 3, name="h", rng=np.random.RandomState(0)))
        return F.mean(PF.affine(h, 2, name="out", rng=np.random.RandomState(1)) ** 2)

    unrolled(0)
    solver = solver_of(S.Sgd(0.0))

    def steps(numbers: Sequence[int], state: Any = None) -> Tuple[Any, Any]:
        scaler, found = GradScaler(solver, storage="float16"), []
        if state is not None:
            scaler.load_state_dict(json.loads(json.dumps(state)))
        for number in numbers:
            loss = unrolled(number)
            assert scaler_step(scaler, solver, loss)
            found.append((scaler.scaling(loss).result.kind, scaler.scaling(loss).accumulated_scales))
        return found, scaler.state_dict()

    saved, end = 2 * count + 3, 4 * count
    straight, _ = steps(range(end))
    assert steps(range(saved, end), steps(range(saved))[1])[0] == straight[saved:]


def test_a_loaded_state_replaces_what_has_begun_and_what_waits() -> None:
    losses, solvers = gan()
    scaler = GradScaler(*solvers, storage="float16")
    for loss, solver in zip(losses, solvers):
        scaler_step(scaler, solver, loss)
    state = scaler.state_dict()
    backward(scaler, (), losses[1])
    for loaded in (scaler, GradScaler(*solvers, storage="float16")):
        for _ in range(2):
            loaded.load_state_dict(state)
            assert loaded.state_dict() == state
            assert not loaded.has_begun


def test_a_state_that_is_none_changes_nothing() -> None:
    losses, solvers = gan()
    scaler = GradScaler(*solvers, storage="float16")
    for loss, solver in zip(losses, solvers):
        scaler_step(scaler, solver, loss)
    before = scaler.state_dict()
    damaged = json.loads(json.dumps({**before, "steps": 99}))
    # The second of two, after the first was loaded.
    damaged["losses"][0]["components"]["windows"] = {}
    damaged["losses"][1]["components"] = {"x": [1, 2, 3]}
    for state in ({}, {**before, "version": 99}, {**before, "losses": [{}]}, damaged):
        with pytest.raises(ValueError, match="state"):
            scaler.load_state_dict(state)
        assert scaler.state_dict() == before


def with_spectral_norm(h: nn.Variable) -> nn.Variable:
    return PF.affine(h, 4, name="s", apply_w=lambda w: PF.spectral_norm(w, dim=1, itr=1))


def with_an_average(h: nn.Variable) -> nn.Variable:
    mean = nn.parameter.get_parameter_or_create("mean", (1, 4), np.zeros((1, 4)), need_grad=False)
    return h - F.assign(mean, 0.5 * mean + 0.5 * F.mean(h, axis=0, keepdims=True))


def with_a_nameless_average(h: nn.Variable) -> nn.Variable:
    mean = nn.Variable((1, 4))
    mean.data.zero()
    return h - F.assign(mean, 0.5 * mean + 0.5 * F.mean(h, axis=0, keepdims=True))


def with_a_carried_state(h: nn.Variable) -> nn.Variable:
    first = nn.Variable(h.shape)
    first.data.zero()
    last = F.tanh(h + 0.5 * first)
    last.persistent = True
    first.data = last.data
    return last


def with_statistics(h: nn.Variable) -> nn.Variable:
    return PF.batch_normalization(h, name="bn")


def with_dropout(h: nn.Variable) -> nn.Variable:
    return with_statistics(F.dropout(h, 0.1))


Kind = Callable[[nn.Variable], nn.Variable]
KINDS = [
    with_spectral_norm,
    with_statistics,
    with_an_average,
    with_a_nameless_average,
    with_a_carried_state,
]
every_kind = pytest.mark.parametrize("kind", KINDS)


def stateful(kind: Kind) -> Loop:
    """A net whose forward writes what the next forward reads, or draws random numbers."""

    def network(x: nn.Variable) -> nn.Variable:
        return F.mean(PF.affine(kind(F.tanh(PF.affine(x, 4, name="fc1"))), 3, name="fc2") ** 2)

    return Loop(network, (16, 5), solver=S.Momentum(0.1))


@pytest.mark.filterwarnings("ignore:nothing is stored in half precision")
@pytest.mark.parametrize("storage", ["float16", None, "native"])
@pytest.mark.parametrize("kind", [*KINDS, with_dropout])
def test_the_first_batch_leaves_the_state_of_an_updater(kind: Kind, storage: Optional[str]) -> None:
    """In fp32 as a bare loop. Dropout draws anew when the batch runs again: the last forward is left."""
    options = {"storage": None if storage == "native" else storage}
    with nn.context_scope(HALF if storage == "native" else FLOAT):
        found = stateful(kind).scaled(4, **options)
        assert_equal(found, stateful(kind).updated(4, **options))
        if storage is None and kind is not with_dropout:
            assert_equal(found, stateful(kind).plainly(4))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_losses_of_one_iteration_each_run_again_from_their_own_beginning(order: Any) -> None:
    """Losses that read and write one running average, all of them forward before backward."""
    found = []
    for scaled in (False, True):
        nn.clear_parameters()
        nn.seed(0)
        x, losses = constant(np.linspace(-1, 1, 30).reshape(6, 5)), []
        for index in range(3):
            h = F.tanh(PF.affine(x, 4, name=f"fc{index}"))
            losses.append(F.mean(PF.affine(with_an_average(h), 3, name=f"out{index}") ** 2))
        solver = solver_of()
        scaler = GradScaler(solver)
        for _ in range(2):
            solver.zero_grad()
            for loss in losses:
                scaler.forward(loss) if scaled else loss.forward()
            for index in order:
                scaler.backward(losses[index]) if scaled else losses[index].backward()
            if scaled:
                assert scaler.step(solver)
                scaler.update()
            else:
                solver.update()
        found.append(snapshot())
    assert_equal(*found)


def test_the_search_for_the_cause_undoes_nothing_that_another_loss_has_written() -> None:
    gate, losses = Gate(), []
    for number, name in enumerate(("first", "second")):
        h = PF.batch_normalization(data(8, 4, seed=number), name="bn", fix_parameters=True)
        losses.append(F.mean((gate if not number else F.identity)(PF.affine(h, 3, name=name)) ** 2))
    solvers = []
    for name in ("first", "second"):
        own = {key: v for key, v in nn.get_parameters().items() if key.startswith(name)}
        solvers.append(solver_of(S.Sgd(0.1), own))
    scaler = GradScaler(*solvers)
    for gate.factor in (1.0, np.inf):
        for solver in solvers:
            solver.zero_grad()
        for loss in losses:
            scaler.forward(loss)
        statistics = snapshot()["bn/bn/mean"]
        for loss in losses:
            scaler.backward(loss)
        assert scaler.step(solvers[0]) is (gate.factor == 1.0)
        assert scaler.step(solvers[1])
        scaler.update()
        np.testing.assert_array_equal(snapshot()["bn/bn/mean"], statistics)


def test_a_batch_that_one_solver_skips_leaves_the_state_that_it_has_led_to() -> None:
    """Another solver has used it; to look for the cause runs forward again."""
    n = Net()
    fc1, rest = S.Sgd(0.1), S.Sgd(0.1)
    fc1.set_parameters({name: v for name, v in nn.get_parameters().items() if name.startswith("fc1")})
    bias = nn.get_parameters()["fc2/affine/b"]
    rest.set_parameters({"fc2/affine/b": bias})
    n.scaler = scaler = GradScaler(fc1, rest, storage="float16")
    for nan in (False, True):
        n.backward(nan=nan)
        statistics = snapshot()["bn/bn/mean"]
        bias.grad.zero()
        if nan:
            with pytest.warns(LossScaleWarning, match="reads an input"):
                assert not scaler.step(fc1)
        else:
            assert scaler.step(fc1)
        assert scaler.step(rest)
        scaler.update()
        np.testing.assert_array_equal(snapshot()["bn/bn/mean"], statistics)


@every_kind
def test_states_after_the_users_own_forward_are_those_of_one_forward(kind: Kind) -> None:
    n = stateful(kind)
    scaler = GradScaler(n.solver)
    n.feed()
    n.loss.forward()
    before = snapshot()
    n.solver.zero_grad()
    scaler.backward(n.loss)
    assert_equal(snapshot(), before)


@ignores_warnings
def test_after_the_users_own_forward_a_skipped_batch_stays_in_running_statistics() -> None:
    n = Net(storage=None)
    for factor in (1.0, 1.0, np.inf):
        n.solver.zero_grad()
        n.feed(factor=factor)
        n.loss.forward()
        written = snapshot()["bn/bn/mean"]
        n.scaler.backward(n.loss)
        assert n.scaler.step(n.solver) is (factor == 1.0)
        n.scaler.update()
        np.testing.assert_array_equal(snapshot()["bn/bn/mean"], written)


@pytest.mark.parametrize("storage", [None, "float16"])
def test_not_enabled_it_is_a_plain_loop(storage: Any) -> None:
    plain = Net(storage=storage)
    wrapped = plain.loss if storage is None else FormatEmulation(plain.loss, storage, float_tail=True)
    for _ in range(5):
        plain.solver.zero_grad()
        plain.feed()
        wrapped.forward(clear_no_need_grad=True)
        wrapped.backward(1.0, clear_buffer=True)
        plain.solver.update()
    expected = snapshot()
    n = Net(storage=storage, enabled=False)
    assert [n.iterate() for _ in range(5)] == [True] * 5
    assert not n.scaler.is_enabled()
    assert (n.scaler.get_scale(), n.scaler.get_scale(n.loss), n.scaler.steps) == (1.0, 1.0, 5)
    assert_equal(snapshot(), expected)
    assert n.iterate(nan=True), "nothing is looked at"


@pytest.mark.parametrize("enabled", [False, True])
def test_backward_starts_from_a_gradient_of_the_users(enabled: bool) -> None:
    y = PF.affine(data(4, 3), 2, name="a")
    seed = np.arange(8, dtype=np.float32).reshape(4, 2)
    solver = solver_of()
    scaler = GradScaler(solver, enabled=enabled)
    solver.zero_grad()
    scaler.forward(y)
    with pytest.raises(ValueError, match=r"loss has shape \(4, 2\), not one element"):
        scaler.backward(y)
    scaler.backward(y, grad=seed)
    np.testing.assert_array_equal(nn.get_parameters()["a/affine/b"].g, seed.sum(axis=0))


def test_the_scale_is_that_of_the_loss_that_was_used_last() -> None:
    losses = [
        F.mean(PF.affine(data(4, 3), 5, name=n) ** 2) * weight for n, weight in (("a", 1.0), ("b", 1e-5))
    ]
    solver = solver_of(S.Sgd(0.0))
    scaler = GradScaler(solver, storage="float16")
    assert scaler.is_enabled()
    with pytest.raises(RuntimeError, match="no loss is known yet"):
        scaler.get_scale()
    for loss in (*losses, losses[0]):
        scaler_step(scaler, solver, loss)
    assert scaler.get_scale() == scaler.get_scale(losses[0]) == scaler.scaling(losses[0]).loss_scale > 1.0
    assert scaler.get_scale() != scaler.get_scale(losses[1])


class Deep:
    """Layers of tanh, of which `iterate` multiplies the gradients, as data do, or the loss."""

    def __init__(self, layers: int, storage: str = "float16") -> None:
        self.grown, self.weight, h = Gate(), constant(np.ones(1)), data(2, 4, 8)
        for index in range(layers):
            h = F.tanh(PF.affine(h, 8, base_axis=2, name=f"layer{index}", rng=np.random.RandomState(index)))
        self.loss = F.mean(F.reshape(F.mean(self.grown(h) ** 2), (1,)) * self.weight)
        self.solver = solver_of(S.Sgd(1e-30))
        self.scaler = GradScaler(self.solver, storage=storage)

    def iterate(self, factor: float = 1.0, weight: float = 1.0) -> bool:
        self.grown.factor, self.weight.d = factor, weight
        return scaler_step(self.scaler, self.solver, self.loss)


@pytest.mark.parametrize(("jump", "lost"), [(2.0**10, 4), (2.0**20, 7)])
@pytest.mark.parametrize("layers", [2, 12])
def test_lost_steps_grow_with_a_jump_and_not_with_the_depth(layers: int, jump: float, lost: int) -> None:
    deep = Deep(layers)
    assert all(deep.iterate() for _ in range(3))
    assert 1 <= [deep.iterate(jump) for _ in range(12)].count(False) <= lost
    # It stays so: nothing overflows once the jump is the rule.
    assert all(deep.iterate(jump) for _ in range(10))


def test_many_lost_steps_in_a_row_are_warned_of_once() -> None:
    # In float16, gradients that have grown so much would be zero before they grow.
    deep = Deep(2, "bfloat16")
    assert deep.iterate()

    def iterate() -> None:
        for i in range(30):
            deep.iterate(2.0 ** (8 * min(i, 12)))

    with pytest.warns(LossScaleWarning, match="10 batches in a row .*; first bad layer: layer") as told:
        iterate()
    assert sum("in a row" in str(one.message) for one in told) == 1


def test_many_bad_batches_in_a_row_are_warned_of_once_more() -> None:
    n = Net()
    assert n.iterate()
    with pytest.warns(LossScaleWarning) as told:
        assert not any(n.iterate(nan=True) for _ in range(30))
    messages = [str(one.message) for one in told]
    assert len(messages) == 2
    assert messages[1].startswith(
        "10 batches in a row were lost up to iteration 11, the last because forward"
    )


def test_parameters_with_one_name_are_told_apart() -> None:
    x = data(4, 3)
    both = [nn.Variable((3, 2), need_grad=True) for _ in range(2)]
    solvers = [S.Sgd(0.1), S.Sgd(0.1)]
    for solver, w in zip(solvers, both):
        w.d = 1.0
        solver.set_parameters({"w": w})
    scaler = GradScaler(*solvers, storage="float16")
    plan = scaler.scaling(F.mean(F.affine(F.affine(x, both[0]), F.transpose(both[1], (1, 0))) ** 2)).plan
    assert {"w", "1/w"} <= set(plan.names.values())


class Interruptible(Training):
    """One iteration after the other with a `GradScaler`."""

    def __init__(self, storage: Optional[str]) -> None:
        super().__init__(storage=storage, trains_all=True)
        self.scaler = GradScaler(self.solver, storage=storage)

    def iterate(self) -> None:
        self.feed()
        iterate(self.scaler, [self.solver], self.loss)

    def weights(self) -> Dict[str, bytes]:
        return {name: v.data.data.tobytes() for name, v in self.solver.get_parameters().items()}


@pytest.mark.parametrize("storage", [None, "float16"])
def test_an_interrupt_leaves_nothing_swapped(storage: Optional[str]) -> None:
    reference, moments = Interruptible(storage), Moments(0)
    for _ in range(3):
        reference.iterate()
    before = reference.weights()
    moments.run(reference.iterate)
    after = reference.weights()
    for stop in np.linspace(1, moments.count, 12).astype(int):
        loop, now = Interruptible(storage), Moments(int(stop))
        for _ in range(3):
            loop.iterate()
        arrays = [(v.data, v.grad) for v in loop.parameters.values()]
        with pytest.raises(Interrupt):
            now.run(loop.iterate)
        assert loop.weights() in (before, after), now.place
        assert arrays == [(v.data, v.grad) for v in loop.parameters.values()], now.place


def test_it_trains_as_the_updater_does() -> None:
    n = Net(1e-6)
    assert all(n.iterate() for _ in range(20))
    own = snapshot()
    n = Net(1e-6)
    updater = updater_of(n.loss, n.feed, solver=n.solver)
    for _ in range(20):
        updater.update()
    assert_equal(own, snapshot())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scale", r"scaler.forward\(loss\) and scaler.backward\(loss\) instead of scaler.scale\(loss\)"),
        ("get_growth_factor", r"has no attribute 'get_growth_factor': scales follow from measurements"),
        ("set_backoff_factor", "scales follow from measurements"),
        ("nothing_known", "^'GradScaler' object has no attribute 'nothing_known'$"),
    ],
)
def test_methods_of_torch_that_are_not_here(name: str, message: str) -> None:
    scaler = Net().scaler
    assert not hasattr(scaler, name)
    with pytest.raises(AttributeError, match=message):
        getattr(scaler, name)


@pytest.mark.parametrize("way", ["repeat", "next", "scaler"])
def test_an_infinite_gradient_that_no_solver_uses_costs_the_same_everywhere(way: str) -> None:
    """That of a leaf at a square root of zero, which nobody trains."""
    frozen = nn.Variable.from_numpy_array(np.zeros((4, 5), np.float32), need_grad=True)
    loss = two_layers(data(4, 3)) + F.mean(F.pow_scalar(F.abs(frozen), 0.5))
    solver = solver_of(S.Sgd(0.01))
    if way == "scaler":
        scaler = GradScaler(solver, storage="float16")
        assert scaler_step(scaler, solver, loss)
        scaling = scaler.scaling(loss)
    else:
        updater = AdaptiveLossScalingUpdater(solver, loss, storage="float16", on_overflow=way)
        assert updater.update().reason == "updated"
        scaling = updater.scaling
    assert "Abs" in scaling.found_inf
    # The first batch, and that batch once more with what it has shown.
    assert scaling.components.attempt == 1
