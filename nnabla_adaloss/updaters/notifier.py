# SPDX-License-Identifier: Apache-2.0
"""Errors and warnings of a training, each warning once."""

from __future__ import annotations

from typing import Any, ClassVar, Dict, Sequence, Set

import nnabla as nn

from ..engine import AdaptiveLossScaling
from ..errors import LossScaleError, warn
from ..graph.graph import Graph
from ..graph.plan import GraphPlan
from .solvers import parameters_of

# After this many updates without ever a gradient, a loss of zero is more than batches without labels.
_SILENT = 100
# A jump by 2**20 costs six batches.
_LOST = 10


class Notifier:
    """Raises, warns once, or does nothing, according to a policy; notices batches that are lost in a row, and
    updates without a gradient.
    """

    undone: ClassVar = ("_last_gradient",)

    def __init__(self) -> None:
        self._warned: Set[str] = set()
        self._lost_in_a_row = 0
        # Keys of the solvers' parameters when last asked.
        self._trained: Set[int] = set()
        # The last iteration with a gradient that was not zero; 0: none yet.
        self._last_gradient = 0
        # Parameters, by name, for which no backward has left a gradient other than zero yet.
        self._untrained: Dict[str, nn.Variable] = {}

    def notify(self, policy: str, kind: str, message: str) -> None:
        """`"raise"` a LossScaleError, `"warn"` once for each kind, or `"skip"`."""
        if policy == "raise":
            raise LossScaleError(message)
        if policy == "warn":
            self.warn(kind, message)

    def warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warn(message)

    def note_update(
        self,
        iteration: int,
        scale: float,
        engines: Sequence[AdaptiveLossScaling],
        solvers: Sequence[Any],
    ) -> bool:
        """Note an update after the last passes of these engines; False, with a warning, where every gradient
        is exactly zero.
        """
        self._lost_in_a_row = 0
        if self._untrained:
            self._note_untrained(iteration, engines)
        # To ask a solver for its parameters takes as long as everything else here.
        if self._none_has_learned(engines):
            parameters = parameters_of(solvers)
            self._trained = {hash(v) for v in parameters}
            none = self._none_has_learned(engines)
            # Other batches, other ranks and hooks may have added to gradients that these passes left at zero.
            if none and engines[0].kernels.gradients_are_zero(parameters):
                self._warn_of_zeros(iteration, scale, engines)
                return False
        self._last_gradient = iteration
        return True

    def _none_has_learned(self, engines: Sequence[AdaptiveLossScaling]) -> bool:
        """Whether the passes of these engines have left zeros in the gradients of all trained parameters."""
        return all(self._trained.isdisjoint(engine.result.nonzero) for engine in engines)

    def _note_untrained(self, iteration: int, engines: Sequence[AdaptiveLossScaling]) -> None:
        """Note which parameters have a gradient now; warn after a while of those that never had one."""
        nonzero = {key for engine in engines for key in engine.result.nonzero}
        self._untrained = {name: v for name, v in self._untrained.items() if hash(v) not in nonzero}
        if not self._untrained or iteration < _SILENT:
            return
        left, self._untrained = self._untrained, {}
        missing = [name for name, v in left.items() if v.grad.zeroing]
        if missing:
            self.warn(
                "untrained",
                f"{len(missing)} of the solver's parameters had no gradient in {iteration} updates "
                f"(the first is {missing[0]!r}): the loss does not depend on them. Give the "
                "solver only those that it trains; `diagnose` lists the others",
            )
        # Other ranks may have had gradients, and an inactive loss may come later.
        inactive = any(0.0 in engine.result.schedule.loss_weights for engine in engines if engine.result)
        zero = [] if inactive else [name for name in left if name not in missing]
        if zero and engines[0].kernels.gradients_are_zero([left[name] for name in zero]):
            self.warn(
                "zero gradients of some",
                f"the gradients of {len(zero)} of the solver's parameters were exactly zero in {iteration} "
                f"updates (the first is {zero[0]!r}): they underflow, or what they lead to passes none on. "
                "`diagnose` says which",
            )

    def _warn_of_zeros(self, iteration: int, scale: float, engines: Sequence[AdaptiveLossScaling]) -> None:
        in_a_row = iteration - self._last_gradient
        # The batch may have had nothing to learn from, as one without a reward.
        may_be_silent = self._last_gradient or in_a_row < _SILENT
        if may_be_silent and all(engine.has_nothing_to_learn() for engine in engines):
            return
        since = f"in {in_a_row} updates up to" if in_a_row > 1 else "in"
        self.warn(
            "zero_gradients",
            f"every gradient is exactly zero {since} iteration {iteration}, at loss scale {scale:g}: the "
            "network is at rest, or everything underflows. Look at the loss weight, and at what "
            "`diagnose` says",
        )

    def count_lost(self, iteration: int, where: str, fault: str = "") -> None:
        """Count a batch that was lost to overflow, or to a `fault` of forward; warn of many in a row."""
        self._lost_in_a_row += 1
        if self._lost_in_a_row != _LOST:
            return
        lost = f"{_LOST} batches in a row were lost up to iteration {iteration}"
        advice = "Look at the data, the parameters, the learning rate, and at what `diagnose` says"
        if fault:
            self.warn("lost to forward", f"{lost}, the last because forward is not finite: {fault}. {advice}")
        else:
            self.warn(
                "lost",
                f"{lost}, the last to overflow, though each has lowered the scales; first bad layer: "
                f'{where}. {advice}; on_overflow="repeat" of the updater loses none',
            )

    def check_parameters(self, solver: Any, graph: Graph, plan: GraphPlan) -> None:
        """Raise ValueError when the solver has no parameters, warn when they are not the network's."""
        parameters = solver.get_parameters()
        if not parameters:
            raise ValueError(
                "solver has no parameters, so nothing would be trained: call "
                "solver.set_parameters(nnabla.get_parameters()) first"
            )
        reached = {graph.keys[leaf] for node in plan.nodes for leaf in node.leaves}
        if not any(hash(v) in reached for v in parameters.values()):
            self.warn(
                "foreign_parameters",
                f"the loss does not depend on any of the solver's {len(parameters)} parameters (the first is "
                f"{next(iter(parameters))!r}): they are of another network, or none of them needs a gradient",
            )
            return
        # Running statistics, or frozen on purpose: Variables of a solver do not tell.
        fixed = {graph.keys[position] for position in graph.leaves}.difference(
            graph.keys[position] for position in graph.needed
        )
        self._untrained = {name: v for name, v in parameters.items() if hash(v) not in fixed}
