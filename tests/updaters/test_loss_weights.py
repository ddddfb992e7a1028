# SPDX-License-Identifier: Apache-2.0
"""Which loss weights the documentation promises to work, per format, and what is said about the others."""

from __future__ import annotations

from typing import Any, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScaling, AdaptiveLossScalingUpdater, FormatEmulation, LossScaleError
from tests.updaters.networks import data, updater_of


def network(weight: float) -> nn.Variable:
    nn.clear_parameters()
    rng = np.random.RandomState(0)
    h = data(32, 16)
    t = nn.Variable.from_numpy_array(rng.randint(0, 10, (32, 1)))
    for name in "abc":
        h = F.tanh(PF.affine(h, 32, name=name, rng=rng))
    return F.mean(F.softmax_cross_entropy(PF.affine(h, 10, name="d", rng=rng), t)) * weight


def gradients(loss: Any, *scale: float) -> np.ndarray:
    settled = False
    while not settled:
        for v in nn.get_parameters().values():
            v.grad.zero()
        loss.forward()
        loss.backward(*scale)
        settled = getattr(loss, "settled", True)
        if getattr(loss, "found_inf", []):
            settled = not loss.after_overflow()
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
    nn.clear_parameters()
    rng = np.random.RandomState(0)
    a = PF.affine(F.tanh(PF.affine(data(16, 8), 16, name="a", rng=rng)), 16, name="b", rng=rng) ** 2
    loss = WITH_SMALL_CONSTANTS[name](a)
    assert updater_of(loss, solver=S.Sgd(0.0), float_tail=float_tail).update().reason == "updated"
    stored = np.concatenate([v.g.ravel() for v in nn.get_parameters().values()])
    exact = gradients(loss, 1.0)
    assert np.linalg.norm(stored - exact) <= (0.002 if float_tail else 0.02) * np.linalg.norm(exact)


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_without_the_float_tail_small_weights_are_reported() -> None:
    updater, _ = updater_with(1e-13, float_tail=False)
    assert updater.update().reason == "zero_gradients"


@pytest.mark.parametrize("weight", [1e5, 1e6])
def test_without_the_float_tail_losses_that_leave_the_format_are_named(weight: float) -> None:
    updater, _ = updater_with(weight, float_tail=False)
    message = r"the loss is not finite.*MulScalar\) computes 1 numbers beyond float16, which ends at 65504"
    with pytest.raises(LossScaleError, match=message):
        updater.update()
    assert updater.scale == 8.0
