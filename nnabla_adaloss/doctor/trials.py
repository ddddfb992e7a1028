# SPDX-License-Identifier: Apache-2.0
"""Which of nnabla's own functions work here: small programs, one for each that training needs.

nnabla is not imported before a program runs: the examination must not depend on what it examines.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from .findings import Area, Finding, Status, failure
from .isolation import Outcome, call_isolated

# Largest accepted difference, relative to the largest number of the array. Half of the CPU adds up in half.
_TOLERANCE = {"float": 1e-3, "half": 5e-2}
# An array whose numbers are all this small beside those of others holds what rounding left.
_NOTHING = 1e-2
# Seconds; longer than all trials of a process take on a GPU whose libraries load slowly.
_TIME_LIMIT = 60.0


class Trial(NamedTuple):
    """A function of nnabla's, tried once."""

    # Makes its output of nnabla's `F` and `PF`, of `labels`, which makes integers, and of inputs.
    program: Callable[..., Any]
    inputs: Sequence[Tuple[int, ...]]  # shapes
    # What NumPy makes of the same inputs; None: the CPU's result in float is taken for right.
    expected: Optional[Callable[..., Any]] = None


def _both(program: Callable[..., Any], *inputs: Tuple[int, ...]) -> Trial:
    """A program that NumPy runs as well."""
    return Trial(program, inputs, partial(program, SimpleNamespace(F=np)))


def _own(program: Callable[..., Any], *inputs: Tuple[int, ...]) -> Trial:
    """A program whose result on the CPU in float is taken for right."""
    return Trial(program, inputs)


def _normalized(*axes: int) -> Callable[[Any], Any]:
    return lambda x: (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)


def _softmax(x: Any) -> Any:
    return np.exp(x) / np.exp(x).sum(1, keepdims=True)


def _dropout(n: Any, x: Any) -> Any:
    # Whatever it drops: what is kept is twice as large, so that the first term is zero.
    y = n.F.dropout(x, 0.5)
    return (y - 2.0 * x) * y + x


_SQUARE, _IMAGES, _STATE = (64, 64), (8, 16, 8, 8), (1, 1, 4, 8)

# Reductions are large enough to take the way that large ones take on a GPU, by cuBLAS or cuDNN.
TRIALS: Mapping[str, Trial] = {
    "sum": _both(lambda n, x: n.F.sum(x), (64, 512)),
    "sum, of rows": _both(lambda n, x: n.F.sum(x, axis=1), (64, 128)),
    "sum, of columns": _both(lambda n, x: n.F.sum(x, axis=0), (128, 64)),
    "mean": _both(lambda n, x: n.F.mean(x), (64, 512)),
    "mean, of rows": _both(lambda n, x: n.F.mean(x, axis=1), (64, 128)),
    "max": _both(lambda n, x: n.F.max(x, axis=1), (64, 128)),
    "min": _both(lambda n, x: n.F.min(x, axis=1), (64, 128)),
    "norm": Trial(lambda n, x: n.F.norm(x), [_SQUARE], np.linalg.norm),
    "add2": _both(lambda n, a, b: a + b, _SQUARE, _SQUARE),
    "add2, broadcast": _both(lambda n, a, b: a + b, _SQUARE, (1, 64)),
    "mul2": _both(lambda n, a, b: a * b, _SQUARE, _SQUARE),
    "mul_scalar": _both(lambda n, x: x * 3.0, _SQUARE),
    "pow_scalar": _both(lambda n, x: x**2, _SQUARE),
    "exp": _both(lambda n, x: n.F.exp(x), _SQUARE),
    "tanh": _both(lambda n, x: n.F.tanh(x), _SQUARE),
    "sigmoid": Trial(lambda n, x: n.F.sigmoid(x), [_SQUARE], lambda x: 1 / (1 + np.exp(-x))),
    "relu": Trial(lambda n, x: n.F.relu(x), [_SQUARE], lambda x: x.clip(0)),
    "gelu": _own(lambda n, x: n.F.gelu(x), _SQUARE),
    "swish": Trial(lambda n, x: n.F.swish(x), [_SQUARE], lambda x: x / (1 + np.exp(-x))),
    "softmax": Trial(lambda n, x: n.F.softmax(x), [_SQUARE], _softmax),
    "log_softmax": Trial(lambda n, x: n.F.log_softmax(x), [_SQUARE], lambda x: np.log(_softmax(x))),
    "softmax_cross_entropy": _own(lambda n, x: n.F.softmax_cross_entropy(x, n.labels(10, 64, 1)), (64, 10)),
    "sigmoid_cross_entropy": _own(lambda n, x: n.F.sigmoid_cross_entropy(x, n.labels(2, 64, 2)), (64, 2)),
    "squared_error": Trial(
        lambda n, a, b: n.F.squared_error(a, b), [(64, 10), (64, 10)], lambda a, b: (a - b) ** 2
    ),
    "layer_normalization": Trial(lambda n, x: n.PF.layer_normalization(x), [(32, 64)], _normalized(1)),
    "batch_normalization": Trial(lambda n, x: n.PF.batch_normalization(x), [_IMAGES], _normalized(0, 2, 3)),
    "instance_normalization": Trial(
        lambda n, x: n.PF.instance_normalization(x), [_IMAGES], _normalized(2, 3)
    ),
    "group_normalization": _own(lambda n, x: n.PF.group_normalization(x, 4), _IMAGES),
    "weight_normalization": _own(lambda n, x: n.PF.affine(x, 8, apply_w=n.PF.weight_normalization), (8, 16)),
    "affine": _own(lambda n, x: n.PF.affine(x, 32), _SQUARE),
    "batch_matmul": Trial(lambda n, a, b: n.F.batch_matmul(a, b), [(8, 16, 32), (8, 32, 16)], np.matmul),
    "convolution": _own(lambda n, x: n.PF.convolution(x, 16, (3, 3), pad=(1, 1)), _IMAGES),
    "convolution, one dimension": _own(lambda n, x: n.PF.convolution(x, 16, (3,), pad=(1,)), (8, 16, 32)),
    "deconvolution": _own(lambda n, x: n.PF.deconvolution(x, 16, (2, 2), stride=(2, 2)), (8, 16, 4, 4)),
    "depthwise_convolution": _own(lambda n, x: n.PF.depthwise_convolution(x, (3, 3), pad=(1, 1)), _IMAGES),
    "max_pooling": _own(lambda n, x: n.F.max_pooling(x, (2, 2)), _IMAGES),
    "average_pooling": _own(lambda n, x: n.F.average_pooling(x, (2, 2)), _IMAGES),
    "global_average_pooling": Trial(
        lambda n, x: n.F.global_average_pooling(x), [_IMAGES], lambda x: x.mean((2, 3), keepdims=True)
    ),
    "embed": _own(lambda n: n.PF.embed(n.labels(50, 8, 16), 50, 32)),
    "lstm": _own(lambda n, x, h, c: n.PF.lstm(x, h, c, training=True)[0], (5, 4, 8), _STATE, _STATE),
    "transpose": _both(lambda n, x: n.F.transpose(x, (2, 0, 1)), (8, 4, 6)),
    "concatenate": Trial(
        lambda n, a, b: n.F.concatenate(a, b, axis=1), [(8, 8), (8, 8)], lambda a, b: np.hstack([a, b])
    ),
    "slice": _both(lambda n, x: x[:, :4], (8, 8)),
    "broadcast": Trial(lambda n, x: n.F.broadcast(x, (8, 8)), [(1, 8)], lambda x: x.repeat(8, 0)),
    "interpolate": _own(lambda n, x: n.F.interpolate(x, output_size=(16, 16), mode="nearest"), (4, 4, 8, 8)),
    "dropout": Trial(_dropout, [_SQUARE], lambda x: x),
}


def try_function(extension: str, type_config: str, name: str) -> List[str]:
    """Compare a function's output with NumPy's, and its gradients with the CPU's in float: ArithmeticError.

    What is returned are the types of functions that run on the host though the context is a GPU's.
    """
    from nnabla.ext_utils import get_extension_context

    from nnabla_adaloss.graph.host_functions import runs_on_host

    trial, generator = TRIALS[name], np.random.default_rng(0)
    inputs = [generator.standard_normal(shape).astype(np.float32) for shape in trial.inputs]
    right, _ = _results(trial, inputs, get_extension_context("cpu", type_config="float"))
    found, functions = _results(trial, inputs, get_extension_context(extension, type_config=type_config))
    if trial.expected is not None:
        right[0] = trial.expected(*(values.astype(np.float64) for values in inputs))
    largest = max(np.abs(array).max() for array in right)
    for index, (array, wanted) in enumerate(zip(found, right)):
        difference = np.abs(array - wanted).max() / max(np.abs(wanted).max(), _NOTHING * largest)
        if not difference <= _TOLERANCE[type_config]:
            what = "a gradient" if index else "its output"
            raise ArithmeticError(f"wrong numbers: {what} differs by {difference:.1e} of the largest")
    return [function.info.type_name for function in functions if runs_on_host(function.context)]


def _results(trial: Trial, inputs: Sequence[Any], context: Any) -> Tuple[List[Any], List[Any]]:
    """Output and gradients in a context, in float64; and the functions that ran."""
    import nnabla as nn
    import nnabla.functions as F
    import nnabla.parametric_functions as PF

    def labels(below: int, *shape: int) -> Any:
        return nn.Variable.from_numpy_array(np.random.default_rng(2).integers(0, below, shape))

    nn.clear_parameters()
    nn.seed(0)
    functions: List[Any] = []
    with nn.context_scope(context):
        given = [nn.Variable.from_numpy_array(values, need_grad=True) for values in inputs]
        y = trial.program(SimpleNamespace(F=F, PF=PF, labels=labels), *given)
        y.visit(functions.append)
        y.forward()
        output = np.array(y.d, np.float64)
        leaves = [*given, *nn.get_parameters().values()]
        for leaf in leaves:
            leaf.grad.zero()
        y.backward(np.random.default_rng(1).standard_normal(y.shape).astype(np.float32))
        return [output, *(np.array(leaf.g, np.float64) for leaf in leaves)], functions


def try_functions(
    extension: str,
    type_config: str,
    names: Sequence[str] = tuple(TRIALS),
    *,
    processes: int = 1,
    on_progress: Callable[[str], Any],
) -> Dict[str, Outcome]:
    """What became of the trials of some functions, with a process for each part of them."""
    found: Dict[str, Outcome] = {}

    def try_part(part: Sequence[str]) -> None:
        calls = [(extension, type_config, name) for name in part]
        found.update(zip(part, call_isolated(try_function, *calls, time_limit=_TIME_LIMIT)))
        on_progress(f"{extension}:{type_config}: {len(found)} of {len(names)} functions tried")

    with ThreadPoolExecutor() as pool:  # they wait for processes
        list(pool.map(try_part, [names[first::processes] for first in range(processes)]))
    return {name: found[name] for name in names}


def findings_of(area: Area, type_config: str, tried: Mapping[str, Outcome], machine: str) -> List[Finding]:
    """What trials say: a line for what works, and one for all that fail in the same way on that `machine`."""
    subject = f"nnabla's functions, {type_config}"
    works = [outcome.value for outcome in tried.values() if not outcome.error]
    found = []
    if works:
        detail = f"{len(works)} of {len(tried)} give the right numbers"
        if any(works):
            names = ", ".join(sorted({name for on_host in works for name in on_host}))
            detail += f"; on the host, for lack of a CUDA implementation: {names}"
        found.append(Finding(area, Status.WORKS, subject, detail))
    alike: Dict[Finding, List[str]] = {}
    for name, outcome in tried.items():
        if outcome.error:
            alike.setdefault(_failed(area, subject, outcome.error), []).append(name)
    for finding, failed in sorted(alike.items()):
        detail = f"{', '.join(failed)}: {finding.detail}. This is nnabla without this package ({machine})"
        found.append(finding._replace(detail=detail))
    return found


def _failed(area: Area, subject: str, error: str) -> Finding:
    """What errors of different functions have in common."""
    finding = failure(area, subject, error)
    detail = "wrong numbers" if "wrong numbers" in error else " ".join(finding.detail.split())[:200]
    cure = f"{finding.cure}; until then avoid these functions" if finding.cure else ""
    cure = cure or "avoid these functions, or report this to nnabla"
    if area is Area.CPU:
        cure = finding.cure or "install into a fresh virtual environment: pip install nnabla-adaloss"
    return finding._replace(detail=detail, cure=cure)


def blamed(finding: Finding, tried: Mapping[str, Outcome]) -> Finding:
    """A finding that this package is broken, with whose fault that is by nnabla's functions; or any other."""
    if finding.status is not Status.BROKEN:
        return finding
    broken = ", ".join(name for name, outcome in tried.items() if outcome.error)
    cause, cure = f"nnabla's own functions fail here ({broken}): see above, and fix that first", ""
    if not broken:
        cause = "nnabla's own functions work here, so the fault is in this package"
        cure = finding.cure or "please report it with the doctor's output"
    return finding._replace(detail=f"{finding.detail}. {cause}", cure=cure)
