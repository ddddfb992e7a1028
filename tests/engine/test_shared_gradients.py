# SPDX-License-Identifier: Apache-2.0
"""Leaves whose gradients are one array train as one weight that is used twice."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScaling, AdaptiveLossScalingUpdater
from tests.worlds.passes import look, run
from tests.worlds.trainings import solver_of
from tests.worlds.values import FLOAT, HALF, Values, assert_equal, data, snapshot

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
    rng, x = np.random.RandomState(0), data(4, 5)
    w = PF.get_parameter_or_create("w", (5, 5), rng.randn(5, 5).astype(np.float32) * 0.5)
    other = w if share is None else share(w)
    h = F.tanh(F.affine(x, w)) * 2.0**-6
    h = F.tanh(PF.affine(h, 5, name="between", rng=rng))
    return F.mean(F.affine(h, other) ** 2) + F.sum(F.tanh(other)) * 2.0**-8


def trained(share: Optional[Share], way: str, storage: Optional[str]) -> Values:
    """The parameters after some updates; `way` "nnabla" is a loop of its own."""
    nn.clear_parameters()
    with nn.context_scope(HALF if storage == "native" else FLOAT):
        loss, solver = losses(share), solver_of(S.Sgd(0.125))
        stored: Any = {"storage": None if storage == "native" else storage}
        hooks = {"function_post_hook": (None, look)} if way == "hooked" else {}
        updater = AdaptiveLossScalingUpdater(solver, loss, **stored, **hooks)
        for _ in range(12):
            if way == "nnabla":
                run(loss, clear=True)
                solver.update()
            else:
                assert updater.update().reason == "updated"
                hookless = updater.scaling.result.kind == "hookless"
        assert way == "nnabla" or hookless == (way == "updater")
    return snapshot()


@pytest.mark.parametrize("way", ["updater", "hooked"])
@pytest.mark.parametrize("share", SHARES)
def test_shared_gradients_train_in_fp32_as_in_nnablas_loop(share: str, way: str) -> None:
    assert_equal(trained(SHARES[share], way, None), trained(SHARES[share], "nnabla", None))


@pytest.mark.parametrize("storage", ["float16", "native"])
@pytest.mark.parametrize("way", ["updater", "hooked"])
@pytest.mark.parametrize("share", ["reshaped to the same", "assigned"])
def test_shared_gradients_train_in_half_as_one_weight(share: str, way: str, storage: str) -> None:
    assert_equal(trained(SHARES[share], way, storage), trained(None, way, storage))


def test_gradients_that_overlap_otherwise_are_refused() -> None:
    nn.clear_parameters()
    w = PF.get_parameter_or_create("rows", (6, 3))
    part = nn.Variable((2, 3), need_grad=True)
    part.data, part.grad = w.data.narrow(0, 1, 2), w.grad.narrow(0, 1, 2)
    loss = F.sum(w**2) + F.sum(part**2)
    with pytest.raises(ValueError, match=r"gradients of rows and an input of shape \(2, 3\) overlap"):
        AdaptiveLossScaling(loss).backward()
