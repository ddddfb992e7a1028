# SPDX-License-Identifier: Apache-2.0
"""What forward does to memory: which inputs functions write; when leaves are read, and outputs written."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, Optional, Set, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss.graph import functions
from nnabla_adaloss.graph.float_tail import float_context
from nnabla_adaloss.graph.functions import hands_memory_on, written_inputs
from nnabla_adaloss.graph.graph import Graph
from nnabla_adaloss.graph.memory_uses import memory_uses

IMAGES, CHANNELS = (2, 3, 4, 4), (1, 3, 1, 1)


def variable(*shape: int) -> nn.Variable:
    rng = np.random.RandomState(len(shape))
    return nn.Variable.from_numpy_array((np.abs(rng.randn(*shape)) + 0.1).astype(np.float32))


def changed(y: nn.Variable) -> Set[int]:
    """Indices of the inputs of a function that change when it runs, three times: some count."""
    inputs = y.parent.inputs
    before = [v.d.copy() for v in inputs]
    for _ in range(3):
        y.forward()
    return {i for i, v in enumerate(inputs) if not np.array_equal(v.d, before[i])}


def properties_of(y: nn.Variable) -> FrozenSet[int]:
    return written_inputs(y.parent.info.type_name, y.parent.info.args)


def fused_convolution(**options: Any) -> nn.Variable:
    names = ("beta", "gamma", "mean", "variance")
    statistics = {name: variable(*CHANNELS) for name in names}
    return F.fused_convolution(variable(*IMAGES), variable(3, 3, 3, 3), **statistics, **options)


def min_max_quantized(**options: Any) -> nn.Variable:
    low, high, levels = variable(1, 1), variable(1, 1), [variable(1, 1), variable(1, 1)]
    high.d, levels[0].d, levels[1].d = 2.0, 0.0, 255.0
    return F.min_max_quantize(variable(4, 4), low, high, *levels, **options)


def first_of(function: Callable[..., Any]) -> Callable[..., nn.Variable]:
    return lambda *inputs: function(*inputs)[0]


NORMALIZED = [IMAGES, *[CHANNELS] * 4]
SUBTRACTED = [IMAGES, (3, 4, 4), (1,)]
KERNEL = (3, 3, 3, 3)
ROWS = nn.Variable.from_numpy_array(np.array([[1, 2]]))
# What computes it, the shapes of its inputs, and which of them are written.
CASES: Dict[str, Tuple[Callable[..., Any], List[Any], Set[int]]] = {
    "assign": (lambda x: F.assign(x, nn.Variable((2, 3))), [(2, 3)], {0}),
    "bool scatter": (F.bool_scatter, [(3,), (2, 3), (2, 3)], {2}),
    "batch normalization": (F.batch_normalization, NORMALIZED, {3, 4}),
    "of running statistics": (partial(F.batch_normalization, batch_stat=False), NORMALIZED, set()),
    "fused": (F.fused_batch_normalization, NORMALIZED, {3, 4}),
    "fused convolution": (fused_convolution, [], {4, 5}),
    "fused convolution of running statistics": (partial(fused_convolution, batch_stat=False), [], set()),
    "mean subtraction": (F.mean_subtraction, SUBTRACTED, {1, 2}),
    "of a running mean": (partial(F.mean_subtraction, update_running_mean=False), SUBTRACTED, set()),
    "min max quantize": (partial(min_max_quantized, x_min_max=True, ema=True), [], {1, 2}),
    "min max quantize of this batch": (partial(min_max_quantized, x_min_max=True), [], {1, 2}),
    "spectral norm": (F.spectral_norm, [(4, 3), (4,)], {1}),
    "binary connect": (F.binary_connect_affine, [(2, 3), (3, 4), (3, 4)], {2}),
    "binary weight": (F.binary_weight_affine, [(2, 3), (3, 4), (3, 4), (4, 1)], {2, 3}),
    "binary connect convolution": (F.binary_connect_convolution, [IMAGES, KERNEL, KERNEL], {2}),
    "binary weight convolution": (F.binary_weight_convolution, [IMAGES, KERNEL, KERNEL, (3,)], {2, 3}),
    "scatter": (lambda u, w: F.scatter_nd(u, ROWS, out=w), [(2, 3), (4, 3)], {2}),
    "quantize linear": (F.quantize_linear, [(2, 3), (1, 1), (1, 1)], {2}),
    "lstm": (first_of(F.lstm), [(2, 3, 4), (1, 1, 3, 5), (1, 1, 3, 5), (1, 4, 5, 9)], set()),
    "gru": (first_of(F.gru), [(2, 3, 4), (1, 1, 3, 5), (1, 3, 5, 9)], set()),
    "rnn": (first_of(F.rnn), [(2, 3, 4), (1, 1, 3, 5), (1, 5, 9)], set()),
}


@pytest.mark.parametrize("name", CASES)
def test_arrays_that_forward_writes_are_known(name: str) -> None:
    function, shapes, written = CASES[name]
    y = function(*(variable(*shape) for shape in shapes))
    assert changed(y) == written == properties_of(y)


def test_arrays_that_backward_writes_are_known() -> None:
    x = variable(2, 3)
    x.need_grad = True
    y = F.vat_noise(x, variable(2, 3))
    assert changed(y) == set()
    written, before = y.parent.inputs[1], y.parent.inputs[1].d.copy()
    y.backward()
    assert (written.d != before).all()
    assert properties_of(y) == {1}


@pytest.mark.parametrize(
    "make",
    [
        lambda: PF.inq_affine(variable(2, 3), 4, inq_iterations=(1, 2)),
        lambda: PF.inq_convolution(variable(*IMAGES), 4, (3, 3), inq_iterations=(1, 2)),
    ],
)
def test_weights_that_are_fixed_while_training_are_written(make: Callable[[], nn.Variable]) -> None:
    y = make()
    # They are put back to what they were when they were fixed.
    y.forward()
    y.forward()
    y.parent.inputs[1].d = 1.0
    assert changed(y) == {1, 2} == properties_of(y)


@pytest.mark.parametrize(
    ("make", "handed"),
    [
        (lambda x: F.reshape(x, (6,)), True),
        (lambda x: F.reshape(x, (6,), inplace=False), False),
        (F.unlink, True),
        (F.identity, False),
        (partial(F.relu, inplace=True), False),
        (lambda x: F.add2(x, variable(2, 3), inplace=True), False),
        (lambda x: F.bool_scatter(variable(3), variable(2, 3), x), False),
    ],
)
def test_functions_that_hand_on_the_memory_of_their_input_are_known(make: Any, handed: bool) -> None:
    x = variable(2, 3)
    f = make(x).parent
    assert hands_memory_on(f.info.type_name, f.info.args) == handed
    assert handed == (f.inplace_data(0) == 1)


def test_programs_for_several_ranks_write_as_on_one() -> None:
    assert written_inputs("SyncBatchNormalization", {"batch_stat": True}) == {3, 4}


def test_a_float_context_has_each_backend_once() -> None:
    half = nn.Context(["cudnn:half", "cuda:half", "cpu:half", "cpu:float"], "CudaCachedArray", "0")
    assert float_context(half).backend == ["cudnn:float", "cuda:float", "cpu:float"]


def cut(v: nn.Variable) -> nn.Variable:
    return v.get_unlinked_variable(need_grad=False)


class Uses:
    """By variable, the type of the function that uses its memory."""

    def __init__(self, loss: nn.Variable, names: Mapping[int, str] = {}) -> None:
        graph = Graph(loss)
        found = memory_uses(graph.description(names))
        types = [*graph.described.type_names, "never"]
        self.leaves, self.outputs = (
            {graph.variables[p]: types[index] for p, index in uses.items()}
            for uses in (found.leaves, found.outputs)
        )
        self.cut_off = len(found.cut_off)


def test_leaves_are_read_and_outputs_written() -> None:
    x, t = nn.Variable((2, 3)), nn.Variable((2, 3))
    h = F.tanh(x)
    uses = Uses(F.squared_error(F.sin(h), F.exp(t) + x))
    assert uses.leaves == {x: "Tanh", t: "Exp"}
    assert (uses.outputs[h], len(uses.outputs), uses.cut_off) == ("Tanh", 5, 0)


def test_parameters_are_left_out() -> None:
    x, w = nn.Variable((2, 3)), nn.Variable((2, 3), need_grad=True)
    assert Uses(F.mean(x * w), {hash(w): "w"}).leaves.keys() == {x}
    assert Uses(F.mean(x * w)).leaves.keys() == {x, w}


@pytest.mark.parametrize(
    ("build", "first"),
    [
        (lambda y: F.sin(y) * F.exp(cut(y)), None),
        (lambda y: F.exp(cut(y)) * F.sin(y), "Exp"),
        (lambda y: F.exp(cut(y)) * F.sin(y) + F.cos(cut(y)), "Exp"),
        (lambda y: y - cut(y), None),
        # Reshaped in place, it is neither read nor written.
        (lambda y: F.reshape(cut(y), (6,)) * F.reshape(y, (6,)), None),
        (lambda y: F.reshape(cut(y), (6,), inplace=False) * F.reshape(y, (6,)), "Reshape"),
        (lambda y: (lambda flat: F.sin(flat) * cut(flat))(F.reshape(y, (6,))), None),
        (lambda y: F.mean(F.sin(y)) + F.mean(F.exp(cut(y))) + F.mean(F.cos(F.reshape(y, (6,)))), None),
        (lambda y: F.exp(F.unlink(cut(y))) * y, "Exp"),
    ],
)
def test_the_order_tells_when_an_unlinked_array_is_read(
    build: Callable[[nn.Variable], nn.Variable], first: Optional[str]
) -> None:
    x = nn.Variable((2, 3))
    y = F.tanh(x)
    uses = Uses(F.mean(build(y)))
    uses.leaves.pop(x)
    assert uses.leaves == ({} if first is None else {y: first})
    assert uses.cut_off == (first is None)


def test_memory_that_is_handed_on_is_not_written() -> None:
    x = nn.Variable((2, 3))
    flat = F.unlink(F.reshape(x, (6,)))
    uses = Uses(F.mean(F.sin(flat)))
    assert (uses.leaves, len(uses.outputs)) == ({x: "Sin"}, 2)
    assert Uses(flat).leaves == {x: "never"}


def test_no_function_has_two_rows() -> None:
    names = [name for names in functions._ROWS for name in names.split()]
    assert sorted(names) == sorted(set(names))


NEVER_ENLARGE: Dict[str, Callable[..., Any]] = {
    "Identity": F.identity,
    "ReLU": F.relu,
    "Reshape": lambda x: F.reshape(x, (4, 3)),
    "Sigmoid": F.sigmoid,
    "Tanh": F.tanh,
    "Transpose": lambda x: F.transpose(x, (1, 0)),
    "Add2": F.add2,
    "Sub2": F.sub2,
}


def test_functions_said_never_to_enlarge_a_gradient_do_not() -> None:
    assert {name for name, row in functions.FUNCTIONS.items() if row.never_enlarges} == {*NEVER_ENLARGE}
    for name, function in {**NEVER_ENLARGE, "Mul2": F.mul2}.items():
        rng = np.random.RandomState(0)
        inputs = [variable(3, 4) for _ in range(1 + name.endswith("2"))]
        for v in inputs:
            v.d, v.need_grad = 4.0 * rng.randn(3, 4), True
            v.grad.zero()
        y = function(*inputs)
        y.forward()
        y.backward(np.sign(rng.randn(*y.shape)).astype(np.float32))
        # It is not in the table for nothing: others do.
        assert any(np.abs(v.g).max() > 1.0 for v in inputs) == (name == "Mul2")


DIFFERENTIATED: Dict[str, Callable[..., Any]] = {
    "Div2": F.div2,
    "Exp": F.exp,
    "Log": F.log,
    "Mul2": F.mul2,
    "MulScalar": lambda x: F.mul_scalar(x, -0.3),
    "PowScalar": lambda x: F.pow_scalar(x, -1.5),
    "RDivScalar": lambda x: F.r_div_scalar(x, -0.3),
    "RPowScalar": lambda x: F.r_pow_scalar(x, 0.3),
    "SquaredError": F.squared_error,
    "Sum": F.sum,
    "Where": F.where,
}


@pytest.mark.parametrize("values", [(0.4, 1.7, 2.3), (3.1, 0.2, 0.6), (0.0, 2.9, 5.3)])
def test_derivatives_are_those_of_nnabla(values: Tuple[float, ...]) -> None:
    assert {name for name, row in functions.FUNCTIONS.items() if row.derivatives} == {*DIFFERENTIATED}
    for name, function in DIFFERENTIATED.items():
        derivatives, first = functions.properties_of(name).derivatives, int(name != "Where")
        inputs = [variable(1) for _ in derivatives]
        for v, value in zip(inputs, values[first:]):
            v.d, v.need_grad = value, True
            v.grad.zero()
        y = function(*inputs)
        y.forward()
        y.backward()
        for v, derivative in list(zip(inputs, derivatives))[1 - first :]:
            read = [float([*inputs, y][i].d[0]) for i in derivative.reads]
            assert derivative.of(y.parent.info.args, 1, *read) == pytest.approx(float(v.g[0]), rel=1e-5)


@pytest.mark.parametrize("name", ["Div2", "Log", "Mul2", "PowScalar", "RDivScalar"])
def test_degrees_tell_how_a_factor_of_an_input_counts_where_it_cannot_be_read(name: str) -> None:
    for index, derivative in enumerate(functions.properties_of(name).derivatives):
        found = []
        for factor in (1.0, 16.0):
            inputs = [variable(1) for _ in functions.properties_of(name).derivatives]
            for i, v in enumerate(inputs):
                v.d, v.need_grad = 0.7 * (factor if i == index else 1.0), True
                v.grad.zero()
            y = DIFFERENTIATED[name](*inputs)
            y.forward()
            y.backward()
            found.append(factor * float(inputs[index].g[0]))
        assert found[1] / found[0] == pytest.approx(16.0 ** derivative.degree(y.parent.info.args), rel=1e-5)
