# SPDX-License-Identifier: Apache-2.0
"""In fp32, scales that are powers of two change no bit of any gradient, whatever the graph."""

from __future__ import annotations

from typing import Any, Callable, Dict

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling
from tests.engine.random_graphs import Network, assert_same_above_subnormals, networks

ALL_ONE = AdaLossConfig(loss_scale_method="fixed", dtype="float32")


def gradients(network: Network, backward: Callable[[], None]) -> Dict[str, np.ndarray]:
    for leaf in network.leaves.values():
        leaf.grad.zero()
    backward()
    return {name: leaf.g.copy() for name, leaf in network.leaves.items()}


def random_scales(seed: int) -> AdaLossConfig:
    rng = np.random.default_rng(seed)
    if seed % 3 == 0:
        # Scales of the iteration before, from a range so narrow that every layer gets one.
        u_min = float(rng.uniform(1e-3, 10.0))
        return AdaLossConfig("approx_range", u_min=u_min, u_max=1e30, use_bound=False, delay=1)

    def method(g: np.ndarray, W: np.ndarray, *, config: AdaLossConfig, fan_in: float) -> float:
        return float(2.0 ** rng.integers(-6, 10))

    return AdaLossConfig(loss_scale_method=method, use_bound=False, dtype="float32")


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.float32).view(np.uint32)


@pytest.mark.slow
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    networks,
    st.integers(0, 2**31),
    st.integers(-8, 16),
    st.booleans(),
    st.sampled_from([1, 2]),
)
def test_scales_change_no_bit(
    network: Network, seed: int, exponent: int, clear_buffer: bool, accum_grad: int
) -> None:
    def run(config: AdaLossConfig) -> Dict[str, np.ndarray]:
        scaling = AdaptiveLossScaling(network.loss, config)

        def backward() -> None:
            for _ in range(accum_grad):
                scaling.forward(clear_no_need_grad=clear_buffer)
                scaling.backward(2.0**exponent, clear_buffer=clear_buffer)

        if config.delay == 1:
            backward()
        return gradients(network, backward)

    def native() -> None:
        for _ in range(accum_grad):
            network.loss.forward(clear_no_need_grad=clear_buffer)
            network.loss.backward(1.0, clear_buffer=clear_buffer)

    ones, scaled, reference = run(ALL_ONE), run(random_scales(seed)), gradients(network, native)
    for name in network.leaves:
        for found in (scaled, ones):
            assert_same_above_subnormals(bits(found[name]), bits(reference[name]), name)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks, st.integers(0, 2**31))
def test_gradients_that_stay_readable_are_unscaled(network: Network, seed: int) -> None:
    inner = intermediates(network.loss)
    network.loss.forward()
    network.loss.backward(1.0)
    expected = [v.g.copy() for v in inner]
    AdaptiveLossScaling(network.loss, random_scales(seed)).backward(8.0)
    for v, reference in zip(inner, expected):
        np.testing.assert_allclose(v.g, reference, rtol=1e-5, atol=1e-6 * (np.abs(reference).max() + 1e-30))


def intermediates(loss: Any) -> list[Any]:
    """Variables between functions, apart from those that recomputation clears."""
    found: Dict[int, Any] = {}

    def visit(f: Any) -> None:
        for v in f.outputs:
            if v.need_grad and not v.recompute and v.parent.info.type_name != "Split":
                found[hash(v)] = v

    loss.visit(visit)
    return list(found.values())
