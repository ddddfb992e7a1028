# SPDX-License-Identifier: Apache-2.0
"""State that forward writes is found, saved and restored; batches and windows of batches are undone."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss.graph.graph import Graph
from nnabla_adaloss.graph.names import registered_names
from nnabla_adaloss.graph.plan import GraphPlan
from nnabla_adaloss.kernels import CpuKernels
from nnabla_adaloss.undo.batch_guard import BatchGuard, ForwardState
from tests.worlds.values import constant, data


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
    assert [*guard.state.written.values()] == [w]
    guard.undo_batch()
    assert w.d.tolist() == [1.0, 1.0]


pytestmark = pytest.mark.any_context


def parameter(name: str, values: Any) -> nn.Variable:
    return nn.parameter.get_parameter_or_create(name, np.shape(values), np.array(values), need_grad=False)


def network() -> nn.Variable:
    """A batch normalization, and two parameters that need no gradient."""
    h = PF.batch_normalization(PF.affine(data(4, 3), 3, name="a"), name="bn")
    return F.mean(h * parameter("gain", [[1.0, 2.0, 3.0]]) + parameter("shift", [[0.0, 0.0, 0.0]]))


def plan_of(loss: nn.Variable) -> Tuple[Graph, GraphPlan]:
    graph = Graph(loss)
    return graph, GraphPlan(graph, names=registered_names())


def parameters(*names: str) -> List[nn.Variable]:
    found = nn.get_parameters(grad_only=False)
    return [found[name] for name in names]


def statistics() -> List[List[float]]:
    return [v.d.tolist() for v in parameters("bn/bn/mean", "bn/bn/var")]


def test_the_first_values_of_each_batch_are_kept() -> None:
    loss = network()
    state, plan, before = ForwardState(CpuKernels()), plan_of(loss), statistics()
    state.save(*plan)
    loss.forward()
    state.save(*plan)
    loss.forward()
    assert statistics() != before
    state.restore()
    assert statistics() == before
    loss.forward()
    then = statistics()
    state.drop()
    state.save(*plan)
    loss.forward()
    state.restore()
    assert statistics() == then


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
def test_writes_seen_in_the_first_forward_are_put_back_from_then_on(dtype: Any) -> None:
    loss = network()
    state, plan, (gain, shift) = ForwardState(CpuKernels()), plan_of(loss), parameters("gain", "shift")
    gain.data.cast(dtype)
    state.save(*plan)
    gain.data.data[...] = 5  # as a function of the user's own would
    state.note_changes()
    state.drop()
    state.save(*plan)
    gain.data.data[...] = 6
    # What forward did not write the first time belongs to the user.
    shift.d = 1.0
    state.note_changes()
    state.restore()
    assert gain.data.dtype == dtype
    assert gain.d.tolist() == [[5.0, 5.0, 5.0]]
    assert shift.d.tolist() == [[1.0, 1.0, 1.0]]
    shift.d = 2.0
    state.note_changes()
    state.save(*plan)
    shift.d = 3.0
    state.restore()
    assert shift.d.tolist() == [[3.0, 3.0, 3.0]]
    # Nor is it looked for again when the network is built anew.
    state.drop()
    state.save(*plan_of(network()))
    shift.d = 4.0
    state.note_changes()
    state.restore()
    assert shift.d.tolist() == [[4.0, 4.0, 4.0]]


def normalized(mean: nn.Variable, variance: nn.Variable, gain: float) -> nn.Variable:
    """A batch normalization whose running statistics are no parameters."""
    x = constant(np.full((4, 3), gain))
    ones, zeros = (constant([[v] * 3]) for v in (1.0, 0.0))
    return F.mean(F.batch_normalization(x, zeros, ones, mean, variance) * parameter("gain", [[1.0] * 3]))


def test_arrays_that_two_graphs_write_are_as_before_the_first() -> None:
    mean, variance = nn.Variable((1, 3)), nn.Variable((1, 3))
    mean.d, variance.d = 0.25, 1.0
    state = ForwardState(CpuKernels())
    for gain in (2.0, 4.0):
        loss = normalized(mean, variance, gain)
        state.save(*plan_of(loss))
        loss.forward()
        moment = state.now()
        kept = mean.d.copy()
    mean.d = 7.0
    state.restore(moment)
    assert mean.d.tolist() == kept.tolist() != [[0.25] * 3]
    state.restore()
    assert mean.d.tolist() == [[0.25] * 3]
    assert variance.d.tolist() == [[1.0] * 3]


def test_writes_of_an_interrupted_first_forward_are_put_back() -> None:
    """Nobody knows then what the rest of it would have written: it is looked for once more."""
    loss = network()
    state, plan, before = ForwardState(CpuKernels()), plan_of(loss), statistics()
    gain, shift = parameters("gain", "shift")
    state.save(*plan)
    gain.d = 5.0
    state.restore()
    assert gain.d.tolist() == [[1.0, 2.0, 3.0]]
    assert statistics() == before
    # What the user writes then is the user's.
    gain.d = 6.0
    state.restore()
    assert gain.d.tolist() == [[6.0] * 3]
    state.drop()
    state.save(*plan)
    shift.d = 7.0
    state.note_changes()
    state.restore()
    assert shift.d.tolist() == [[0.0] * 3]


def test_writes_first_seen_in_a_later_graph_are_put_back_with_that_batch() -> None:
    loss, other = network(), F.mean(nn.Variable((1, 3)) * parameter("scale", [[1.0, 1.0, 1.0]]))
    state, (scale,) = ForwardState(CpuKernels()), parameters("scale")
    state.save(*plan_of(loss))
    loss.forward()
    state.note_changes()
    state.save(*plan_of(other))
    moment = state.now()
    scale.d = 4.0  # as a function of the user's own would
    state.note_changes()
    state.restore(moment)
    assert scale.d.tolist() == [[1.0] * 3]


WRITERS: Dict[str, Callable[[nn.Variable], nn.Variable]] = {
    "assigned": lambda w: F.assign(w, 0.5 * nn.Variable((2, 3))),
    "scattered": lambda w: F.scatter_nd(constant(np.zeros((1, 3))), constant([[1]]), out=w),
    "scattered by a mask": lambda w: F.bool_scatter(constant([0.0]), constant([[0, 1, 0]] * 2), w),
    "assigned to a view": lambda w: F.assign(F.reshape(w, (6,)), 0.5 * nn.Variable((6,))),
}


@pytest.mark.parametrize("way", WRITERS)
def test_written_arrays_that_need_a_gradient_are_put_back(way: str) -> None:
    average = nn.parameter.get_parameter_or_create("average", (2, 3), np.ones((2, 3)))
    loss = F.mean(WRITERS[way](average))
    state = ForwardState(CpuKernels())
    state.save(*plan_of(loss))
    loss.forward()
    assert not average.d.all()
    state.restore()
    assert average.d.tolist() == [[1.0] * 3] * 2


def test_unlinked_arrays_read_before_they_are_computed_are_put_back() -> None:
    x = constant(np.ones((2, 3)))
    y = F.tanh(x)
    y.data.zero()
    loss = F.mean(F.exp(y.get_unlinked_variable(need_grad=False))) + F.mean(y)
    state, plan = ForwardState(CpuKernels()), plan_of(loss)
    state.save(*plan)
    loss.forward()
    assert y.d.all()
    state.restore()
    assert not y.d.any()
    y.data.clear()
    with pytest.raises(RuntimeError, match=r"an input of shape \(2, 3\) shares its data with an output"):
        state.save(*plan)
