# SPDX-License-Identifier: Apache-2.0
"""What forward does to memory: which inputs functions write; when leaves are read, and outputs written."""

from __future__ import annotations

import faulthandler
import inspect
import itertools
import multiprocessing
import os
import re
from functools import partial
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Sequence, Set, Tuple

import nnabla as nn
import nnabla.function_bases as function_bases
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss.graph.float_tail import float_context
from nnabla_adaloss.graph.function_kinds import hands_memory_on, memory_uses, written_inputs
from nnabla_adaloss.graph.reading import GraphReading, read_graph

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


def known(y: nn.Variable) -> FrozenSet[int]:
    return written_inputs(y.parent.info.type_name, y.parent.info.args)


def batch_normalized(function: Callable[..., Any], **options: Any) -> nn.Variable:
    return function(variable(*IMAGES), *(variable(*CHANNELS) for _ in range(4)), **options)


def fused_convolution(**options: Any) -> nn.Variable:
    names = ("beta", "gamma", "mean", "variance")
    statistics = {name: variable(*CHANNELS) for name in names}
    return F.fused_convolution(variable(*IMAGES), variable(3, 3, 3, 3), **statistics, **options)


def min_max_quantized(**options: Any) -> nn.Variable:
    low, high, levels = variable(1, 1), variable(1, 1), [variable(1, 1), variable(1, 1)]
    high.d, levels[0].d, levels[1].d = 2.0, 0.0, 255.0
    return F.min_max_quantize(variable(4, 4), low, high, *levels, **options)


def binary(function: Callable[..., Any], count: int) -> nn.Variable:
    x, w = variable(2, 3), variable(3, 4)
    return function(x, w, *(variable(*shape) for shape in [(3, 4), (4, 1)][:count]))


CASES: Dict[str, Tuple[Callable[[], nn.Variable], Set[int]]] = {
    "assign": (lambda: F.assign(variable(2, 3), nn.Variable((2, 3))), {0}),
    "bool scatter": (lambda: F.bool_scatter(variable(3), variable(2, 3), variable(2, 3)), {2}),
    "batch normalization": (partial(batch_normalized, F.batch_normalization), {3, 4}),
    "of running statistics": (partial(batch_normalized, F.batch_normalization, batch_stat=False), set()),
    "fused": (partial(batch_normalized, F.fused_batch_normalization), {3, 4}),
    "fused convolution": (fused_convolution, {4, 5}),
    "fused convolution of running statistics": (partial(fused_convolution, batch_stat=False), set()),
    "mean subtraction": (
        lambda: F.mean_subtraction(variable(*IMAGES), variable(3, 4, 4), variable(1)),
        {1, 2},
    ),
    "of a running mean": (
        lambda: F.mean_subtraction(
            variable(*IMAGES), variable(3, 4, 4), variable(1), update_running_mean=False
        ),
        set(),
    ),
    "min max quantize": (partial(min_max_quantized, x_min_max=True, ema=True), {1, 2}),
    "min max quantize of this batch": (partial(min_max_quantized, x_min_max=True), {1, 2}),
    "spectral norm": (lambda: F.spectral_norm(variable(4, 3), variable(4)), {1}),
    "binary connect": (partial(binary, F.binary_connect_affine, 1), {2}),
    "binary weight": (partial(binary, F.binary_weight_affine, 2), {2, 3}),
    "quantize linear": (lambda: F.quantize_linear(variable(2, 3), variable(1, 1), variable(1, 1)), {2}),
    "lstm": (
        lambda: F.lstm(variable(2, 3, 4), variable(1, 1, 3, 5), variable(1, 1, 3, 5), variable(1, 4, 5, 9))[
            0
        ],
        set(),
    ),
    "gru": (lambda: F.gru(variable(2, 3, 4), variable(1, 1, 3, 5), variable(1, 3, 5, 9))[0], set()),
    "rnn": (lambda: F.rnn(variable(2, 3, 4), variable(1, 1, 3, 5), variable(1, 5, 9))[0], set()),
    "noise": (lambda: F.vat_noise(variable(2, 3), variable(2, 3)), set()),
}


@pytest.mark.parametrize("name", CASES)
def test_what_forward_writes_is_known(name: str) -> None:
    make, written = CASES[name]
    y = make()
    assert changed(y) == written == known(y)


def test_weights_that_are_fixed_while_training_are_written() -> None:
    y = PF.inq_affine(variable(2, 3), 4, inq_iterations=(1, 2))
    # They are put back to what they were when they were fixed.
    y.forward()
    y.forward()
    y.parent.inputs[1].d = 1.0
    assert changed(y) == {1, 2} == known(y)


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
def test_what_hands_the_memory_of_its_input_on_is_known(make: Any, handed: bool) -> None:
    x = variable(2, 3)
    f = make(x).parent
    assert hands_memory_on(f.info.type_name, f.info.args) == handed
    assert handed == (f.inplace_data(0) == 1)


# Every function of nnabla, with inputs of shapes that it takes.

SHAPES = [IMAGES, (2, 3), (3,), CHANNELS, (4, 4), (1,), (2, 3, 4), (3, 3, 3, 3)]
COMBINATIONS = 100


def function_names() -> List[str]:
    functions = inspect.getmembers(function_bases, inspect.isfunction)
    return [name for name, f in functions if "n_outputs" in inspect.signature(f).parameters]


def inputs_of(name: str) -> Tuple[List[str], List[str]]:
    """Names of the inputs that a function needs, and of those that it may have."""
    function = getattr(function_bases, name)
    documented = (function.__doc__ or "").partition("Args:")[2]
    needed: List[str] = []
    optional: List[str] = []
    for parameter in inspect.signature(function).parameters.values():
        kind = re.search(rf"\b{parameter.name}\(~?([^)]*)\)", documented)
        if kind is None or "Variable" not in kind.group(1):
            continue
        (needed if parameter.default is inspect.Parameter.empty else optional).append(parameter.name)
    return needed, [n for n in optional if n != "outputs"]


def unknown_of(name: str) -> Optional[Set[int]]:
    """The inputs that a function writes although that is not known of it; None when it could not be run."""
    needed, optional = inputs_of(name)
    for inputs in ([*needed, *optional], needed):
        for shapes in itertools.islice(itertools.product(SHAPES, repeat=len(inputs)), COMBINATIONS):
            try:
                given = dict(zip(inputs, [variable(*shape) for shape in shapes]))
                outputs = getattr(function_bases, name)(**given)
                y = outputs if isinstance(outputs, nn.Variable) else outputs[0]
                found = changed(y)
            except Exception:  # of whatever kind: these shapes do not fit
                continue
            return found - known(y)
    return None


def try_all(names: Sequence[str], results: Any) -> None:
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for name in names:
        results.send((name, None))
        results.send((name, unknown_of(name)))


def run_all(names: Sequence[str]) -> Dict[str, Optional[Set[int]]]:
    """`unknown_of` each, in a process that may crash: a few functions do on shapes that do not fit."""
    found: Dict[str, Optional[Set[int]]] = {}
    fork = multiprocessing.get_context("fork")
    while len(found) < len(names):
        receiver, sender = fork.Pipe(duplex=False)
        process = fork.Process(target=try_all, args=([n for n in names if n not in found], sender))
        process.start()
        sender.close()
        try:
            while True:
                name, unknown = receiver.recv()
                found[name] = unknown
        except EOFError:
            process.join()
    return found


@pytest.mark.slow
def test_no_other_function_writes_an_input() -> None:
    found = run_all(function_names())
    assert {name: unknown for name, unknown in found.items() if unknown} == {}
    assert sum(unknown is not None for unknown in found.values()) > 160


def test_a_float_context_has_each_backend_once() -> None:
    half = nn.Context(["cudnn:half", "cuda:half", "cpu:half", "cpu:float"], "CudaCachedArray", "0")
    assert float_context(half).backend == ["cudnn:float", "cuda:float", "cpu:float"]


def cut(v: nn.Variable) -> nn.Variable:
    return v.get_unlinked_variable(need_grad=False)


def types(reading: GraphReading, uses: Dict[int, int]) -> Dict[nn.Variable, str]:
    """The type of the function that uses each variable."""
    found = [*reading.described.type_names, "never"]
    return {reading.variables[p]: found[index] for p, index in uses.items()}


def test_leaves_are_read_and_outputs_written() -> None:
    x, t = nn.Variable((2, 3)), nn.Variable((2, 3))
    h = F.tanh(x)
    reading = read_graph(F.squared_error(F.sin(h), F.exp(t) + x))
    uses = memory_uses(reading.description({}))
    assert types(reading, uses.leaves) == {x: "Tanh", t: "Exp"}
    assert types(reading, uses.outputs)[h] == "Tanh"
    assert len(uses.outputs) == 5
    assert not uses.cut_off


def test_parameters_are_left_out() -> None:
    x, w = nn.Variable((2, 3)), nn.Variable((2, 3), need_grad=True)
    reading = read_graph(F.mean(x * w))
    assert list(types(reading, memory_uses(reading.description({hash(w): "w"})).leaves)) == [x]
    assert list(types(reading, memory_uses(reading.description({})).leaves)) == [x, w]


def after(y: nn.Variable) -> nn.Variable:
    return F.sin(y) * F.exp(cut(y))


def before(y: nn.Variable) -> nn.Variable:
    return F.exp(cut(y)) * F.sin(y)


def both(y: nn.Variable) -> nn.Variable:
    return before(y) + F.cos(cut(y))


def in_one_function(y: nn.Variable) -> nn.Variable:
    return y - cut(y)


def reshaped_before(y: nn.Variable) -> nn.Variable:
    return F.reshape(cut(y), (6,)) * F.reshape(y, (6,))


def copied_before(y: nn.Variable) -> nn.Variable:
    return F.reshape(cut(y), (6,), inplace=False) * F.reshape(y, (6,))


def of_a_reshaped_one(y: nn.Variable) -> nn.Variable:
    flat = F.reshape(y, (6,))
    return F.sin(flat) * cut(flat)


def before_it_is_reshaped(y: nn.Variable) -> nn.Variable:
    return F.mean(F.sin(y)) + F.mean(F.exp(cut(y))) + F.mean(F.cos(F.reshape(y, (6,))))


def read_before_and_unlinked(y: nn.Variable) -> nn.Variable:
    return F.exp(F.unlink(cut(y))) * y


@pytest.mark.parametrize(
    ("build", "first"),
    [
        (after, None),
        (before, "Exp"),
        (both, "Exp"),
        (in_one_function, None),
        (reshaped_before, None),
        (copied_before, "Reshape"),
        (of_a_reshaped_one, None),
        (before_it_is_reshaped, None),
        (read_before_and_unlinked, "Exp"),
    ],
)
def test_what_is_read_cut_off_from_the_graph_is_told_by_the_order(
    build: Callable[[nn.Variable], nn.Variable], first: Optional[str]
) -> None:
    x = nn.Variable((2, 3))
    y = F.tanh(x)
    reading = read_graph(F.mean(build(y)))
    uses = memory_uses(reading.described)
    leaves = types(reading, uses.leaves)
    leaves.pop(x)
    assert leaves == ({} if first is None else {y: first})
    assert len(uses.cut_off) == (first is None)


def test_memory_that_is_handed_on_is_not_written() -> None:
    x = nn.Variable((2, 3))
    flat = F.unlink(F.reshape(x, (6,)))
    reading = read_graph(F.mean(F.sin(flat)))
    uses = memory_uses(reading.described)
    assert types(reading, uses.leaves) == {x: "Sin"}
    assert len(uses.outputs) == 2
    reading = read_graph(flat)
    assert types(reading, memory_uses(reading.described).leaves) == {x: "never"}
