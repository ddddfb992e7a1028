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

from nnabla_adaloss import AdaLossConfig
from tests.fuzz.budget import budget
from tests.worlds.trainings import updater_of
from tests.worlds.values import data

pytestmark = [pytest.mark.slow, pytest.mark.gate]

factors = st.integers(-20, 12).map(lambda e: 2.0**e)


@st.composite
def losses(draw: Any) -> nn.Variable:
    """A net with branches, small regularizers of inner gradients, and weights of any size."""
    nn.clear_parameters()
    rng = np.random.RandomState(draw(st.integers(0, 1000)))
    h = data(4, 5)
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
@budget(30)
@given(losses(), st.integers(3, 24), st.sampled_from([0, 1]), st.sampled_from([16.0, 2.0**16]))
def test_tries_are_bounded_by_the_bits_to_lose(
    loss: nn.Variable, exponent: int, delay: int, upper: float
) -> None:
    config = AdaLossConfig("approx_range", delay=delay, scale_upper_bound=upper, accum_upper_bound=2.0**20)
    updater = updater_of(
        loss,
        solver=S.Sgd(0.0),
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
