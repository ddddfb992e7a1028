# SPDX-License-Identifier: Apache-2.0
"""Trials of nnabla's own functions: a small program for each one that training needs.

nnabla is imported only when a program runs: the examination must work without it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

import numpy as np

from .findings import Area, Finding, failure
from .probes import Answer, call_isolated

# Largest accepted difference, relative to the largest number of the array. The CPU sums float16 in float16.
_TOLERANCE = {"float": 1e-3, "half": 5e-2}
# An array this small beside the others holds rounding errors only.
_NOTHING = 1e-2
# Seconds; exceeds the time of all trials of a process on a GPU whose libraries load slowly.
_TIME_LIMIT = 60.0


def _dropout(n: Any, x: Any) -> Any:
    # Kept elements are doubled and dropped ones are 0, so the first term is 0 for any mask.
    y = n.F.dropout(x, 0.5)
    return (y - 2.0 * x) * y + x


_SQUARE, _IMAGES, _STATE = (64, 64), (8, 16, 8, 8), (1, 1, 4, 8)

# Programs of nnabla's `F` and `PF`, of `labels`, which makes integers, and of inputs, with the inputs'
# shapes. Reductions are large enough for the kernels of large ones on a GPU.
Trials = Dict[str, Tuple[Callable[..., Any], Sequence[Tuple[int, ...]]]]
# Programs that NumPy, as `F`, computes the expected output of.
LIKE_NUMPY: Trials = {
    "sum": (lambda n, x: n.F.sum(x), [(64, 512)]),
    "sum, of rows": (lambda n, x: n.F.sum(x, axis=1), [(64, 128)]),
    "sum, of columns": (lambda n, x: n.F.sum(x, axis=0), [(128, 64)]),
    "mean": (lambda n, x: n.F.mean(x), [(64, 512)]),
    "mean, of rows": (lambda n, x: n.F.mean(x, axis=1), [(64, 128)]),
    "max": (lambda n, x: n.F.max(x, axis=1), [(64, 128)]),
    "min": (lambda n, x: n.F.min(x, axis=1), [(64, 128)]),
    "add2": (lambda n, a, b: a + b, [_SQUARE, _SQUARE]),
    "add2, broadcast": (lambda n, a, b: a + b, [_SQUARE, (1, 64)]),
    "mul2": (lambda n, a, b: a * b, [_SQUARE, _SQUARE]),
    "mul_scalar": (lambda n, x: x * 3.0, [_SQUARE]),
    "pow_scalar": (lambda n, x: x**2, [_SQUARE]),
    "exp": (lambda n, x: n.F.exp(x), [_SQUARE]),
    "tanh": (lambda n, x: n.F.tanh(x), [_SQUARE]),
    "transpose": (lambda n, x: n.F.transpose(x, (2, 0, 1)), [(8, 4, 6)]),
    "slice": (lambda n, x: x[:, :4], [(8, 8)]),
}
# Programs whose expected output is the CPU's in float.
TRIALS: Trials = {
    **LIKE_NUMPY,
    "norm": (lambda n, x: n.F.norm(x), [_SQUARE]),
    "sigmoid": (lambda n, x: n.F.sigmoid(x), [_SQUARE]),
    "relu": (lambda n, x: n.F.relu(x), [_SQUARE]),
    "gelu": (lambda n, x: n.F.gelu(x), [_SQUARE]),
    "swish": (lambda n, x: n.F.swish(x), [_SQUARE]),
    "softmax": (lambda n, x: n.F.softmax(x), [_SQUARE]),
    "log_softmax": (lambda n, x: n.F.log_softmax(x), [_SQUARE]),
    "softmax_cross_entropy": (lambda n, x: n.F.softmax_cross_entropy(x, n.labels(10, 64, 1)), [(64, 10)]),
    "sigmoid_cross_entropy": (lambda n, x: n.F.sigmoid_cross_entropy(x, n.labels(2, 64, 2)), [(64, 2)]),
    "squared_error": (lambda n, a, b: n.F.squared_error(a, b), [(64, 10), (64, 10)]),
    "layer_normalization": (lambda n, x: n.PF.layer_normalization(x), [(32, 64)]),
    "batch_normalization": (lambda n, x: n.PF.batch_normalization(x), [_IMAGES]),
    "instance_normalization": (lambda n, x: n.PF.instance_normalization(x), [_IMAGES]),
    "group_normalization": (lambda n, x: n.PF.group_normalization(x, 4), [_IMAGES]),
    "weight_normalization": (lambda n, x: n.PF.affine(x, 8, apply_w=n.PF.weight_normalization), [(8, 16)]),
    "affine": (lambda n, x: n.PF.affine(x, 32), [_SQUARE]),
    "batch_matmul": (lambda n, a, b: n.F.batch_matmul(a, b), [(8, 16, 32), (8, 32, 16)]),
    "convolution": (lambda n, x: n.PF.convolution(x, 16, (3, 3), pad=(1, 1)), [_IMAGES]),
    "convolution, one dimension": (lambda n, x: n.PF.convolution(x, 16, (3,), pad=(1,)), [(8, 16, 32)]),
    "deconvolution": (lambda n, x: n.PF.deconvolution(x, 16, (2, 2), stride=(2, 2)), [(8, 16, 4, 4)]),
    "depthwise_convolution": (lambda n, x: n.PF.depthwise_convolution(x, (3, 3), pad=(1, 1)), [_IMAGES]),
    "max_pooling": (lambda n, x: n.F.max_pooling(x, (2, 2)), [_IMAGES]),
    "average_pooling": (lambda n, x: n.F.average_pooling(x, (2, 2)), [_IMAGES]),
    "global_average_pooling": (lambda n, x: n.F.global_average_pooling(x), [_IMAGES]),
    "embed": (lambda n: n.PF.embed(n.labels(50, 8, 16), 50, 32), []),
    "lstm": (lambda n, x, h, c: n.PF.lstm(x, h, c, training=True)[0], [(5, 4, 8), _STATE, _STATE]),
    "concatenate": (lambda n, a, b: n.F.concatenate(a, b, axis=1), [(8, 8), (8, 8)]),
    "broadcast": (lambda n, x: n.F.broadcast(x, (8, 8)), [(1, 8)]),
    "interpolate": (lambda n, x: n.F.interpolate(x, output_size=(16, 16), mode="nearest"), [(4, 4, 8, 8)]),
    "dropout": (_dropout, [_SQUARE]),
}


def try_function(extension: str, type_config: str, name: str) -> List[str]:
    """Compare a function with NumPy and the CPU, or raise ArithmeticError; list types run on the host."""
    from nnabla.ext_utils import get_extension_context

    from nnabla_adaloss.graph.memory_uses import runs_on_host

    (program, shapes), generator = TRIALS[name], np.random.default_rng(0)
    inputs = [generator.standard_normal(shape).astype(np.float32) for shape in shapes]
    right, _ = _results(program, inputs, get_extension_context("cpu", type_config="float"))
    results, functions = _results(program, inputs, get_extension_context(extension, type_config=type_config))
    if name in LIKE_NUMPY:
        right[0] = program(SimpleNamespace(F=np), *(values.astype(np.float64) for values in inputs))
    largest = max(np.abs(array).max() for array in right)
    for index, (array, expected) in enumerate(zip(results, right)):
        difference = np.abs(array - expected).max() / max(np.abs(expected).max(), _NOTHING * largest)
        if not difference <= _TOLERANCE[type_config]:
            part = "a gradient" if index else "its output"
            raise ArithmeticError(f"wrong numbers: {part} differs by {difference:.1e} of the largest")
    return [function.info.type_name for function in functions if runs_on_host(function.context)]


def _results(program: Callable[..., Any], inputs: Sequence[Any], context: Any) -> Tuple[List[Any], List[Any]]:
    """Compute output and gradients in a context, as float64; and list the functions that ran."""
    import nnabla as nn
    import nnabla.functions as F
    import nnabla.parametric_functions as PF

    def labels(below: int, *shape: int) -> Any:
        return nn.Variable.from_numpy_array(np.random.default_rng(2).integers(0, below, shape))

    nn.clear_parameters()
    nn.seed(0)
    functions: List[Any] = []
    with nn.context_scope(context):
        variables = [nn.Variable.from_numpy_array(values, need_grad=True) for values in inputs]
        y = program(SimpleNamespace(F=F, PF=PF, labels=labels), *variables)
        y.visit(functions.append)
        y.forward()
        output = np.array(y.d, np.float64)
        leaves = [*variables, *nn.get_parameters().values()]
        for leaf in leaves:
            leaf.grad.zero()
        y.backward(np.random.default_rng(1).standard_normal(y.shape).astype(np.float32))
        return [output, *(np.array(leaf.g, np.float64) for leaf in leaves)], functions


def try_functions(extension: str, type_config: str, processes: int) -> Dict[str, Answer]:
    """Run the trials, divided among processes; return their answers by name."""
    calls = [(extension, type_config, name) for name in TRIALS]
    answers: List[Any] = [None] * len(calls)

    def try_part(first: int) -> None:
        part = slice(first, None, processes)
        answers[part] = call_isolated(try_function, *calls[part], time_limit=_TIME_LIMIT)

    with ThreadPoolExecutor() as pool:  # the threads only wait for processes
        list(pool.map(try_part, range(processes)))
    return dict(zip(TRIALS, answers))


def findings_of(area: Area, type_config: str, tried: Mapping[str, Answer], machine: str) -> List[Finding]:
    """Findings of trials: one for all that work, one for each way of failing on `machine`."""
    subject = f"nnabla's functions, {type_config}"
    works = [value for value, error in tried.values() if not error]
    findings = []
    if works:
        detail = f"{len(works)} of {len(tried)} give the right numbers"
        if any(works):
            names = ", ".join(sorted({name for on_host in works for name in on_host}))
            detail += f"; on the host, for lack of a CUDA implementation: {names}"
        findings.append(Finding(area, "works", subject, detail))
    # Failures without their parts that differ between functions, so that equal ones merge.
    alike: Dict[Finding, List[str]] = {}
    for name, error in [(name, error) for name, (_, error) in tried.items() if error]:
        finding = failure(area, subject, error)
        detail = "wrong numbers" if "wrong numbers" in error else " ".join(finding.detail.split())[:200]
        if area == "CPU":
            cure = finding.cure or "install into a fresh virtual environment: pip install nnabla-adaloss"
        else:
            cure = f"{finding.cure or 'report this to nnabla'}; until then avoid these functions"
        alike.setdefault(finding._replace(detail=detail, cure=cure), []).append(name)
    for finding, failed in sorted(alike.items()):
        detail = f"{', '.join(failed)}: {finding.detail}. This is nnabla without this package ({machine})"
        findings.append(finding._replace(detail=detail))
    return findings


def blamed(finding: Finding, tried: Mapping[str, Answer]) -> Finding:
    """Add to a failure of this package whether nnabla's own functions fail, too."""
    if finding.status != "broken":
        return finding
    broken = ", ".join(name for name, (_, error) in tried.items() if error)
    cause, cure = f"nnabla's own functions fail here ({broken}): see above, and fix that first", ""
    if not broken:
        cause = "nnabla's own functions work here, so the fault is in this package"
        cure = finding.cure or "please report it with the doctor's output"
    return finding._replace(detail=f"{finding.detail}. {cause}", cure=cure)
