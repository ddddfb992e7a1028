# SPDX-License-Identifier: Apache-2.0
"""Runs trials in this process and prints a line for each: it may end any moment, with what it was at."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, Iterator, List, Sequence, Tuple

from nnabla_adaloss.cuda_libraries import preload_cuda_libraries

from .trials import TRIALS, Trial

# Largest accepted difference, relative to the largest number of the array. Half of the CPU adds up in half.
_TOLERANCE = {"float": 1e-3, "half": 5e-2}
# An array whose numbers are all this small beside those of others holds what rounding left.
_NOTHING = 1e-2


def run_trials(extension: str, type_config: str, names: Sequence[str]) -> None:
    """Try functions, one after another, and print a line of JSON when one begins and when it has ended.

    After one that raises, no other is tried: a GPU's context is of no use then.

    Args:
        extension: "cpu" or "cudnn".
        type_config: "float" or "half".
        names: keys of `TRIALS`.
    """
    preload_cuda_libraries()
    from nnabla.ext_utils import get_extension_context

    on_cpu = get_extension_context("cpu", type_config="float")
    context = get_extension_context(extension, type_config=type_config)
    for name in names:
        _say(begun=name)
        try:
            error, on_host = _try(TRIALS[name], on_cpu, context, _TOLERANCE[type_config])
        except Exception as raised:
            _say(ended=name, error=f"{type(raised).__name__}: {raised}", on_host=[])
            return
        _say(ended=name, error=error, on_host=on_host)


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def _try(trial: Trial, on_cpu: Any, context: Any, tolerance: float) -> Tuple[str, List[str]]:
    """What is wrong, empty where nothing is, and the types of functions that run on the host."""
    import numpy as np

    from nnabla_adaloss.graph.host_functions import runs_on_host

    reference = _results(trial, on_cpu)
    found = _results(trial, context)
    on_host = [f.info.type_name for f in found.functions if runs_on_host(f.context)]
    if trial.expected is not None:
        with np.errstate(all="ignore"):
            inputs = [value.astype(np.float64) for value in found.inputs]
            reference.arrays[0] = trial.expected(np, *inputs)
    largest = max(np.abs(array).max() for array in reference.arrays)
    for what, array, right in zip(_names(), found.arrays, reference.arrays):
        scale = max(np.abs(right).max(), _NOTHING * largest)
        difference = np.abs(array - right).max() / scale
        if not difference <= tolerance:
            return f"wrong numbers: {what} differs by {difference:.1e} of the largest", on_host
    return "", on_host


def _names() -> Iterator[str]:
    yield "its output"
    while True:
        yield "a gradient"


def _results(trial: Trial, context: Any) -> Any:
    """Output and gradients of a trial in a context, in float64, its inputs, and its functions."""
    import nnabla as nn
    import nnabla.functions as F
    import nnabla.parametric_functions as PF
    import numpy as np

    generator = np.random.default_rng(0)
    made: List[Any] = []

    def x(*shape: int) -> Any:
        made.append(nn.Variable.from_numpy_array(generator.standard_normal(shape).astype(np.float32)))
        made[-1].need_grad = True
        return made[-1]

    def labels(*shape: int, of: int = 10) -> Any:
        return nn.Variable.from_numpy_array(generator.integers(0, of, shape))

    nn.clear_parameters()
    nn.seed(0)
    functions: List[Any] = []
    with nn.context_scope(context):
        y = trial.program(SimpleNamespace(F=F, PF=PF, x=x, labels=labels))
        y.visit(functions.append)
        y.forward()
        value = np.array(y.d, np.float64)
        leaves = [*made, *nn.get_parameters().values()]
        for leaf in leaves:
            leaf.grad.zero()
        y.backward(generator.standard_normal(y.shape).astype(np.float32))
        gradients = [np.array(leaf.g, np.float64) for leaf in leaves]
    inputs = [np.array(v.d) for v in made]
    return SimpleNamespace(arrays=[value, *gradients], inputs=inputs, functions=functions)
