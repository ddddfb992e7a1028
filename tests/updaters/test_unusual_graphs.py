# SPDX-License-Identifier: Apache-2.0
"""Graphs that nobody would build on purpose: trained as nnabla does, or refused in one sentence."""

from __future__ import annotations

from typing import Any, Callable, Dict, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScalingUpdater

HALF = nn.Context(["cpu:half", "cpu:float"], "CpuCachedArray", "0")
FLOAT = nn.Context(["cpu:float"], "CpuCachedArray", "0")
Make = Callable[[], nn.Variable]


def data(dtype: Any = np.float32) -> nn.Variable:
    return nn.Variable.from_numpy_array(np.random.RandomState(0).randn(4, 3).astype(dtype))


def network(x: nn.Variable) -> nn.Variable:
    h = F.tanh(PF.affine(x, 5, name="a", rng=np.random.RandomState(1)))
    return F.mean(PF.affine(h, 2, name="b", rng=np.random.RandomState(2)) ** 2)


def a_loss_in_float64() -> nn.Variable:
    loss = network(data())
    loss.data.cast(np.float64)
    return loss


def data_in_float64() -> nn.Variable:
    return network(data(np.float64))


def parameters_in_half() -> nn.Variable:
    loss = network(data())
    for v in nn.get_parameters().values():
        v.data.cast(np.float16)
    return loss


def gradients_in_half() -> nn.Variable:
    loss = network(data())
    for v in nn.get_parameters().values():
        v.grad.cast(np.float16)
    return loss


def solver_of_all() -> Any:
    solver = S.Momentum(0.1)
    solver.set_parameters(nn.get_parameters())
    return solver


def values() -> Dict[str, np.ndarray]:
    return {name: v.d.copy() for name, v in nn.get_parameters().items()}


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
@pytest.mark.parametrize("make", [a_loss_in_float64, data_in_float64, parameters_in_half, gradients_in_half])
def test_other_types_train_as_with_nnabla(make: Make) -> None:
    trained: List[Dict[str, np.ndarray]] = []
    for adaptive in (False, True):
        nn.clear_parameters()
        loss = make()
        solver = solver_of_all()
        updater = AdaptiveLossScalingUpdater(solver, loss) if adaptive else None
        for _ in range(5):
            if updater is not None:
                assert updater.update().reason == "updated"
                continue
            solver.zero_grad()
            loss.forward()
            loss.backward()
            solver.update()
        trained.append(values())
    for name, array in trained[0].items():
        np.testing.assert_array_equal(trained[1][name], array, err_msg=name)


@pytest.mark.parametrize("weight", [1.0, 1e-9])
def test_a_context_that_changes_in_the_middle(weight: float) -> None:
    def make(contexts: List[nn.Context]) -> nn.Variable:
        h = data()
        for name, context in zip("abc", contexts):
            with nn.context_scope(context):
                h = F.tanh(PF.affine(h, 5, name=name, rng=np.random.RandomState(ord(name))))
        with nn.context_scope(contexts[3]):
            return F.mean(h**2) * weight

    found: List[Dict[str, np.ndarray]] = []
    for contexts in ([FLOAT] * 4, [HALF, FLOAT, HALF, FLOAT], [FLOAT, HALF, FLOAT, HALF]):
        nn.clear_parameters()
        loss, gradients = make(contexts), {}
        solver = S.Sgd(0.0)
        solver.set_parameters(nn.get_parameters())

        def note(s: Any, gradients: Dict[str, np.ndarray] = gradients) -> None:
            gradients.update({name: v.g.copy() for name, v in s.get_parameters().items()})

        storage = "float32" if HALF not in contexts else None
        updater = AdaptiveLossScalingUpdater(solver, loss, storage=storage, on_gradients=note)
        for _ in range(3):
            assert updater.update().reason == "updated"
        found.append(gradients)
    for mixed in found[1:]:
        for name, exact in found[0].items():
            assert np.linalg.norm(mixed[name] - exact) < 0.01 * np.linalg.norm(exact), name


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Variable.from_numpy_array(np.ones(())),
        lambda: nn.Variable.from_numpy_array(np.ones(()), need_grad=True),
        lambda: F.constant(1.0, ()),
    ],
)
def test_a_loss_that_is_computed_from_no_parameter_is_refused(make: Make) -> None:
    nn.clear_parameters()
    network(data())
    with pytest.raises(ValueError, match="^loss needs no gradient: it is not computed from any variable"):
        AdaptiveLossScalingUpdater(solver_of_all(), make())


def test_a_network_that_is_half_in_part_is_not_emulated() -> None:
    nn.clear_parameters()
    with nn.context_scope(HALF):
        h = F.tanh(PF.affine(data(), 5, name="a"))
    loss = F.mean(PF.affine(h, 2, name="b") ** 2)
    with pytest.raises(ValueError, match=r"^storage: Affine is computed in cpu:half.*or leave storage out$"):
        AdaptiveLossScalingUpdater(solver_of_all(), loss, storage="float16")
