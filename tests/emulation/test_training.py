# SPDX-License-Identifier: Apache-2.0
"""Trainings whose matrix products read 8 bits."""

from __future__ import annotations

from typing import Any, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScalingUpdater, FixedLossScalingUpdater, FormatEmulation, Precision
from tests.emulation.networks import masked_attention
from tests.imports import modules_looked_for


def digits(seed: int = 0) -> Any:
    """Ten classes of noisy 8x8 patterns."""
    rng = np.random.default_rng(seed)
    patterns = rng.standard_normal((10, 1, 8, 8))
    labels = rng.integers(0, 10, 200)
    images = patterns[labels] + 0.5 * rng.standard_normal((200, 1, 8, 8))
    return images.astype(np.float32), labels[:, None]


def trained(storage: Any, steps: int = 40) -> List[float]:
    nn.clear_parameters()
    rng = np.random.RandomState(0)
    images, labels = digits()
    x, t = nn.Variable.from_numpy_array(images), nn.Variable.from_numpy_array(labels)
    h = F.relu(PF.batch_normalization(PF.convolution(x, 8, (3, 3), name="c", rng=rng), name="bn"))
    h = F.relu(PF.affine(F.max_pooling(h, (2, 2)), 32, name="a", rng=rng))
    loss = F.mean(F.softmax_cross_entropy(PF.affine(h, 10, name="b", rng=rng), t))
    solver = S.Momentum(0.05)
    solver.set_parameters(nn.get_parameters())
    updater = AdaptiveLossScalingUpdater(solver, loss, storage=storage)
    losses = []
    for _ in range(steps):
        assert updater.update().updated
        losses.append(float(loss.d))
    return losses


@pytest.mark.parametrize("made", [AdaptiveLossScalingUpdater, FixedLossScalingUpdater])
@pytest.mark.parametrize("storage", ["float16", "fp8_hybrid"])
def test_an_update_looks_for_no_module(made: Any, storage: str) -> None:
    mask = nn.Variable.from_numpy_array(np.array([[True, False, True]]))
    t = nn.Variable.from_numpy_array(np.array([[1], [0]]))
    x = nn.Variable.from_numpy_array(np.random.default_rng(0).standard_normal((2, 4)))
    h = F.broadcast(mask, (2, 3)) * PF.batch_normalization(PF.affine(x, 3, name="a"), name="bn")
    loss = F.mean(F.softmax_cross_entropy(PF.affine(h, 2, name="b"), t))
    solver = S.Sgd(1e-3)
    solver.set_parameters(nn.get_parameters())
    updater = made(solver, loss, storage=storage)
    for _ in range(3):
        updater.update()
    with modules_looked_for() as looked_for:
        for _ in range(8):
            assert updater.update().updated
    assert not looked_for


@pytest.mark.slow
@pytest.mark.gate
@pytest.mark.parametrize(
    "storage",
    [
        "fp8_hybrid",
        Precision("float8_e4m3", "float8_e5m2", saturate=True, operands_only=True, otherwise="bfloat16"),
        Precision("float8_e4m3", "float8_e5m2", saturate=True, operands_only=True, stochastic_seed=0),
    ],
    ids=str,
)
def test_trains_about_as_in_fp32(storage: Any) -> None:
    with pytest.warns(UserWarning, match="nothing is stored in half precision"):
        exact = trained(None)
    narrow = trained(storage)
    assert exact[-1] < 0.05 * exact[0]
    assert narrow[-1] < 0.05 * narrow[0]
    np.testing.assert_allclose(narrow[:10], exact[:10], rtol=0.15)


def test_an_attention_mask_survives() -> None:
    """Stored in 8 bits, -1e4 is NaN or -448."""
    loss = masked_attention()
    loss.forward()
    exact = float(loss.d)
    FormatEmulation(loss, "float8_e4m3").forward()
    assert np.isnan(loss.d)
    emulation = FormatEmulation(loss, "fp8_hybrid")
    emulation.forward()
    assert float(loss.d) == pytest.approx(exact, rel=0.1)
    for v in nn.get_parameters().values():
        v.grad.zero()
    emulation.backward(64.0)
    assert all(
        np.isfinite(v.g).all() and v.g.any() for n, v in nn.get_parameters().items() if n != "k/affine/b"
    )
