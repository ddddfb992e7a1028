# SPDX-License-Identifier: Apache-2.0
"""Matrix products: every one that nnabla has is known, with its fan-in and the layout of its matrices."""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, List, Tuple

import nnabla as nn
import nnabla.function as function_module
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, get_loss_scale_by_element_wise_range
from nnabla_adaloss.core.components import LayerInput, NodeStructure, ScaledInput
from nnabla_adaloss.graph import functions
from nnabla_adaloss.graph.functions import UNSCALED, Function, Product, is_matrix_product, properties_of
from nnabla_adaloss.graph.plan import GraphPlan


def ones(*shape: int) -> nn.Variable:
    return nn.Variable.from_numpy_array(np.ones(shape, np.float32), need_grad=True)


# By type name, examples of each product that gets a scale.
MAKERS: Dict[str, Dict[str, Callable[[], nn.Variable]]] = {
    "Affine": {
        "affine": lambda: F.affine(ones(3, 4), ones(4, 5)),
        "affine_base_axis": lambda: F.affine(ones(3, 2, 4), ones(4, 5, 6), base_axis=2),
    },
    "Convolution": {
        "convolution": lambda: F.convolution(ones(2, 4, 60, 60), ones(6, 4, 3, 3)),
        "strided": lambda: F.convolution(ones(2, 4, 90, 90), ones(6, 4, 3, 3), stride=(2, 2)),
        "wide_stride": lambda: F.convolution(ones(1, 2, 90, 90), ones(6, 2, 2, 2), stride=(3, 3)),
        "grouped": lambda: F.convolution(ones(2, 4, 60, 60), ones(6, 2, 3, 3), group=2),
        "dilated": lambda: F.convolution(ones(2, 4, 90, 90), ones(6, 4, 3, 3), dilation=(2, 2)),
    },
    "Deconvolution": {
        "deconvolution": lambda: F.deconvolution(ones(2, 4, 8, 8), ones(4, 6, 3, 3)),
        "strided_deconvolution": lambda: F.deconvolution(
            ones(2, 4, 8, 8), ones(4, 3, 3, 3), stride=(2, 2), group=2
        ),
    },
    "DepthwiseConvolution": {
        "depthwise": lambda: F.depthwise_convolution(ones(2, 4, 60, 60), ones(8, 3, 3), multiplier=2),
        "strided_depthwise": lambda: F.depthwise_convolution(
            ones(2, 4, 90, 90), ones(4, 3, 3), stride=(2, 2)
        ),
    },
    "DepthwiseDeconvolution": {
        "depthwise_deconvolution": lambda: F.depthwise_deconvolution(ones(2, 4, 8, 8), ones(4, 3, 3)),
        "divided": lambda: F.depthwise_deconvolution(ones(2, 4, 8, 8), ones(4, 3, 3), divisor=2),
    },
    "BatchMatmul": {
        "batch_matmul": lambda: F.batch_matmul(ones(2, 3, 4), ones(2, 4, 5)),
        "transposed": lambda: F.batch_matmul(
            ones(2, 4, 3), ones(2, 5, 4), transpose_a=True, transpose_b=True
        ),
        "broadcast": lambda: F.batch_matmul(ones(2, 1, 3, 4), ones(2, 7, 4, 5)),
    },
}
CASES = {case: make for makers in MAKERS.values() for case, make in makers.items()}
SCALED = [name for name, row in functions.FUNCTIONS.items() if row.product not in (None, UNSCALED)]


def scaled_inputs_of(f: Any) -> List[ScaledInput]:
    product = properties_of(f.info.type_name).product
    shapes = [v.shape for v in f.inputs]
    return product.scaled_inputs(f.info.args, shapes, f.outputs[0].shape) if product else []


def check_that_slots_scale(y: nn.Variable) -> None:
    """Swap the weight of each slot for twice the weight during backward, as the engine does."""
    f, rng = y.parent, np.random.default_rng(0)
    for v in f.inputs:
        v.d = rng.standard_normal(v.shape)
    seed = rng.standard_normal(y.shape).astype(np.float32)

    def gradients() -> List[np.ndarray]:
        for v in f.inputs:
            v.grad.zero()
        y.backward(seed)
        return [v.g.copy() for v in f.inputs]

    y.forward()
    native, scaled_inputs = gradients(), scaled_inputs_of(f)
    assert scaled_inputs
    for scaled_input in scaled_inputs:
        weight = f.inputs[scaled_input.weight]
        own = weight.data
        weight.data = nn.NdArray.from_numpy_array(2.0 * weight.d)
        scaled = gradients()
        weight.data = own
        for index, (found, expected) in enumerate(zip(scaled, native)):
            assert expected.any()
            message = f"{f.info.type_name} ignores or spreads a swapped weight: make it UNSCALED"
            wanted = 2.0 * expected if index == scaled_input.input else expected
            np.testing.assert_array_equal(found, wanted, err_msg=message)


@pytest.mark.parametrize("type_name", SCALED)
def test_an_input_gradient_is_scaled_by_the_weight_alone(type_name: str) -> None:
    assert MAKERS.get(type_name), f"{type_name} has slots: add what makes it to MAKERS"
    for make in MAKERS[type_name].values():
        y = make()
        assert y.parent.info.type_name == type_name
        check_that_slots_scale(y)
    assert not properties_of(type_name).own_references


def test_a_product_with_references_of_its_own_cannot_be_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(functions.FUNCTIONS, "Einsum", Function(Product()))
    with pytest.raises(AssertionError, match="make it UNSCALED"):
        check_that_slots_scale(F.einsum(ones(3, 4), ones(4, 5), equation="ij,jk->ik"))


def test_a_product_of_two_weights_cannot_be_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of one weight is multiplied by the other."""
    row = Function(Product(lambda args, inputs, output: [ScaledInput(0, 1, 1.0, 1.0)]))
    monkeypatch.setitem(functions.FUNCTIONS, "AdaptiveSeparableConvolution", row)
    vertical, horizontal = ones(1, 2, 3, 3), ones(1, 2, 3, 3)
    with pytest.raises(AssertionError, match="spreads a swapped weight: make it UNSCALED"):
        check_that_slots_scale(F.adaptive_separable_convolution(ones(1, 2, 4, 4), vertical, horizontal))


@pytest.mark.parametrize("case", sorted(CASES))
def test_fan_in_is_the_number_of_products(case: str) -> None:
    y = CASES[case]()
    f = y.parent
    scaled_inputs = scaled_inputs_of(f)
    y.forward()
    for v in f.inputs:
        v.grad.zero()
    y.backward(np.ones(y.shape, np.float32))
    for scaled_input in scaled_inputs:
        counted = f.inputs[scaled_input.input].g
        assert scaled_input.fan_in_bound == counted.max()
        # At the border fewer taps meet an element.
        assert counted.mean() == pytest.approx(scaled_input.fan_in, rel=0.13)
        assert scaled_input.fan_in <= scaled_input.fan_in_bound


def products_of(case: str) -> Tuple[Any, Any, Any]:
    """Return a layer's output, its gradient, and the scalable inputs' matrices (gradient, weight)."""
    rng = np.random.default_rng(len(case))
    y = CASES[case]()
    for v in y.parent.inputs:
        v.d = rng.uniform(0.5, 1.0, v.shape)
    y.forward()
    g = rng.uniform(0.5, 1.0, y.shape).astype(np.float32)
    for v in y.parent.inputs:
        v.grad.zero()
    y.backward(g)
    (node,) = GraphPlan(y).nodes
    weights = [y.parent.inputs[scaled_input.scaled.weight].d for scaled_input in node.layer_inputs]
    return y, g, [matrices(node, scaled_input, g, w) for scaled_input, w in zip(node.layer_inputs, weights)]


def matrices(
    node: NodeStructure, scaled_input: LayerInput, g: np.ndarray, weight: np.ndarray
) -> Tuple[Any, Any]:
    product = properties_of(node.type_name).product
    assert product is not None
    return product.matrices(g, weight, node.args, scaled_input.scaled)


@pytest.mark.parametrize("case", sorted(CASES))
def test_the_shared_axis_is_the_channels(case: str) -> None:
    y, g, found = products_of(case)
    for scaled_input, (gradient, weight) in zip(scaled_inputs_of(y.parent), found):
        assert gradient.shape[1] == weight.shape[0]
        assert gradient.size == g.size
        assert weight.size == y.parent.inputs[scaled_input.weight].size
        if case.startswith("affine"):
            # Its product is the input gradient.
            x = y.parent.inputs[0]
            np.testing.assert_allclose((gradient @ weight).reshape(x.shape), x.g, rtol=1e-5)


@pytest.mark.parametrize(
    "case", ["deconvolution", "strided_deconvolution", "convolution", "grouped", "depthwise"]
)
def test_channels_pair_gradient_and_weight(case: str) -> None:
    # With all but one output channel of the gradient zero, only that channel's weights have products.
    y, g, _ = products_of(case)
    (node,) = GraphPlan(y).nodes
    (scaled_input,) = node.layer_inputs
    for channel in range(g.shape[1]):
        only = np.zeros_like(g)
        only[:, channel] = 1.0
        weight = y.parent.inputs[1]
        weight.grad.zero()
        y.forward()
        y.backward(only)
        seen, used = matrices(node, scaled_input, only, weight.g != 0)
        assert np.flatnonzero(used.any(axis=1)).tolist() == [channel]
        assert np.flatnonzero(seen.any(axis=0)).tolist() == [channel]


@pytest.mark.parametrize("square", [False, True])
def test_the_engine_asks_element_wise_methods_with_matrices(square: bool) -> None:
    rng = np.random.RandomState(0)
    width = 5 if square else 7
    y = PF.affine(ones(4, 5), width, name="a", rng=rng)
    w = nn.get_parameters()["a/affine/W"]
    # Columns of very different size: pairing them the wrong way round gives another scale.
    w.d = w.d * 10.0 ** -np.arange(width)
    g = (rng.randn(4, width) * 10.0 ** (np.arange(width) - width)).astype(np.float32)
    config = AdaLossConfig(loss_scale_method="element_wise_range", use_bound=False)
    scaling = AdaptiveLossScaling(y, config)
    for again in (False, True):
        scaling.forward()
        scaling.backward(1.0, grad=g, rerun=again)
    expected = get_loss_scale_by_element_wise_range(
        g, np.ascontiguousarray(w.d.T), config=config, fan_in=width
    )
    found = scaling.layer_scales["a/affine"]
    assert found <= float(expected) < 2.0 * found
    assert found > 1.0


PRODUCT = re.compile(
    r"affine|conv(?!ert)|correlation|matmul|dot|einsum|linear|dense|gemm|attention|rnn|lstm|gru",
    re.IGNORECASE,
)

# What has such a name and is no product with weights; of AffineGrid theta is an activation.
OTHERS = {"AffineGrid", "DequantizeLinear", "QuantizeLinear"}
FUNCTIONS = [name for name in vars(function_module) if PRODUCT.search(name) and name[0].isupper()]
GRADIENTS = [
    f"{layer}{part}Grad"
    for layer in ("Affine", "Convolution", "Deconvolution")
    for part in ("Data", "Filter")
]


@pytest.mark.parametrize(
    "type_name", [*FUNCTIONS, *GRADIENTS, "ReLU", "Embed", "EmbedFilterGrad", "PReLU", "Mul2"]
)
def test_products_are_known_and_nothing_else_is_taken_for_one(type_name: str) -> None:
    found = type_name in FUNCTIONS or type_name in GRADIENTS
    assert is_matrix_product(type_name) == (found and type_name not in OTHERS)


def test_the_search_finds_all_entries() -> None:
    assert {*SCALED, *OTHERS, "Einsum", "GRU", "INQAffine", "LSTM", "PatchCorrelation", "RNN"} <= {*FUNCTIONS}
