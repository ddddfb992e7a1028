# SPDX-License-Identifier: Apache-2.0
"""What is stored in half precision, by functions and by layers, and how scales follow."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
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
    LossScaleError,
    Precision,
    round_to_format,
)
from nnabla_adaloss.core.precision import FP8_HYBRID
from nnabla_adaloss.emulation.rounding_plan import half_gradients, half_inputs, half_outputs, operands_of
from tests.emulation.networks import half, is_half
from tests.worlds.passes import run
from tests.worlds.trainings import solver_of, updater_of
from tests.worlds.values import assert_equal, constant, data, snapshot

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


def test_with_the_float_tail_predictions_are_those_of_the_training() -> None:
    y = F.affine(F.affine(data(3, 4, seed=1), parameter("a/W", 4, 4)) * 1e5 / 1e5, parameter("b/W", 4, 2))
    GradScaler(solver_of(), storage="float16").forward(F.mean(y**2))
    expected = y.d.copy()
    FormatEmulation(y, "float16", float_tail=True).forward()
    np.testing.assert_array_equal(y.d, expected)
    FormatEmulation(y, "float16").forward()
    assert not np.isfinite(y.d).all()


def test_products_read_in_the_precision_of_their_own_layer() -> None:
    x, w, second = data(3, 4, seed=1), parameter("w/W", 4, 4), parameter("second/W", 4, 2)
    h = F.affine(x, w)
    loss = F.sum(F.affine(h, second) ** 2)
    FormatEmulation(loss, {"second": "fp8_hybrid"}).forward()
    in_fp32 = F.affine(x, w)
    in_fp32.forward()
    np.testing.assert_array_equal(h.d, in_fp32.d)
    y = F.affine(*(round_to_format(v, "fp8_hybrid") for v in (constant(h.d), second)))
    y.forward()
    assert loss.d == half(half(half(y.d) ** 2).sum())


def test_a_weight_that_layers_share_is_stored_in_the_widest_of_their_formats() -> None:
    w = parameter("shared/W", 5, 5)
    h = F.affine(data(3, 5, seed=2), w)
    loss = F.sum(F.affine(F.tanh(h), w))
    emulation = FormatEmulation(loss, {"shared": EIGHT, "shared#2": HALF})
    emulation.forward()
    stored = emulation.emulated_storage.weights[hash(w)]
    np.testing.assert_array_equal(stored.data, half(w.d))


def test_a_sum_of_layers_is_as_wide_as_the_widest() -> None:
    x = data(3, 5, seed=3)
    a, b = F.affine(x, parameter("a/W", 5, 5)), F.affine(x, parameter("b/W", 5, 5))
    emulation = FormatEmulation(F.sum(F.tanh(a + b)), {"a": EIGHT, "b": HALF})
    storage = emulation.emulated_storage
    total = a.function_references[0].outputs[0]
    assert storage.data_format(hash(a), 15).name == "float8_e4m3"
    assert storage.data_format(hash(total), 15).name == "float16"
    assert storage.gradient_format(hash(a), 15).name == "float8_e5m2"


def test_functions_before_all_layers_and_those_that_read_a_parameter_go_by_their_own_names() -> None:
    x = data(3, 5, seed=3)
    scaled = x * 0.3
    product = F.affine(scaled, parameter("a/W", 5, 2)) * parameter("gain/W", 3, 2)
    loss = F.sum(product)
    storage = FormatEmulation(loss, {"a": EIGHT, "gain": BRAIN, "*": HALF}).emulated_storage
    assert storage.data_format(hash(scaled), 15).name == "float16"
    assert storage.data_format(hash(product), 6).name == "bfloat16"
    with pytest.raises(ValueError, match="layers are a/MulScalar, a, gain$"):
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
    with pytest.raises(ValueError, match=r"'head/\*', which matches no layer; .* layers are a, b, c$"):
        MAKERS[how](loss, {"head/*": "float16", "*": "float32"})
    MAKERS[how](loss, {"a": "float16", "*": "float32"})


def test_layers_of_modules_go_by_the_names_that_their_solver_knows() -> None:
    w = nn.Variable((5, 2), need_grad=True)
    loss = F.mean(F.affine(data(3, 5, seed=4), w) ** 2)
    updater = updater_of(loss, parameters={"head/W": w}, storage={"head": "bf16"})
    assert updater.scaling.loss.emulated_storage.data_format(hash(w), 10).name == "bfloat16"


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
        return updater_of(loss, storage=storage, config=AdaLossConfig(method, delay=delay))

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
    updater = updater_of(network(), storage={"b": EIGHT, "*": HALF})
    for _ in range(4):
        updater.loss = network()
        assert updater.update().updated


def test_overflow_in_forward_names_the_format_of_the_layer() -> None:
    h = F.affine(data(6, 8, seed=0) * 100.0, parameter("a/W", 8, 7))
    loss = F.mean(F.affine(h, parameter("b/W", 7, 5)))
    updater = updater_of(loss, storage={"a": Precision("float8_e4m3"), "*": "bf16"})
    with pytest.raises(LossScaleError, match=r"a \(Affine\) .* beyond float8_e4m3, which ends at 448"):
        updater.update()


# ---- function by function


def leaf(*shape: int, need_grad: bool = True) -> nn.Variable:
    return nn.Variable(shape, need_grad=need_grad)


def no_grad(*shape: int) -> nn.Variable:
    return leaf(*shape, need_grad=False)


def normalized(normalization: Callable[..., Any]) -> Any:
    """The output of a batch normalization, and the mean and the variance of the batch."""
    parameters = (constant(np.full((1, 3, 1, 1), value)) for value in (0.1, 1.1, 0.0, 1.0))
    return normalization(data(6, 3, 4, 4), *parameters, batch_stat=True, output_stat=True)


@pytest.mark.parametrize(
    ("made", "halves"),
    [
        # The statistics of a batch stay fp32.
        (lambda: normalized(F.batch_normalization), [True, False, False]),
        (lambda: normalized(F.fused_batch_normalization), [True, False, False]),
        (lambda: F.split(data(1, 3) * 1.0, axis=1), [True] * 3),
    ],
)
def test_outputs_that_are_halves(made: Callable[[], List[nn.Variable]], halves: List[bool]) -> None:
    x, outputs = leaf(), list(made())
    x.d = 1.0
    assert [v in half_outputs(outputs[0].parent) for v in outputs] == halves
    for v in outputs:
        v.persistent = True
    FormatEmulation(F.sum(F.add_n(*(F.sum(v) for v in outputs)) * x)).forward()
    assert [is_half(v.d) for v in outputs] == halves


def places(found: Sequence[nn.Variable], f: Any) -> List[int]:
    """Which inputs of a function were found."""
    return [index for index, v in enumerate(f.inputs) if v in found]


def normalized_by(function: Callable[..., Any], *shape: int, **more: nn.Variable) -> nn.Variable:
    """The statistics that are kept need no gradient."""
    return function(leaf(2, 3, 4), leaf(*shape), leaf(*shape), no_grad(*shape), no_grad(*shape), **more)


def fused(**more: nn.Variable) -> nn.Variable:
    return F.fused_convolution(leaf(2, 3, 5, 5), leaf(4, 3, 3, 3), **more)


def per_map() -> Dict[str, nn.Variable]:
    kept = {"mean": no_grad(1, 4, 1, 1), "variance": no_grad(1, 4, 1, 1)}
    return {"beta": leaf(1, 4, 1, 1), "gamma": leaf(1, 4, 1, 1), **kept}


@pytest.mark.parametrize(
    ("made", "half", "gradients"),
    [
        # The data of a product are read in half precision, need_grad or not.
        (lambda: F.affine(no_grad(2, 3), leaf(3, 4), leaf(4)), [0, 1, 2], [1, 2]),
        (lambda: F.affine(leaf(2, 3) * 1.0, leaf(3, 4), no_grad(4)), [0, 1, 2], [0, 1]),
        (lambda: F.einsum(no_grad(2, 3), leaf(3, 4), equation="ij,jk->ik"), [0, 1], [1]),
        # Arithmetic casts all that it reads.
        (lambda: F.add2(leaf(2, 3), no_grad(2, 3)), [0, 1], [0]),
        # What needs no gradient may be a label.
        (lambda: F.sigmoid_cross_entropy(leaf(2, 3), no_grad(2, 3)), [0], [0]),
        (lambda: F.softmax(leaf(2, 3)), [], []),
        # It reads its weights through references of its own, which no swap reaches.
        (
            lambda: F.lstm(leaf(2, 1, 3), leaf(1, 1, 1, 4), leaf(1, 1, 1, 4), leaf(1, 4, 4, 7))[0],
            [],
            [0, 1, 2, 3],
        ),
        (lambda: normalized_by(F.batch_normalization, 1, 3, 1), [0], [0]),
        (lambda: normalized_by(F.fused_batch_normalization, 1, 3, 1, z=leaf(2, 3, 4)), [0, 5], [0, 5]),
        (lambda: fused(bias=leaf(4)), [0, 1, 2], [0, 1, 2]),
        (lambda: fused(**per_map()), [0, 1], [0, 1]),
    ],
)
def test_inputs_read_and_gradients_written_in_half(
    made: Callable[[], nn.Variable], half: List[int], gradients: List[int]
) -> None:
    f = made().parent
    assert places(half_inputs(f), f) == half
    assert places(half_gradients(f), f) == gradients


def test_arithmetic_casts_no_data_to_less_than_16_bits() -> None:
    f = F.add2(leaf(2, 3), no_grad(2, 3)).parent
    assert places(half_inputs(f, casts_data=False), f) == [0]


def test_a_gradient_between_two_functions_is_half_when_one_of_them_is() -> None:
    x = leaf(2, 3)
    inner = F.log_softmax(F.softmax(x * 2.0))
    assert half_gradients(inner.parent) == []
    assert half_gradients(inner.parent.inputs[0].parent) == inner.parent.inputs[0].parent.inputs
    assert half_gradients((inner * 2.0).parent) == [inner]


def test_a_gradient_that_is_written_twice_is_rounded_once() -> None:
    x = leaf(2, 3)
    assert half_gradients((x * x).parent) == [x]


# ---- operands of matrix products


def test_the_same_variable_in_both_slots_is_one_operand() -> None:
    v = leaf(2, 3, 3)
    reads, backward_reads = operands_of(F.batch_matmul(v, v).parent, FP8_HYBRID)
    assert [o.variable for o in reads] == [v]
    assert [o.variable for o in backward_reads][:1] == [v]


def test_backward_reads_the_factors_of_products() -> None:
    x, w, b = data(4, 3), leaf(3, 2), leaf(2)
    f = F.affine(x, w, b).parent
    assert [o.variable for o in operands_of(f, FP8_HYBRID)[1]] == [x, f.outputs[0]]
    f = F.affine(leaf(4, 3), w, b).parent
    assert [o.position for o in operands_of(f, FP8_HYBRID)[1]] == [0, 1, 0]
    f = F.adaptive_separable_convolution(data(2, 2, 5, 5), leaf(2, 3, 3, 3), data(2, 3, 3, 3)).parent
    assert [o.position for o in operands_of(f, FP8_HYBRID)[1]] == [0, 2, 0]


def test_a_single_element_is_not_worth_rounding() -> None:
    f = F.affine(data(1, 1), leaf(1, 3)).parent
    assert [[o.position for o in found] for found in operands_of(f, FP8_HYBRID)] == [[1], [0]]
    f = F.affine(leaf(1, 3), leaf(3, 1)).parent
    assert [o.attribute for o in operands_of(f, FP8_HYBRID)[1]] == ["data", "data"]


def test_layers_with_references_of_their_own_are_left_alone() -> None:
    y, *_ = PF.lstm(data(3, 2, 4), nn.Variable((1, 1, 2, 5)), nn.Variable((1, 1, 2, 5)))
    assert y.parent.info.type_name == "LSTM"
    assert operands_of(y.parent, FP8_HYBRID) == ([], [])
