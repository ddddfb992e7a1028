# SPDX-License-Identifier: Apache-2.0
"""The solvers of a training loop, and the calls that each has had since the last `update()`."""

from __future__ import annotations

from enum import Enum
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import nnabla as nn


class _Stage(Enum):
    """The last call for a solver."""

    SCALED = "scaled"
    UNSCALED = "unscaled"
    STEPPED = "stepped"


class SolverSteps:
    """Checks that `unscale_` and `step` are called at most once per iteration for each solver, in this order.

    Args:
        solvers: the solvers, with their parameters set.

    Raises:
        TypeError: something that is given as a solver is none.
        ValueError: no solver is given, one twice, or one without parameters.
    """

    def __init__(self, solvers: Sequence[Any]) -> None:
        if not solvers:
            raise ValueError("GradScaler needs a solver, or several: GradScaler(solver)")
        for index, solver in enumerate(solvers):
            _check(f"solvers[{index}]", solver)
            if any(solver is other for other in solvers[:index]):
                raise ValueError(f"solvers[{index}] is given twice")
        self._solvers = list(solvers)
        self.begin()

    def begin(self) -> None:
        """Begin an iteration."""
        self._stages = [_Stage.SCALED for _ in self._solvers]
        self._finite: List[Optional[bool]] = [None for _ in self._solvers]

    def index(self, solver: Any) -> int:
        """The index of `solver`; ValueError when it is none of them."""
        for index, known in enumerate(self._solvers):
            if known is solver:
                return index
        raise ValueError(
            f"solver is none of the {len(self._solvers)} that this scaler was made with: GradScaler(*solvers)"
        )

    def unscale(self, index: int, is_finite: Callable[[Any], bool]) -> None:
        """Find out whether the gradients of a solver are finite, before the user changes them.

        Args:
            index: which solver.
            is_finite: called with it.

        Raises:
            RuntimeError: it was called for this solver in this iteration, or `step` was.
        """
        if self._stages[index] is _Stage.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this solver since the last update()")
        if self._stages[index] is _Stage.STEPPED:
            raise RuntimeError("unscale_() is being called after step()")
        self._stages[index] = _Stage.UNSCALED
        self._finite[index] = is_finite(self._solvers[index])

    def step(self, index: int, is_finite: Callable[[Any], bool]) -> bool:
        """True when the gradients of a solver are finite, or were so at `unscale`.

        Args:
            index: which solver.
            is_finite: called with it, if `unscale` was not called before.

        Raises:
            RuntimeError: it was called for this solver in this iteration.
        """
        if self._stages[index] is _Stage.STEPPED:
            raise RuntimeError("step() has already been called on this solver since the last update()")
        self._stages[index] = _Stage.STEPPED
        finite = self._finite[index]
        return is_finite(self._solvers[index]) if finite is None else finite

    def parameters(self, *, without: Any = None) -> Iterator[nn.Variable]:
        """The parameters of all solvers, or of all but one."""
        for solver in self._solvers:
            if solver is not without:
                yield from solver.get_parameters().values()

    def named_parameters(self) -> Dict[str, nn.Variable]:
        """The parameters of all solvers by name; where two share a name, the solver's index comes first."""
        found: Dict[str, nn.Variable] = {}
        for index, solver in enumerate(self._solvers):
            for name, v in solver.get_parameters().items():
                found[name if found.get(name, v) == v else f"{index}/{name}"] = v
        return found


def _check(name: str, solver: Any) -> None:
    for method in ("update", "get_parameters", "check_inf_or_nan_grad"):
        if not callable(getattr(solver, method, None)):
            raise TypeError(f"{name} must be an nnabla solver; {type(solver).__name__} has no {method}()")
    if not solver.get_parameters():
        raise ValueError(f"{name} has no parameters: call solver.set_parameters(nnabla.get_parameters())")
