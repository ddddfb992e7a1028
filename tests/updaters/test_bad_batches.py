# SPDX-License-Identifier: Apache-2.0
"""Batches that no scale can help: told apart from overflows, named, and nothing of them stays behind."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial
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
    GradScaler,
    HistoryPolicy,
    LossScaleError,
    LossScaleWarning,
)
from nnabla_adaloss.core.verdict import PassVerdict, Rules
from nnabla_adaloss.engine import BatchLoop
from tests.worlds.networks import gate, two_layers
from tests.worlds.trainings import AS_THE_BASELINE, scaler_step, solver_of, training, updater_of, updater_on
from tests.worlds.values import FLOAT, HALF, assert_equal, constant, data, gradients, snapshot, zero_grads
from tests.worlds.warned import silent, warned

SKIP = {"on_nonfinite_loss": "skip", "on_nonfinite_forward": "skip"}


def statistics() -> Dict[str, np.ndarray]:
    found = snapshot()
    return {name: found[f"bn/bn/{name}"] for name in ("mean", "var")}


@pytest.mark.parametrize(
    ("batches", "options"),
    [
        ({"spoilt": {1: math.nan}}, SKIP),
        ({"spoilt": {1: math.inf}}, SKIP),
        ({"spoilt": {1: 1e6}}, SKIP),
        ({"spoilt": {1: math.nan}}, {}),
        ({"spoilt": {1: 1e6}}, {}),
        ({"overflow": [1]}, {"max_retries": 0}),
        ({"spoilt": {4: math.nan}}, {**SKIP, "accum_grad": 3}),
    ],
)
def test_running_statistics_are_as_before_a_batch_that_was_lost(
    batches: Dict[str, Any], options: Dict[str, Any]
) -> None:
    """Skipped or an error, also those that a script goes on with, or saves, after it has caught that."""
    updater = updater_on(training(**batches), **options)
    assert updater.update().updated
    before = statistics()
    if options:
        assert not updater.update().updated
    else:
        with pytest.raises(LossScaleError, match="the forward pass is not finite|the loss is not finite"):
            updater.update()
    assert_equal(statistics(), before)
    assert updater.update().updated
    assert not np.array_equal(statistics()["mean"], before["mean"])


@pytest.mark.parametrize(
    "options",
    [{}, SKIP, {"accum_grad": 2}, {"on_overflow": "next", **SKIP}, {"storage": None}],
    ids=["raise", "skip", "accumulated", "next", "not emulated"],
)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_a_loss_that_is_nan_is_a_fault_though_its_gradients_are_finite(
    options: Dict[str, Any], first: bool
) -> None:
    positive, x = constant([1.0]), data(8, 4)
    h = PF.batch_normalization(PF.affine(x, 5, name="a"), name="bn")
    updater = updater_of(F.mean(PF.affine(h, 2, name="b") ** 2) + F.sum(F.log(positive)), **options)
    if not first:
        assert updater.update().updated
    before, scale = snapshot(), updater.scale
    positive.d = -1.0
    if "on_nonfinite_loss" in options:
        result = updater.update()
        assert (result.updated, result.reason) == (False, "nonfinite_loss")
        assert result.cause.startswith("Log (Log) computes 1 infinity or NaN")
    else:
        with pytest.raises(LossScaleError, match=r"^the loss is not finite in iteration .*: Log \(Log\)"):
            updater.update()
    assert_equal(snapshot(), before)
    assert updater.scale == scale
    positive.d = 1.0
    assert updater.update().updated


@pytest.mark.parametrize("storage", ["float16", None])
def test_an_infinite_loss_whose_gradients_are_finite_trains(storage: Optional[str]) -> None:
    largest = constant([3e38])
    updater = updater_of(two_layers(data(4, 3)) + F.sum(largest * 2.0), storage=storage)
    assert [updater.update().reason for _ in range(3)] == ["updated"] * 3
    assert updater.scaling.variable.d == math.inf


@pytest.mark.parametrize("scaler", [False, True])
@pytest.mark.parametrize("storage", ["float16", "native"])
@pytest.mark.parametrize("target", [300.0, 100.0], ids=["always", "from then on"])
def test_an_overflow_of_gradients_lowers_the_scale_where_the_loss_is_infinite(
    target: float, storage: str, scaler: bool
) -> None:
    factor = constant([1.0])
    with nn.context_scope(HALF if storage == "native" else FLOAT):
        y = PF.affine(data(4, 3), 2, name="a", rng=np.random.RandomState(0))
        loss = F.mean(F.squared_error(y, constant(np.full((4, 2), target))) * F.broadcast(factor, (4, 2)))
    solver, stored = solver_of(S.Sgd(1e-6)), None if storage == "native" else storage
    if scaler:
        loop = GradScaler(solver, storage=stored)
        step = partial(scaler_step, loop, solver, loss)
    else:
        step = AdaptiveLossScalingUpdater(solver, loss, storage=stored).update
    with warned():
        for value in (1.0, 1.0, 60.0, 60.0):
            factor.d, before = value, snapshot()["a/affine/W"].copy()
            step()
    assert not np.array_equal(snapshot()["a/affine/W"], before)
    factor.d, before = math.inf, snapshot()
    with warned(), suppress(LossScaleError):
        step()
    assert_equal(snapshot(), before)


@pytest.mark.parametrize("storage", ["float16", "native"])
def test_a_nan_after_infinite_losses_is_bad_data(storage: str) -> None:
    added = constant([0.0])
    with nn.context_scope(HALF if storage == "native" else FLOAT):
        y = PF.affine(data(4, 3), 2, name="a", rng=np.random.RandomState(0))
        loss = F.mean(F.squared_error(y, constant(np.full((4, 2), 300.0)))) + F.sum(added * 1.0)
    stored = None if storage == "native" else storage
    updater = AdaptiveLossScalingUpdater(solver_of(S.Sgd(1e-6)), loss, storage=stored)
    with warned():
        updater.update()
    added.d = math.nan
    with pytest.raises(LossScaleError, match="^the loss is not finite in iteration 2"):
        updater.update()


def test_no_loss_is_read_from_a_sink() -> None:
    x = data(4, 3)
    loss = F.sink(F.mean(PF.affine(x, 2, name="a") ** 2), one_input_grad=True)
    loss.data.fill(math.nan)
    assert updater_of(loss).update().updated


def test_a_state_that_is_not_finite_is_undone_where_gradients_are_fine() -> None:
    added = constant([1.0])
    total = nn.parameter.get_parameter_or_create("total", (1,), np.zeros(1), need_grad=False)
    # Nothing of an infinity comes through.
    updater = updater_of(two_layers(data(4, 3)) + F.sum(F.relu(-F.assign(total, total + added))))
    for more, expected in ((1.0, 1.0), (math.inf, 1.0), (1.0, 2.0)):
        added.d = more
        assert updater.update().updated
        assert float(total.d[0]) == expected


@pytest.mark.parametrize("activation", [F.relu, F.crelu])
def test_nan_in_the_data_behind_a_relu_is_named_after_one_batch(activation: Any) -> None:
    """The loss stays finite: it turns NaN into 0."""
    numbers, fed = np.random.default_rng(0), [0]
    x = nn.Variable((4, 1, 6, 6))
    h = activation(PF.convolution(x, 3, (3, 3), name="conv"))

    def feed() -> None:
        x.d = numbers.standard_normal(x.shape)
        if fed[0] in (1, 3):
            x.d[0] = math.nan
        fed[0] += 1

    loss = F.mean(PF.affine(h, 2, name="head") ** 2)
    updater = updater_of(loss, feed, solver=S.Sgd(0.01), on_nonfinite_forward="skip")
    results = [updater.update() for _ in range(5)]
    assert [r.reason for r in results] == ["updated", "nonfinite_forward"] * 2 + ["updated"]
    # What the storage has seen in forward tells that lower scales cannot help.
    assert [r.retries for r in results[1:]] == [0, 0, 0, 0]
    assert len({r.scale for r in results}) == 1
    assert fed[0] == 5
    assert "conv/conv (Convolution) reads an input of shape (4, 1, 6, 6) that holds 36" in results[1].cause

    fed[0], updater.on_nonfinite_forward = 3, "raise"
    with pytest.raises(
        LossScaleError, match=r'forward pass is not finite.*conv/conv.*on_nonfinite_forward="skip"'
    ):
        updater.update()
    assert updater.update().updated


def masked(loss_of: Callable[[nn.Variable, nn.Variable], nn.Variable]) -> nn.Variable:
    """Attention with a mask of minus infinity."""
    mask = constant(np.where(np.arange(5) > 3, -np.inf, 0.0)[np.newaxis])
    h = F.tanh(PF.affine(data(4, 6), 5, name="a"))
    weights = F.softmax(PF.affine(h, 5, name="b") + F.broadcast(mask, (4, 5)))
    return loss_of(weights, h)


def test_an_attention_mask_of_minus_infinity_is_no_fault() -> None:
    """Forward holds infinities, but the overflow is one of scale: it is lowered until gradients fit."""
    loss = masked(lambda weights, h: F.sum(weights * h) * 1e3)
    updater = updater_of(loss, solver=S.Sgd(1e-6), scale=2.0**40)
    result = updater.update()
    assert result.updated
    assert result.retries
    assert updater.scale < 2.0**30


def test_amaxes_measured_with_a_smaller_scale_are_not_taken_for_gradients() -> None:
    loss = masked(lambda weights, h: F.sum(weights * h) * 1e3)
    solver, scaling = solver_of(), AdaptiveLossScaling(FormatEmulation(loss))
    solver.zero_grad()
    scaling.forward(clear_no_need_grad=True)
    scaling.backward(2.0**40, clear_buffer=True)
    before = gradients()
    loop = BatchLoop(scaling, lambda rerun: None, nn.get_parameters().values, 2.0**-24)
    outcome = loop.conclude(
        loop.overflow_facts()._replace(can_measure_more=False), Rules(repeat=False, max_repeats=0)
    )
    assert (outcome.verdict, outcome.fault, outcome.lowered) == (PassVerdict.OVERFLOW, "", True)
    assert_equal(gradients(), before)


@pytest.mark.parametrize("way", ["repeat", "next", "scaler"])
@pytest.mark.parametrize("storage", ["float16", "native"])
def test_a_bad_batch_leaves_parameters_alone_that_no_batch_reaches(storage: str, way: str) -> None:
    """Distillation: the solver has the parameters of the teacher, too, which gets no gradient."""
    x = data(4, 6)
    with nn.context_scope(HALF if storage == "native" else nn.Context()):
        soft = F.softmax(PF.affine(x, 3, name="teacher"))
        soft.need_grad = False
        student = F.log_softmax(PF.affine(F.tanh(PF.affine(x, 5, name="a")), 3, name="student"))
        loss = -F.mean(F.sum(soft * student, axis=1)) * 1e3
    solver, known = S.Sgd(1e-3), nn.get_parameters()
    # The first ones of the solver are those that were set last.
    solver.set_parameters({name: known[name] for name in sorted(known, key=lambda name: "teacher" in name)})
    parameters = solver.get_parameters()
    assert next(iter(parameters)).startswith("teacher")
    before = {name: v.d.copy() for name, v in parameters.items()}
    emulated = None if storage == "native" else storage
    if way == "scaler":
        scaler = GradScaler(solver, history=HistoryPolicy(start_scale=2.0**60), storage=emulated)
        updated = [scaler_step(scaler, solver, loss) for _ in range(12)]
        assert any(updated)
    else:
        options: Any = {"storage": emulated, "on_overflow": way, "global_scale": "dynamic"}
        updater = AdaptiveLossScalingUpdater(solver, loss, lambda: None, scale=2.0**60, **options)
        results = [updater.update() for _ in range(60 if way == "next" else 2)]
        assert sum(result.retries for result in results)
        assert results[-1].reason == "updated"
    for name, v in parameters.items():
        assert np.isfinite(v.d).all()
        assert np.array_equal(v.d, before[name]) == name.startswith("teacher")


def tiny(storage: Optional[str], weight: Any, *feed: Any, **options: Any) -> AdaptiveLossScalingUpdater:
    """An updater of a small network; `storage` is "native" for nnabla's own half."""
    with nn.context_scope(HALF if storage == "native" else nn.Context()):
        errors = (PF.affine(constant(np.ones((4, 3))), 1, name="a") - 3.0) ** 2
        loss = F.mean(errors * weight) if isinstance(weight, nn.Variable) else F.mean(errors) * weight
    return updater_of(loss, *feed, storage=None if storage == "native" else storage, **options)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    ("storage", "weight", "scale"),
    [
        ("float16", 1e-12, 8.0),
        ("float16", 1e-3, 2.0**-22),
        ("native", 1e-3, 2.0**-22),
        (None, 1e-45, 2.0**-20),
    ],
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


every_storage = pytest.mark.parametrize("storage", [None, "float16", "native"])


@every_storage
def test_a_loss_that_is_always_zero_is_reported_after_a_while(storage: Optional[str]) -> None:
    updater = tiny(storage, 0.0, config=AdaLossConfig())
    with silent():
        assert {updater.update().reason for _ in range(99)} == {"zero_gradients"}
    with pytest.warns(LossScaleWarning, match="exactly zero in 100 updates up to iteration 100"):
        updater.update()


def test_batches_without_labels_are_no_alarm_however_many_come_after_one_with_them() -> None:
    labelled = nn.Variable((4, 1))
    labelled.d = 1.0
    updater = tiny(None, labelled, solver=S.Sgd(0.01), config=AdaLossConfig())
    with silent():
        assert updater.update().reason == "updated"
        labelled.d = 0.0
        assert {updater.update().reason for _ in range(150)} == {"zero_gradients"}


@pytest.mark.parametrize("options", [{}, AS_THE_BASELINE])
def test_parameters_that_the_solver_does_not_have_decide_nothing(options: Dict[str, Any]) -> None:
    """Fine-tuning a head: nobody clears the backbone's gradients, so an infinity in them stays."""

    def head() -> Any:
        return training(overflow=[5, 11], trained=lambda name: name.startswith("output"))

    train, fed = head(), []
    theirs = DynamicLossScalingUpdater(
        train.solver, FormatEmulation(train.loss), lambda: fed.append(train.feed())
    )
    for _ in range(20):
        theirs.update()
    assert (len(fed), theirs.scale) == (22, 2.0)
    ours = updater_on(head(), **SKIP, **options)
    results = [ours.update() for _ in range(20)]
    assert all(r.updated for r in results)
    assert not results[-1].nonfinite_layers
    assert ours.counters.batches == 22
    assert ours.scale == 2.0 if options else ours.scale > 8.0


@pytest.mark.parametrize("make", [AdaptiveLossScalingUpdater, FixedLossScalingUpdater])
def test_wrapping_twice_is_refused(make: Any) -> None:
    loss = two_layers(data(4, 3))
    with pytest.raises(TypeError, match="give the loss that was wrapped"):
        make(solver_of(), AdaptiveLossScaling(loss))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_loss_of_one_element_may_have_any_shape(shape: Tuple[int, ...]) -> None:
    x = nn.Variable((4, 3))
    updater = updater_of(F.reshape(two_layers(x), shape), on_nonfinite_loss="skip")
    with silent():  # NumPy's, of arrays that are taken for numbers
        for value, reason in ((math.nan, "nonfinite_loss"), (1.0, "updated")):
            x.d = value
            assert updater.update().reason == reason


def test_a_loss_of_several_elements_is_refused_with_the_sum_that_nnabla_takes() -> None:
    loss = PF.affine(data(4, 3), 2, name="a") ** 2
    with pytest.raises(
        ValueError, match=r"shape \(4, 2\), not one element; .*functions\.sum.*functions\.mean"
    ):
        updater_of(loss)
    found = []
    for backward in (loss, F.sum(loss)):
        zero_grads()
        backward.forward()
        backward.backward()
        found.append(gradients())
    assert_equal(*found)


def test_nothing_to_train_is_said() -> None:
    loss = two_layers(data(4, 3))
    with pytest.raises(ValueError, match="^solver has no parameters.*set_parameters"):
        AdaptiveLossScalingUpdater(S.Sgd(0.1), loss, storage="float16").update()
    solver = S.Sgd(0.1)
    solver.set_parameters({"other/W": nn.Variable((2, 2), need_grad=True)})
    updater = AdaptiveLossScalingUpdater(solver, loss, storage="float16")
    with pytest.warns(LossScaleWarning, match="depend on any of the solver's 1 parameters.*'other/W'"):
        updater.update()


@pytest.mark.parametrize("accum_grad", [1, 2])
def test_parameters_that_never_have_a_gradient_are_said_once(accum_grad: int) -> None:
    x = data(4, 3)
    loss = two_layers(x)
    PF.affine(x, 2, name="other")
    updater = updater_of(loss, accum_grad=accum_grad)
    with silent():
        for _ in range(99):
            updater.update()
    with pytest.warns(
        LossScaleWarning, match="^2 of the solver's parameters had no gradient in 100 updates .*other"
    ):
        updater.update()
    with silent():
        for _ in range(101):
            updater.update()


@pytest.mark.parametrize("context", [FLOAT, HALF], ids=["emulated", "half"])
@pytest.mark.parametrize("bias", [0.0, -50.0])
def test_parameters_whose_gradients_stay_zero_are_named_once(bias: float, context: nn.Context) -> None:
    with nn.context_scope(context), warned() as messages:
        x = data(4, 3)
        dead = PF.affine(x, 5, b_init=np.full(5, bias), name="dead")
        h = F.relu(dead) + PF.affine(x, 5, name="alive")
        loss = F.mean(PF.affine(h, 2, name="out") ** 2)
        updater = updater_of(loss, storage="float16" if context is FLOAT else None)
        for _ in range(205):
            updater.update()
    expected = ["2 of the solver's parameters were exactly zero in 100 updates (the first is 'dead/"]
    assert [text in message for text, message in zip(expected, messages)] == [True] * len(messages)
    assert len(messages) == (bias < 0)


def test_parameters_of_a_loss_that_comes_later_are_no_alarm() -> None:
    x, weight = data(4, 3), nn.Variable()
    first, second = (F.mean(PF.affine(x, 2, name=name) ** 2) for name in ("first", "second"))
    updater = updater_of(first + second * F.reshape(weight, ()))
    with silent():
        for iteration in range(120):
            weight.d = float(iteration > 110)
            updater.update()


def test_running_statistics_frozen_parameters_and_those_that_come_later_are_no_alarm() -> None:
    x = data(4, 3)
    h = PF.batch_normalization(PF.affine(x, 5, fix_parameters=True, name="frozen"), name="bn")
    first, second = (F.mean(PF.affine(h, 2, name=name) ** 2) for name in ("first", "second"))
    updater = updater_of(first, parameters=nn.get_parameters(grad_only=False))
    with silent():
        for iteration in range(110):
            updater.loss = second if iteration == 50 else first
            updater.update()


def test_training_in_fp32_is_said() -> None:
    loss = two_layers(data(4, 3))
    told = '^nothing is stored in half precision: .* storage is None. Pass storage="float16"'
    with pytest.warns(LossScaleWarning, match=told) as caught:
        AdaptiveLossScalingUpdater(solver_of(), loss)
    # It points to the line that made the updater.
    assert caught[0].filename == __file__
    with silent():
        updater_of(loss)
        AdaptiveLossScalingUpdater(solver_of(), loss, config=AdaLossConfig())


def test_a_graph_for_each_batch_of_a_window_is_undone_to_its_begin() -> None:
    one, fed = constant([1.0]), [0]

    def build() -> nn.Variable:
        y = PF.affine(PF.batch_normalization(PF.affine(data(8, 4, seed=fed[0]), 3), name="bn"), 2, name="b")
        return F.mean(y**2) + gate(y, one)

    def feed() -> None:
        updater.loss = build()
        fed[0] += 1
        one.d = float(fed[0] != 6)
        if fed[0] == 9:
            raise OSError("no data")

    updater = updater_of(build(), feed, solver=S.Sgd(0.01), accum_grad=3, max_retries=0)
    assert updater.update().updated
    before: List[Any] = [statistics()]
    assert updater.update().reason == "overflow"  # in the last of its three batches
    assert_equal(statistics(), before[0])
    with pytest.raises(OSError, match="no data"):
        updater.update()
    assert_equal(statistics(), before[0])
    assert updater.iteration == 2
    assert updater.update().updated


@pytest.mark.parametrize(
    ("value", "divides"), [(np.nan, False), (np.inf, False), (0.0, True), (np.nan, True)]
)
def test_a_loss_weight_that_is_no_number_is_a_fault_of_forward_and_leaves_no_trace(
    value: float, *, divides: bool
) -> None:
    weight = constant(1.0)
    loss = two_layers(data(8, 4))
    updater = updater_of(F.div2(loss, weight) if divides else loss * weight, on_nonfinite_loss="skip")
    good = [updater.update() for _ in range(3)]
    gains, parameters = updater.scaling.components.unit_amaxes(), snapshot()
    weight.d = value
    with warned():
        bad = updater.update()
    assert (bad.updated, bad.reason) == (False, "nonfinite_loss")
    assert ("Div2" if divides else "Mul2") in bad.cause or "reads an input" in bad.cause
    assert_equal(snapshot(), parameters)
    assert updater.scaling.components.unit_amaxes() == gains
    weight.d = 1.0
    again = updater.update()
    assert (again.updated, again.retries, again.scale) == (True, 0, good[-1].scale)


@pytest.mark.parametrize(
    ("parameter", "value", "cause"),
    [
        ("output/affine/b", np.nan, "the parameter output/affine/b"),
        ("output/affine/W", 6e4, "beyond float16"),
    ],
)
def test_the_cause_is_named_and_no_scale_moves(parameter: str, value: float, cause: str) -> None:
    train = training()
    updater = updater_on(train)
    scale = updater.update().scale
    train.parameters[parameter].d = value
    with pytest.raises(LossScaleError, match=cause):
        updater.update()
    assert updater.scale == scale
    assert updater.counters.batches == 2


def log_of_maximum(p: nn.Variable) -> nn.Variable:
    """As published: the constant is 0 in float16."""
    return F.log(F.maximum_scalar(p, 1e-12))


@pytest.mark.parametrize("log", [log_of_maximum, lambda p: F.log(F.relu(p))])
def test_a_gradient_that_is_masked_before_any_parameter_is_no_overflow(
    log: Callable[[nn.Variable], nn.Variable],
) -> None:
    """Where p is 0 the branch that is not taken has an infinite slope: 0 times infinity is NaN."""

    def network() -> nn.Variable:
        nn.clear_parameters()
        p = F.relu(PF.affine(data(16, 6), 8, name="a", rng=np.random.RandomState(1)))
        p.forward()
        return F.mean(F.where(constant(p.d > 0.1), log(p), p) ** 2)

    loss = network()
    dynamic = DynamicLossScalingUpdater(solver_of(S.Sgd(0.01)), FormatEmulation(loss), lambda: None)
    for _ in range(5):
        dynamic.update()
    theirs = snapshot()
    updater = updater_of(network(), solver=S.Sgd(0.01))
    results = [updater.update() for _ in range(5)]
    # The first batch is repeated, with what it has shown.
    assert [(r.updated, r.retries) for r in results] == [(True, 1), *[(True, 0)] * 4]
    assert len({r.scale for r in results}) == 1
    # The first batch is looked at function by function; what is masked reaches no parameter.
    assert results[0].nonfinite_layers, "nothing was masked"
    assert dynamic.scale == 8.0
    for name, v in nn.get_parameters().items():
        np.testing.assert_allclose(v.d, theirs[name], rtol=0, atol=1e-3, err_msg=name)


@pytest.mark.parametrize(("storage", "times"), [("float32", 0), ("float16", 1), ("native", 1)])
@pytest.mark.parametrize("scaler", [False, True])
def test_an_infinite_loss_whose_gradients_are_finite_is_told_once(
    storage: str, times: int, scaler: bool
) -> None:
    with nn.context_scope(HALF if storage == "native" else FLOAT):
        y = PF.affine(data(4, 3), 2, name="a", rng=np.random.RandomState(0))
        # The square of 300 exceeds 65504; its derivative does not.
        loss = F.mean(F.squared_error(y, constant(np.full((4, 2), 300.0))))
    solver, stored = solver_of(S.Sgd(1e-3)), None if storage == "native" else storage
    if scaler:
        loop = GradScaler(solver, storage=stored)
        step = partial(scaler_step, loop, solver, loss)
    else:
        step = AdaptiveLossScalingUpdater(solver, loss, storage=stored).update
    before = snapshot()
    with warned() as told:
        for _ in range(3):
            step()
    assert [message.startswith("the loss is infinite in iteration 1,") for message in told] == [True] * times
    assert not np.array_equal(snapshot()["a/affine/W"], before["a/affine/W"])


def test_hopeless_batches_in_a_row_are_told_as_such() -> None:
    updater = updater_on(training(overflow=range(1, 99)))
    updater.update()
    hopeless = pytest.raises(LossScaleError, match=r"as in 24 batches before; .* No scale helps")
    with warned() as told, hopeless as error:
        updater.update()
    assert "last good scale: " in str(error.value)
    (in_a_row,) = [text for text in told if "10 batches in a row" in text]
    assert "the last because no loss scale makes its gradients finite; first bad layer: " in in_a_row
    assert "on_overflow" not in in_a_row


def test_overflows_in_a_row_at_a_fixed_scale_are_told_once() -> None:
    train = training(overflow=range(99))
    updater = FixedLossScalingUpdater(train.solver, train.loss, train.feed, storage="float16")
    with warned() as told:
        assert not any(updater.update().updated for _ in range(30))
    assert len(told) == 1
    assert "10 batches in a row were lost up to iteration 10" in told[0]
    assert "at the fixed scale 128; first bad layer: " in told[0]
