# SPDX-License-Identifier: Apache-2.0
"""Loops of one's own, in PyTorch's words."""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScalingUpdater,
    FormatEmulation,
    GradScaler,
    LossScaleWarning,
)
from tests.updaters.test_overflow import Gate


class Net(NamedTuple):
    loss: nn.Variable
    feed: Callable[..., None]
    solver: Any
    parameters: Dict[str, nn.Variable]
    x: nn.Variable


def net(weight: float = 1.0, *, seed: int = 0) -> Net:
    """A small net; its feeder makes gradients infinite while the loss is finite, or larger by a factor."""
    nn.clear_parameters()
    rng = np.random.default_rng(seed)
    x, t, one, weights = nn.Variable((8, 6)), nn.Variable((8, 1)), nn.Variable((1,)), nn.Variable((1,))
    h = F.relu(PF.affine(x, 16, name="fc1", rng=np.random.RandomState(seed)))
    h = PF.batch_normalization(h, name="bn")
    y = PF.affine(h, 3, name="fc2", rng=np.random.RandomState(seed + 1))
    root = F.pow_scalar(F.reshape(F.mean(y) * 0.0, (1,)) + one, 0.5)
    loss = F.mean(F.softmax_cross_entropy(y, t) * F.broadcast(F.reshape(weights, (1, 1)), (8, 1))) * weight
    loss = loss + F.sum(root) * 0.0
    solver = S.Momentum(0.05 / weight)
    solver.set_parameters(nn.get_parameters())

    def feed(*, overflow: bool = False, nan: bool = False, factor: float = 1.0) -> None:
        weights.d = factor
        x.d, t.d, one.d = rng.standard_normal(x.shape), rng.integers(0, 3, t.shape), float(not overflow)
        if nan:
            x.d[0, 0] = np.nan

    return Net(loss, feed, solver, nn.get_parameters(grad_only=False), x)


def iterate(scaler: GradScaler, n: Net, **what: Any) -> bool:
    n.solver.zero_grad()
    n.feed(**what)
    scaler.forward(n.loss, clear_no_need_grad=True)
    scaler.backward(n.loss, clear_buffer=True)
    updated = scaler.step(n.solver)
    scaler.update()
    return updated


def snapshot(n: Net) -> Dict[str, np.ndarray]:
    return {name: v.d.copy() for name, v in n.parameters.items()}


def test_gradients_come_out_unscaled() -> None:
    n = net()
    n.feed()
    n.solver.zero_grad()
    n.loss.forward()
    n.loss.backward()
    expected = {name: v.g.copy() for name, v in nn.get_parameters().items()}
    scaler = GradScaler(n.solver)
    n.solver.zero_grad()
    n.loss.forward()
    scaler.backward(n.loss)
    for name, v in nn.get_parameters().items():
        np.testing.assert_allclose(v.g, expected[name], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("method", ["approx_range", "amax_history"])
def test_the_first_batch_has_its_scale_already(method: str) -> None:
    n = net(1e-8)
    n.feed()
    n.solver.zero_grad()
    n.loss.forward()
    n.loss.backward()
    expected = nn.get_parameters()["fc1/affine/W"].g.copy()
    scaler = GradScaler(n.solver, storage="float16", config=AdaLossConfig(loss_scale_method=method))
    n.solver.zero_grad()
    scaler.forward(n.loss)
    scaler.backward(n.loss)
    error = np.linalg.norm(nn.get_parameters()["fc1/affine/W"].g - expected) / np.linalg.norm(expected)
    assert error < 0.02
    assert scaler.scaling(n.loss).loss_scale > 2.0**30


def test_it_trains_as_the_updater_does() -> None:
    n = net(1e-6)
    scaler = GradScaler(n.solver, storage="float16")
    assert all(iterate(scaler, n) for _ in range(20))
    own = snapshot(n)
    n = net(1e-6)
    updater = AdaptiveLossScalingUpdater(n.solver, n.loss, n.feed, storage="float16")
    for _ in range(20):
        updater.update()
    for name, value in snapshot(n).items():
        np.testing.assert_array_equal(own[name], value, err_msg=name)


def test_gradients_are_clipped_unscaled() -> None:
    n = net(1e-6)
    scaler = GradScaler(n.solver, storage="float16")
    for _ in range(2):
        n.solver.zero_grad()
        n.feed()
        scaler.forward(n.loss)
        scaler.backward(n.loss)
        scaler.unscale_(n.solver)
        before = nn.get_parameters()["fc2/affine/W"].g.copy()
        n.solver.clip_grad_by_norm(1e-9)
        after = nn.get_parameters()["fc2/affine/W"].g
        assert 1e-9 < np.linalg.norm(before) < 1e-5
        np.testing.assert_allclose(np.linalg.norm(after), 1e-9, rtol=1e-3)
        assert scaler.step(n.solver)
        scaler.update()


@pytest.mark.parametrize(("method", "skipped"), [("approx_range", 1), (None, 1)])
def test_an_overflow_skips_the_step_and_lowers_what_was_at_fault(method: Optional[str], skipped: int) -> None:
    n = net()
    scaler = GradScaler(n.solver, storage="float16", config=AdaLossConfig(loss_scale_method=method))
    for _ in range(3):
        assert iterate(scaler, n)
    before, scale = snapshot(n), scaler.scaling(n.loss).loss_scale
    assert not iterate(scaler, n, factor=2.0**5)
    assert all((value == before[name]).all() for name, value in snapshot(n).items())
    assert (scaler.steps, scaler.skipped_steps) == (3, 1)
    assert scaler.cause.startswith("overflow, first in ")
    # One component alone is lowered first, then all behind it with it.
    while not iterate(scaler, n, factor=2.0**5):
        assert scaler.skipped_steps <= skipped
    assert scaler.skipped_steps == skipped
    assert scale / 32.0 <= scaler.scaling(n.loss).loss_scale <= scale / 16.0


def test_dropout_and_running_statistics_survive_the_first_batch() -> None:
    nn.clear_parameters()
    x = nn.Variable.from_numpy_array(np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32))
    h = PF.batch_normalization(PF.affine(x, 8, name="fc1"), name="bn")
    dropped = F.dropout(h, 0.5)
    dropped.persistent = h.persistent = True
    loss = F.mean(PF.affine(dropped, 3, name="fc2") ** 2) * 1e-8
    solver = S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())
    scaler = GradScaler(solver, storage="float16")
    solver.zero_grad()
    scaler.forward(loss)
    mean = nn.get_parameters(grad_only=False)["bn/bn/mean"]
    once = mean.d.copy()
    scaler.backward(loss)
    # Only what was let through brings a gradient back.
    np.testing.assert_array_equal(h.g == 0.0, dropped.d == 0.0)
    np.testing.assert_array_equal(mean.d, once)


def test_infinite_gradients_of_a_finite_loss_skip_the_step() -> None:
    n = net()
    scaler = GradScaler(n.solver)
    assert iterate(scaler, n)
    before = snapshot(n)
    assert not iterate(scaler, n, overflow=True)
    assert all((v == before[name]).all() for name, v in snapshot(n).items())
    assert iterate(scaler, n)


def test_nan_in_the_data_lowers_no_scale_and_leaves_nothing_behind() -> None:
    n = net()
    scaler = GradScaler(n.solver, storage="float16")
    for _ in range(2):
        assert iterate(scaler, n)
    before, amaxes = snapshot(n), scaler.scaling(n.loss).components.amaxes()
    with pytest.warns(LossScaleWarning, match=r"step skipped in iteration 2: fc1/affine \(Affine\) reads an"):
        assert not iterate(scaler, n, nan=True)
    assert all((v == before[name]).all() for name, v in snapshot(n).items())
    assert scaler.scaling(n.loss).components.amaxes() == amaxes
    assert iterate(scaler, n)


def test_clipping_does_not_hide_a_nan() -> None:
    n = net()
    scaler = GradScaler(n.solver)
    n.feed(nan=True)
    n.solver.zero_grad()
    scaler.forward(n.loss)
    scaler.backward(n.loss)
    scaler.unscale_(n.solver)
    for v in nn.get_parameters().values():
        v.g = 0.0
    with pytest.warns(LossScaleWarning, match="reads an input"):
        assert not scaler.step(n.solver)


def test_calls_in_the_wrong_order_are_refused() -> None:
    n = net()
    scaler = GradScaler(n.solver, storage="float16")
    with pytest.raises(RuntimeError, match=r"step\(\) before backward"):
        scaler.step(n.solver)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) before backward"):
        scaler.unscale_(n.solver)
    with pytest.raises(RuntimeError, match=r"update\(\) has nothing to do"):
        scaler.update()
    n.feed()
    n.loss.forward()
    with pytest.raises(RuntimeError, match=r"forward did not run in storage='float16'"):
        scaler.backward(n.loss)
    n.solver.zero_grad()
    scaler.forward(n.loss)
    scaler.backward(n.loss)
    scaler.unscale_(n.solver)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(n.solver)
    scaler.step(n.solver)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step"):
        scaler.unscale_(n.solver)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        scaler.step(n.solver)
    with pytest.raises(ValueError, match="none of the 1 that this scaler was made with"):
        scaler.step(S.Sgd(0.1))
    scaler.update()
    with pytest.raises(RuntimeError, match=r"step\(\) before backward"):
        scaler.step(n.solver)


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
        GradScaler(*solvers(net().solver))


def test_micro_batches_are_added() -> None:
    n = net()
    scaler = GradScaler(n.solver, storage="float16")
    n.solver.zero_grad()
    sums: Dict[str, np.ndarray] = {}
    for _ in range(3):
        n.feed()
        scaler.forward(n.loss)
        scaler.backward(n.loss)
        now = nn.get_parameters()["fc1/affine/W"].g.copy()
        assert not np.array_equal(now, sums.get("W"))
        sums["W"] = now
    assert scaler.step(n.solver)
    scaler.update()
    assert scaler.steps == 1


def gan() -> Any:
    """Two losses with a solver each; the weights of the losses differ by 1e6."""
    nn.clear_parameters()
    rng = np.random.default_rng(0)
    z, real = nn.Variable((16, 4)), nn.Variable((16, 2))

    def discriminate(v: nn.Variable) -> nn.Variable:
        h = F.leaky_relu(PF.affine(v, 16, name="d/fc1", rng=np.random.RandomState(1)))
        return PF.affine(h, 1, name="d/fc2", rng=np.random.RandomState(2))

    h = F.leaky_relu(PF.affine(z, 16, name="g/fc1", rng=np.random.RandomState(3)))
    fake = PF.affine(h, 2, name="g/fc2", rng=np.random.RandomState(4))
    score = discriminate(fake)
    loss_g = F.mean(F.sigmoid_cross_entropy(score, F.constant(1, score.shape))) * 1e-6
    detached = discriminate(fake.get_unlinked_variable(need_grad=False))
    loss_d = F.mean(
        F.sigmoid_cross_entropy(discriminate(real), F.constant(1, score.shape))
        + F.sigmoid_cross_entropy(detached, F.constant(0, score.shape))
    )
    solvers = S.Sgd(1e4), S.Sgd(0.01)
    for solver, scope in zip(solvers, ("g", "d")):
        with nn.parameter_scope(scope):
            solver.set_parameters(nn.get_parameters())

    def feed() -> None:
        z.d, real.d = rng.standard_normal(z.shape), rng.standard_normal(real.shape) + 2.0

    return loss_g, loss_d, (*solvers,), feed


@pytest.mark.parametrize("updates", ["once", "after each"])
def test_two_losses_with_a_solver_each(updates: str) -> None:
    loss_g, loss_d, (solver_g, solver_d), feed = gan()
    scaler = GradScaler(solver_g, solver_d, storage="float16")
    engines = set()
    for _ in range(4):
        feed()
        for loss, solver in ((loss_g, solver_g), (loss_d, solver_d)):
            solver.zero_grad()
            scaler.forward(loss)
            scaler.backward(loss)
            engines.add(id(scaler.scaling(loss)))
            assert scaler.step(solver)
            if updates == "after each":
                scaler.update()
        if updates == "once":
            scaler.update()
    assert len(engines) == 2
    assert scaler.scaling(loss_g).loss_scale > 1e4 * scaler.scaling(loss_d).loss_scale


def test_an_overflow_of_one_solver_does_not_stop_the_other() -> None:
    loss_g, loss_d, (solver_g, solver_d), feed = gan()
    scaler = GradScaler(solver_g, solver_d)
    feed()
    solver_g.zero_grad()
    scaler.forward(loss_g)
    scaler.backward(loss_g)
    solver_d.zero_grad()
    scaler.forward(loss_d)
    scaler.backward(loss_d)
    gradients = {name: v.g.copy() for name, v in solver_d.get_parameters().items()}
    next(iter(solver_g.get_parameters().values())).g = np.inf
    with pytest.warns(LossScaleWarning, match="no backward has left them so"):
        assert not scaler.step(solver_g)
    for name, v in solver_d.get_parameters().items():
        np.testing.assert_array_equal(v.g, gradients[name])
    assert scaler.step(solver_d)
    scaler.update()
    assert (scaler.steps, scaler.skipped_steps) == (1, 1)


def test_a_bad_batch_of_one_solver_leaves_the_gradients_of_another() -> None:
    nn.clear_parameters()
    x = nn.Variable((8, 4))
    h = F.relu(PF.affine(x, 8, name="fc1", rng=np.random.RandomState(0)))  # it lets no NaN through
    loss = F.mean(PF.affine(h, 3, name="fc2", rng=np.random.RandomState(1)) ** 2)
    first, second = S.Sgd(0.1), S.Sgd(0.1)
    for solver, scope in ((first, "fc1"), (second, "fc2")):
        with nn.parameter_scope(scope):
            solver.set_parameters(nn.get_parameters())
    scaler = GradScaler(first, second)
    x.d = np.random.default_rng(0).standard_normal(x.shape)
    x.d[0, 0] = np.nan
    first.zero_grad()
    second.zero_grad()
    scaler.forward(loss)
    scaler.backward(loss)
    gradients = {name: v.g.copy() for name, v in second.get_parameters().items()}
    with pytest.warns(LossScaleWarning, match="fc1/affine"):
        assert not scaler.step(first)
    for name, v in second.get_parameters().items():
        np.testing.assert_array_equal(v.g, gradients[name])
    assert scaler.step(second)
    scaler.update()


def test_what_a_skipped_batch_added_to_running_statistics_is_put_back() -> None:
    n = net()
    scaler = GradScaler(n.solver)
    assert iterate(scaler, n)
    mean = n.parameters["bn/bn/mean"].d.copy()
    n.solver.zero_grad()
    n.feed()
    scaler.forward(n.loss)
    scaler.backward(n.loss)
    n.parameters["fc1/affine/W"].g = np.inf
    with pytest.warns(LossScaleWarning, match="no backward has left them so"):
        assert not scaler.step(n.solver)
    scaler.update()
    np.testing.assert_array_equal(n.parameters["bn/bn/mean"].d, mean)


def rebuilt(solver: Any, rng: np.random.Generator, size: int = 4) -> nn.Variable:
    x = nn.Variable.from_numpy_array(rng.standard_normal((size, 3)).astype(np.float32))
    return F.mean(PF.affine(F.tanh(PF.affine(x, 5, name="a")), 2, name="b") ** 2) * 1e-6


def test_a_graph_that_is_built_anew_goes_on_with_what_was_measured() -> None:
    rng = np.random.default_rng(0)
    solver = S.Sgd(0.01)
    rebuilt(solver, rng)
    solver.set_parameters(nn.get_parameters())
    scaler = GradScaler(solver, storage="float16")
    scales, measured = [], []
    for size in (4, 4, 6, 4, 3):  # the size of a batch makes no other network
        loss = rebuilt(solver, rng, size)
        solver.zero_grad()
        scaler.forward(loss)
        scaler.backward(loss)
        assert scaler.step(solver)
        scaler.update()
        scales.append(scaler.scaling(loss).loss_scale)
        measured.append(scaler.scaling(loss).components)
    assert all(components is measured[0] for components in measured)
    # Scales are held for batches of all sizes.
    windows = scaler.state_dict()["losses"][0]["components"]["windows"]
    assert {pushed for pushed, _ in windows.values()} == {1}
    assert min(scales) > 2.0**20
    assert len(scaler.state_dict()["losses"]) == 1


def test_no_more_than_a_few_networks_are_remembered() -> None:
    solver = S.Sgd(0.01)
    x = nn.Variable.from_numpy_array(np.ones((2, 3), np.float32))

    def deep(depth: int) -> nn.Variable:
        h = x
        for _ in range(depth):
            h = F.tanh(PF.affine(h, 3, name="rnn"))
        return F.mean(h**2)

    deep(1)
    solver.set_parameters(nn.get_parameters())
    scaler = GradScaler(solver)
    for depth in range(1, 13):
        loss = deep(depth)
        loss.forward()
        scaler.backward(loss)
        scaler.step(solver)
        scaler.update()
    assert len(scaler.state_dict()["losses"]) == 8


@pytest.mark.parametrize("seen", [False, True])
def test_a_copy_by_its_state_goes_on_as_the_original(seen: bool) -> None:
    def run(scaler: GradScaler, n: Net, count: int) -> None:
        for _ in range(count):
            iterate(scaler, n)

    n = net(1e-7)
    scaler = GradScaler(n.solver, storage="float16")
    run(scaler, n, 6)
    expected = snapshot(n)

    n = net(1e-7)
    scaler = GradScaler(n.solver, storage="float16")
    run(scaler, n, 3)
    state = json.loads(json.dumps(scaler.state_dict()))
    copy = GradScaler(n.solver, storage="float16")
    if seen:
        copy.scaling(n.loss)
    copy.load_state_dict(state)
    assert copy.state_dict()["losses"] == state["losses"]
    run(copy, n, 3)
    for name, value in snapshot(n).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    assert copy.steps == 6


@pytest.mark.parametrize("seen", [False, True])
def test_a_state_is_that_of_batches_of_all_sizes(seen: bool) -> None:
    rng, solver = np.random.default_rng(0), S.Sgd(0.01)
    rebuilt(solver, rng, 4)
    solver.set_parameters(nn.get_parameters())

    def iterate(scaler: GradScaler, size: int) -> float:
        loss = rebuilt(solver, rng, size)
        solver.zero_grad()
        scaler.forward(loss)
        scaler.backward(loss)
        scaler.step(solver)
        scaler.update()
        return scaler.scaling(loss).loss_scale

    scaler, copy = GradScaler(solver, storage="float16"), GradScaler(solver, storage="float16")
    scale = iterate(scaler, 4)
    if seen:
        copy.scaling(rebuilt(solver, rng, 6))
    copy.load_state_dict(scaler.state_dict())
    assert iterate(copy, 7) == scale
    assert len(copy.state_dict()["losses"]) == 1


def test_a_state_that_is_none_changes_nothing() -> None:
    n = net()
    scaler = GradScaler(n.solver)
    iterate(scaler, n)
    before = scaler.state_dict()
    damaged = json.loads(json.dumps(before))
    damaged["losses"][0]["components"] = {"x": [1, 2, 3]}
    for state in ({}, {**before, "version": 99}, {**before, "losses": [{}]}, damaged):
        with pytest.raises(ValueError, match="state"):
            scaler.load_state_dict(state)
        assert scaler.state_dict() == before


class Stateful(NamedTuple):
    """A net whose forward writes what the next forward reads, or draws random numbers."""

    loss: nn.Variable
    solver: Any
    feed: Callable[[], None]


def with_spectral_norm(h: nn.Variable) -> nn.Variable:
    def normalized(w: nn.Variable) -> nn.Variable:
        return PF.spectral_norm(w, dim=1, itr=1)

    return PF.affine(h, 4, name="s", apply_w=normalized, rng=np.random.RandomState(2))


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


def with_dropout(h: nn.Variable) -> nn.Variable:
    return PF.batch_normalization(F.dropout(h, 0.1), name="bn")


KINDS: Dict[str, Callable[[nn.Variable], nn.Variable]] = {
    "spectral norm": with_spectral_norm,
    "batch normalization": lambda h: PF.batch_normalization(h, name="bn"),
    "an average": with_an_average,
    "a nameless average": with_a_nameless_average,
    "a carried state": with_a_carried_state,
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


def stateful(kind: Callable[[nn.Variable], nn.Variable]) -> Stateful:
    nn.clear_parameters()
    rng = np.random.default_rng(0)
    nn.random.set_function_seed(0)
    nn.random.prng = np.random.RandomState(0)
    x = nn.Variable((16, 5))
    h = kind(F.tanh(PF.affine(x, 4, name="fc1", rng=np.random.RandomState(0))))
    loss = F.mean(PF.affine(h, 3, name="fc2", rng=np.random.RandomState(1)) ** 2)
    solver = S.Momentum(0.1)
    solver.set_parameters(nn.get_parameters())

    def feed() -> None:
        x.d = rng.standard_normal(x.shape)

    return Stateful(loss, solver, feed)


def everything() -> Dict[str, np.ndarray]:
    return {name: v.d.copy() for name, v in nn.get_parameters(grad_only=False).items()}


def scaled(n: Stateful, count: int, **options: Any) -> Dict[str, np.ndarray]:
    scaler = GradScaler(n.solver, **options)
    for _ in range(count):
        n.solver.zero_grad()
        n.feed()
        scaler.forward(n.loss, clear_no_need_grad=True)
        scaler.backward(n.loss, clear_buffer=True)
        assert scaler.step(n.solver)
        scaler.update()
    return everything()


def updated(n: Stateful, count: int, **options: Any) -> Dict[str, np.ndarray]:
    updater = AdaptiveLossScalingUpdater(n.solver, n.loss, n.feed, **options)
    assert all(updater.update().updated for _ in range(count))
    return everything()


def bare(n: Stateful, count: int) -> Dict[str, np.ndarray]:
    for _ in range(count):
        n.solver.zero_grad()
        n.feed()
        n.loss.forward()
        n.loss.backward()
        n.solver.update()
    return everything()


def assert_equal(found: Dict[str, np.ndarray], expected: Dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@every_kind
@pytest.mark.parametrize("count", [1, 4])
def test_in_fp32_it_trains_bit_for_bit_as_a_bare_loop(
    kind: Callable[[nn.Variable], nn.Variable], count: int
) -> None:
    assert_equal(scaled(stateful(kind), count), bare(stateful(kind), count))


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", [*KINDS.values(), with_dropout], ids=[*KINDS, "dropout"])
def test_the_first_batch_leaves_what_the_updater_leaves(
    kind: Callable[[nn.Variable], nn.Variable], storage: str, count: int
) -> None:
    """Dropout draws anew when the batch runs again: all that is left is of the last forward."""
    found = scaled(stateful(kind), count, storage=storage)
    assert_equal(found, updated(stateful(kind), count, storage=storage))


@pytest.mark.filterwarnings("ignore:nothing is stored in half precision")
@pytest.mark.parametrize("kind", [*KINDS.values(), with_dropout], ids=[*KINDS, "dropout"])
def test_so_it_does_without_a_storage(kind: Callable[[nn.Variable], nn.Variable]) -> None:
    assert_equal(scaled(stateful(kind), 3), updated(stateful(kind), 3))


@pytest.mark.parametrize("kind", [with_an_average, with_a_carried_state, with_spectral_norm])
def test_in_a_half_context_too(kind: Callable[[nn.Variable], nn.Variable]) -> None:
    with nn.context_scope(nn.Context(["cpu:half", "cpu:float"], "CpuCachedArray", "0")):
        assert_equal(scaled(stateful(kind), 2), updated(stateful(kind), 2))


def two_losses() -> Dict[str, Any]:
    """Two losses that read and write one running average, both of them forward before backward."""
    nn.clear_parameters()
    x, losses = nn.Variable.from_numpy_array(np.linspace(-1, 1, 30, dtype=np.float32).reshape(6, 5)), []
    for index in range(3):
        h = F.tanh(PF.affine(x, 4, name=f"fc{index}", rng=np.random.RandomState(index)))
        losses.append(F.mean(PF.affine(with_an_average(h), 3, name=f"out{index}") ** 2))
        for v in nn.get_parameters().values():
            v.d = np.random.RandomState(v.size).standard_normal(v.shape)
    solver = S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())
    return {"losses": losses, "solver": solver}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_losses_of_one_iteration_each_run_again_from_their_own_beginning(order: Any) -> None:
    losses, solver = two_losses().values()
    for _ in range(2):
        solver.zero_grad()
        for loss in losses:
            loss.forward()
        for index in order:
            losses[index].backward()
        solver.update()
    expected = everything()
    losses, solver = two_losses().values()
    scaler = GradScaler(solver)
    for _ in range(2):
        solver.zero_grad()
        for loss in losses:
            scaler.forward(loss)
        for index in order:
            scaler.backward(losses[index])
        assert scaler.step(solver)
        scaler.update()
    assert_equal(everything(), expected)


def test_a_batch_that_one_solver_skips_leaves_the_state_that_it_has_led_to() -> None:
    """Another solver has used it; to look for the cause runs forward again."""
    n = net()
    fc1, rest = S.Sgd(0.1), S.Sgd(0.1)
    fc1.set_parameters({name: v for name, v in nn.get_parameters().items() if name.startswith("fc1")})
    rest.set_parameters({name: v for name, v in nn.get_parameters().items() if not name.startswith("fc1")})
    scaler = GradScaler(fc1, rest, storage="float16")
    for nan in (False, True):
        n.feed(nan=nan)
        fc1.zero_grad()
        rest.zero_grad()
        scaler.forward(n.loss)
        scaler.backward(n.loss)
        statistics = n.parameters["bn/bn/mean"].d.copy()
        rest.set_parameters({"fc2/affine/b": n.parameters["fc2/affine/b"]}, reset=True)
        n.parameters["fc2/affine/b"].grad.zero()
        if nan:
            with pytest.warns(LossScaleWarning, match="reads an input"):
                assert not scaler.step(fc1)
        else:
            assert scaler.step(fc1)
        assert scaler.step(rest)
        scaler.update()
        np.testing.assert_array_equal(n.parameters["bn/bn/mean"].d, statistics)


@every_kind
def test_after_the_users_own_forward_states_are_those_of_one_forward(
    kind: Callable[[nn.Variable], nn.Variable],
) -> None:
    n = stateful(kind)
    scaler = GradScaler(n.solver)
    n.feed()
    n.loss.forward()
    before = everything()
    n.solver.zero_grad()
    scaler.backward(n.loss)
    assert_equal(everything(), before)


@pytest.mark.parametrize("storage", [None, "float16"])
def test_not_enabled_it_is_a_plain_loop(storage: Any) -> None:
    plain = net()
    wrapped = plain.loss if storage is None else FormatEmulation(plain.loss, storage, float_tail=True)
    for _ in range(5):
        plain.solver.zero_grad()
        plain.feed()
        wrapped.forward(clear_no_need_grad=True)
        wrapped.backward(1.0, clear_buffer=True)
        plain.solver.update()
    expected = snapshot(plain)
    n = net()
    scaler = GradScaler(n.solver, storage=storage, enabled=False)
    assert [iterate(scaler, n) for _ in range(5)] == [True] * 5
    assert not scaler.is_enabled()
    assert (scaler.get_scale(), scaler.get_scale(n.loss), scaler.steps) == (1.0, 1.0, 5)
    for name, value in snapshot(n).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    assert iterate(scaler, n, nan=True), "nothing is looked at"


def test_the_scale_is_that_of_the_loss_that_was_used_last() -> None:
    n = net()
    scaler = GradScaler(n.solver, storage="float16")
    assert scaler.is_enabled()
    with pytest.raises(RuntimeError, match="no loss is known yet"):
        scaler.get_scale()
    iterate(scaler, n)
    assert scaler.get_scale() == scaler.get_scale(n.loss) == scaler.scaling(n.loss).loss_scale > 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scale", r"scaler.forward\(loss\) and scaler.backward\(loss\) in the place of scaler.scale\(loss\)"),
        ("get_growth_factor", r"has no attribute 'get_growth_factor': scales follow from what was measured"),
        ("set_backoff_factor", "scales follow from what was measured"),
        ("nothing_known", "^'GradScaler' object has no attribute 'nothing_known'$"),
    ],
)
def test_methods_of_torch_that_are_not_here(name: str, message: str) -> None:
    scaler = GradScaler(net().solver)
    assert not hasattr(scaler, name)
    with pytest.raises(AttributeError, match=message):
        getattr(scaler, name)


class Deep:
    """Layers of tanh, whose loss is multiplied by what `iterate` is given."""

    def __init__(self, layers: int, *, attention: bool = False, backend: str = "cpu:float") -> None:
        nn.clear_parameters()
        random = np.random.RandomState(0)
        self.factor = nn.Variable.from_numpy_array(np.ones(1, np.float32))
        with nn.context_scope(nn.Context([backend, "cpu:float"], "CpuCachedArray", "0")):
            h = nn.Variable.from_numpy_array(random.randn(2, 4, 8).astype(np.float32))
            for index in range(layers):
                name = f"layer{index}"
                if attention:
                    q, k = (PF.affine(h, 8, base_axis=2, name=name + part, rng=random) for part in "qk")
                    h = F.batch_matmul(F.softmax(F.batch_matmul(q, k, transpose_b=True)), h) + h
                h = F.tanh(PF.affine(h, 8, base_axis=2, name=name, rng=random))
            self.loss = F.mean(F.reshape(F.mean(h**2), (1,)) * self.factor)
        solver = S.Sgd(1e-30)
        solver.set_parameters(nn.get_parameters())
        self.solver = solver
        self.scaler = GradScaler(solver, storage=None if backend == "cpu:half" else "float16")

    def iterate(self, factor: float = 1.0) -> bool:
        self.factor.d = factor
        self.solver.zero_grad()
        self.scaler.forward(self.loss)
        self.scaler.backward(self.loss)
        updated = self.scaler.step(self.solver)
        self.scaler.update()
        return updated


@pytest.mark.parametrize(("jump", "lost"), [(2.0**10, 4), (2.0**20, 7)])
@pytest.mark.parametrize("layers", [2, 12, pytest.param(32, marks=pytest.mark.slow)])
def test_lost_steps_grow_with_a_jump_and_not_with_the_depth(layers: int, jump: float, lost: int) -> None:
    deep = Deep(layers)
    assert all(deep.iterate() for _ in range(3))
    assert 1 <= [deep.iterate(jump) for _ in range(12)].count(False) <= lost
    # It stays so: nothing overflows once the jump is the rule.
    assert all(deep.iterate(jump) for _ in range(10))


@pytest.mark.parametrize("backend", ["cpu:float", "cpu:half"])
def test_what_overflows_where_no_layer_has_a_weight_is_lowered_too(backend: str) -> None:
    deep = Deep(2, attention=True, backend=backend)
    assert all(deep.iterate() for _ in range(3))
    assert [deep.iterate(2.0**10) for _ in range(8)].count(False) <= 4
    assert all(deep.iterate(2.0**10) for _ in range(3))


@pytest.mark.parametrize("backend", ["cpu:float", "cpu:half"])
def test_an_overflow_of_attention_scores_ends_where_only_their_layers_show_it(backend: str) -> None:
    """What follows the scores overflows with them; what is before does not, and has parameters."""
    nn.clear_parameters()
    random, gate = np.random.RandomState(0), Gate()
    with nn.context_scope(nn.Context([backend, "cpu:float"], "CpuCachedArray", "0")):
        x = nn.Variable.from_numpy_array(random.randn(2, 4, 8).astype(np.float32))
        q, k, v = (PF.affine(x, 8, base_axis=2, name=name, rng=random) for name in "qkv")
        scores = gate(F.batch_matmul(q, k, transpose_b=True))
        h = F.batch_matmul(F.softmax(scores), v)
        loss = F.mean(PF.affine(h, 8, base_axis=2, name="out", rng=random) ** 2)
    solver = S.Sgd(1e-30)
    solver.set_parameters(nn.get_parameters())
    scaler = GradScaler(solver, storage=None if backend == "cpu:half" else "float16")

    def step() -> bool:
        solver.zero_grad()
        scaler.forward(loss)
        scaler.backward(loss)
        updated = scaler.step(solver)
        scaler.update()
        return updated

    assert all(step() for _ in range(3))
    gate.factor = 2.0**12
    assert [step() for _ in range(12)].count(False) <= 5


def test_losses_of_very_different_size_in_turn_lose_only_the_first_steps() -> None:
    deep = Deep(4)
    done = [deep.iterate(1e6 if i % 2 else 1e-6) for i in range(150)]
    assert done.count(False) <= 14
    assert all(done[30:])


def test_many_lost_steps_in_a_row_are_warned_of_once() -> None:
    deep = Deep(2)
    assert deep.iterate()

    def iterate() -> None:
        for i in range(30):
            deep.iterate(2.0 ** (8 * min(i, 12)))

    with pytest.warns(LossScaleWarning, match="10 batches in a row .*; first bad layer: layer") as told:
        iterate()
    assert sum("in a row" in str(one.message) for one in told) == 1


def test_a_state_saved_after_a_lost_step_goes_on_bit_for_bit() -> None:
    deep = Deep(3)
    assert all(deep.iterate() for _ in range(3))
    assert not deep.iterate(2.0**10)
    state = json.loads(json.dumps(deep.scaler.state_dict()))

    def go_on(scaler: GradScaler) -> List[Any]:
        deep.scaler = scaler
        found = []
        for _ in range(6):
            updated = deep.iterate(2.0**10)
            gradients = [v.g.tobytes() for v in nn.get_parameters().values()] if updated else []
            found.append((updated, scaler.get_scale(), scaler.scaling(deep.loss).layer_scales, gradients))
        return found

    expected = go_on(deep.scaler)
    assert [updated for updated, *_ in expected].count(False) >= 1
    copy = GradScaler(deep.solver, storage="float16")
    copy.load_state_dict(state)
    assert go_on(copy) == expected


def test_a_batch_that_has_underflowed_runs_again_with_scales_of_its_own() -> None:
    deep = Deep(3)
    assert all(deep.iterate() for _ in range(3))
    for _ in range(3):
        assert deep.iterate(1e-12)
        gradients = {name: v.g.copy() for name, v in nn.get_parameters().items()}
        for v in nn.get_parameters().values():
            v.grad.zero()
        deep.loss.forward()
        deep.loss.backward(1.0)
        for name, v in nn.get_parameters().items():
            np.testing.assert_allclose(gradients[name], v.g, rtol=0.1, atol=0.02 * np.abs(v.g).max())
        assert deep.iterate()
