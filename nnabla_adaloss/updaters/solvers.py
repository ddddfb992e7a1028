# SPDX-License-Identifier: Apache-2.0
"""Solvers of a training, and their parameters."""

from __future__ import annotations

import inspect
from itertools import chain
from typing import Any, Dict, Iterable, List, Sequence

import nnabla as nn
from nnabla.solver import Solver

from ..graph.loss import LossWrapper
from ..graph.names import must_override
from ..host_context import dtype_of
from ..kernels.arrays import FLOAT32

_METHODS = ("zero_grad", "update", "weight_decay", "scale_grad", "get_parameters")
_NO_SOLVER = (((nn.Variable, LossWrapper), "the loss comes after the solver"),)


def has(solver: Any, name: str) -> bool:
    """True if a solver has an attribute; of a class in Python, one that it overrides."""
    # nnabla crashes in methods that such a class inherits from `Solver`, as it has no C++ solver.
    kind = type(solver)
    if issubclass(kind, Solver) and kind is not Solver and name not in vars(solver):
        return getattr(kind, name, None) is not getattr(Solver, name, None)
    return hasattr(solver, name)


def check_solver(name: str, value: Any, methods: Sequence[str] = _METHODS, instead: Any = _NO_SOLVER) -> Any:
    """Return `value` if it is a solver; else TypeError, with advice from `instead` for known types."""
    advice = next((advice for kind, advice in instead if isinstance(value, kind)), None)
    if isinstance(value, type) or inspect.isroutine(value):
        advice = f"{value.__name__} makes one: call it, as in {value.__name__}(1e-3)"
    missing = [method for method in methods if not has(value, method)]
    if missing and isinstance(value, Solver):
        advice = must_override(value, missing[0])
    elif missing:
        advice = advice or f"{type(value).__name__} has no {missing[0]}()"
    if advice:
        raise TypeError(f"{name} must be an nnabla solver; {advice}")
    return value


def make_memory(solver: Any, trained: Iterable[nn.Variable], context: nn.Context) -> None:
    """Allocate the memory of a solver's first step, in whose middle an error would leave it half done."""
    states = solver.get_states().values() if has(solver, "get_states") else ()
    for variable in chain(trained, *(state.pstate.values() for state in states)):
        if dtype_of(variable.data) == FLOAT32:
            variable.data.data_ptr(FLOAT32, context)


def parameters_of(solvers: Sequence[Any]) -> List[nn.Variable]:
    """Parameters of solvers."""
    return [v for solver in solvers for v in solver.get_parameters().values()]


def named_parameters(solvers: Sequence[Any]) -> Dict[str, nn.Variable]:
    """Parameters of solvers by name, prefixed by the solver's index if two share a name."""
    parameters: Dict[str, nn.Variable] = {}
    for index, solver in enumerate(solvers):
        for name, v in solver.get_parameters().items():
            parameters[name if parameters.get(name, v) == v else f"{index}/{name}"] = v
    return parameters
