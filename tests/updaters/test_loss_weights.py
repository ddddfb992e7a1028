# SPDX-License-Identifier: Apache-2.0
"""A loss weight leaves no trace in what is learned, how often a batch runs, or what it is scaled by."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

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
    load_checkpoint,
    save_checkpoint,
)
from nnabla_adaloss.engine.chooser import Chooser
from nnabla_adaloss.kernels import CpuKernels
from tests.worlds.trainings import scaler_step, solver_of, updater_of
from tests.worlds.values import FLOAT, HALF, constant, data


def network(weight: float) -> nn.Variable:
    nn.clear_parameters()
    rng = np.random.RandomState(0)
    h = data(32, 16)
    t = nn.Variable.from_numpy_array(rng.randint(0, 10, (32, 1)))
    for name in "abc":
        h = F.tanh(PF.affine(h, 32, name=name, rng=rng))
    return F.mean(F.softmax_cross_entropy(PF.affine(h, 10, name="d", rng=rng), t)) * weight


def gradients(loss: Any, *scale: float) -> np.ndarray:
    calibrated = False
    while not calibrated:
        for v in nn.get_parameters().values():
            v.grad.zero()
        loss.forward()
        loss.backward(*scale)
        calibrated = getattr(loss, "calibrated", True)
        if getattr(loss, "found_inf", []):
            calibrated = not loss.after_overflow()
    found = [v.g.ravel() for v in nn.get_parameters().values()]
    return np.concatenate(found).astype(np.float64)


def updater_with(weight: float, **options: Any) -> Tuple[AdaptiveLossScalingUpdater, nn.Variable]:
    loss = network(weight)
    return updater_of(loss, solver=S.Sgd(0.1 / weight), **options), loss


@pytest.mark.parametrize("storage", ["float16", "bfloat16", "float8_e5m2"])
@pytest.mark.parametrize("exponent", [-30, -12, -8, -3, 0, 3, 8])
def test_weights_that_work(storage: str, exponent: int) -> None:
    updater, loss = updater_with(10.0**exponent, storage=storage)
    assert updater.update().reason == "updated"
    exact = gradients(loss, 1.0)
    emulation = FormatEmulation(loss, storage, float_tail=True)
    stored = gradients(AdaptiveLossScaling(emulation))
    allowed = {"float16": 0.002, "bfloat16": 0.01, "float8_e5m2": 0.25}[storage]
    assert np.linalg.norm(stored - exact) <= allowed * np.linalg.norm(exact)


WITH_SMALL_CONSTANTS = {
    "a mean's weight": lambda a: F.mean(a) * 1e-9,
    "elements' weight": lambda a: F.mean(a * 1e-9),
    "quotient": lambda a: F.mean(1e-9 / (a + 1.0)),
    "Huber": lambda a: F.mean(F.huber_loss(a, a * 0.0, 1e-7)),
    "two weights": lambda a: F.mean(F.tanh(a * 1e-6) * 1e-7),
}


@pytest.mark.parametrize("float_tail", [True, False])
@pytest.mark.parametrize("name", WITH_SMALL_CONSTANTS)
def test_small_constants_flush_no_gradient(name: str, *, float_tail: bool) -> None:
    if name == "two weights" and not float_tail:
        pytest.skip("float16 does not hold gradients of 4e-3 and 4e-16 at one scale")
    rng = np.random.RandomState(0)
    a = PF.affine(F.tanh(PF.affine(data(16, 8), 16, name="a", rng=rng)), 16, name="b", rng=rng) ** 2
    loss = WITH_SMALL_CONSTANTS[name](a)
    assert updater_of(loss, solver=S.Sgd(0.0), float_tail=float_tail).update().reason == "updated"
    stored = np.concatenate([v.g.ravel() for v in nn.get_parameters().values()])
    exact = gradients(loss, 1.0)
    assert np.linalg.norm(stored - exact) <= (0.002 if float_tail else 0.02) * np.linalg.norm(exact)


@pytest.mark.parametrize("weight", [1e5, 1e6])
def test_a_loss_that_leaves_the_format_trains_without_the_float_tail(weight: float) -> None:
    """Its value is infinite, as it is stored, and its gradients are not."""
    loss = network(weight)
    assert updater_of(loss, solver=S.Sgd(0.0), float_tail=False).update().reason == "updated"
    assert np.isinf(loss.d)
    stored = np.concatenate([v.g.ravel() for v in nn.get_parameters().values()])
    exact = gradients(loss, 1.0)
    assert np.linalg.norm(stored - exact) <= 0.002 * np.linalg.norm(exact)


# `loss * w` with the learning rate divided by w, beside the same with w = 1.

Terms = Sequence[nn.Variable]  # two losses: their sums over all elements
ELEMENTS = 64.0
FORMS: Dict[str, Callable[[Terms, float], nn.Variable]] = {
    "constant": lambda terms, w: (terms[0] + terms[1] * 0.25) * (w / ELEMENTS),
    "Variable": lambda terms, w: (terms[0] + terms[1] * 0.25) / ELEMENTS * constant(w),
    "quotient": lambda terms, w: F.div2(terms[0] + terms[1] * 0.25, constant(ELEMENTS / w)),
    "each": lambda terms, w: terms[0] * constant(w / ELEMENTS) + terms[1] * (0.25 * w / ELEMENTS),
    "nested": lambda terms, w: (
        (terms[0] * 2.0**-10 + terms[1] * constant(2.0**-12)) * (w * 2.0**30 / ELEMENTS) / 2.0**20
    ),
}


class Trained(NamedTuple):
    """What became of a training."""

    repeats: int
    scales: Sequence[float]  # S of each component in the last pass, times its loss weight
    parameters: Sequence[bytes]


def trained(storage: Optional[str], way: str, form: str, exponent: int, *, mean: bool = False) -> Trained:
    """Train for 25 iterations with a weight of 2**exponent; without `storage` in native half."""
    nn.clear_parameters()
    weight, scaled, rng = 2.0**exponent, way.startswith("scaler"), np.random.RandomState(0)
    x, targets = data(16, 4), [constant(rng.randn(16, 4)) for _ in range(2)]

    def built() -> nn.Variable:
        with nn.context_scope(FLOAT if storage else HALF):
            rng.seed(1)
            h = F.tanh(PF.affine(F.tanh(PF.affine(x, 6, name="a", rng=rng)), 6, name="b", rng=rng))
            heads = [PF.affine(h, 4, name=name, rng=rng) for name in ("large", "small")]
            errors = [F.squared_error(y, t) for y, t in zip(heads, targets)]
            terms = [F.mean(error) * ELEMENTS if mean else F.sum(error) for error in errors]
            return FORMS[form](terms, weight)

    loss, solver, repeats = built(), S.Momentum(0.05 / weight), 0
    solver = solver_of(solver)
    if scaled:
        scaler = GradScaler(solver, storage=storage)
        for _ in range(25):
            loss = built() if way.endswith("rebuilt") else loss
            assert scaler_step(scaler, solver, loss)
            scaling = scaler.scaling(loss)
            repeats += scaling.components.attempt
    else:

        def feed() -> None:
            if way.endswith("rebuilt"):
                updater.loss = built()

        updater = updater_of(loss, feed, solver=solver, storage=storage)
        assert all(updater.update().reason == "updated" for _ in range(25))
        scaling, repeats = updater.scaling, updater.counters.repeats
    schedule = scaling.result.schedule
    several = [
        i for i in range(len(schedule.components.names)) if i not in schedule.components.scalar_components
    ]
    scales = [schedule.component_scales[i] * schedule.loss_weights[i] for i in several]
    return Trained(repeats, scales, [v.d.tobytes() for v in nn.get_parameters().values()])


@cache
def unweighted(storage: Optional[str], way: str, form: str) -> Trained:
    return trained(storage, way, form, 0)


STORAGES = "float16", "float8_e5m2", None
WAYS = "updater", "updater rebuilt", "scaler", "scaler rebuilt"
# Each storage in each way; forms and exponents take turns.
CASES = [
    (*case, form, exponent)
    for case, form, exponent in zip(
        product(STORAGES, WAYS), cycle(FORMS), cycle([-60, 13, -1, 60, -31, 1, 30])
    )
]


@pytest.mark.parametrize(("storage", "way", "form", "exponent"), CASES)
def test_a_loss_weight_leaves_no_trace(storage: Optional[str], way: str, form: str, exponent: int) -> None:
    """Also in native half, where the functions at the loss compute in float."""
    expected = unweighted(storage, way, form)
    assert expected.repeats <= 2
    assert trained(storage, way, form, exponent) == expected


@pytest.mark.parametrize("storage", STORAGES)
def test_a_mean_is_a_sum_with_a_weight(storage: Optional[str]) -> None:
    assert trained(storage, "updater", "constant", -20, mean=True) == unweighted(
        storage, "updater", "constant"
    )


@pytest.mark.parametrize("method", ["approx_range", "fixed"])
@pytest.mark.parametrize("exponent", [-60, -7, 30])
def test_other_methods_see_no_trace_of_it_either(method: str, exponent: int) -> None:
    def found(weight: float) -> Tuple[int, List[bytes]]:
        config = AdaLossConfig(loss_scale_method=method)
        updater = updater_of(network(weight), solver=S.Sgd(0.1 / weight), config=config)
        assert all(updater.update().updated for _ in range(20))
        return updater.counters.repeats, [v.d.tobytes() for v in nn.get_parameters().values()]

    assert found(2.0**exponent) == found(1.0)


# A weight within a function of the loss.

NO_TRACE = {
    "log": lambda a, w: F.log(a * w),
    "root": lambda a, w: (a * w) ** 0.5 * (1.0 / w) ** 0.5,
    "square": lambda a, w: (a * w) ** 2 / w / w,
    "product": lambda a, w: (a * w) * (a * w) / w / w,
    "quotient": lambda a, w: (a * w) / (a * w + w),
    "reciprocal": lambda a, w: -w / (a * w + w),
    "larger": lambda a, w: F.maximum2(a * w, a * (0.5 * w)) / w,
    "chosen": lambda a, w: F.where(constant(0.0), a * 3.0, a * w) / w,
    "reshaped": lambda a, w: F.sum(F.reshape(a * w, (1, 1)) * F.reshape(constant([1.0 / w]), (1, 1))),
}


def trained_with(form: str, weight: float, storage: Optional[str]) -> Tuple[List[str], int, List[np.ndarray]]:
    with nn.context_scope(FLOAT if storage else HALF):
        loss = NO_TRACE[form](network(1.0), weight)
    updater = updater_of(loss, solver=S.Sgd(0.1), storage=storage)
    reasons = [updater.update().reason for _ in range(10)]
    assert all(v.g.any() for v in nn.get_parameters().values())
    return reasons, updater.counters.repeats, [v.d.copy() for v in nn.get_parameters().values()]


@cache
def trained_without(form: str, storage: Optional[str]) -> List[np.ndarray]:
    return trained_with(form, 1.0, storage)[2]


@pytest.mark.parametrize("form", NO_TRACE)
@pytest.mark.parametrize(
    ("storage", "weight", "read"),
    [("float16", 2.0**-46, True), ("float8_e5m2", 2.0**-20, True), (None, 2.0**-46, False)],
)
def test_a_weight_within_a_function_of_the_loss_costs_no_batch(
    form: str, weight: float, storage: Optional[str], read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with kernels that do not wait for what a GPU computes."""
    expected = trained_without(form, storage)
    monkeypatch.setattr(CpuKernels, "asynchronous", not read)
    reasons, repeats, parameters = trained_with(form, weight, storage)
    assert reasons == ["updated"] * 10
    assert repeats <= 2
    for one, other in zip(parameters, expected):
        np.testing.assert_allclose(one, other, rtol=0.0, atol=1e-3 if storage != "float8_e5m2" else 0.05)


@pytest.mark.parametrize("storage", ["float16", "float8_e5m2"])
@pytest.mark.parametrize("read", [True, False], ids=["read", "not read"])
def test_a_weight_that_falls_within_a_logarithm_loses_no_batch(
    storage: str, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuKernels, "asynchronous", not read)
    weight = constant(1.0)
    loss = F.log(network(1.0) * weight)

    def feed() -> None:
        weight.d = 1e-12 ** (updater.iteration / 60)

    updater = updater_of(loss, feed, storage=storage, on_overflow="next")
    for _ in range(60):
        assert updater.update().updated
        assert all(v.g.any() for v in nn.get_parameters().values())
    assert updater.counters.repeats + sum(updater.counters.lost.values()) <= 1


UNREAD: Dict[str, Callable[..., nn.Variable]] = {
    "quotient": lambda a, b, w: a * w / (b + 1.0),
    "quotient of a fed weight": lambda a, b, w: a * constant(w) / (b + 1.0),
    "weight in the divisor": lambda a, b, w: a / (b * w + 1.0),
    "product": lambda a, b, w: (a * w) * (b + 1.0),
    "product of both": lambda a, b, w: (a * w) * (b * w),
    "logarithm of a sum": lambda a, b, w: F.log(a * w + b),
    "root of a quotient": lambda a, b, w: (a * w / (b + 1.0)) ** 0.5,
    "learned": lambda a, b, w: (
        a * nn.parameter.get_parameter_or_create("w", (), np.array(w, np.float32)) + b * w
    ),
}


@pytest.mark.parametrize("form", UNREAD)
@pytest.mark.parametrize("recompute", [True, False], ids=["computed again", "not waited for"])
def test_heads_whose_weights_cannot_be_read_leave_the_trunk_its_gradient(
    form: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuKernels, "asynchronous", not recompute)

    def built(weight: float) -> nn.Variable:
        nn.clear_parameters()
        rng = np.random.RandomState(0)
        x, t = data(16, 8), constant(rng.randn(16, 4))
        h = F.tanh(PF.affine(F.tanh(PF.affine(x, 12, name="a", rng=rng)), 12, name="b", rng=rng))
        tops = [F.tanh(PF.affine(h, 8, name=name, rng=rng)) for name in ("large", "small")]
        losses = [
            F.mean(F.squared_error(PF.affine(y, 4, name=f"{n}", rng=rng), t)) for n, y in enumerate(tops)
        ]
        with nn.recompute() if recompute else nullcontext():
            return UNREAD[form](*losses, weight)

    for weight in (1e-4, 1e-12):
        exact = gradients(built(weight), 1.0)
        updater = updater_of(built(weight), solver=S.Sgd(0.0), storage="float16")
        assert updater.update().reason == "updated"
        assert updater.counters.repeats <= 3
        stored = [v.g.ravel() for v in nn.get_parameters().values()]
        ends = np.cumsum([len(g) for g in stored])[:-1]
        # Each parameter by itself: those of the trunk alone would hardly show in a sum.
        for one, own in zip(stored, np.split(exact, ends)):
            assert np.linalg.norm(one - own) <= 0.02 * np.linalg.norm(own) + 1e-30


@pytest.mark.parametrize("storage", ["float16", "float8_e5m2"])
@pytest.mark.parametrize("recompute", [True, False], ids=["computed again", "not waited for"])
def test_a_learned_uncertainty_that_cannot_be_read_leaves_its_head_the_gradient(
    storage: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of `exp(-s)` is a loss, far above that of the head behind it."""
    monkeypatch.setattr(CpuKernels, "asynchronous", not recompute)

    def built() -> nn.Variable:
        nn.clear_parameters()
        rng = np.random.RandomState(0)
        x, t = data(16, 8), constant(rng.randint(0, 4, (16, 1)))
        tops = [F.tanh(PF.affine(x, 12, name=f"{name}/hidden", rng=rng)) for name in ("large", "small")]
        large, small = [
            F.mean(F.softmax_cross_entropy(PF.affine(y, 4, name=name, rng=rng), t))
            for name, y in zip(("large", "small"), tops)
        ]
        s = nn.parameter.get_parameter_or_create("s", (), np.array(-np.log(1e-12), np.float32))
        with nn.recompute() if recompute else nullcontext():
            precision = F.exp(-s)
        return large + precision * small + s

    exact = gradients(built(), 1.0)
    updater = updater_of(built(), solver=S.Sgd(0.0), storage=storage)
    assert updater.update().reason == "updated"
    assert updater.counters.repeats <= 3
    stored = [v.g.ravel() for v in nn.get_parameters().values()]
    for one, own in zip(stored, np.split(exact, np.cumsum([len(g) for g in stored])[:-1])):
        assert np.linalg.norm(one - own) <= (0.02 if storage == "float16" else 0.4) * np.linalg.norm(own)


def noisy(form: Callable[..., nn.Variable], noise: float = 3.0, **options: Any) -> AdaptiveLossScalingUpdater:
    """A training with two losses, which batches make larger and smaller."""
    nn.clear_parameters()
    rng, x, t = np.random.RandomState(0), nn.Variable((32, 8)), nn.Variable((32, 2))
    h = F.tanh(PF.affine(x, 12, name="a", rng=rng))
    losses = [F.mean((PF.affine(h, 2, name=name, rng=rng) - t) ** 2) for name in ("b", "c")]

    def feed() -> None:
        batch = np.random.RandomState(updater.counters.fed).randn(32, 10)
        x.d, t.d = batch[:, :8], np.sin(batch[:, :2]) * noise ** batch[:, 8:].clip(-1, 1)

    updater = updater_of(form(*losses), feed, solver=S.Adam(0.003), **options)
    return updater


def test_logarithms_do_not_have_scales_chosen_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: List[int] = []
    decide = Chooser.decide
    monkeypatch.setattr(Chooser, "decide", lambda *args: chosen.append(1) or decide(*args))

    def count(form: Callable[..., nn.Variable]) -> int:
        updater, before = noisy(form, storage=None), len(chosen)
        assert all(updater.update().updated for _ in range(160))
        return len(chosen) - before

    assert count(lambda a, b: F.log(a) + F.log(b * 1e-9)) <= 1.1 * count(lambda a, b: a + b)


@pytest.mark.parametrize(("storage", "saved"), [("float16", 5), ("float8_e5m2", 16), ("float16", 30)])
def test_resumed_trainings_keep_the_weights_that_data_decide(
    storage: str, saved: int, tmp_path: Path
) -> None:
    def until(end: int, updater: AdaptiveLossScalingUpdater) -> List[Any]:
        found: List[Any] = []
        while updater.iteration < end:
            assert updater.update().updated
            schedule = updater.scaling.result.schedule
            found.append((schedule.loss_weights, [*schedule.component_scales]))
        return found

    def end_of(updater: AdaptiveLossScalingUpdater) -> List[Any]:
        found = until(40, updater)
        return [found, *(v.d.tobytes() for v in nn.get_parameters().values()), updater.state_dict()]

    def form(a: nn.Variable, b: nn.Variable) -> nn.Variable:
        return F.log(a) * F.log(b) + F.squared_error(a, b) ** 0.5

    updater = noisy(form, 30.0, storage=storage)
    before = until(saved, updater)
    save_checkpoint(tmp_path / "c", updater)
    expected = end_of(updater)
    # The weights move, and are not those of each batch.
    assert 1 < len({weights for weights, _ in before + expected[0]}) < 20
    updater = noisy(form, 30.0, storage=storage)
    load_checkpoint(tmp_path / "c", updater)
    np.testing.assert_equal(end_of(updater), expected)
