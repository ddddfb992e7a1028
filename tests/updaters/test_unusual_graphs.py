# SPDX-License-Identifier: Apache-2.0
"""Graphs that nobody would build on purpose: trained as nnabla does, or refused in one sentence."""

from __future__ import annotations

from typing import Dict, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from tests.worlds.networks import two_layers
from tests.worlds.trainings import solver_of, updater_of
from tests.worlds.values import FLOAT, HALF, assert_equal, data, gradients, snapshot


def cast(which: str) -> nn.Variable:
    """A loss of which something is of another type."""
    x = nn.Variable.from_numpy_array(data(4, 3).d.astype(np.float64 if which == "data" else np.float32))
    loss = two_layers(x)
    if which == "loss":
        loss.data.cast(np.float64)
    for v in nn.get_parameters().values():
        if which == "parameters":
            v.data.cast(np.float16)
        if which == "gradients":
            v.grad.cast(np.float16)
    return loss


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
@pytest.mark.parametrize("which", ["loss", "data", "parameters", "gradients"])
def test_other_types_train_as_with_nnabla(which: str) -> None:
    loss = cast(which)
    solver = solver_of(S.Momentum(0.1))
    for _ in range(5):
        solver.zero_grad()
        loss.forward()
        loss.backward()
        solver.update()
    expected = snapshot()
    nn.clear_parameters()
    updater = updater_of(cast(which), solver=S.Momentum(0.1), storage=None)
    assert {updater.update().reason for _ in range(5)} == {"updated"}
    assert_equal(snapshot(), expected)


@pytest.mark.parametrize("weight", [1.0, 1e-9])
def test_a_context_that_changes_in_the_middle(weight: float) -> None:
    def make(contexts: List[nn.Context]) -> nn.Variable:
        h = data(4, 3)
        for name, context in zip("abc", contexts):
            with nn.context_scope(context):
                h = F.tanh(PF.affine(h, 5, name=name, rng=np.random.RandomState(ord(name))))
        with nn.context_scope(contexts[3]):
            return F.mean(h**2) * weight

    found: List[Dict[str, np.ndarray]] = []
    for contexts in ([FLOAT] * 4, [HALF, FLOAT, HALF, FLOAT], [FLOAT, HALF, FLOAT, HALF]):
        nn.clear_parameters()
        storage = "float32" if HALF not in contexts else None
        updater = updater_of(make(contexts), solver=S.Sgd(0.0), storage=storage)
        for _ in range(3):
            assert updater.update().reason == "updated"
        found.append(gradients())
    for mixed in found[1:]:
        for name, exact in found[0].items():
            assert np.linalg.norm(mixed[name] - exact) < 0.01 * np.linalg.norm(exact), name


def test_a_network_that_is_half_in_part_is_not_emulated() -> None:
    with nn.context_scope(HALF):
        h = F.tanh(PF.affine(data(4, 3), 5, name="a"))
    loss = F.mean(PF.affine(h, 2, name="b") ** 2)
    with pytest.raises(ValueError, match=r"^storage: Affine is computed in cpu:half.*or leave storage out$"):
        updater_of(loss)
