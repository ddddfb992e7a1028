# SPDX-License-Identifier: Apache-2.0
"""Layers of one network in different formats: what is rounded, and how scales follow."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.solvers as S
import numpy as np
import pytest
from numpy.typing import NDArray

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScaling,
    AdaptiveLossScalingUpdater,
    FixedLossScalingUpdater,
    FormatEmulation,
    GradScaler,
    HistoryPolicy,
    LossScaleError,
    Precision,
)
from nnabla_adaloss.functions import round_to_format
from tests.worlds.passes import run
from tests.worlds.trainings import solver_of
from tests.worlds.values import assert_equal, data, snapshot

HALF, BRAIN = Precision("float16"), Precision("bfloat16")
FP32, EIGHT = Precision("float32"), Precision("float8_e4m3", "float8_e5m2")
SCALE = 64.0


def parameter(name: str, *shape: int) -> nn.Variable:
    rng = np.random.default_rng(sum(map(ord, name)))
    initial = rng.standard_normal(shape).astype(np.float32)
    return nn.parameter.get_parameter_or_create(name, shape, lambda shape: initial)


def gradients(loss: Any) -> Dict[str, NDArray[Any]]:
    return run(loss, SCALE, clear=True)


def network() -> nn.Variable:
    h = F.relu(F.affine(data(6, 8, seed=0), parameter("a/W", 8, 7), parameter("a/b", 7)))
    h = F.sin(F.affine(h, parameter("b/W", 7, 5), parameter("b/b", 5)))
    return F.mean(F.affine(h, parameter("c/W", 5, 4), parameter("c/b", 4)) ** 2)


def network_by_hand(a: Precision, b: Precision, c: Precision) -> nn.Variable:
    """Each array rounded where it is written, and weights where they are read, by functions in the graph.

    None of the functions reads its own output in backward, which would be unrounded here.
    """

    def layer(x: nn.Variable, name: str, sizes: List[int], precision: Precision) -> nn.Variable:
        w, bias = parameter(f"{name}/W", *sizes), parameter(f"{name}/b", sizes[1])
        y = F.affine(x, round_to_format(w, precision), round_to_format(bias, precision))
        return round_to_format(y, precision)

    h = round_to_format(F.relu(layer(round_to_format(data(6, 8, seed=0), a), "a", [8, 7], a)), a)
    h = round_to_format(F.sin(layer(h, "b", [7, 5], b)), b)
    h = round_to_format(layer(h, "c", [5, 4], c) ** 2, c)
    # A single element is stored in 16 bits or more.
    single = Precision(c.data_format(1), c.gradient_format(1))
    return round_to_format(F.mean(h), single)


@pytest.mark.parametrize(
    ("layers", "storage"),
    [
        ((EIGHT, HALF, BRAIN), {"a": EIGHT, "b": HALF, "*": BRAIN}),
        ((BRAIN, EIGHT, HALF), {"b": EIGHT, "c": HALF, "*": BRAIN}),
        # What no pattern matches is in fp32.
        ((HALF, FP32, EIGHT), {"a": HALF, "c": EIGHT}),
    ],
)
def test_it_equals_a_network_whose_layers_are_rounded_by_hand(
    layers: Tuple[Precision, Precision, Precision], storage: Any
) -> None:
    loss = network_by_hand(*layers)
    expected = gradients(loss)
    emulation = FormatEmulation(network(), storage)
    assert_equal(gradients(emulation), expected)
    assert emulation.variable.d == loss.d
    # Neither of them is what one format for all layers gives.
    for one in layers:
        assert any((gradients(FormatEmulation(network(), one))[n] != v).any() for n, v in expected.items())


@pytest.mark.parametrize("storage", ["float16", "float8_e5m2", "fp8_hybrid"])
def test_equal_precisions_of_all_layers_are_one_precision(storage: str) -> None:
    expected = gradients(FormatEmulation(network(), storage, float_tail=True))
    assert_equal(
        gradients(FormatEmulation(network(), {"b": storage, "*": storage}, float_tail=True)), expected
    )


def test_products_read_in_the_precision_of_their_own_layer() -> None:
    w = parameter("w/W", 4, 4)
    x = data(3, 4, seed=1)
    with nn.parameter_scope("first"):
        h = F.affine(x, w)
    loss = F.sum(F.affine(h, parameter("second/W", 4, 2)) ** 2)
    emulation = FormatEmulation(loss, {"second": "fp8_hybrid"})
    emulation.forward()
    in_fp32 = F.affine(x, w)
    in_fp32.forward()
    np.testing.assert_array_equal(h.d, in_fp32.d)
    fitted = [
        round_to_format(v, "fp8_hybrid")
        for v in (nn.Variable.from_numpy_array(h.d), parameter("second/W", 4, 2))
    ]
    y = F.affine(*fitted)
    y.forward()
    expected = (y.d.astype(np.float16).astype(np.float32) ** 2).astype(np.float16).astype(np.float32).sum()
    assert loss.d == np.float32(np.float16(expected))


def test_a_weight_that_layers_share_is_stored_in_the_widest_of_their_formats() -> None:
    w = parameter("shared/W", 5, 5)
    h = F.affine(data(3, 5, seed=2), w)
    loss = F.sum(F.affine(F.tanh(h), w))
    emulation = FormatEmulation(loss, {"shared": EIGHT, "shared#2": HALF})
    emulation.forward()
    stored = emulation.emulated_storage.weights[hash(w)]
    np.testing.assert_array_equal(stored.data, w.d.astype(np.float16).astype(np.float32))


def test_a_sum_of_layers_is_as_wide_as_the_widest() -> None:
    x = data(3, 5, seed=3)
    a, b = F.affine(x, parameter("a/W", 5, 5)), F.affine(x, parameter("b/W", 5, 5))
    emulation = FormatEmulation(F.sum(F.tanh(a + b)), {"a": EIGHT, "b": HALF})
    storage = emulation.emulated_storage
    total = a.function_references[0].outputs[0]
    assert storage.data_format(hash(a), 15).name == "float8_e4m3"
    assert storage.data_format(hash(total), 15).name == "float16"
    assert storage.gradient_format(hash(a), 15).name == "float8_e5m2"


def test_functions_before_all_layers_go_by_their_own_names() -> None:
    x = data(3, 5, seed=3)
    scaled = x * 0.3
    loss = F.sum(F.affine(scaled, parameter("a/W", 5, 2)))
    storage = FormatEmulation(loss, {"a": EIGHT, "*": HALF}).emulated_storage
    assert storage.data_format(hash(scaled), 15).name == "float16"
    with pytest.raises(ValueError, match="layers are a/MulScalar, a$"):
        FormatEmulation(loss, {"b": EIGHT})


MAKERS: Dict[str, Callable[..., Any]] = {
    "emulation": FormatEmulation,
    "updater": lambda loss, storage: AdaptiveLossScalingUpdater(solver_of(), loss, storage=storage),
    "fixed": lambda loss, storage: FixedLossScalingUpdater(solver_of(), loss, storage=storage),
    "scaler": lambda loss, storage: GradScaler(solver_of(), storage=storage).forward(loss),
}


@pytest.mark.parametrize("how", MAKERS)
def test_a_pattern_without_a_layer_is_refused_before_anything_is_computed(how: str) -> None:
    loss = network()
    with pytest.raises(
        ValueError, match=r"'head/\*', which matches no layer; the network's layers are a, b, c$"
    ):
        MAKERS[how](loss, {"head/*": "float16", "*": "float32"})
    MAKERS[how](loss, {"a": "float16", "*": "float32"})


def test_layers_of_modules_go_by_the_names_that_their_solver_knows() -> None:
    w = nn.Variable.from_numpy_array(np.ones((5, 2), np.float32), need_grad=True)
    solver = S.Sgd(0.1)
    solver.set_parameters({"head/W": w})
    loss = F.mean(F.affine(data(3, 5, seed=4), w) ** 2)
    updater = AdaptiveLossScalingUpdater(solver, loss, storage={"head": "bf16"})
    assert updater.scaling.loss.emulated_storage.data_format(hash(w), 10).name == "bfloat16"


def test_every_component_stays_within_the_formats_of_its_own_layers() -> None:
    config = AdaLossConfig(loss_scale_method="amax_history")
    emulation = FormatEmulation(
        network(), {"a": BRAIN, "b": Precision("float8_e4m3"), "*": HALF}, float_tail=True
    )
    scaling = AdaptiveLossScaling(emulation, config)
    assert scaling.config.range.u_max == 448.0
    for _ in range(2):
        scaling.forward()
        scaling.backward()
        assert not scaling.found_inf
    known = scaling._graph.prepared()
    names, limits = known.components.names, dict(zip(known.components.names, known.limits))
    # What layer c hands on is stored by tanh, which follows b; b's input gradient in a's format.
    assert limits["b/Sin"] == 448.0
    assert limits["a/ReLU"] == BRAIN.backward.max
    scaling.end_iteration(good=False)
    amax = scaling.components.amaxes()
    room = scaling.components.known(known.components, known.loss_weights(), known.limits).room
    for name, scale in zip(names, room):
        if scale is not None and amax.get(name):
            assert amax[name] * scale <= limits[name]
            # In bfloat16 it is the largest scale that is there which ends it.
            assert amax[name] * scale > limits[name] / 8 or scale == HistoryPolicy().max_scale


def test_gradients_of_a_wide_layer_use_its_range() -> None:
    """With the range of the narrow layer for all, a's gradient would be kept 2**7 lower than it can be."""
    config = AdaLossConfig(loss_scale_method="amax_history")

    def scale_of_a(storage: Any) -> float:
        scaling = AdaptiveLossScaling(FormatEmulation(network(), storage, float_tail=True), config)
        for _ in range(2):
            scaling.forward()
            scaling.backward()
        return scaling.accumulated_scales["b"]

    narrow = Precision("float8_e4m3")
    assert scale_of_a({"a": HALF, "*": narrow}) >= 64 * scale_of_a(narrow)


@pytest.mark.parametrize("method", ["approx_range", "amax_history"])
@pytest.mark.parametrize("delay", [0, 1])
def test_training_with_several_formats_saves_and_resumes_bit_for_bit(method: str, delay: int) -> None:
    storage = {"a": "bf16", "b": Precision("float8_e4m3", "float8_e5m2", stochastic_seed=1), "*": "half"}

    def updater() -> AdaptiveLossScalingUpdater:
        nn.clear_parameters()
        loss = network()
        config = AdaLossConfig(loss_scale_method=method, delay=delay)
        return AdaptiveLossScalingUpdater(solver_of(S.Sgd(0.01)), loss, storage=storage, config=config)

    whole = updater()
    for _ in range(6):
        assert whole.update().updated
    expected, first = snapshot(), updater()
    for _ in range(3):
        first.update()
    weights, state = snapshot(), first.state_dict()
    second = updater()
    for name, v in nn.get_parameters().items():
        v.d = weights[name]
    second.load_state_dict(state)
    for _ in range(3):
        second.update()
    assert_equal(snapshot(), expected)


def test_a_rebuilt_graph_goes_on() -> None:
    loss = network()
    updater = AdaptiveLossScalingUpdater(solver_of(S.Sgd(0.01)), loss, storage={"b": EIGHT, "*": HALF})
    for _ in range(4):
        updater.loss = network()
        assert updater.update().updated


def test_overflow_in_forward_names_the_format_of_the_layer() -> None:
    h = F.affine(data(6, 8, seed=0) * 100.0, parameter("a/W", 8, 7))
    loss = F.mean(F.affine(h, parameter("b/W", 7, 5)))
    updater = AdaptiveLossScalingUpdater(
        solver_of(S.Sgd(0.01)), loss, storage={"a": Precision("float8_e4m3"), "*": "bf16"}
    )
    with pytest.raises(
        LossScaleError, match=r"a \(Affine\) computes .* beyond float8_e4m3, which ends at 448"
    ):
        updater.update()
