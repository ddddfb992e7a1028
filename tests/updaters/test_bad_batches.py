# SPDX-License-Identifier: Apache-2.0
"""Batches that no scale can help: told apart from overflows, named, and nothing of them stays behind."""

from __future__ import annotations

import math
import warnings
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
    DynamicLossScalingUpdater,
    FixedLossScalingUpdater,
    FormatEmulation,
    LossScaleError,
    LossScaleWarning,
    UpdateResult,
)
from nnabla_adaloss.updaters.outcome import GOOD, examine
from tests.updaters.networks import AS_THE_BASELINE


class Work:
    """A network with batch normalization, whose batches can be spoilt, and its updater."""

    def __init__(
        self,
        spoil: Optional[Callable[[int, nn.Variable], None]] = None,
        trained: Callable[[str], bool] = lambda name: True,
        **options: Any,
    ) -> None:
        nn.clear_parameters()
        rng = np.random.RandomState(0)
        data = np.random.default_rng(0)
        self.x, t, self.one = nn.Variable((8, 1, 6, 6)), nn.Variable((8, 1)), nn.Variable((1,))
        h = PF.batch_normalization(PF.convolution(self.x, 4, (3, 3), name="conv", rng=rng), name="bn")
        y = PF.affine(F.relu(h), 5, name="head", rng=rng)
        # sqrt has an infinite slope at 0: where `one` is 0, every gradient is lost while forward is finite.
        root = F.pow_scalar(F.reshape(F.mean(y) * 0.0, (1,)) + self.one, 0.5)
        self.loss = F.mean(F.softmax_cross_entropy(y, t)) + F.sum(root)
        self.solver = S.Momentum(0.05)
        self.solver.set_parameters({n: v for n, v in nn.get_parameters().items() if trained(n)})
        self.batches = 0
        self.overflows: List[int] = []

        def feed() -> None:
            self.x.d = data.standard_normal(self.x.shape)
            t.d = data.integers(0, 5, t.shape)
            self.one.d = float(self.batches not in self.overflows)
            if spoil is not None:
                spoil(self.batches, self.x)
            self.batches += 1

        self.feed = feed
        self.updater = AdaptiveLossScalingUpdater(
            self.solver, self.loss, feed, **{"storage": "float16", **options}
        )

    def statistics(self) -> Dict[str, np.ndarray]:
        names = ("bn/bn/mean", "bn/bn/var")
        return {name: nn.get_parameters(grad_only=False)[name].d.copy() for name in names}


def nan_pixel(*batches: int, value: float = math.nan) -> Callable[[int, nn.Variable], None]:
    def spoil(batch: int, x: nn.Variable) -> None:
        if batch in batches:
            x.d[0, 0, 0, 0] = value

    return spoil


def equal(a: Dict[str, np.ndarray], b: Dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e6])
def test_running_statistics_are_as_before_a_batch_that_was_thrown_away(value: float) -> None:
    work = Work(nan_pixel(1, value=value), on_nonfinite_loss="skip", on_nonfinite_forward="skip")
    assert work.updater.update().updated
    before = work.statistics()
    result = work.updater.update()
    for name, array in work.statistics().items():
        assert np.isfinite(array).all(), name
    assert not result.updated
    assert equal(work.statistics(), before)
    assert work.updater.update().updated
    assert not equal(work.statistics(), before)


@pytest.mark.parametrize("value", [math.nan, 1e6])
def test_running_statistics_are_as_before_an_error(value: float) -> None:
    """Also those that a script goes on with, or saves, after it has caught it."""
    work = Work(nan_pixel(1, value=value))
    work.updater.update()
    before = work.statistics()
    with pytest.raises(LossScaleError, match="the forward pass is not finite|the loss is not finite"):
        work.updater.update()
    assert equal(work.statistics(), before)
    assert work.updater.update().updated


def test_running_statistics_are_as_before_an_overflow() -> None:
    work = Work(max_retries=0)
    work.updater.update()
    before = work.statistics()
    work.overflows = [1]
    assert work.updater.update().reason == "overflow"
    assert equal(work.statistics(), before)


def test_with_accumulation_the_whole_window_is_undone() -> None:
    work = Work(nan_pixel(4), on_nonfinite_loss="skip", on_nonfinite_forward="skip", accum_grad=3)
    work.updater.update()
    before = work.statistics()
    assert not work.updater.update().updated
    assert equal(work.statistics(), before)


def test_what_else_forward_writes_is_found() -> None:
    """Quantized weights, found by function; a counter that a user's function keeps, found by what it does."""
    nn.clear_parameters()
    x, one = (
        nn.Variable.from_numpy_array(np.ones((4, 3), np.float32)),
        nn.Variable.from_numpy_array(np.ones(1)),
    )
    counter = nn.parameter.get_parameter_or_create("counter", (1,), np.zeros(1), need_grad=False)
    counted = F.assign(counter, counter + 1.0)
    y = PF.binary_connect_affine(x, 2, name="b")
    loss = (
        F.mean(y**2) + F.sum(F.pow_scalar(F.reshape(F.mean(y) * 0.0, (1,)) + one, 0.5)) + F.sum(counted) * 0.0
    )
    solver = S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())
    updater = AdaptiveLossScalingUpdater(solver, loss, storage="float16", max_retries=0)
    for expected in (1.0, 2.0):
        assert updater.update().updated
        assert float(counter.d[0]) == expected
    one.d = 0.0
    assert updater.update().reason == "overflow"
    assert float(counter.d[0]) == 2.0


@pytest.mark.parametrize("activation", [F.relu, F.crelu])
def test_nan_in_the_data_behind_a_relu_is_named_after_one_batch(activation: Any) -> None:
    """The loss stays finite: it turns NaN into 0."""
    nn.clear_parameters()
    rng, data = np.random.RandomState(0), np.random.default_rng(0)
    x = nn.Variable((4, 1, 6, 6))
    h = activation(PF.convolution(x, 3, (3, 3), name="conv", rng=rng))
    loss = F.mean(PF.affine(h, 2, name="head", rng=rng) ** 2)
    solver = S.Sgd(0.01)
    solver.set_parameters(nn.get_parameters())
    fed = [0]

    def feed() -> None:
        x.d = data.standard_normal(x.shape)
        if fed[0] in (1, 3):
            x.d[0] = math.nan
        fed[0] += 1

    updater = AdaptiveLossScalingUpdater(solver, loss, feed, storage="float16", on_nonfinite_forward="skip")
    results = [updater.update() for _ in range(5)]
    assert [r.reason for r in results] == ["updated", "nonfinite_forward"] * 2 + ["updated"]
    assert len({r.scale for r in results}) == 1
    assert fed[0] == 5
    assert "conv/conv (Convolution) reads an input of shape (4, 1, 6, 6) that holds 36" in results[1].cause

    fed[0], updater.on_nonfinite_forward = 3, "raise"
    with pytest.raises(LossScaleError, match=r"the forward pass is not finite.*conv/conv.*stays at "):
        updater.update()
    assert updater.update().updated


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (
            lambda work: np.copyto(nn.get_parameters()["head/affine/b"].d, np.nan),
            "the parameter head/affine/b",
        ),
        (lambda work: np.copyto(nn.get_parameters()["head/affine/W"].d, 60000.0), "beyond float16"),
    ],
)
def test_the_cause_is_named_and_no_scale_moves(spoil: Callable[[Work], None], cause: str) -> None:
    work = Work()
    scale = work.updater.update().scale
    spoil(work)
    with pytest.raises(LossScaleError, match=cause):
        work.updater.update()
    assert work.updater.scale == scale
    assert work.batches == 2


def test_an_attention_mask_of_minus_infinity_is_no_fault() -> None:
    """Forward holds infinities, but the overflow is one of scale: it is lowered until gradients fit."""
    nn.clear_parameters()
    rng = np.random.RandomState(0)
    x = nn.Variable.from_numpy_array(rng.randn(4, 6).astype(np.float32))
    mask = nn.Variable.from_numpy_array(
        np.where(np.arange(5) > 3, -np.inf, 0.0).astype(np.float32)[np.newaxis]
    )
    h = F.tanh(PF.affine(x, 5, name="a", rng=rng))
    weights = F.softmax(PF.affine(h, 5, name="b", rng=rng) + F.broadcast(mask, (4, 5)))
    loss = F.sum(weights * h) * 1e3
    solver = S.Sgd(1e-6)
    solver.set_parameters(nn.get_parameters())
    updater = AdaptiveLossScalingUpdater(solver, loss, storage="float16", scale=2.0**40)
    result = updater.update()
    assert result.updated
    assert result.retries
    assert updater.scale < 2.0**30


def test_after_an_error_at_the_floor_the_scale_is_what_it_was() -> None:
    work = Work(min_scale=2.0)
    scale = work.updater.update().scale
    work.overflows = list(range(1, 40))
    with pytest.raises(LossScaleError, match="at the smallest loss scale, 2"):
        work.updater.update()
    assert work.updater.scale == scale
    work.overflows = []
    before = nn.get_parameters()["head/affine/W"].d.copy()
    assert work.updater.update()[:3] == (True, scale, 0)
    assert not np.array_equal(nn.get_parameters()["head/affine/W"].d, before)


HALF = nn.Context(["cpu:half", "cpu:float"], "CpuCachedArray", "0")
NATIVE = "native"


def tiny(storage: Optional[str], weight: float, **options: Any) -> AdaptiveLossScalingUpdater:
    """An updater of a small network, whose gradients are zero with the weights below."""
    nn.clear_parameters()
    x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
    with nn.context_scope(HALF if storage == NATIVE else nn.Context()):
        loss = F.mean(PF.affine(x, 2, name="a") ** 2) * weight
    solver = S.Sgd(1.0)
    solver.set_parameters(nn.get_parameters())
    storage = None if storage == NATIVE else storage
    return AdaptiveLossScalingUpdater(solver, loss, storage=storage, **options)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    ("storage", "weight", "scale"),
    [("float16", 1e-12, 8.0), ("float16", 1e-3, 2.0**-20), (NATIVE, 1e-3, 2.0**-20), (None, 1e-45, 2.0**-20)],
)
def test_a_step_without_any_gradient_is_reported_once(
    storage: Optional[str], weight: float, scale: float, delay: int
) -> None:
    config = AdaLossConfig(loss_scale_method="fixed", delay=delay)
    options = {"config": config, "scale": scale, "global_scale": "dynamic", "float_tail": False}
    updater = tiny(storage, weight, **options)
    with pytest.warns(LossScaleWarning, match="every gradient is exactly zero in iteration 1") as caught:
        results = [updater.update() for _ in range(3)]
    assert [r.reason for r in results] == ["zero_gradients"] * 3
    assert len([w for w in caught if "exactly zero" in str(w.message)]) == 1


@pytest.mark.parametrize("storage", [None, "float16", NATIVE])
def test_a_loss_that_is_always_zero_is_reported_after_a_while(storage: Optional[str]) -> None:
    updater = tiny(storage, 0.0, config=AdaLossConfig())
    with warnings.catch_warnings():
        warnings.simplefilter("error", LossScaleWarning)
        assert {updater.update().reason for _ in range(9)} == {"zero_gradients"}
    with pytest.warns(LossScaleWarning, match="exactly zero in 10 updates up to iteration 10"):
        updater.update()


@pytest.mark.parametrize("accum_grad", [1, 2])
@pytest.mark.parametrize("storage", [None, "float16", NATIVE])
def test_a_batch_without_labels_is_no_alarm(storage: Optional[str], accum_grad: int) -> None:
    nn.clear_parameters()
    x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
    labelled = nn.Variable((4, 1))
    with nn.context_scope(HALF if storage == NATIVE else nn.Context()):
        loss = F.mean((PF.affine(x, 1, name="a") - 3.0) ** 2 * labelled)
    solver = S.Sgd(0.01)
    solver.set_parameters(nn.get_parameters())
    batches = iter([0.0] * 4 + [1.0, 0.0] * 10)

    def feed() -> None:
        labelled.d = next(batches)

    updater = AdaptiveLossScalingUpdater(
        solver,
        loss,
        feed,
        storage=None if storage == NATIVE else storage,
        config=AdaLossConfig(),
        accum_grad=accum_grad,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", LossScaleWarning)
        reasons = [updater.update().reason for _ in range(24 // accum_grad)]
    zero = ["zero_gradients"] * (4 // accum_grad)
    alternating = ["updated", "zero_gradients"] * 10 if accum_grad == 1 else ["updated"] * 10
    assert reasons == zero + alternating


@pytest.mark.parametrize("options", [{}, AS_THE_BASELINE])
def test_parameters_that_the_solver_does_not_have_decide_nothing(options: Dict[str, Any]) -> None:
    """Fine-tuning a head: nobody clears the backbone's gradients, so an infinity in them stays."""
    kept: Dict[str, List[UpdateResult]] = {}
    for which in ("ours", "nnabla's"):
        work = Work(trained=lambda name: name.startswith("head"), on_nonfinite_loss="skip", **options)
        work.overflows = [5, 11]
        if which == "nnabla's":
            updater = DynamicLossScalingUpdater(work.solver, FormatEmulation(work.loss), work.feed)
            for _ in range(20):
                updater.update()
            kept[which] = work.batches, updater.scale
        else:
            results = [work.updater.update() for _ in range(20)]
            assert all(r.updated for r in results)
            kept[which] = work.batches, work.updater.scale
            assert not results[-1].nonfinite_layers
    assert kept["nnabla's"] == (22, 2.0)
    assert kept["ours"] == (22, 2.0 if options else 16384.0)


def log_of_maximum(p: nn.Variable) -> nn.Variable:
    """As published: the constant is 0 in float16."""
    return F.log(F.maximum_scalar(p, 1e-12))


def log_of_relu(p: nn.Variable) -> nn.Variable:
    return F.log(F.relu(p))


@pytest.mark.parametrize("log", [log_of_maximum, log_of_relu])
def test_a_gradient_that_is_masked_before_any_parameter_is_no_overflow(
    log: Callable[[nn.Variable], nn.Variable],
) -> None:
    """Where p is 0 the branch that is not taken has an infinite slope: 0 times infinity is NaN."""

    def training() -> Any:
        nn.clear_parameters()
        rng = np.random.RandomState(0)
        x = nn.Variable.from_numpy_array(rng.randn(16, 6).astype(np.float32))
        p = F.relu(PF.affine(x, 8, name="a", rng=rng))
        p.forward()
        taken = nn.Variable.from_numpy_array((p.d > 0.1).astype(np.float32))
        loss = F.mean(F.where(taken, log(p), p) ** 2)
        solver = S.Sgd(0.01)
        solver.set_parameters(nn.get_parameters())
        return solver, loss

    solver, loss = training()
    dynamic = DynamicLossScalingUpdater(solver, FormatEmulation(loss), lambda: None)
    for _ in range(5):
        dynamic.update()
    theirs = {name: v.d.copy() for name, v in nn.get_parameters().items()}

    solver, loss = training()
    updater = AdaptiveLossScalingUpdater(solver, loss, storage="float16")
    results = [updater.update() for _ in range(5)]
    # The first batch is repeated, with what it has shown.
    assert [(r.updated, r.retries) for r in results] == [(True, 1), *[(True, 0)] * 4]
    assert len({r.scale for r in results}) == 1
    # The first batch is looked at function by function; what is masked reaches no parameter.
    assert results[0].nonfinite_layers, "nothing was masked"
    assert dynamic.scale == 8.0
    for name, v in nn.get_parameters().items():
        np.testing.assert_allclose(v.d, theirs[name], rtol=0, atol=1e-3, err_msg=name)


def small(batches: int = 1) -> Any:
    nn.clear_parameters()
    x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
    loss = F.mean(PF.affine(F.tanh(PF.affine(x, 3, name="a")), 2, name="b") ** 2)
    solver = S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())
    return solver, loss


@pytest.mark.parametrize("updater", [AdaptiveLossScalingUpdater, FixedLossScalingUpdater])
def test_wrapping_twice_is_refused(updater: Any) -> None:
    solver, loss = small()
    with pytest.raises(TypeError, match="give the loss that was wrapped"):
        updater(solver, AdaptiveLossScaling(loss))
    with pytest.raises(TypeError, match="give the loss that was wrapped"):
        AdaptiveLossScaling(AdaptiveLossScaling(loss))


def test_no_loss_at_all() -> None:
    solver, _ = small()
    with pytest.raises(TypeError, match="loss must be"):
        AdaptiveLossScalingUpdater(solver, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_loss_of_one_element_may_have_any_shape(shape: Tuple[int, ...]) -> None:
    nn.clear_parameters()
    x = nn.Variable((4, 3))
    loss = F.reshape(F.mean(PF.affine(x, 2, name="a") ** 2), shape)
    solver = S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())
    updater = AdaptiveLossScalingUpdater(solver, loss, storage="float16", on_nonfinite_loss="skip")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # NumPy's, of arrays that are taken for numbers
        for value, reason in ((math.nan, "nonfinite_loss"), (1.0, "updated")):
            x.d = value
            assert updater.update().reason == reason


def test_a_loss_that_the_feeder_assigns_counts_at_once() -> None:
    solver, loss = small()
    other = F.mean(PF.affine(nn.Variable.from_numpy_array(np.ones((4, 3), np.float32)), 3, name="a") ** 2)

    def feed() -> None:
        updater.loss = other

    updater = AdaptiveLossScalingUpdater(solver, loss, feed, storage="float16")
    before = {name: v.d.copy() for name, v in nn.get_parameters().items()}
    updater.update()
    changed = {name for name, v in nn.get_parameters().items() if not np.array_equal(v.d, before[name])}
    assert changed == {"a/affine/W", "a/affine/b"}


def test_nothing_to_train_is_said() -> None:
    _, loss = small()
    with pytest.raises(ValueError, match="^solver has no parameters.*set_parameters"):
        AdaptiveLossScalingUpdater(S.Sgd(0.1), loss, storage="float16").update()
    solver = S.Sgd(0.1)
    solver.set_parameters({"other/W": nn.Variable((2, 2), need_grad=True)})
    updater = AdaptiveLossScalingUpdater(solver, loss, storage="float16")
    with pytest.warns(
        LossScaleWarning, match="does not depend on any of the solver's 1 parameters.*'other/W'"
    ):
        updater.update()


def test_training_in_fp32_is_said() -> None:
    solver, loss = small()
    told = '^nothing is stored in half precision: .* storage is None. Pass storage="float16"'
    with pytest.warns(LossScaleWarning, match=told) as caught:
        AdaptiveLossScalingUpdater(solver, loss)
    # It points to the line that made the updater.
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AdaptiveLossScalingUpdater(solver, loss, storage="float16")
        AdaptiveLossScalingUpdater(solver, loss, config=AdaLossConfig())


def test_an_update_that_the_feeder_interrupts_did_not_happen() -> None:
    solver, loss = small()
    fail = [False]

    def feed() -> None:
        if fail[0]:
            raise OSError("no data")

    updater = AdaptiveLossScalingUpdater(solver, loss, feed, storage="float16")
    updater.update()
    fail[0] = True
    with pytest.raises(OSError, match="no data"):
        updater.update()
    assert updater.iteration == 1
    fail[0] = False
    assert updater.update().updated
    assert updater.iteration == 2


def test_what_was_looked_at_with_a_smaller_scale_is_no_gradient() -> None:
    """Ranks decide by the sum of their gradients: it must not be finite because one has looked closer."""
    nn.clear_parameters()
    x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
    mask = nn.Variable.from_numpy_array(np.array([[0.0, -np.inf]], np.float32))
    h = PF.affine(x, 2, name="a")
    loss = F.sum(F.softmax(h + F.broadcast(mask, (4, 2))) * h) * 1e3
    solver = S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())
    scaling = AdaptiveLossScaling(FormatEmulation(loss))
    solver.zero_grad()
    scaling.forward(clear_no_need_grad=True)
    scaling.backward(2.0**40, clear_buffer=True)
    outcome = examine(GOOD, scaling, solver, 2.0**-24)
    assert (outcome.overflowed, outcome.nonfinite_loss, outcome.fault) == (True, False, None)
    assert solver.check_inf_or_nan_grad()


def test_a_graph_for_each_batch_of_a_window_is_undone_to_its_begin() -> None:
    nn.clear_parameters()
    data, fed = np.random.default_rng(0), [0]
    one = nn.Variable.from_numpy_array(np.ones(1, np.float32))

    def build() -> nn.Variable:
        x = nn.Variable.from_numpy_array(data.standard_normal((8, 4)).astype(np.float32))
        y = PF.affine(PF.batch_normalization(PF.affine(x, 3, name="a"), name="bn"), 2, name="b")
        return F.mean(y**2) + F.sum(F.pow_scalar(F.reshape(F.mean(y) * 0.0, (1,)) + one, 0.5))

    def feed() -> None:
        updater.loss = build()
        fed[0] += 1
        one.d = float(fed[0] != 6)
        if fed[0] == 9:
            raise OSError("no data")

    loss, solver = build(), S.Sgd(0.01)
    solver.set_parameters(nn.get_parameters())
    updater = AdaptiveLossScalingUpdater(solver, loss, feed, storage="float16", accum_grad=3, max_retries=0)
    assert updater.update().updated

    def statistics() -> List[np.ndarray]:
        return [nn.get_parameters(grad_only=False)[f"bn/bn/{name}"].d.copy() for name in ("mean", "var")]

    before = statistics()
    assert updater.update().reason == "overflow"  # in the last of its three batches
    for now, then in zip(statistics(), before):
        np.testing.assert_array_equal(now, then)
    with pytest.raises(OSError, match="no data"):
        updater.update()
    for now, then in zip(statistics(), before):
        np.testing.assert_array_equal(now, then)
    assert updater.update().updated
