# SPDX-License-Identifier: Apache-2.0
"""Random losses whose weights change from batch to batch, beside nnabla's own loop: bit for bit in fp32."""

from __future__ import annotations

import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Sequence

import hypothesis.strategies as st
import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest
from hypothesis import given

from nnabla_adaloss import AdaLossConfig, GradScaler
from tests.fuzz.budget import budget
from tests.worlds.trainings import scaler_step, solver_of, updater_of
from tests.worlds.values import assert_equal, constant, snapshot

Weigh = Callable[[nn.Variable, nn.Variable], nn.Variable]
Combine = Callable[[Sequence[nn.Variable]], nn.Variable]

REDUCTIONS: Dict[str, Callable[[nn.Variable], nn.Variable]] = {
    "mean": lambda y: F.mean(y**2),
    "sum": lambda y: F.sum(F.tanh(y)),
    "of rows": lambda y: F.mean(F.sum(y**2, axis=1)),
    "variance": lambda y: F.mean((y - F.mean(y, keepdims=True)) ** 2) + F.mean(y),
    "share": lambda y: F.mean(F.log(F.sigmoid(y) / F.sum(F.sigmoid(y), keepdims=True))),
}
WEIGHTS: Dict[str, Weigh] = {
    "none": lambda one, w: one,
    "Variable": lambda one, w: one * w,
    "quotient": lambda one, w: F.div2(one, w + 2.0),
    "computed": lambda one, w: (w * 0.5 + 0.25) * one,
    "constant": lambda one, w: (one * 2.0**-20 - 1.0) * w,
    "squared": lambda one, w: (one * w) ** 2,
}
COMBINATIONS: Dict[str, Combine] = {
    "sum": lambda losses: sum(losses[1:], losses[0]),
    "stack": lambda losses: F.sum(F.stack(*losses)) if len(losses) > 1 else losses[0],
    "mean of stack": lambda losses: F.mean(F.stack(*losses)) if len(losses) > 1 else losses[0],
    "product": lambda losses: F.mul2(losses[0], losses[-1]) + losses[0],
}


class Drawn(NamedTuple):
    """A network with several losses, and their weights batch by batch."""

    heads: Sequence[str]  # the reduction of each
    weights: Sequence[str]
    combination: str
    early: bool  # whether the last head reads the trunk early
    values: Sequence[Sequence[float]]

    def run(self, way: str, **options: Any) -> List[Dict[str, np.ndarray]]:
        """The parameters after each batch."""
        nn.clear_parameters()
        rng, x = np.random.RandomState(0), nn.Variable((4, 3))
        variables = [constant(0.0) for _ in self.heads]
        h = stem = F.tanh(PF.affine(x, 4, name="stem", rng=rng))
        for name in ("first", "second"):
            h = h + F.tanh(PF.affine(h, 4, name=name, rng=rng))
        losses = []
        for index, (head, weight) in enumerate(zip(self.heads, self.weights)):
            trunk = stem if self.early and index == len(self.heads) - 1 else h
            y = PF.affine(trunk, 3, name=f"head{index}", rng=rng)
            losses.append(WEIGHTS[weight](REDUCTIONS[head](y), variables[index]))
        loss, found, solver = COMBINATIONS[self.combination](losses), [], solver_of(S.Sgd(2.0**-7))
        scaler = GradScaler(solver, **options) if way == "scaler" else None
        updater = updater_of(loss, solver=solver, storage=None, **options) if way == "updater" else None
        for number, values in enumerate(self.values):
            x.d = np.random.RandomState(number).randn(*x.shape)
            for variable, value in zip(variables, values):
                variable.d = value
            if updater is not None:
                assert updater.update().updated
            elif scaler is not None:
                assert scaler_step(scaler, solver, loss)
            else:
                solver.zero_grad()
                loss.forward(clear_no_need_grad=True)
                loss.backward(clear_buffer=True)
                solver.update()
            found.append(snapshot())
        return found


@st.composite
def drawn(draw: Any) -> Drawn:
    count = draw(st.integers(1, 3))
    heads, weights = (
        draw(st.lists(st.sampled_from(sorted(names)), min_size=count, max_size=count))
        for names in (REDUCTIONS, WEIGHTS)
    )
    # Below 2**-126, scales keep more than float32 does.
    value = st.sampled_from([0.0, 1.0, -1.0, 0.3, 1e-6, 1e-9, 1e4])
    batch = st.lists(value, min_size=count, max_size=count)
    values = draw(st.lists(batch, min_size=2, max_size=6))
    return Drawn(heads, weights, draw(st.sampled_from(sorted(COMBINATIONS))), draw(st.booleans()), values)


@pytest.mark.parametrize("way", ["updater", "scaler"])
@pytest.mark.parametrize("method", ["amax_history", "fixed", "approx_range"])
@budget(20)
@given(network=drawn())
def test_whatever_losses_are_weighed_by_no_bit_changes(way: str, method: str, network: Drawn) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = network.run("nnabla")
        if not all(np.isfinite(v).all() for v in expected[-1].values()):
            return
        config = AdaLossConfig(loss_scale_method=method, dtype="float16")
        for ours, theirs in zip(network.run(way, config=config), expected):
            assert_equal(ours, theirs)
