# SPDX-License-Identifier: Apache-2.0
"""How an updater tells of what went wrong: an error, or a warning the first time."""

from __future__ import annotations

import warnings
from typing import Any, Optional, Set, Tuple

import nnabla as nn
import numpy as np

from ..errors import LossScaleError, LossScaleWarning
from ..graph.function_kinds import computes_in_half
from ..graph.loss_like import LossLike
from ..graph.plan import GraphPlan


class Reports:
    """Raises, warns once, or says nothing, as a policy has it."""

    def __init__(self) -> None:
        self._told: Set[str] = set()

    def act(self, policy: str, kind: str, message: str) -> None:
        """Do what `policy` says: `"raise"` a LossScaleError, `"warn"` once for each kind, or `"skip"`."""
        if policy == "raise":
            raise LossScaleError(message)
        if policy == "warn":
            self.warn(kind, message)

    def warn(self, kind: str, message: str) -> None:
        """Warn, the first time that there is something of this kind to warn of."""
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(message, LossScaleWarning, stacklevel=5)

    def check_what_is_trained(self, solver: Any, plan: GraphPlan) -> None:
        """Raise ValueError when the solver has no parameters, warn when they are not the network's."""
        parameters = solver.get_parameters()
        if not parameters:
            raise ValueError(
                "solver has no parameters, so nothing would be trained: call "
                "solver.set_parameters(nnabla.get_parameters()) first"
            )
        reached = {key for node in plan.nodes.values() for key in node.leaf_keys}
        if not any(hash(v) in reached for v in parameters.values()):
            self.warn(
                "foreign_parameters",
                f"the loss does not depend on any of the solver's {len(parameters)} parameters (the first is "
                f"{next(iter(parameters))!r}): they are of another network, or none of them needs a gradient",
            )


def tell_of_float_storage(loss: LossLike, storage: Optional[Any], config: Optional[Any]) -> None:
    """Warn when training is in fp32 only because nobody said anything about storage."""
    if storage is not None or config is not None or not isinstance(loss, nn.Variable):
        return
    if not computes_in_half(loss.parent.context):
        warnings.warn(
            "nothing is stored in half precision: the network is in a float context and storage is None. "
            'Pass storage="float16" to emulate it, or build the network in a half context',
            LossScaleWarning,
            stacklevel=3,
        )


def nonfinite_gradients(solver: Any) -> Tuple[int, int]:
    """How many NaNs and how many infinities the gradients of a solver's parameters hold."""
    gradients = [v.g for v in solver.get_parameters().values()]
    return sum(int(np.isnan(g).sum()) for g in gradients), sum(int(np.isinf(g).sum()) for g in gradients)
