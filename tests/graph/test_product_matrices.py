# SPDX-License-Identifier: Apache-2.0
"""Matrices of a layer's product: multiplied, they give every product that nnabla's own backward sums."""

from __future__ import annotations

from typing import Any, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, get_loss_scale_by_element_wise_range
from nnabla_adaloss.graph.matrix_products import product_matrices
from nnabla_adaloss.graph.node import Node, Scaling
from nnabla_adaloss.graph.plan import GraphPlan
from tests.graph.test_matrix_products import CASES


def products_of(case: str) -> Tuple[Any, Any, Any]:
    """Return a layer's output, its gradient, and the scalable inputs' matrices (gradient, factor)."""
    rng = np.random.default_rng(len(case))
    y = CASES[case]()
    for v in y.parent.inputs:
        v.d = rng.uniform(0.5, 1.0, v.shape)
    y.forward()
    g = rng.uniform(0.5, 1.0, y.shape).astype(np.float32)
    for v in y.parent.inputs:
        v.grad.zero()
    y.backward(g)
    (node,) = GraphPlan(y).nodes.values()
    return y, g, [(s, *matrices(node, s, g, s.factor.d)) for s in node.scalings]


def matrices(node: Node, scaling: Scaling, g: np.ndarray, factor: np.ndarray) -> Tuple[Any, Any]:
    return product_matrices(node.type_name, node.args, scaling.slot, g, factor)


@pytest.mark.parametrize("case", sorted(CASES))
def test_the_shared_axis_is_the_channels(case: str) -> None:
    _, g, found = products_of(case)
    for scaling, gradient, factor in found:
        assert gradient.shape[1] == factor.shape[0]
        assert gradient.size == g.size
        assert factor.size == scaling.factor.size


@pytest.mark.parametrize("case", ["affine", "affine_base_axis"])
def test_an_affine_layers_product_is_its_input_gradient(case: str) -> None:
    y, _, ((scaling, gradient, factor),) = products_of(case)
    x = y.parent.inputs[0]
    np.testing.assert_allclose((gradient @ factor).reshape(x.shape), x.g, rtol=1e-5)


@pytest.mark.parametrize(
    "case", ["deconvolution", "strided_deconvolution", "convolution", "grouped", "depthwise"]
)
def test_channels_pair_gradient_and_weight(case: str) -> None:
    # With all but one output channel of the gradient zero, only that channel's weights have products.
    y, g, _ = products_of(case)
    (node,) = GraphPlan(y).nodes.values()
    (scaling,) = node.scalings
    for channel in range(g.shape[1]):
        only = np.zeros_like(g)
        only[:, channel] = 1.0
        weight = y.parent.inputs[1]
        weight.grad.zero()
        y.forward()
        y.backward(only)
        seen, used = matrices(node, scaling, only, weight.g != 0)
        assert np.flatnonzero(used.any(axis=1)).tolist() == [channel]
        assert np.flatnonzero(seen.any(axis=0)).tolist() == [channel]


@pytest.mark.parametrize("square", [False, True])
def test_the_engine_asks_element_wise_methods_with_matrices(square: bool) -> None:
    nn.clear_parameters()
    rng = np.random.RandomState(0)
    width = 5 if square else 7
    x = nn.Variable.from_numpy_array(rng.randn(4, 5).astype(np.float32), need_grad=True)
    y = PF.affine(x, width, name="a", rng=rng)
    w = nn.get_parameters()["a/affine/W"]
    # Columns of very different size: pairing them the wrong way round gives another scale.
    w.d = w.d * 10.0 ** -np.arange(width)
    g = rng.randn(4, width).astype(np.float32) * 10.0 ** (np.arange(width) - width)
    config = AdaLossConfig(loss_scale_method="element_wise_range", use_bound=False)
    scaling = AdaptiveLossScaling(y, config)
    for again in (False, True):
        scaling.forward()
        scaling.backward(1.0, grad=g, again=again)
    expected = get_loss_scale_by_element_wise_range(
        g.astype(np.float32), np.ascontiguousarray(w.d.T), config=config, fan_in=width
    )
    found = scaling.layer_scales["a/affine"]
    assert found <= float(expected) < 2.0 * found
    assert found > 1.0


def test_every_method_runs_on_every_kind_of_layer() -> None:
    for case in sorted(CASES):
        for method in ("approx_range", "abs_range", "element_wise_range"):
            y = CASES[case]()
            loss = F.mean(y) * 1e-9
            scaling = AdaptiveLossScaling(loss, AdaLossConfig(loss_scale_method=method))
            for v in y.parent.inputs:
                v.grad.zero()
            scaling.forward()
            scaling.backward(1.0)
            assert all(np.isfinite(v.g).all() for v in y.parent.inputs), (case, method)
