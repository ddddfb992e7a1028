# SPDX-License-Identifier: Apache-2.0
"""Which pass applies a schedule, with hooks or without, changes no bit of what it leaves behind."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, FormatEmulation
from tests.engine.random_graphs import Network, assert_same_above_subnormals, build, networks

EVERY = 3
STOPPED_BY_RELU = ["affine", "relu", "relu", "one_of_many_outputs", "affine"]


def config_of(seed: int, **changes: Any) -> AdaLossConfig:
    """Statistics of earlier iterations, or a method that gives every layer a scale of its own."""

    def method(g: np.ndarray, W: np.ndarray, *, config: AdaLossConfig, fan_in: float) -> float:
        return float(2.0 ** np.random.default_rng(int(seed + fan_in)).integers(-6, 10))

    chosen: Dict[str, Any] = {
        "loss_scale_method": {0: "amax_history", 1: "approx_range"}.get(seed % 3, method),
        "use_bound": False,
        "measure_every": EVERY,
    }
    return AdaLossConfig(**chosen, **changes)


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.float32).view(np.uint32)


def gradients(network: Network, backward: Callable[[], None]) -> Dict[str, np.ndarray]:
    for leaf in network.leaves.values():
        leaf.grad.zero()
    backward()
    return {name: bits(leaf.g.copy()) for name, leaf in network.leaves.items()}


def look(f: Any) -> None:
    """A hook that sees each function: steps cannot be taken at once then."""


class Way(NamedTuple):
    """How a loss is gone through."""

    scale: Optional[float]
    clear_buffer: bool
    accum_grad: int


storages = st.sampled_from(["float16", "bfloat16", "fp8_hybrid", "float8_e5m2"])
ways = st.builds(Way, st.sampled_from([None, 1.0, 256.0]), st.booleans(), st.sampled_from([1, 2]))


def runs(
    network: Network,
    config: AdaLossConfig,
    way: Way,
    storage: Optional[str],
    hook: Optional[Callable[[Any], None]],
) -> Tuple[List[Dict[str, np.ndarray]], AdaptiveLossScaling]:
    loss = network.loss if storage is None else FormatEmulation(network.loss, storage)
    scaling = AdaptiveLossScaling(loss, config)

    def backward() -> None:
        for _ in range(way.accum_grad):
            scaling.forward(clear_no_need_grad=way.clear_buffer)
            scaling.backward(
                way.scale, clear_buffer=way.clear_buffer, function_post_hook=hook, iteration=len(found)
            )

    found: List[Dict[str, np.ndarray]] = []
    for _ in range(2 * EVERY):
        found.append(gradients(network, backward))
    return found, scaling


def planned_and_hooked(
    network: Network, seed: int, way: Way, storage: Optional[str] = None
) -> List[Dict[str, np.ndarray]]:
    """Gradients of passes with held scales, after it was seen that hooks come to the same in all."""
    config = config_of(seed)
    planned, scaling = runs(network, config, way, storage, hook=None)
    hooked, other = runs(network, config, way, storage, hook=look)
    assert scaling.found_inf == other.found_inf
    assert scaling.layer_scales == other.layer_scales
    assert scaling.accumulated_scales == other.accumulated_scales
    assert scaling.state_dict() == other.state_dict()
    for a, b in zip(planned, hooked):
        for name in network.leaves:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    return planned


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks, st.integers(0, 2**31), ways)
def test_planned_hooked_and_native_gradients_are_the_same(network: Network, seed: int, way: Way) -> None:
    def native() -> None:
        for _ in range(way.accum_grad):
            network.loss.forward(clear_no_need_grad=way.clear_buffer)
            network.loss.backward(1.0, clear_buffer=way.clear_buffer)

    planned = planned_and_hooked(network, seed, way)
    reference = gradients(network, native)
    for found in planned:
        for name in network.leaves:
            assert_same_above_subnormals(found[name], reference[name], name)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    networks,
    st.integers(0, 2**31),
    ways,
    st.sampled_from(["float16", "bfloat16", "fp8_hybrid", "float8_e5m2"]),
)
# A bias has a gradient of -0.0 in both batches.
@example(build(533, STOPPED_BY_RELU, input_gradient=False), 0, Way(None, True, 2), "float16")
def test_so_they_are_as_they_are_stored(network: Network, seed: int, way: Way, storage: str) -> None:
    planned_and_hooked(network, seed, way, storage)


def test_what_is_too_small_for_float32_is_there_with_a_scale() -> None:
    steps = ["squared", "squared", "bias", "convolutions", "affine", "squared", "grouped"]
    network = build(343154, steps, input_gradient=False)

    def native() -> None:
        network.loss.forward(clear_no_need_grad=True)
        network.loss.backward(1.0, clear_buffer=True)

    reference = gradients(network, native)["w11"]
    found = runs(network, config_of(0), Way(None, True, 1), None, None)[0][-1]["w11"]
    assert np.count_nonzero(found << 1) > np.count_nonzero(reference << 1)
    assert_same_above_subnormals(found, reference, "w11")
