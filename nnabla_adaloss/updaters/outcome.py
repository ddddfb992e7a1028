# SPDX-License-Identifier: Apache-2.0
"""The outcome of the batches of one update: whether gradients overflowed, and why."""

from __future__ import annotations

from itertools import compress
from typing import Any, NamedTuple, Optional, Tuple

import numpy as np

from ..engine import AdaptiveLossScaling
from ..undo import ForwardFault
from .exchange import GradientExchange, gradients_are_finite

# The first of these that holds on any rank is the cause; if none does, it is an overflow.
_CAUSES = "nonfinite_loss", "nonfinite_forward", "hopeless", "retries"


class BatchOutcome(NamedTuple):
    """The first overflow among the batches of one update on this rank, if there was one."""

    overflowed: bool = False  # whether a gradient that the solver is going to use was not finite
    # All layers whose gradients were not finite, also where the solver does not use them, in backward order.
    nonfinite_layers: Tuple[str, ...] = ()
    nonfinite_loss: bool = False
    fault: Optional[ForwardFault] = None  # in forward, which no loss scale prevents
    component: str = ""  # the part of the network where that began; empty: not known
    lowered: bool = False  # whether this rank has lowered a scale for it, other than S0
    at_floor: bool = False  # whether no scale was left to lower
    exhausted: bool = False  # whether the batch was repeated as often as allowed

    @property
    def bad_batch(self) -> bool:
        """True when the loss or another value of forward is not finite, so that gradients are not either."""
        return self.nonfinite_loss or self.fault is not None


GOOD = BatchOutcome()
"""The outcome of batches with which nothing was wrong."""


def examine(
    before: BatchOutcome,
    scaling: AdaptiveLossScaling,
    solver: Any,
    smallest_scale: float,
    *,
    search: bool = True,
    known_bad: bool = False,
) -> BatchOutcome:
    """The outcome after one more pass: infinities and NaNs count in gradients of the solver's parameters.
    `search`: look for a fault in forward also where nothing that is known of it suggests one. `known_bad`:
    these gradients were not finite, whatever has become of them.
    """
    if not scaling.found_inf:
        return before
    layers = tuple(dict.fromkeys((*before.nonfinite_layers, *scaling.found_inf)))
    if before.overflowed or (not known_bad and gradients_are_finite(scaling.kernels, solver)):
        return before._replace(nonfinite_layers=layers)
    nonfinite_loss = not np.isfinite(scaling.variable.d).all()
    component = scaling.result.component or ""
    found = BatchOutcome(True, layers, nonfinite_loss, None, component)
    suspect = nonfinite_loss or not scaling.result.state_finite or scaling.guard.stored_nonfinite
    return find_fault(found, scaling, solver, smallest_scale) if search or suspect else found


def find_fault(
    found: BatchOutcome, scaling: AdaptiveLossScaling, solver: Any, smallest_scale: float
) -> BatchOutcome:
    """The outcome of a batch that overflowed, with what is wrong in forward, which runs once more for that.

    Where forward is not finite, backward runs once more with the smallest scale. If gradients are finite then
    (an attention mask of minus infinity is no fault), the scale was too large all the same.
    """
    fault = scaling.guard.find_fault()
    if fault is not None and not found.nonfinite_loss and _finite_at(smallest_scale, scaling, solver):
        fault = None
    return found._replace(fault=fault)


def smallest_scale_helps(scaling: AdaptiveLossScaling, solver: Any, smallest_scale: float) -> bool:
    """True when gradients of the last batch are finite at the smallest scale, with which they are left."""
    scaling.guard.rewind()
    scaling.forward(clear_no_need_grad=True)
    return _finite_at(smallest_scale, scaling, solver)


def _finite_at(scale: float, scaling: AdaptiveLossScaling, solver: Any) -> bool:
    solver.zero_grad()
    scaling.probe(scale)
    return gradients_are_finite(scaling.kernels, solver)


def agree_on_cause(
    exchange: GradientExchange, outcome: BatchOutcome, *, repeat: bool
) -> Tuple[str, bool, bool]:
    """The cause of gradients that are not finite, the same on all ranks; whether a batch was repeated as
    often as allowed; and whether only S0 is left to be lowered. `repeat`: ranks repeat batches on their own.
    """
    unexplained = outcome.overflowed and not outcome.lowered and not repeat
    bad_batch = outcome.nonfinite_loss, outcome.fault is not None
    *causes, lowered, global_scale = exchange.any(
        [*bad_batch, outcome.at_floor, outcome.exhausted, outcome.lowered, unexplained]
    )
    cause, exhausted = next(compress(_CAUSES, causes), "overflow"), causes[3]
    # The sum over ranks may overflow where no rank's own gradients did.
    return cause, exhausted, global_scale or not (lowered or causes[2] or exhausted)
