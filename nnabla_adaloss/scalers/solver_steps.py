# SPDX-License-Identifier: Apache-2.0
"""The solvers of a training loop, and the calls that each has had since the last `update()`."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, Sequence, Set

import nnabla as nn

from ..core.config import AdaLossConfig
from ..graph.loss import LossWrapper
from ..updaters.settings import check_solver

_INSTEAD = (
    ((nn.Variable, LossWrapper), "give a loss to forward(loss)"),
    ((list, tuple), "write GradScaler(*solvers)"),
    (AdaLossConfig, "write config="),
)


class SolverSteps:
    """Checks that `unscale_` and `step` are called once per iteration for each solver, in this order."""

    def __init__(self, solvers: Sequence[Any]) -> None:
        if not solvers:
            raise ValueError("GradScaler needs a solver, or several: GradScaler(solver)")
        for index, solver in enumerate(solvers):
            name = f"solvers[{index}]"
            check_solver(name, solver, ("update", "get_parameters", "check_inf_or_nan_grad"), _INSTEAD)
            if not solver.get_parameters():
                raise ValueError(
                    f"{name} has no parameters: call solver.set_parameters(nnabla.get_parameters())"
                )
            if any(solver is other for other in solvers[:index]):
                raise ValueError(f"{name} is given twice")
        self._solvers = list(solvers)
        self.begin()

    def begin(self) -> None:
        """Begin an iteration."""
        # By index: whether the gradients were finite at `unscale`.
        self._finite: Dict[int, bool] = {}
        self._stepped: Set[int] = set()

    def index(self, solver: Any) -> int:
        """The index of `solver`; ValueError when it is none of them."""
        for index, known in enumerate(self._solvers):
            if known is solver:
                return index
        raise ValueError(
            f"solver is none of the {len(self._solvers)} that this scaler was made with: GradScaler(*solvers)"
        )

    def unscale(self, index: int, is_finite: Callable[[Any], bool]) -> None:
        """Find out whether the gradients of a solver are finite, before the user changes them."""
        if index in self._stepped:
            raise RuntimeError("unscale_() is being called after step()")
        if index in self._finite:
            raise RuntimeError("unscale_() has already been called on this solver since the last update()")
        self._finite[index] = is_finite(self._solvers[index])

    def step(self, index: int, is_finite: Callable[[Any], bool]) -> bool:
        """True when the gradients of a solver are finite, or were so at `unscale`."""
        if index in self._stepped:
            raise RuntimeError("step() has already been called on this solver since the last update()")
        self._stepped.add(index)
        return self._finite[index] if index in self._finite else is_finite(self._solvers[index])

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
