# SPDX-License-Identifier: Apache-2.0
"""Parameter gradients get into their fp32 masters unscaled; what one batch has spoilt stays its own."""

from __future__ import annotations

import math
from typing import Any, List, Optional

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, AdaptiveLossScalingUpdater, FormatEmulation
from nnabla_adaloss.engine.leaf_gradients import TakenLeaf, Written, told_apart
from tests.engine.nets import mlp, zero_grads
from tests.tampering import Tampering


def test_what_functions_write_is_told_apart_where_each_is_by_itself_else_as_a_sum_for_the_first() -> None:
    v = nn.Variable((2,), need_grad=True)

    def entry(leaf: int, function: int, scale: float, *, alone: bool) -> Written:
        return Written(TakenLeaf(leaf, function, v, scale, False, False), v.grad, v.grad, alone)

    def told(written: List[Written], largest: List[float]) -> List[Any]:
        return [(taken.leaf, taken.function, amax) for taken, amax in told_apart(written, largest)]

    first = [entry(0, 7, 2.0, alone=True), entry(1, 6, 2.0, alone=True)]
    rounded = [*first, entry(0, 5, 8.0, alone=True)]
    assert told(rounded, [3.0, 1.0, math.inf]) == [(0, 7, 3.0), (1, 6, 1.0), (0, 5, math.inf)]
    # With another scale a sum counts for who has added: the first component's scale says nothing about it.
    added = [*first, entry(0, 5, 8.0, alone=False)]
    assert told(added, [3.0, 1.0, 4.0]) == [(0, 7, 3.0), (1, 6, 1.0), (0, 5, 4.0)]
    alike = [*first, entry(0, 5, 2.0, alone=False)]
    assert told(alike, [3.0, 1.0, 4.0]) == [(0, 7, 4.0), (1, 6, 1.0)]
    # What an earlier batch has left in a gradient is not told apart either, and is no matter of this one.
    assert told([entry(0, 7, 2.0, alone=False)] * 2, [3.0, 5.0]) == []


class Silent(Tampering):
    """The identity; its backward writes nothing."""

    def changed(self, g: np.ndarray) -> np.ndarray:
        return g

    def backward_impl(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("hook", [None, lambda f: None])
def test_a_gradient_that_no_function_writes_stays_lazily_zero(hook: Any) -> None:
    x = nn.Variable.from_numpy_array(np.ones((2, 3), np.float32))
    w = PF.get_parameter_or_create("w", (2, 3))
    scaling = AdaptiveLossScaling(F.mean((PF.affine(x, 3, name="a") + Silent()(w)) ** 2))
    for _ in range(3):
        zero_grads()
        for _ in range(2):
            scaling.forward()
            scaling.backward(function_post_hook=hook)
            assert w.grad.zeroing
    assert nn.get_parameters()["a/affine/W"].g.any()


@pytest.mark.parametrize("hook", [None, lambda f: None])
def test_what_a_gradient_held_is_not_rounded_by_a_scale_that_is_no_power_of_two(hook: Any) -> None:
    scaling = AdaptiveLossScaling(mlp(0.0), AdaLossConfig("fixed", power_of_two=False))
    held = np.linspace(0.1, 0.9, 64, dtype=np.float32)
    for _ in range(2):
        for v in nn.get_parameters().values():
            v.g = held[: v.size].reshape(v.shape)
        scaling.forward()
        scaling.backward(1000.0, function_post_hook=hook)
    for v in nn.get_parameters().values():
        np.testing.assert_array_equal(v.g, held[: v.size].reshape(v.shape))


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
        n.solver, n.loss, lambda: n.feed(next(weights)), storage=storage, on_nonfinite_loss="skip", **options
    )
    results = [updater.update() for _ in range(7)]
    assert [r.updated for r in results] == [True, True, False, True, True, False, True]
    assert [bool(r.nonfinite_layers) for r in results] == [not r.updated for r in results]
    assert results[2].nonfinite_layers == results[5].nonfinite_layers
    assert updater.scaling.found_inf == []
    assert np.isnan(n.parameters["one/affine/W"].g).all()


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
