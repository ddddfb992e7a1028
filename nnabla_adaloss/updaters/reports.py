# SPDX-License-Identifier: Apache-2.0
"""How an updater tells of what went wrong: an error, or a warning the first time."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence, Set, Tuple

import numpy as np

from ..engine import AdaptiveLossScaling
from ..errors import LossScaleError, warn
from ..graph.plan import GraphPlan

# After so many updates in a row without a gradient, a loss of zero is no batch without labels any more.
_SILENT = 10


class Reports:
    """Raises, warns once, or says nothing, as a policy has it."""

    def __init__(self) -> None:
        self._told: Set[str] = set()
        # The last iteration with a gradient that was not zero.
        self._last_gradient = 0

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
            warn(message)

    def note_zero_gradients(self, iteration: int, scale: float, *, loss_is_zero: Callable[[], bool]) -> None:
        """Warn of an update without any gradient.

        Where the loss is zero too, a batch may have had nothing to learn from: that is warned of when it was
        so for many updates in a row.
        """
        in_a_row = iteration - self._last_gradient
        if in_a_row < _SILENT and loss_is_zero():
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

    def note_gradients(self, iteration: int) -> None:
        """Remember that an update had gradients."""
        self._last_gradient = iteration

    def tell_of_hopeless_batch(self, iteration: int, layers: Sequence[str]) -> None:
        """Warn of a batch that is thrown away because no scale helps it."""
        self.warn(
            "hopeless",
            f"gradients of a batch in iteration {iteration} are not finite at any loss scale: it is thrown "
            f"away; first bad layer: {_first(layers)}",
        )

    def bad_batch(self, policy: str, kind: str, whose: str, fault: str, iteration: int, scale: float) -> None:
        """Report a batch with which something is wrong that no scale mends, as `policy` says."""
        subject = "the loss" if kind == "nonfinite_loss" else "the forward pass"
        self.act(
            policy,
            kind,
            f"{subject}{whose} is not finite in iteration {iteration}{': ' if fault else ''}{fault}; that is "
            f"no overflow of gradients, and the loss scale stays at {scale:g}. Look at the data and the "
            "learning rate",
        )

    def floor(
        self,
        policy: str,
        iteration: int,
        floor: float,
        layers: Sequence[str],
        nonfinite: Tuple[int, int],
        last_good_scale: float,
        scale: float,
    ) -> None:
        """Report an overflow at the smallest scale, as `policy` says."""
        nans, infinities = nonfinite
        self.act(
            policy,
            "scale_floor",
            f"gradients overflow in iteration {iteration} at the smallest loss scale, {floor:g}; first bad "
            f"layer: {_first(layers)}; parameter gradients hold {nans} NaNs and {infinities} infinities; "
            f"last good scale: {last_good_scale:g}. The scale is {scale:g} again",
        )

    def exhausted(self, policy: str, iteration: int, retries: int, layers: Sequence[str]) -> None:
        """Report a batch that was repeated as often as may be, as `policy` says."""
        self.act(
            policy,
            "retries",
            f"gradients overflowed {retries} times in iteration {iteration}, with ever lower scales; first "
            f"bad layer: {_first(layers)}",
        )

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


def _first(layers: Sequence[str]) -> str:
    return layers[0] if layers else "on another rank"


def tell_of_float_storage(
    scaling: AdaptiveLossScaling, storage: Optional[Any], config: Optional[Any]
) -> None:
    """Warn when training is in fp32 only because nobody said anything about storage."""
    if storage is None and config is None and scaling.loss is scaling.variable and not scaling.in_half:
        warn(
            "nothing is stored in half precision: the network is in a float context and storage is None. "
            'Pass storage="float16" to emulate it, or build the network in a half context'
        )


def nonfinite_gradients(solver: Any) -> Tuple[int, int]:
    """How many NaNs and how many infinities the gradients of a solver's parameters hold."""
    gradients = [v.g for v in solver.get_parameters().values()]
    return sum(int(np.isnan(g).sum()) for g in gradients), sum(int(np.isinf(g).sum()) for g in gradients)
