# SPDX-License-Identifier: Apache-2.0
"""What is not finite in one batch is not told of the next ones, where gradients are summed for good."""

from __future__ import annotations

from typing import Any, List, Optional

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScaling, AdaptiveLossScalingUpdater, FormatEmulation, GradScaler


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


def test_a_step_that_is_skipped_is_not_told_of_the_next_ones() -> None:
    n = FineTuning()
    scaler = GradScaler(n.solver, storage="float16")
    found: List[bool] = []
    for weight in (1.0, 1.0, np.nan, 1.0):
        n.solver.zero_grad()
        n.feed(weight)
        scaler.forward(n.loss)
        scaler.backward(n.loss)
        found.append(bool(scaler.scaling(n.loss).found_inf))
        scaler.step(n.solver)
        scaler.update()
    assert found == [False, False, True, False]


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
