# SPDX-License-Identifier: Apache-2.0
"""Functions that keep references of their own to their gradients, on nnabla's native half arrays."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, AdaptiveLossScalingUpdater
from tests.worlds.passes import look
from tests.worlds.trainings import solver_of
from tests.worlds.values import FLOAT, HALF, Values, assert_close, assert_equal, snapshot

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


def trained(
    case: Case,
    context: nn.Context,
    made: Any = AdaptiveLossScalingUpdater,
    *,
    rebuilt: bool = False,
) -> Values:
    """How far each parameter has gone in some updates of this updater."""
    nn.clear_parameters()
    x = nn.Variable((STEPS, BATCH, WIDTH))
    loss = network(case, context, x)
    for name, v in nn.get_parameters(grad_only=False).items():
        v.d = np.random.RandomState(len(name)).randn(*v.shape) * 0.5
        v.need_grad = v.need_grad and name not in case.frozen
    parameters, inputs = nn.get_parameters(), np.random.RandomState(1)
    begun, solver = snapshot(parameters), solver_of(S.Sgd(0.1))

    def feed() -> None:
        x.d = inputs.randn(*x.shape)
        if rebuilt:
            updater.loss = network(case, context, x)

    options = {"scale": 64.0, "N": 1000} if made is DynamicLossScalingUpdater else {}
    updater = made(solver, loss, feed, **options)
    for _ in range(UPDATES):
        updater.update()
        assert options or {v.grad.dtype for v in parameters.values()} == {np.dtype(np.float32)}
    return {name: v.d - begun[name] for name, v in parameters.items()}


def error(found: Values, exact: Values) -> float:
    assert found.keys() == exact.keys()
    return max(float(np.linalg.norm(found[n] - g) / np.linalg.norm(g)) for n, g in exact.items())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_trains_as_in_float(case: Case) -> None:
    exact, native = (trained(case, context, DynamicLossScalingUpdater) for context in (FLOAT, HALF))
    found = trained(case, HALF)
    assert error(found, exact) < min(1.5 * error(native, exact) + 0.001, 0.01)


SOME = pytest.mark.parametrize(
    "case", [Case("lstm"), Case("gru", shared=True), Case("spectral_norm")], ids=str
)


@SOME
def test_graphs_that_are_built_again(case: Case) -> None:
    assert_equal(trained(case, HALF, rebuilt=True), trained(case, HALF))


@SOME
@pytest.mark.parametrize("planned", [False, True])
def test_earlier_contents_of_a_gradient_are_added_in_float32(case: Case, planned: bool) -> None:
    # In half precision it would leave the range at the scale that gradients get.
    x = nn.Variable((STEPS, BATCH, WIDTH))
    x.d = np.random.RandomState(1).randn(*x.shape)
    loss = network(case, HALF, x)
    scaling = AdaptiveLossScaling(loss, AdaLossConfig("fixed", fixed_loss_scale=1.0))
    parameters, buffers = nn.get_parameters(), nn.get_parameters(grad_only=False)
    values, found = snapshot(buffers), []
    for before in (0.0, 3000.0):
        for name, v in buffers.items():
            v.d = values[name]
        for v in parameters.values():
            v.grad.zero() if before == 0.0 else v.grad.fill(before)
        scaling.forward()
        scaling.backward(64.0, function_pre_hook=None if planned else look)
        assert not scaling.found_inf
        found.append({name: v.g.astype(np.float64) - before for name, v in parameters.items()})
    assert_close(found[1], found[0], rtol=0.0, atol=2.0**-12)
