# SPDX-License-Identifier: Apache-2.0
"""Backward without a scale: gradients stay as they are, components get the scale that they have room for."""

from __future__ import annotations

from typing import Callable, Dict

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling
from tests.engine.random_graphs import Network, networks
from tests.engine.test_bit_identity import bits

METHODS = ("approx_range", "amax_history")


def in_fp32(method: str, delay: int = 0) -> AdaLossConfig:
    """Scales for float16's range, in which nothing is stored: no gradient is rounded."""
    return AdaLossConfig(
        loss_scale_method=method, dtype="float32", u_max=65504.0, u_min=2.0**-24, delay=delay
    )


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    networks,
    st.sampled_from(METHODS),
    st.sampled_from([0, 1]),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.sampled_from([1.0, 2.0**-20]),
)
def test_no_bit_changes(
    network: Network, method: str, delay: int, clear_buffer: bool, accum_grad: int, weight: float
) -> None:
    loss = network.loss * weight
    scaling = AdaptiveLossScaling(loss, in_fp32(method, delay))

    def run(backward: Callable[[], None]) -> Dict[str, np.ndarray]:
        # What a user has in the gradients stays there.
        for leaf in network.leaves.values():
            leaf.grad.zero() if leaf.ndim > 1 else leaf.grad.fill(0.5)
        for _ in range(accum_grad):
            loss.forward(clear_no_need_grad=clear_buffer)
            backward()
        return {name: leaf.g.copy() for name, leaf in network.leaves.items()}

    native = run(lambda: loss.backward(1.0, clear_buffer=clear_buffer))
    for _ in range(3):
        found = run(lambda: scaling.backward(clear_buffer=clear_buffer))
        for name in network.leaves:
            np.testing.assert_array_equal(bits(found[name]), bits(native[name]), err_msg=name)
