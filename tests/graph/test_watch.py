# SPDX-License-Identifier: Apache-2.0
"""Changes of a graph that are noticed, and those that are none."""

from __future__ import annotations

import nnabla as nn
import nnabla.functions as F
import numpy as np

from nnabla_adaloss.graph.watch import GraphWatch


def test_nothing_changed() -> None:
    x = nn.Variable.from_numpy_array(np.ones((2, 3), np.float32), need_grad=True)
    y = F.sum(F.tanh(x))
    watch = GraphWatch([x, y.parent.inputs[0], y])
    y.forward(clear_no_need_grad=True)
    y.backward(clear_buffer=True)
    x.d = 2.0
    x.grad.zero()
    assert not watch.changed


def test_a_leaf_or_an_intermediate_that_needs_no_gradient_any_more() -> None:
    x = nn.Variable((2, 3), need_grad=True)
    h = F.tanh(x)
    for v in (x, h):
        watch = GraphWatch([x, h])
        v.need_grad = False
        assert watch.changed
        assert not watch.rewired
        v.need_grad = True
        assert not watch.changed


def test_a_rewired_graph() -> None:
    x = nn.Variable((2, 3), need_grad=True)
    h = F.tanh(x)
    watch = GraphWatch(F.sum(h).parent.inputs)
    h.rewire_on(F.sigmoid(x))
    assert watch.changed
    assert watch.rewired


def test_an_activation_that_is_to_be_computed_again() -> None:
    x = nn.Variable((2, 3), need_grad=True)
    h = F.tanh(x)
    watch = GraphWatch([x, h], [h])
    h.recompute = True
    assert watch.changed
    h.recompute = False
    assert not watch.changed


def test_a_function_that_needs_a_gradient_since_the_last_forward() -> None:
    x = nn.Variable((2, 3))
    x.d = 0.0
    h = F.tanh(x)
    h.need_grad = True
    x.need_grad = True
    watch = GraphWatch([x, h], [h], [h.parent])
    h.forward()
    assert watch.changed
    assert not watch.rewired
