# SPDX-License-Identifier: Apache-2.0
"""Random graphs, formats and injected values: no crash, no swap left, no wrong gradient in silence."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Tuple

import hypothesis.strategies as st
import nnabla as nn
import numpy as np
import pytest
from hypothesis import given

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, FormatEmulation
from nnabla_adaloss.core.precision import PRECISIONS, get_precision
from tests.fuzz.budget import budget
from tests.worlds import random_graphs
from tests.worlds.random_graphs import STEPS, Network
from tests.worlds.tampering import Tampering
from tests.worlds.values import zero_grads

pytestmark = [pytest.mark.slow, pytest.mark.gate]

# Infinities, NaN, subnormals of float16 and float32, zero, the edges of float16 and of float32.
values = st.sampled_from(
    [np.inf, -np.inf, np.nan, 2.0**-24, -(2.0**-25), 1e-40, 0.0, -0.0, 65504.0, -65520.0, 1e38, 3e-5]
)
places = st.sampled_from(["nowhere", "one element", "everywhere"])


def spoil(array: np.ndarray, place: str, value: float) -> np.ndarray:
    """Return a copy of ``array`` with ``value`` in it."""
    spoilt = np.array(array, np.float32)
    if place == "everywhere":
        spoilt[...] = value
    elif place == "one element" and spoilt.size:
        spoilt.flat[spoilt.size // 2] = value
    return spoilt


class SpoilGradient(Tampering):
    """Identity whose gradient is spoilt on its way back, in proportion to the scale that it carries."""

    def __init__(self, place: str, value: float, ctx: Any = None) -> None:
        super().__init__(ctx)
        self.place, self.value = place, value

    def changed(self, g: np.ndarray) -> np.ndarray:
        # Multiplied, not replaced: all functions that the engine takes for linear are linear.
        return g * spoil(np.ones_like(g), self.place, self.value)


injections = st.tuples(places, values)


@st.composite
def spoilt_networks(draw: Any) -> Network:
    weight, data, gradient = draw(injections), draw(injections), draw(injections)

    def affine(b: Any, pool: List[nn.Variable], reuse: bool = False) -> List[nn.Variable]:
        return [SpoilGradient(*gradient)(random_graphs._affine(b, pool, reuse)[0])]

    steps = draw(st.lists(st.sampled_from(sorted(STEPS)), max_size=6))
    steps.insert(draw(st.integers(0, len(steps))), "spoilt")
    STEPS["spoilt"] = affine
    try:
        network = random_graphs.build(draw(st.integers(0, 2**31)), steps, input_gradient=draw(st.booleans()))
    finally:
        del STEPS["spoilt"]
    names = sorted(network.leaves)
    leaf = network.leaves[names[draw(st.integers(0, len(names) - 1))]]
    leaf.d = spoil(leaf.d, *weight)
    if "x" in network.leaves:
        network.leaves["x"].d = spoil(network.leaves["x"].d, *data)
    return network


configs = st.builds(
    AdaLossConfig,
    loss_scale_method=st.sampled_from(["approx_range", "abs_range", "element_wise_range", "fixed"]),
    fixed_loss_scale=st.sampled_from([1.0, 4.0, 0.5]),
    use_bound=st.booleans(),
    update_per_n_iteration=st.sampled_from([1, 3]),
    scale_upper_bound=st.sampled_from([16.0, 2.0**14]),
)


def arrays(network: Network) -> Dict[str, Tuple[Any, Any]]:
    return {name: (v.data, v.grad) for name, v in network.leaves.items()}


def gradients(loss: Any, network: Network, scale: float, forward: bool = True) -> Dict[str, np.ndarray]:
    zero_grads(network.leaves.values())
    if forward:
        loss.forward()
    loss.backward(scale)
    return {name: leaf.g.copy() for name, leaf in network.leaves.items()}


def with_delay(config: AdaLossConfig, delay: int, dtype: str) -> AdaLossConfig:
    """Return ``config`` with a delay if its method can have one."""
    looks_at_arrays = config.loss_scale_method == "element_wise_range"
    return dataclasses.replace(config, delay=0 if looks_at_arrays else delay, dtype=dtype)


def check(
    found: Dict[str, np.ndarray],
    expected: Dict[str, np.ndarray],
    scaling: AdaptiveLossScaling,
    rtol: float,
    atol: float = 0.0,
) -> None:
    if scaling.found_inf:
        return
    for name, gradient in found.items():
        assert np.isfinite(gradient).all(), f"{name} is not finite, and nobody says so"
        if np.isfinite(expected[name]).all():
            largest = float(np.abs(expected[name]).max(initial=0.0))
            close = rtol * largest + atol
            np.testing.assert_allclose(gradient, expected[name], rtol=0.0, atol=close, err_msg=name)


FORMATS = ["float32"] * 2 + list(PRECISIONS)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@budget(60)
@given(spoilt_networks(), configs, st.integers(-10, 20), st.sampled_from([0, 1]), st.sampled_from(FORMATS))
def test_nothing_breaks_no_infinity_is_silent_and_in_fp32_gradients_are_nnablas(
    network: Network, config: AdaLossConfig, exponent: int, delay: int, storage: str
) -> None:
    before, expected, loss = arrays(network), gradients(network.loss, network, 1.0), network.loss
    if storage != "float32":
        loss = FormatEmulation(loss, storage)
        # Nothing is known of what the format rounds.
        expected = {name: np.full_like(g, np.nan) for name, g in expected.items()}
    dtype = "float32" if storage == "float32" else get_precision(storage).stored_gradients.name
    scaling = AdaptiveLossScaling(loss, with_delay(config, delay, dtype))
    for _ in range(2):
        found = gradients(scaling, network, 2.0**exponent)
        assert arrays(network) == before
        # What nnabla itself loses below float32's normal range is no measure.
        check(found, expected, scaling, rtol=1e-4, atol=1e-37)
        assert all(0.0 < scale < np.inf for scale in scaling.layer_scales.values())


@st.composite
def healthy(draw: Any) -> Network:
    """A network that float16 can hold, whose weights are float16 numbers."""
    steps = draw(st.lists(st.sampled_from(sorted(set(STEPS) - {"recompute"})), max_size=5))
    network = random_graphs.build(draw(st.integers(0, 2**31)), steps, input_gradient=False)
    for leaf in network.leaves.values():
        leaf.d = leaf.d.astype(np.float16)
    return network


@budget(40)
@given(healthy(), configs, st.integers(0, 8), st.sampled_from([0, 1]))
def test_gradients_in_fp16_are_those_of_the_same_activations_to_rounding(
    network: Network, config: AdaLossConfig, exponent: int, delay: int
) -> None:
    """fp32 backward on the activations that fp16 forward left: all that differs is how gradients round."""
    config = with_delay(config, delay, "float16")
    emulation = FormatEmulation(network.loss, "float16")
    scaling = AdaptiveLossScaling(emulation, config)
    found = gradients(scaling, network, 2.0**exponent)
    emulation.forward()
    expected = gradients(network.loss, network, 1.0, forward=False)
    largest = max(float(np.abs(g).max(initial=0.0)) for g in expected.values())
    # Without bounds the scales add up until weight gradients, which no guard foresees, may overflow.
    assert scaling.found_inf == [] or not config.use_bound
    # Per parameter; what remains of a sum that cancels (a bias before batch normalization) is only noise.
    check(found, expected, scaling, rtol=2e-2, atol=3e-3 * largest)
