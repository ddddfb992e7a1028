# SPDX-License-Identifier: Apache-2.0
"""Graphs that nobody would build on purpose: trained as nnabla does, or refused in one sentence."""

from __future__ import annotations

from typing import Any, Dict, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, DynamicLossScalingUpdater, FormatEmulation
from tests.worlds.networks import two_layers
from tests.worlds.trainings import solver_of, updater_of
from tests.worlds.values import FLOAT, HALF, assert_equal, constant, data, gradients, snapshot


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


CLOUDS, POINTS, CLASSES = 16, 5, 4


def orthogonality(matrix: nn.Variable) -> nn.Variable:
    """How far matrices are from being orthogonal."""
    product = F.batch_matmul(matrix, F.transpose(matrix, (0, 2, 1)))
    identity = constant(np.tile(np.eye(3), (CLOUDS, 1, 1)))
    return F.mean(F.norm(F.reshape(product - identity, (CLOUDS, -1)), axis=1))


def point_net(*, spread: float, size: float) -> nn.Variable:
    """The loss of a net that turns point clouds of this `size` by matrices of its own, and classifies them.

    Where they are nearly alike, of little `spread`, batch normalization multiplies gradients by much.
    """
    nn.clear_parameters()
    rng = np.random.RandomState(0)
    features = constant(rng.randn(1, 6) + spread * rng.randn(CLOUDS, 6))
    points = constant(rng.randn(CLOUDS, POINTS, 3) * size)
    h = F.relu(PF.batch_normalization(PF.affine(features, 8, name="turn1", rng=rng), name="turn1"))
    # The matrix feeds the product with the points, and the regularizer.
    turned = PF.affine(h, 9, name="turn2", rng=rng) + constant(np.tile(np.eye(3).reshape(1, 9), (CLOUDS, 1)))
    matrix = F.reshape(turned, (CLOUDS, 3, 3))
    h = F.relu(PF.affine(F.batch_matmul(points, matrix), 8, base_axis=2, name="point", rng=rng))
    y = PF.affine(F.max(h, axis=1), CLASSES, name="class", rng=rng)
    t = constant(rng.randint(0, CLASSES, (CLOUDS, 1)))
    return F.mean(F.softmax_cross_entropy(y, t)) + 0.001 * orthogonality(matrix)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    ("spread", "size", "scale"),
    [(1e-2, 1.0, 128.0), (1e-2, 8.0, 8.0), (1e-3, 8.0, 8.0), (1e-4, 1.0, 8.0)],
)
def test_training_goes_on_where_a_layer_meets_a_small_regularizer(
    spread: float, size: float, scale: float, delay: int
) -> None:
    """nnabla's updater needs one batch for an update; the layers' scales may cost some in the first one."""
    loss = point_net(spread=spread, size=size)
    dynamic = DynamicLossScalingUpdater(
        solver_of(S.Adam(0.001)), FormatEmulation(loss), lambda: None, scale=scale
    )
    dynamic.update()
    assert dynamic.scale > scale / 64.0, "the batch is no good example"

    loss = point_net(spread=spread, size=size)
    before = snapshot()
    updater = updater_of(loss, solver=S.Adam(0.001), scale=scale, config=AdaLossConfig(delay=delay))
    results: List[Any] = [updater.update() for _ in range(8)]
    assert all(result.updated for result in results), results
    # Each one that is thrown away halves the scale of the layer, or the global one.
    assert sum(result.retries for result in results) <= 30, results
    assert [result.retries for result in results[-4:]] == [0] * 4
    for name, v in nn.get_parameters().items():
        assert not np.array_equal(v.d, before[name]), name
