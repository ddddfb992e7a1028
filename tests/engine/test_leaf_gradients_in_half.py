# SPDX-License-Identifier: Apache-2.0
"""Functions that keep references of their own to their gradients, on nnabla's native half arrays."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, AdaptiveLossScalingUpdater
from tests.worlds.trainings import solver_of
from tests.worlds.values import FLOAT, HALF, Values, assert_equal, snapshot

UPDATES = 6
STEPS, BATCH, WIDTH, HIDDEN = 3, 2, 4, 3


class Case(NamedTuple):
    """A network with a function that keeps references of its own."""

    kind: str
    layers: int = 1
    bidirectional: bool = False
    shared: bool = False
    with_head: bool = True
    frozen: Tuple[str, ...] = ()

    def __str__(self) -> str:
        defaults = Case(self.kind)
        differing = [f for f, a, b in zip(self._fields, self, defaults) if a != b]
        return "-".join([self.kind, *differing])


CASES = [
    Case("lstm", layers=2, bidirectional=True),
    Case("lstm", shared=True),
    Case("lstm", frozen=("r/lstm/weight_l0", "r/lstm/bias")),
    Case("gru", shared=True, with_head=False),
    Case("rnn", layers=2, bidirectional=True, shared=True),
    Case("spectral_norm"),
    Case("spectral_norm", shared=True),
]


def outputs_of(case: Case, x: nn.Variable) -> List[nn.Variable]:
    if case.kind == "spectral_norm":

        def normalized(w: nn.Variable) -> nn.Variable:
            return PF.spectral_norm(w, dim=1, itr=1)

        return [PF.affine(x, HIDDEN, base_axis=2, name="r", apply_w=normalized)]
    states = []
    for _ in range(2 if case.kind == "lstm" else 1):
        state = nn.Variable((case.layers, 1 + case.bidirectional, BATCH, HIDDEN))
        state.d = 0.1
        states.append(state)
    function = {"lstm": PF.lstm, "gru": PF.gru, "rnn": PF.rnn}[case.kind]
    options = {"num_layers": case.layers, "bidirectional": case.bidirectional, "training": True}
    return list(function(x, *states, **options, name="r"))


def network(case: Case, context: nn.Context, x: nn.Variable) -> nn.Variable:
    with nn.context_scope(context):
        h = F.reshape(outputs_of(case, x)[0], (STEPS * BATCH, -1))
        loss = F.mean((PF.affine(h, 2, name="head") if case.with_head else h) ** 2)
        if case.shared:
            loss = loss + F.mean(outputs_of(case, x * 0.5)[0] ** 2)
    return loss


class Trained(NamedTuple):
    """What has become of parameters in some updates."""

    moved: Values  # how far each has gone
    dtypes: Set[Any]  # of their gradients

    @classmethod
    def on(
        cls,
        case: Case,
        context: nn.Context,
        config: Optional[Dict[str, Any]] = None,
        *,
        batches: int = 1,
        rebuilt: bool = False,
    ) -> Trained:
        """With an adaptive scale, or where there is no configuration with nnabla's own updater."""
        nn.clear_parameters()
        x = nn.Variable((STEPS, BATCH, WIDTH))
        loss = network(case, context, x)
        for name, v in nn.get_parameters(grad_only=False).items():
            v.d = np.random.RandomState(len(name)).randn(*v.shape) * 0.5
        for name in case.frozen:
            nn.get_parameters(grad_only=False)[name].need_grad = False
        parameters, inputs = nn.get_parameters(), np.random.RandomState(1)
        begun, dtypes = snapshot(parameters), set()
        solver = solver_of(S.Sgd(0.1 / batches))

        def feed() -> None:
            x.d = inputs.randn(*x.shape)
            if rebuilt:
                updater.loss = network(case, context, x)

        updater: Any = (
            DynamicLossScalingUpdater(solver, loss, feed, scale=64.0, N=1000, accum_grad=batches)
            if config is None
            else AdaptiveLossScalingUpdater(
                solver, loss, feed, config=AdaLossConfig(**config), accum_grad=batches
            )
        )
        for _ in range(UPDATES):
            updater.update()
            dtypes |= {v.grad.dtype for v in parameters.values()}
        return cls({name: v.d - begun[name] for name, v in parameters.items()}, dtypes)

    def error(self, exact: Trained) -> float:
        assert self.moved.keys() == exact.moved.keys()
        return max(
            float(np.linalg.norm(self.moved[n] - g) / np.linalg.norm(g)) for n, g in exact.moved.items()
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_trains_as_in_float(case: Case) -> None:
    exact = Trained.on(case, FLOAT)
    native, found = Trained.on(case, HALF), Trained.on(case, HALF, {})
    assert found.error(exact) < min(1.5 * native.error(exact) + 0.001, 0.01)
    assert found.dtypes == {np.dtype(np.float32)}


SOME = pytest.mark.parametrize(
    "case", [Case("lstm"), Case("gru", shared=True), Case("spectral_norm")], ids=str
)


@SOME
@pytest.mark.parametrize(
    "config",
    [
        {"delay": 1},
        {"delay": 1, "measure_every": 3},
        {"measure_every": 1},
        {"loss_scale_method": "amax_history"},
        {"fixed_loss_scale": 4.0, "loss_scale_method": "fixed"},
    ],
    ids=str,
)
@pytest.mark.parametrize("batches", [1, 2])
def test_however_scales_are_chosen(case: Case, config: Dict[str, Any], batches: int) -> None:
    exact = Trained.on(case, FLOAT, batches=batches)
    found = Trained.on(case, HALF, config, batches=batches)
    assert found.error(exact) < 0.01
    assert found.dtypes == {np.dtype(np.float32)}


@SOME
def test_graphs_that_are_built_again(case: Case) -> None:
    once, again = (Trained.on(case, HALF, {}, rebuilt=rebuilt) for rebuilt in (False, True))
    assert_equal(again.moved, once.moved)


@SOME
@pytest.mark.parametrize("planned", [False, True])
def test_what_a_gradient_held_before_is_added_in_float32(case: Case, planned: bool) -> None:
    # In half precision it would leave the range at the scale that gradients get.
    nn.clear_parameters()
    x = nn.Variable((STEPS, BATCH, WIDTH))
    x.d = np.random.RandomState(1).randn(*x.shape)
    loss = network(case, HALF, x)
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=1.0))
    parameters, buffers = nn.get_parameters(), nn.get_parameters(grad_only=False)
    values = snapshot(buffers)
    found = []
    for before in (0.0, 3000.0):
        for name, v in buffers.items():
            v.d = values[name]
        for v in parameters.values():
            v.grad.zero() if before == 0.0 else v.grad.fill(before)
        scaling.forward()
        scaling.backward(64.0, function_pre_hook=None if planned else lambda f: None)
        assert not scaling.found_inf
        found.append({name: v.g.astype(np.float64) for name, v in parameters.items()})
    for name, gradient in found[0].items():
        np.testing.assert_allclose(found[1][name] - 3000.0, gradient, rtol=0, atol=2.0**-12, err_msg=name)
