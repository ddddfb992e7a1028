# SPDX-License-Identifier: Apache-2.0
"""Leaves whose gradients are one array train as one weight that is used twice."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Callable, Dict, List, Optional

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScaling, AdaptiveLossScalingUpdater, FormatEmulation, GradScaler
from tests.worlds.values import HALF

Share = Callable[[nn.Variable], nn.Variable]


def assigned(w: nn.Variable) -> nn.Variable:
    other = nn.Variable(w.shape, need_grad=True)
    other.data, other.grad = w.data, w.grad
    return other


def assigned_gradient(w: nn.Variable) -> nn.Variable:
    """A weight of its own, to whose gradient that of another is added."""
    other = nn.Variable.from_numpy_array(w.d * 0.5)
    other.need_grad = True
    other.grad = w.grad
    return other


SHARES: Dict[str, Share] = {
    "reshaped": lambda w: w.reshape((w.shape[0] * w.shape[1],), unlink=True).reshape(w.shape),
    "reshaped to the same": lambda w: w.reshape(w.shape, unlink=True),
    "assigned": assigned,
    "gradient alone": assigned_gradient,
}


def losses(share: Optional[Share]) -> nn.Variable:
    """A weight, and what shares its gradient, in layers whose gradients differ much in size."""
    rng = np.random.RandomState(0)
    x = nn.Variable.from_numpy_array(rng.randn(4, 5).astype(np.float32))
    w = PF.get_parameter_or_create("w", (5, 5), rng.randn(5, 5).astype(np.float32) * 0.5)
    other = w if share is None else share(w)
    h = F.tanh(F.affine(x, w)) * 2.0**-6
    h = F.tanh(PF.affine(h, 5, name="between", rng=rng))
    return F.mean(F.affine(h, other) ** 2) + F.sum(F.tanh(other)) * 2.0**-8


def trained(
    share: Optional[Share], way: str, storage: Optional[str], *, rebuilt: bool = False
) -> List[np.ndarray]:
    """The parameters after some updates; `way` "nnabla" is a loop of its own."""
    nn.clear_parameters()
    with nn.context_scope(HALF if storage == "native" else nn.Context()):
        loss = losses(share)
        again = (lambda: losses(share)) if rebuilt else (lambda: loss)
        solver = S.Sgd(0.125)
        solver.set_parameters(nn.get_parameters())
        emulated = None if storage == "native" else storage
        if way == "nnabla":
            for _ in range(12):
                solver.zero_grad()
                loss.forward(clear_no_need_grad=True)
                loss.backward(clear_buffer=True)
                solver.update()
        elif way == "scaler":
            scaler = GradScaler(solver, storage=emulated)
            for _ in range(12):
                solver.zero_grad()
                scaler.forward(loss, clear_no_need_grad=True)
                scaler.backward(loss, clear_buffer=True)
                assert scaler.step(solver)
                scaler.update()
        else:
            hooks = {"function_post_hook": (None, lambda f: None)} if way == "hooked" else {}

            def feed() -> None:
                if rebuilt:
                    updater.loss = again()

            updater = AdaptiveLossScalingUpdater(solver, loss, feed, storage=emulated, **hooks)
            for _ in range(12):
                assert updater.update().reason == "updated"
            assert (updater.scaling.result.kind == "hookless") == (way == "updater")
    return [v.d.copy() for v in nn.get_parameters().values()]


@pytest.mark.parametrize("way", ["updater", "hooked", "scaler"])
@pytest.mark.parametrize("share", SHARES)
def test_in_fp32_they_train_as_in_nnablas_loop(share: str, way: str) -> None:
    for one, other in zip(trained(SHARES[share], way, None), trained(SHARES[share], "nnabla", None)):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("storage", ["float16", "native"])
@pytest.mark.parametrize("way", ["updater", "hooked", "scaler"])
@pytest.mark.parametrize("share", ["reshaped to the same", "assigned"])
def test_in_half_they_train_as_one_weight(share: str, way: str, storage: str) -> None:
    for one, other in zip(trained(SHARES[share], way, storage), trained(None, way, storage)):
        np.testing.assert_array_equal(one, other)


def test_a_view_that_is_made_anew_for_each_graph() -> None:
    share = SHARES["reshaped to the same"]
    for one, other in zip(trained(share, "updater", None, rebuilt=True), trained(share, "nnabla", None)):
        np.testing.assert_array_equal(one, other)


def test_two_scopes_of_one_network() -> None:
    """Parameters that were set under a second name, as an imported network has them."""
    x = nn.Variable.from_numpy_array(np.random.RandomState(0).randn(4, 5).astype(np.float32))
    scopes: List[Any] = [OrderedDict(), OrderedDict()]
    with nn.parameter_scope("", scopes[0]):
        first = PF.affine(x, 5, name="a")
        shared = nn.get_parameters()
    with nn.parameter_scope("", scopes[1]):
        for name, v in shared.items():
            nn.parameter.set_parameter(name, assigned(v))
        loss = F.mean(first**2) + F.mean(PF.affine(F.tanh(x), 5, name="a") ** 4) * 1e-3
    expected, found = [], []
    for run in (loss, AdaptiveLossScaling(loss)):
        for _ in range(4):
            for v in shared.values():
                v.grad.zero()
            run.forward(clear_no_need_grad=True)
            run.backward(
                **({"clear_buffer": True} if run is not loss else {"grad": 1.0, "clear_buffer": True})
            )
            (expected if run is loss else found).append([v.g.copy() for v in shared.values()])
    np.testing.assert_equal(found, expected)


@pytest.mark.parametrize("accumulated", [False, True])
def test_what_gradients_hold_before_stays_in_them(accumulated: bool) -> None:
    nn.clear_parameters()
    loss = losses(SHARES["reshaped to the same"])
    w = nn.get_parameters()["w"]
    scaling = AdaptiveLossScaling(FormatEmulation(loss, "float16"))
    found = []
    for count in (1, 1, 2):
        w.grad.zero()
        if accumulated:
            w.g = 1.0
        for number in range(count):
            scaling.forward()
            scaling.backward(iteration=number)
        found.append(w.g.copy() - float(accumulated))
    np.testing.assert_allclose(found[2], 2.0 * found[1], rtol=1e-5, atol=1e-6)


def test_gradients_that_overlap_otherwise_are_refused() -> None:
    nn.clear_parameters()
    w = PF.get_parameter_or_create("rows", (6, 3))
    part = nn.Variable((2, 3), need_grad=True)
    part.data, part.grad = w.data.narrow(0, 1, 2), w.grad.narrow(0, 1, 2)
    loss = F.sum(w**2) + F.sum(part**2)
    with pytest.raises(ValueError, match=r"gradients of rows and an input of shape \(2, 3\) overlap"):
        AdaptiveLossScaling(loss).backward()
