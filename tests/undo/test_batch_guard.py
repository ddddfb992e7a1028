# SPDX-License-Identifier: Apache-2.0
"""What is undone of a batch, and of a window of batches."""

from __future__ import annotations

from typing import List

import nnabla as nn
import nnabla.functions as F
import numpy as np

from nnabla_adaloss.graph.graph import Graph
from nnabla_adaloss.graph.names import registered_names
from nnabla_adaloss.graph.plan import GraphPlan
from nnabla_adaloss.kernels import CpuKernels
from nnabla_adaloss.undo import BatchGuard


def guarded() -> BatchGuard:
    """The guard of a graph that reads a parameter without a gradient."""
    w = nn.parameter.get_parameter_or_create("w", (2,), np.ones(2), need_grad=False)
    graph = Graph(F.sum(nn.Variable((2,), need_grad=True) * w))
    plan = GraphPlan(graph, names=registered_names())
    return BatchGuard(lambda: (graph, plan), CpuKernels())


def test_a_window_is_undone_to_the_gradients_before_its_first_backward() -> None:
    guard, gradient = guarded(), nn.NdArray((2,))

    def run(first: bool, value: float) -> List[float]:
        before = gradient.data.tolist()
        guard.begin_batch(first=first)
        guard.before_backward([gradient], all_zero=False)
        gradient.fill(value)
        return before

    gradient.fill(1.0)
    guard.begin()
    before_window, before_batch = run(True, 2.0), run(False, 3.0)
    guard.undo_batch()
    assert gradient.data.tolist() == before_batch
    guard.undo_window()
    assert gradient.data.tolist() == before_window
    # Before another backward, there is nothing of the next window to undo.
    gradient.fill(4.0)
    guard.begin()
    guard.begin_batch(first=True)
    guard.undo_window()
    guard.undo_batch()
    assert gradient.data.tolist() == [4.0, 4.0]


def test_writes_of_forward_are_undone_with_the_batch() -> None:
    guard, (w,) = guarded(), nn.get_parameters(grad_only=False).values()
    guard.begin()
    guard.begin_batch(first=True)
    w.d = 2.0  # as a function of the user's own would
    guard.before_backward([], all_zero=True)
    assert guard.state.written == [w]
    guard.undo_batch()
    assert w.d.tolist() == [1.0, 1.0]
