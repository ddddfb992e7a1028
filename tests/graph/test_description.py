# SPDX-License-Identifier: Apache-2.0
"""Graphs as they are read: nnabla's order, and descriptions that are equal where plans are."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any, Callable, Dict, List, Sequence, Set, Tuple, Union

import hypothesis.strategies as st
import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from nnabla_adaloss.graph.description import GraphDescription, visited
from nnabla_adaloss.graph.graph import Graph
from nnabla_adaloss.graph.names import registered_names
from tests.worlds.random_graphs import STEPS, build, seeds
from tests.worlds.tampering import Gate
from tests.worlds.values import bits, constant, zero_grads


def network(
    *,
    slope: float = 0.1,
    inplace: bool = False,
    recompute: bool = False,
    shape: Tuple[int, int] = (4, 3),
    second: str = "b",
    skip: str = "h",
    frozen: bool = False,
    named: bool = True,
    stop: bool = False,
    backend: str = "cpu:float",
) -> GraphDescription:
    """A small network with everything that can be told apart, in the parameters that are there."""
    with nn.context_scope(nn.Context([backend, "cpu:float"])):
        x = nn.Variable(shape)
        h = PF.affine(x, 3, name="a")
        if stop:
            h.need_grad = False
        activated = F.leaky_relu(h, slope, inplace=inplace)
        activated.recompute = recompute
        y = F.tanh(PF.affine(activated, 3, name=second, fix_parameters=frozen))
        loss = F.mean(y + {"h": h, "x": x, "activated": activated}[skip])
    return Graph(loss).description(registered_names() if named else {})


class Called(Gate):
    """Its name is an ordinary method, as in published code, where nnabla asks for a property."""

    def name(self) -> str:  # type: ignore[override]
        return "TwoWords"


def test_a_function_of_python_whose_name_is_a_method_is_described_by_the_name() -> None:
    def described() -> GraphDescription:
        called = Called(nn.get_current_context())
        return Graph(F.mean(called(PF.affine(nn.Variable((4, 3)), 2, name="a")))).description({})

    assert described() == described()
    assert described().type_names == ["Affine", "TwoWords", "Mean"]


@pytest.mark.parametrize(
    "changed",
    [
        {"slope": 0.2},
        {"inplace": True},
        {"recompute": True},
        {"shape": (5, 3)},
        {"second": "other parameters"},
        {"second": "a"},
        {"skip": "x"},
        {"skip": "activated"},
        {"frozen": True},
        {"named": False},
        {"stop": True},
        {"backend": "cpu:half"},
    ],
    ids=str,
)
def test_properties_that_plans_depend_on_make_another_topology(changed: Dict[str, Any]) -> None:
    assert network() == network() != network(**changed)


def test_a_graph_is_described_before_forward_as_after_it() -> None:
    found = []
    for halfway in (False, True):
        x = nn.Variable((2, 3))
        x.d = 1.0
        h = F.tanh(PF.affine(x, 3, name="a"))
        if halfway:
            h.forward()
        loss = F.mean(PF.affine(F.sigmoid(h), 2, name="b")) + F.mean(h)
        found.append(Graph(loss).description(registered_names()))
        loss.forward()
        found.append(Graph(loss).description(registered_names()))
    assert all(described == found[0] for described in found)


# Nothing of the functions that are visited is kept.


def test_nothing_is_left_to_the_garbage_collector() -> None:
    loss = F.mean(F.tanh(nn.Variable((2, 3), need_grad=True)))
    # What other tests left behind may take several rounds: nnabla lets go of Python's objects in between.
    for _ in range(10):
        if not gc.collect():
            break
    gc.disable()
    try:
        visited(loss)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_deep_graphs_are_visited_without_recursion() -> None:
    h = nn.Variable((1,), need_grad=True)
    for _ in range(5000):
        h = F.identity(h)
    assert len(visited(h)[0]) == 5000


# What backward reads is what nnabla says: whatever else is overwritten, gradients stay what they are.


def leaf(*shape: int, seed: int = 0, need_grad: bool = True) -> nn.Variable:
    v = constant(np.random.default_rng([seed, *shape]).standard_normal(shape))
    v.need_grad = need_grad
    return v


def matrix(*, seed: int = 0) -> nn.Variable:
    return leaf(4, 6, seed=seed)


def image() -> nn.Variable:
    return leaf(2, 4, 6, 6)


def normalized(*, batch_stat: bool) -> nn.Variable:
    """By statistics of the batch, or by running ones."""
    shape = (1, 4, 1, 1)
    running = leaf(*shape, seed=2, need_grad=False), constant(np.full(shape, 0.5))
    return F.batch_normalization(image(), leaf(*shape), leaf(*shape, seed=1), *running, batch_stat=batch_stat)


Outputs = Union[nn.Variable, Sequence[nn.Variable]]

OF_ONE = F.identity, F.tanh, F.softmax, F.relu, F.elu, F.exp, F.abs
OF_TWO = F.add2, F.mul2, F.div2, F.maximum2, F.squared_error
ALONG_AN_AXIS = F.sum, F.mean, F.max, F.norm, F.cumsum, F.sort, F.split

# Each way in which functions read: all or some inputs, the output, in place; and what is made of weights.
KINDS: Dict[str, Callable[[], Outputs]] = {
    "affine": lambda: F.affine(matrix(), leaf(6, 3), leaf(3)),
    "convolution": lambda: F.convolution(image(), leaf(3, 4, 3, 3), leaf(3)),
    "deconvolution": lambda: F.deconvolution(image(), leaf(4, 3, 3, 3), leaf(3)),
    "depthwise convolution": lambda: F.depthwise_convolution(image(), leaf(4, 3, 3), leaf(4)),
    "fused convolution": lambda: F.fused_convolution(image(), leaf(3, 4, 3, 3), leaf(3), nonlinearity="relu"),
    "batch matmul": lambda: F.batch_matmul(leaf(2, 3, 4), leaf(1, 5, 4), transpose_b=True),
    "einsum": lambda: F.einsum(matrix(), leaf(6, 3), equation="ij,jk->ik"),
    "lstm": lambda: F.lstm(leaf(3, 2, 4), leaf(1, 1, 2, 5), leaf(1, 1, 2, 5, seed=1), leaf(1, 4, 5, 9)),
    "embed": lambda: F.embed(constant([[1, 2], [0, 2]]), leaf(3, 4)),
    "transpose": lambda: F.transpose(matrix(), (1, 0)),
    "reshape in place": lambda: F.reshape(F.tanh(matrix()), (6, 4), inplace=True),
    "add in place": lambda: F.add2(F.tanh(matrix()), matrix(seed=1), inplace=True),
    "relu in place": lambda: F.relu(F.tanh(matrix()), inplace=True),
    "multiply that broadcasts": lambda: F.mul2(matrix(), leaf(1, 6)),
    "multiply three": lambda: F.mul_n(matrix(), matrix(seed=1), matrix(seed=2)),
    "times a constant": lambda: matrix() * 3.0,
    "to the power of a constant": lambda: matrix() ** 3,
    "concatenate": lambda: F.concatenate(matrix(), leaf(4, 2), axis=1),
    "slice": lambda: F.slice(matrix(), (1, 0), (4, 6), (2, 3)),
    "where": lambda: F.where(constant(np.arange(24).reshape(4, 6) % 2), matrix(), matrix(seed=1)),
    "weight normalization": lambda: F.weight_normalization(matrix(), leaf(6), dim=1),
    "weight standardization": lambda: F.weight_standardization(leaf(3, 4, 3, 3), channel_axis=0),
    "spectral norm": lambda: F.spectral_norm(matrix(), leaf(4, need_grad=False), itr=1),
    "prelu": lambda: F.prelu(matrix(), leaf(6)),
    "dropout": lambda: F.dropout(matrix(), 0.5, seed=3),
    "max pooling": lambda: F.max_pooling(image(), (2, 2)),
    "batch normalization": lambda: normalized(batch_stat=True),
    "batch normalization by running statistics": lambda: normalized(batch_stat=False),
    "layer normalization": lambda: F.layer_normalization(matrix(), leaf(1, 6), leaf(1, 6, seed=1)),
    "softmax cross entropy": lambda: F.softmax_cross_entropy(matrix(), constant([[1], [2], [0], [3]])),
    **{f.__name__: partial(lambda f: f(matrix()), f) for f in OF_ONE},
    **{f.__name__: partial(lambda f: f(matrix(), matrix(seed=1)), f) for f in OF_TWO},
    **{f.__name__: partial(lambda f: f(matrix(), axis=1), f) for f in ALONG_AN_AXIS},
}


def last(outputs: Outputs) -> Any:
    """The function that has computed them."""
    return (outputs if isinstance(outputs, nn.Variable) else outputs[0]).parent


def weighed(outputs: Outputs) -> nn.Variable:
    """A loss that gives each element of the outputs a gradient of its own."""
    each = [outputs] if isinstance(outputs, nn.Variable) else outputs
    return sum(F.sum(y * leaf(*y.shape, seed=9, need_grad=False)) for y in each)


def memory(v: nn.Variable) -> int:
    return v.d.__array_interface__["data"][0]


def unread(graph: Graph) -> List[nn.Variable]:
    """The variables that backward does not read. Where functions work in place, some are one array; what is
    computed again has none until then.
    """
    described, read = graph.described, set()
    present = {p: v for p, v in enumerate(graph.variables) if not described.recomputed[p]}
    for index, f in enumerate(graph.functions):
        of = {*described.inputs.by_function()[index], *described.outputs.by_function()[index]}
        for position in of & present.keys() if described.need_grads[index] else ():
            if described.reads(f, index, position):
                read.add(memory(present[position]))
    return [v for v in present.values() if memory(v) not in read]


def bits_of_gradients(loss: nn.Variable, *, overwrites: bool) -> List[np.ndarray]:
    """The gradients of all leaves that get one, with what backward does not read overwritten with NaN."""
    nn.seed(0)
    loss.forward()
    graph = Graph(loss)
    leaves = [graph.variables[p] for p in sorted(graph.needed)]
    for v in unread(graph) if overwrites else ():
        v.d = np.nan
    zero_grads(leaves)
    loss.backward(clear_buffer=False)
    assert overwrites or all(np.isfinite(v.g).all() for v in leaves)
    return [bits(v.g.copy()) for v in leaves]


def assert_unread(build: Callable[[], nn.Variable]) -> None:
    expected, found = (bits_of_gradients(build(), overwrites=overwrites) for overwrites in (False, True))
    assert expected
    np.testing.assert_equal(found, expected)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_arrays_that_backward_does_not_read_may_hold_anything(kind: str) -> None:
    count = sum(v.need_grad for v in last(KINDS[kind]()).inputs)
    # All gradients at once, and that of each input by itself.
    for wanted in [None, *range(count)] if count > 1 else [None]:

        def build(wanted: Any = wanted) -> nn.Variable:
            outputs = KINDS[kind]()
            for number, v in enumerate([v for v in last(outputs).inputs if v.need_grad]):
                if wanted is not None and v.parent is None:
                    v.need_grad = number == wanted
            return weighed(outputs)

        assert_unread(build)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(seeds, st.lists(st.sampled_from([name for name in STEPS if name != "recompute"]), max_size=6))
def test_reading_arrays_in_any_network(seed: int, steps: List[str]) -> None:
    assert_unread(lambda: build(seed, steps, input_gradient=bool(seed % 2)).loss)


@pytest.mark.parametrize(("wanted", "read"), [("xw", {"x", "w"}), ("x", {"w"}), ("w", {"x"}), ("b", set())])
def test_a_function_reads_the_inputs_that_wanted_gradients_depend_on(wanted: str, read: Set[str]) -> None:
    named = {"x": leaf(4, 6), "w": leaf(6, 3), "b": leaf(3)}
    for name, v in named.items():
        v.need_grad = name in wanted
    named["y"] = F.affine(*named.values())
    assert read_by("Affine", named["y"], named) == read


def test_a_function_may_read_its_own_results_and_no_foreign_arrays() -> None:
    x = leaf(4, 6)
    h, other = F.tanh(x), F.mul_scalar(x, 2.0)
    assert read_by("Tanh", F.sum(h + other), {"x": x, "h": h, "other": other}) == {"h"}


def read_by(type_name: str, loss: nn.Variable, named: Dict[str, nn.Variable]) -> Set[str]:
    """Which variables backward of the function of a type reads."""
    graph = Graph(loss)
    index, reads = graph.described.type_names.index(type_name), graph.described.reads
    return {
        name for name, v in named.items() if reads(graph.functions[index], index, graph.positions[hash(v)])
    }
