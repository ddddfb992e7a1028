# SPDX-License-Identifier: Apache-2.0
"""Scales that are powers of two change no bit of any gradient in fp32, however a pass applies them."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple
from unittest import mock

import hypothesis.strategies as st
import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, Format, FormatEmulation
from nnabla_adaloss.engine import slices
from tests.worlds.passes import any_scales, look, settle
from tests.worlds.random_graphs import Network, assert_same_above_subnormals, build, networks_that_clip
from tests.worlds.values import Values, assert_equal, bits, data, zero_grads

EVERY = 3
STOPPED_BY_RELU = ["affine", "relu", "relu", "one_of_many_outputs", "affine"]


class Way(NamedTuple):
    """How scales are chosen, and how a loss is gone through."""

    method: str
    drawn: Optional[Tuple[int, int]]  # every component has a random scale, of such exponents; None: chosen
    scale: Optional[float]
    clear_buffer: bool
    accum_grad: int
    storage: Any = None


def ways(exponents: Tuple[int, int], storages: st.SearchStrategy[Any]) -> st.SearchStrategy[Way]:
    return st.builds(
        Way,
        st.sampled_from(["amax_history", "approx_range", "fixed", "element_wise_range"]),
        st.sampled_from([exponents, exponents, None]),
        st.sampled_from([None, 1.0, 256.0]),
        st.booleans(),
        st.sampled_from([1, 2]),
        storages,
    )


def gradients(network: Network, backward: Callable[[], Any]) -> Values:
    zero_grads(network.leaves.values())
    backward()
    return {name: bits(leaf.g.copy()) for name, leaf in network.leaves.items()}


def native(network: Network, way: Way) -> Values:
    def backward() -> None:
        for _ in range(way.accum_grad):
            network.loss.forward(clear_no_need_grad=way.clear_buffer)
            network.loss.backward(1.0, clear_buffer=way.clear_buffer)

    return gradients(network, backward)


def assert_native(found: Values, reference: Values) -> None:
    for name, own in reference.items():
        assert_same_above_subnormals(found[name], own, name)


def iterate(network: Network, scaling: AdaptiveLossScaling, way: Way, iteration: int, hook: Any) -> Values:
    leaves, clear = list(network.leaves.values()), way.clear_buffer
    options: Any = {"clear_buffer": clear, "iteration": iteration, "function_post_hook": hook}

    def backward() -> None:
        if way.accum_grad == 1:
            settle(scaling, iteration, way.scale, leaves=leaves, clear=clear, function_post_hook=hook)
            return
        for _ in range(way.accum_grad):
            scaling.forward(clear_no_need_grad=clear)
            scaling.backward(way.scale, **options)

    return gradients(network, backward)


def runs(network: Network, way: Way, seed: int, hook: Any) -> Tuple[List[Values], AdaptiveLossScaling]:
    loss = network.loss if way.storage is None else FormatEmulation(network.loss, way.storage)
    config = AdaLossConfig(way.method, fixed_loss_scale=4.0, use_bound=False, measure_every=EVERY)
    scaling = AdaptiveLossScaling(loss, config)
    # Each iteration measures a slice, however little there is.
    with any_scales(seed, way.drawn), mock.patch.object(slices, "_LEAST", 1):
        return [iterate(network, scaling, way, i, hook) for i in range(2 * EVERY)], scaling


def run_both_ways(network: Network, way: Way, seed: int) -> List[Values]:
    """The gradients of some iterations, after it was seen that passes with and without hooks come to the same
    in all.
    """
    hookless, scaling = runs(network, way, seed, None)
    hooked, other = runs(network, way, seed, look)
    assert scaling.found_inf == other.found_inf
    assert scaling.layer_scales == other.layer_scales
    assert scaling.accumulated_scales == other.accumulated_scales
    assert scaling.state_dict() == other.state_dict()
    for one, another in zip(hookless, hooked):
        assert_equal(one, another)
    return hookless


@pytest.mark.slow
@pytest.mark.gate
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks_that_clip, ways((-8, 30), st.sampled_from([None, "float32"])), st.integers(0, 2**31))
def test_scales_change_no_bit(network: Network, way: Way, seed: int) -> None:
    reference = native(network, way)
    for found in run_both_ways(network, way, seed):
        assert_native(found, reference)


@pytest.mark.parametrize("storage", [None, "float32", {"*": "float32"}, Format.ieee("as wide", 8, 23)])
@pytest.mark.parametrize("accum_grad", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_nor_do_they_where_several_functions_write_a_leaf(seed: int, accum_grad: int, storage: Any) -> None:
    network = shared_weights()
    way = Way("amax_history", (-8, 30), None, True, accum_grad, storage)
    reference = native(network, way)
    for found in run_both_ways(network, way, seed):
        assert_equal(found, reference)


def shared_weights() -> Network:
    """A convolution that is run several times: nnabla adds up what each sample brings in the leaf itself."""
    h = data(4, 3, 6)
    for _ in range(3):
        h = F.tanh(PF.convolution(h, 3, (3,), pad=(1,), name="recurrent"))
    return Network(F.mean(h**2), nn.get_parameters(), used_once=False)


@pytest.mark.slow
@pytest.mark.gate
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    networks_that_clip,
    ways((-2, 12), st.sampled_from(["float16", "bfloat16", "fp8_hybrid", "float8_e5m2"])),
    st.integers(0, 2**31),
)
# A bias has a gradient of -0.0 in both batches.
@example(
    build(533, STOPPED_BY_RELU, input_gradient=False), Way("amax_history", None, None, True, 2, "float16"), 0
)
def test_passes_with_hooks_and_without_store_the_same(network: Network, way: Way, seed: int) -> None:
    run_both_ways(network, way, seed)


@pytest.mark.slow
@pytest.mark.gate
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks_that_clip, ways((-8, 30), st.none()), st.integers(0, 2**31), st.sampled_from([None, look]))
def test_gradients_that_stay_readable_are_unscaled(network: Network, way: Way, seed: int, hook: Any) -> None:
    unscaled_within(network, way._replace(clear_buffer=False, accum_grad=1), seed, hook)


@pytest.mark.parametrize("hook", [None, look])
def test_the_gradient_of_a_persistent_variable_is_unscaled(hook: Any) -> None:
    network = build(7, ["affine", "relu", "affine"], input_gradient=False)
    for v in intermediates(network.loss).values():
        v.persistent = True
    unscaled_within(network, Way("amax_history", (-8, 30), None, True, 1), 0, hook)


def unscaled_within(network: Network, way: Way, seed: int, hook: Any) -> None:
    inner = intermediates(network.loss)
    native(network, way)
    expected = {name: bits(v.g.copy()) for name, v in inner.items()}
    runs(network, way, seed, hook)
    assert_native({name: bits(v.g) for name, v in inner.items()}, expected)


def intermediates(loss: Any) -> Dict[str, Any]:
    """Variables between functions, apart from those that recomputation clears."""
    found: Dict[str, Any] = {}

    def visit(f: Any) -> None:
        for v in f.outputs:
            if v.need_grad and not v.recompute and v.parent.info.type_name != "Split":
                found[str(hash(v))] = v

    loss.visit(visit)
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "drawn",
    [
        (7, ["affine", "add", "clip", "split", "batch_normalization"]),
        # Functions that clip, one right behind the other.
        (2, ["affine", "clip", "clip", "clip", "affine"]),
    ],
)
def test_a_pass_without_hooks_applies_any_scales(drawn: Tuple[int, List[str]], seed: int) -> None:
    network = build(*drawn, input_gradient=True)
    way = Way("amax_history", (-8, 30), None, True, 1)
    found, scaling = runs(network, way, seed, None)
    assert scaling.result.kind == "hookless"
    steps = scaling.result.schedule.steps.values()
    assert any(step.before and step.after for step in steps)
    assert any(alpha != 1.0 for step in steps for alpha in step.alphas)
    assert_native(found[-1], native(network, way))


def test_gradients_too_small_for_float32_survive_with_a_scale() -> None:
    steps = ["squared", "squared", "bias", "convolutions", "affine", "squared", "grouped"]
    network = build(343154, steps, input_gradient=False)
    way = Way("amax_history", None, None, True, 1)
    reference = native(network, way)["w11"]
    found = runs(network, way, 0, None)[0][-1]["w11"]
    assert np.count_nonzero(found << 1) > np.count_nonzero(reference << 1)
    assert_same_above_subnormals(found, reference, "w11")
