# SPDX-License-Identifier: Apache-2.0
"""Which functions of a half graph compute in float, and that replacing them changes nothing else."""

from __future__ import annotations

import logging
import re
from typing import Any, Callable, List, Set, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import LossScaleWarning
from nnabla_adaloss.graph.float_tail import TailReader, float_tail
from nnabla_adaloss.graph.graph import Graph
from tests.worlds.tampering import Gate
from tests.worlds.values import HALF, constant

WARNING = (
    r"rounds constants: {} \({}\): {} is 0 in half precision\. Functions that draw random numbers, or that "
    r"a function in Python follows.* as in `with nn.context_scope\("
    r"nn.Context\(\['cpu:float'\], 'CpuCachedArray', '0'\)\)"
)
Make = Callable[[nn.Variable], nn.Variable]


def leaf(*shape: int) -> nn.Variable:
    v = constant(np.ones(shape))
    v.need_grad = True
    return v


def graph(make: Make) -> nn.Variable:
    with nn.context_scope(HALF):
        return make(F.tanh(leaf(4, 3)))


def moved(loss: nn.Variable) -> Tuple[Graph, TailReader]:
    """The graph of `loss`, and what was moved to float in it."""
    reader = TailReader(loss, float_tail=True)
    return reader.read(), reader


def in_float(loss: nn.Variable) -> Set[str]:
    """Types of the functions that do not compute in half."""
    described = Graph(loss).described
    half = set(described.in_half)
    return {name for index, name in enumerate(described.type_names) if index not in half}


CASES: List[Any] = [
    pytest.param(lambda h: F.mean(h) * 1e-8, {"Mean", "MulScalar"}, id="weight"),
    pytest.param(lambda h: F.mean(h) + 1e-9 * F.mean(h * h), {"Mean", "MulScalar", "Add2"}, id="two terms"),
    pytest.param(lambda h: F.mean(h) * F.constant(1e-9, ()), {"Mean", "Constant", "Mul2"}, id="constant"),
    pytest.param(lambda h: 1e-9 / (1.0 + F.mean(h)), {"Mean", "AddScalar", "RDivScalar"}, id="quotient"),
    pytest.param(
        lambda h: F.sum(F.stack(F.mean(h), F.mean(h) * 1e-9)),
        {"Mean", "MulScalar", "Stack", "Sum"},
        id="stack",
    ),
    pytest.param(lambda h: F.reshape(F.mean(h), (1,)) * 2.0, {"Mean", "Reshape", "MulScalar"}, id="reshape"),
    pytest.param(lambda h: F.sum((h * 1e-9) * 0.5), {"Sum", "MulScalar"}, id="constant of several"),
    pytest.param(lambda h: F.sum(F.maximum_scalar(h, 1e-8)), {"Sum", "MaximumScalar"}, id="threshold"),
    pytest.param(lambda h: F.sum(h * 0.1), {"Sum"}, id="a constant that half holds"),
    pytest.param(lambda h: F.sum(F.leaky_relu(h, 0.2)), {"Sum"}, id="slope"),
    pytest.param(lambda h: PF.affine(F.reshape(h, (1, 12)), 1), set(), id="a layer of one output"),
    pytest.param(lambda h: PF.affine(F.reshape(F.mean(h), (1, 1)), 1), set(), id="behind such a layer"),
    pytest.param(lambda h: F.mean(PF.batch_normalization(h)), {"Mean"}, id="batch normalization"),
    # A random function of one element with a seed keeps its generator.
    pytest.param(lambda h: F.mean(h) * F.rand(shape=(), seed=3), {"Mean", "Mul2"}, id="draws"),
]


@pytest.mark.parametrize(("make", "expected"), CASES)
def test_functions_that_compute_in_float(make: Make, expected: Set[str]) -> None:
    loss = graph(make)
    reading, tail = moved(loss)
    assert in_float(loss) == expected
    assert len(tail.functions) == len(reading.functions) - len(reading.described.in_half)
    assert not tail.warning


@pytest.mark.parametrize(
    ("constant", "lost"),
    [
        *((c, True) for c in (6e-8, 1e-6, 7e4, 1e9)),
        *((c, False) for c in (0.0, 2.0**-24, 2.0**-20, 0.1, 65504.0, float("inf"), float("nan"))),
    ],
)
def test_constants_that_half_cannot_hold(constant: float, lost: bool) -> None:
    loss = graph(lambda h: F.sum(F.tanh(h * constant)))
    moved(loss)
    assert ("MulScalar" in in_float(loss)) == lost


def test_a_float_graph_and_one_that_was_moved_stay_as_they_are() -> None:
    was_moved = graph(lambda h: F.mean(h) * 1e-8)
    moved(was_moved)
    for loss in (F.mean(F.tanh(leaf(4, 3)) * 1e-9) * 1e-8, was_moved):
        before = Graph(loss).keys
        reading, tail = moved(loss)
        assert (tail.functions, tail.warning, reading.keys) == (frozenset(), "", before)


def test_a_mean_over_more_than_half_can_count() -> None:
    """1/N of 40000 is subnormal; that of 16 is exact."""
    with nn.context_scope(HALF):
        long = F.sum(F.tanh(F.mean(leaf(4, 40000), axis=1)))
        short = F.sum(F.tanh(F.mean(leaf(4, 16), axis=1)))
    for loss, expected in ((long, {"Sum", "Mean"}), (short, {"Sum"})):
        moved(loss)
        assert in_float(loss) == expected


def test_variables_of_the_user_stay_part_of_the_graph() -> None:
    with nn.context_scope(HALF):
        h = F.tanh(leaf(4, 3))
        mean = F.mean(h)
        frozen = F.mean(h * 0.5)
        frozen.need_grad = False
        loss = mean * 1e-8 + frozen
    mean.persistent, mean.name = True, "mean"
    moved(loss)
    loss.forward()
    assert mean.persistent
    assert mean.name == "mean"
    assert mean.data.dtype == np.float32
    assert not frozen.need_grad
    assert float(mean.d) == pytest.approx(np.tanh(1.0), rel=1e-3)
    assert float(loss.d) == pytest.approx(float(mean.d) * 1e-8 + float(frozen.d), rel=1e-6)


@pytest.mark.parametrize("cleared", [False, True])
def test_results_are_computed_again_unless_they_were_cleared(cleared: bool) -> None:
    loss = graph(lambda h: F.mean(h) * 1e-8)
    loss.forward(clear_buffer=cleared)
    _, tail = moved(loss)
    if cleared:
        with pytest.raises(RuntimeError, match="forward has to run again"):
            tail.before_backward()
        loss.forward()
    assert float(loss.d) == pytest.approx(np.tanh(1.0) * 1e-8, rel=1e-3)


def same(h: nn.Variable) -> nn.Variable:
    """What a function in Python makes of it."""
    return Gate(HALF)(h)


def slope(h: nn.Variable) -> nn.Variable:
    """An input gradient, with the functions in Python that nn.grad makes of layers."""
    h = PF.affine(h, 2, name="a")
    return nn.grad([PF.affine(F.softplus(h), 1, name="b")], [h])[0]


@pytest.mark.parametrize(
    ("read", "label"),
    [(same, "MulScalar"), (lambda h: same(F.tanh(h)), "MulScalar"), (slope, "a/affine/MulScalar")],
)
def test_outputs_that_python_reads_stay_in_half_and_are_named(read: Make, label: str) -> None:
    loss = graph(lambda h: F.sum(read(h * 1e-8)))
    reader = TailReader(loss, float_tail=True)
    reader.read()
    assert in_float(loss).isdisjoint({"MulScalar"})
    with pytest.warns(LossScaleWarning, match=WARNING.format(label, "MulScalar", "1e-08")):
        reader.before_backward()
    loss.forward()
    loss.backward()


def test_a_random_function_keeps_its_generator_and_is_named_once() -> None:
    reader = TailReader(graph(lambda h: F.mean(h * F.rand_beta(1e-9, 1e-9, shape=(4, 3)))), float_tail=True)
    reader.read()
    assert re.match("half precision " + WARNING.format("RandBeta", "RandBeta", "1e-09"), reader.warning)


def test_scalars_that_python_reads_in_another_graph_stay_in_half() -> None:
    with nn.context_scope(HALF):
        h = leaf(4, 3) * 1e-8
        losses = [F.sum(h), F.sum(same(F.tanh(h)))]
    moved(losses[0])
    assert in_float(losses[0]) == {"Sum"}
    for loss in losses:
        loss.forward()


def test_mixed_half_is_half() -> None:
    loss = graph(lambda h: F.mean(h) * 1e-8)
    reading = Graph(loss)
    mixed = reading.described._replace(backends=[["cudnn:mixed_half", "cudnn:float"]] * 3)
    assert mixed.in_half == [0, 1, 2]
    assert sorted(float_tail(reading, mixed.in_half)[0]) == [1, 2]


def test_a_graph_with_nothing_to_move_does_not_use_up_the_report(caplog: pytest.LogCaptureFixture) -> None:
    plain = TailReader(F.mean(leaf(4, 3)), float_tail=True)
    plain.read()
    plain.before_backward()
    loss = graph(lambda h: F.mean(h) * 1e-8)
    with caplog.at_level(logging.INFO, "nnabla_adaloss"):
        for _ in range(2):
            reader = TailReader(loss, float_tail=True)
            reader.go_on_from(plain)
            reader.read()
            reader.before_backward()
            plain, loss = reader, graph(lambda h: F.mean(h) * 1e-8)
    assert len(caplog.records) == 1
