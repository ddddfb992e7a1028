# SPDX-License-Identifier: Apache-2.0
"""Every overflow lowers something that the next try uses: tries are bounded by the bits there are to lose."""

from __future__ import annotations

from typing import Any, List

import hypothesis.strategies as st
import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest
from hypothesis import given

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater
from tests.fuzz.budget import budget
from tests.worlds.networks import layers

pytestmark = [pytest.mark.slow, pytest.mark.gate]

factors = st.integers(-20, 12).map(lambda e: 2.0**e)


@st.composite
def losses(draw: Any) -> nn.Variable:
    """A net with branches, small regularizers of inner gradients, and weights of any size."""
    nn.clear_parameters()
    rng = np.random.RandomState(draw(st.integers(0, 1000)))
    h = nn.Variable.from_numpy_array(rng.randn(4, 5).astype(np.float32))
    found: List[nn.Variable] = []
    for i in range(draw(st.integers(2, 5))):
        below = h
        h = F.tanh(PF.affine(h, 5, name=f"layer{i}", rng=rng) * draw(factors))
        if draw(st.booleans()) and i:
            h = h + below
        if draw(st.booleans()):
            found.append(F.mean(h**2) * draw(factors) * draw(factors))
    return F.mean(h**2) * draw(factors) + sum(found)


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
@budget(60)
@given(losses(), st.integers(3, 24), st.sampled_from([0, 1]), st.sampled_from([16.0, 2.0**16]))
def test_tries_are_bounded_by_the_bits_to_lose(
    loss: nn.Variable, exponent: int, delay: int, upper: float
) -> None:
    config = AdaLossConfig("approx_range", delay=delay, scale_upper_bound=upper, accum_upper_bound=2.0**20)
    solver = S.Sgd(0.0)
    solver.set_parameters(nn.get_parameters())
    updater = AdaptiveLossScalingUpdater(
        solver,
        loss,
        storage="float16",
        config=config,
        scale=2.0**exponent,
        max_retries=400,
        on_nonfinite_loss="skip",
        on_nonfinite_forward="skip",
    )
    for _ in range(3):
        result = updater.update()
        if result.reason.startswith("nonfinite"):
            return  # the values themselves leave fp16
        assert result.updated
        # Each try lowers all that is behind the overflow by four bits, however many layers there are.
        assert result.retries <= 16


def test_a_small_auxiliary_loss_drives_no_scale_down() -> None:
    h = layers(8, 8, 8, batch=8, width=6)
    rng = np.random.RandomState(1)
    main, auxiliary = (F.mean(PF.affine(h, 2, name=name, rng=rng) ** 2) for name in ("main", "auxiliary"))
    for delay in (0, 1):
        solver = S.Sgd(1e-3)
        solver.set_parameters(nn.get_parameters())
        updater = AdaptiveLossScalingUpdater(
            solver, main + auxiliary * 1e-8, storage="float16", config=AdaLossConfig(delay=delay)
        )
        results = [updater.update() for _ in range(30)]
        assert all(r.updated for r in results)
        assert not any(r.overflow_layers for r in results)
        # With delay=0 one iteration of eight measures its batch first.
        assert sum(r.retries for r in results[1:]) == (0 if delay else 3)
        assert updater.scale >= 8.0
