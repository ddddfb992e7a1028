# SPDX-License-Identifier: Apache-2.0
"""Functions that keep references of their own to their gradients, on nnabla's native half arrays."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, AdaptiveLossScalingUpdater
from tests.worlds.values import FLOAT, HALF

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
    return list(
        function(
            x,
            *states,
            num_layers=case.layers,
            bidirectional=case.bidirectional,
            training=True,
            name="r",
        )
    )


def network(case: Case, context: nn.Context, x: nn.Variable) -> nn.Variable:
    with nn.context_scope(context):
        h = F.reshape(outputs_of(case, x)[0], (STEPS * BATCH, -1))
        loss = F.mean((PF.affine(h, 2, name="head") if case.with_head else h) ** 2)
        if case.shared:
            loss = loss + F.mean(outputs_of(case, x * 0.5)[0] ** 2)
    return loss


MakeUpdater = Callable[..., Any]


def trained(
    case: Case,
    context: nn.Context,
    make: MakeUpdater,
    *,
    rebuilt: bool = False,
    batches: int = 1,
    dtypes: Optional[Set[Any]] = None,
) -> Dict[str, np.ndarray]:
    """How far each parameter has gone in some updates."""
    nn.clear_parameters()
    x = nn.Variable((STEPS, BATCH, WIDTH))
    loss = network(case, context, x)
    for name, v in nn.get_parameters(grad_only=False).items():
        v.d = np.random.RandomState(len(name)).randn(*v.shape) * 0.5
    for name in case.frozen:
        nn.get_parameters(grad_only=False)[name].need_grad = False
    begun = {name: v.d.copy() for name, v in nn.get_parameters().items()}
    solver = S.Sgd(0.1 / batches)
    solver.set_parameters(nn.get_parameters())
    inputs = np.random.RandomState(1)

    def feed() -> None:
        x.d = inputs.randn(*x.shape)
        if rebuilt:
            updater.loss = network(case, context, x)

    updater = make(solver, loss, feed, batches)
    for _ in range(UPDATES):
        updater.update()
        if dtypes is not None:
            dtypes |= {v.grad.dtype for v in nn.get_parameters().values()}
    return {name: v.d - begun[name] for name, v in nn.get_parameters().items()}


def fixed_scale(solver: Any, loss: nn.Variable, feed: Callable[[], None], batches: int) -> Any:
    """nnabla's own updater."""
    return DynamicLossScalingUpdater(solver, loss, feed, scale=64.0, N=1000, accum_grad=batches)


def adaptive(**config: Any) -> MakeUpdater:
    def make(solver: Any, loss: nn.Variable, feed: Callable[[], None], batches: int) -> Any:
        return AdaptiveLossScalingUpdater(
            solver, loss, feed, config=AdaLossConfig(**config), accum_grad=batches
        )

    return make


def error(found: Dict[str, np.ndarray], exact: Dict[str, np.ndarray]) -> float:
    assert found.keys() == exact.keys()
    return max(float(np.linalg.norm(found[n] - g) / np.linalg.norm(g)) for n, g in exact.items())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_trains_as_in_float(case: Case) -> None:
    exact = trained(case, FLOAT, fixed_scale)
    native = error(trained(case, HALF, fixed_scale), exact)
    dtypes: Set[Any] = set()
    found = error(trained(case, HALF, adaptive(), dtypes=dtypes), exact)
    assert found < 1.5 * native + 0.001
    assert found < 0.01
    assert dtypes == {np.dtype(np.float32)}


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
@pytest.mark.parametrize("case", [Case("lstm"), Case("gru", shared=True), Case("spectral_norm")], ids=str)
@pytest.mark.parametrize("batches", [1, 2])
def test_however_scales_are_chosen(case: Case, config: Dict[str, Any], batches: int) -> None:
    exact = trained(case, FLOAT, fixed_scale, batches=batches)
    dtypes: Set[Any] = set()
    found = trained(case, HALF, adaptive(**config), batches=batches, dtypes=dtypes)
    assert error(found, exact) < 0.01
    assert dtypes == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    "case", [Case("lstm"), Case("lstm", with_head=False), Case("spectral_norm")], ids=str
)
def test_graphs_that_are_built_again(case: Case) -> None:
    once, again = (trained(case, HALF, adaptive(), rebuilt=rebuilt) for rebuilt in (False, True))
    for name, moved in once.items():
        np.testing.assert_array_equal(again[name], moved, err_msg=name)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("case", [Case("lstm"), Case("gru", shared=True), Case("spectral_norm")], ids=str)
def test_what_a_gradient_held_before_is_added_in_float32(case: Case, planned: bool) -> None:
    # In half precision it would leave the range at the scale that gradients get.
    nn.clear_parameters()
    x = nn.Variable((STEPS, BATCH, WIDTH))
    x.d = np.random.RandomState(1).randn(*x.shape)
    loss = network(case, HALF, x)
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=1.0))
    parameters, buffers = nn.get_parameters(), nn.get_parameters(grad_only=False)
    values = {name: v.d.copy() for name, v in buffers.items()}
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
