# SPDX-License-Identifier: Apache-2.0
"""Errors and warnings of a training, each warning once."""

from __future__ import annotations

from typing import Any, Callable, Set

from ..errors import LossScaleError, warn
from ..graph.plan import GraphPlan

# After this many updates without ever a gradient, a loss of zero is more than batches without labels.
_SILENT = 100
# A jump by 2**20 costs six batches.
_LOST = 10


class Notifier:
    """Raises, warns once, or does nothing, according to a policy; also counts batches lost in a row."""

    def __init__(self) -> None:
        self._warned: Set[str] = set()
        self.lost_in_a_row = 0

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

    def notify_zero_gradients(
        self, last: int, iteration: int, scale: float, nothing_to_learn: Callable[[], bool]
    ) -> None:
        """Warn of an update without any gradient, which was last not zero in iteration `last`; 0: never."""
        in_a_row = iteration - last
        # The batch may have had nothing to learn from, as one without a reward.
        if (last or in_a_row < _SILENT) and nothing_to_learn():
            return
        since = (
            f"in {in_a_row} updates up to iteration {iteration}"
            if in_a_row > 1
            else f"in iteration {iteration}"
        )
        self.warn(
            "zero_gradients",
            f"every gradient is exactly zero {since}, at loss scale {scale:g}: the network is at rest, or "
            "everything underflows. Look at the loss weight, and at what `diagnose` says",
        )

    def count_lost(self, iteration: int, where: str) -> None:
        """Count a batch that was lost to overflow; warn of many in a row."""
        self.lost_in_a_row += 1
        if self.lost_in_a_row == _LOST:
            self.warn(
                "lost",
                f"{_LOST} batches in a row were lost to overflow up to iteration {iteration}, though each "
                f"has lowered the scales; first bad layer: {where}. Look at the data, the learning "
                'rate, and at what `diagnose` says; on_overflow="repeat" of the updater loses none',
            )

    def check_parameters(self, solver: Any, plan: GraphPlan) -> None:
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
