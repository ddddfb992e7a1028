# SPDX-License-Identifier: Apache-2.0
"""The outcome of the batches of one update: whether gradients overflowed, and why."""

from __future__ import annotations

import math
from typing import Any, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from ..engine import AdaptiveLossScaling
from ..undo import ForwardFault
from .exchange import GradientExchange, gradients_are_finite


class BatchOutcome(NamedTuple):
    """The first overflow among the batches of one update on this rank, if there was one.

    Attributes:
        overflowed: whether a gradient that the solver is going to use was not finite.
        nonfinite_layers: names of all layers whose gradients were not finite, also where the solver does not
            use them; the first in backward order first.
        nonfinite_loss: whether the loss was not finite.
        fault: where forward was not finite, in a way that no loss scale prevents.
        layer_to_blame: the layer whose own scale is the cause; None: another cause, or none.
        layer_scales: the scales of layers at that time.
        overflow_layers: as `nonfinite_layers`, of a batch that was repeated because of them.
        lowered: whether this rank has lowered a scale for it, other than S0.
        at_floor: whether no scale was left to lower.
        exhausted: whether the batch was repeated as often as allowed.
    """

    overflowed: bool = False
    nonfinite_layers: Tuple[str, ...] = ()
    nonfinite_loss: bool = False
    fault: Optional[ForwardFault] = None
    layer_to_blame: Optional[str] = None
    layer_scales: Mapping[str, float] = {}
    overflow_layers: Tuple[str, ...] = ()
    lowered: bool = False
    at_floor: bool = False
    exhausted: bool = False

    @property
    def bad_batch(self) -> bool:
        """True when the loss or another value of forward is not finite, which no scale prevents."""
        return self.nonfinite_loss or self.fault is not None

    def after_repeat(self, found: BatchOutcome) -> BatchOutcome:
        """This outcome, with the layers that overflowed in a batch that is going to be repeated."""
        return self._replace(
            overflow_layers=found.nonfinite_layers if found.overflowed else self.overflow_layers
        )


GOOD = BatchOutcome()
"""The outcome of batches with which nothing was wrong."""


def examine(
    before: BatchOutcome,
    scaling: AdaptiveLossScaling,
    solver: Any,
    smallest_scale: float,
    *,
    search: bool = True,
) -> BatchOutcome:
    """The outcome after one more pass: infinities and NaNs count in gradients of the solver's parameters.

    Args:
        before: the outcome of the batches before.
        scaling: has just run forward and backward.
        solver: the solver.
        smallest_scale: the smallest global loss scale there is.
        search: whether to look for a fault in forward also where nothing that is known of it suggests one.
    """
    if not scaling.found_inf:
        return before
    layers = tuple(dict.fromkeys((*before.nonfinite_layers, *scaling.found_inf)))
    if before.overflowed or gradients_are_finite(scaling.kernels, solver):
        return before._replace(nonfinite_layers=layers)
    nonfinite_loss = not np.isfinite(scaling.variable.d).all()
    blame, scales = scaling.layer_to_blame(), scaling.layer_scales
    found = BatchOutcome(True, layers, nonfinite_loss, None, blame, scales, before.overflow_layers)
    suspect = nonfinite_loss or not scaling.state_is_finite() or scaling.guard.stored_nonfinite
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
        poison_gradients(solver)
    return found._replace(fault=fault)


def smallest_scale_helps(scaling: AdaptiveLossScaling, solver: Any, smallest_scale: float) -> bool:
    """True when gradients of the last batch are finite at the smallest scale; poisons them."""
    scaling.guard.rewind()
    scaling.forward(clear_no_need_grad=True)
    helps = _finite_at(smallest_scale, scaling, solver)
    poison_gradients(solver)
    return helps


def _finite_at(scale: float, scaling: AdaptiveLossScaling, solver: Any) -> bool:
    solver.zero_grad()
    scaling.probe(scale)
    return gradients_are_finite(scaling.kernels, solver)


def poison_gradients(solver: Any) -> None:
    """Set a gradient to infinity, so that this rank, and through the sum every rank, rejects the batch."""
    next(iter(solver.get_parameters().values())).grad.fill(math.inf)


class Cause(NamedTuple):
    """The cause of gradients that are not finite, the same on all ranks.

    Attributes:
        nonfinite_loss: the loss of a rank was not finite.
        nonfinite_forward: something else in forward was not, in a way that no scale prevents.
        at_floor: a batch overflowed at any scale.
        exhausted: a batch was repeated as often as allowed.
        global_scale: only S0 is left to be lowered.
    """

    nonfinite_loss: bool
    nonfinite_forward: bool
    at_floor: bool
    exhausted: bool
    global_scale: bool

    @property
    def bad_batch(self) -> bool:
        """True when no scale is the cause."""
        return self.nonfinite_loss or self.nonfinite_forward

    @property
    def name(self) -> str:
        """The name of the cause in counters and events."""
        if self.bad_batch:
            return "nonfinite_loss" if self.nonfinite_loss else "nonfinite_forward"
        if self.at_floor:
            return "hopeless"
        return "retries" if self.exhausted else "overflow"


def agree_on_cause(
    exchange: GradientExchange, outcome: BatchOutcome, scaling: AdaptiveLossScaling, *, repeat: bool
) -> Cause:
    """Ask all ranks for the cause; layers that are to blame are lowered on each.

    Args:
        exchange: asks the other ranks.
        outcome: the outcome on this rank.
        scaling: the engine, whose layers may be lowered.
        repeat: whether ranks repeat batches on their own, and have lowered layers already.
    """
    layers = [] if repeat else scaling.layers
    blame = None if outcome.lowered else outcome.layer_to_blame
    unexplained = outcome.overflowed and blame is None and not outcome.lowered and not repeat
    flags = [outcome.nonfinite_loss, outcome.fault is not None, outcome.at_floor, outcome.exhausted]
    *agreed, lowered, global_scale = exchange.any(
        [*flags, *(layer == blame for layer in layers), outcome.lowered, unexplained]
    )
    nonfinite_loss, nonfinite_forward, at_floor, exhausted, *blamed = agreed
    if not (nonfinite_loss or nonfinite_forward or global_scale):
        for layer, flag in zip(layers, blamed):
            if flag:
                scales = outcome.layer_scales or scaling.layer_scales
                scaling.back_off(layer, scales.get(layer, 1.0))
    # The sum over ranks may overflow where no rank's own gradients did.
    explained = any(blamed) or lowered or at_floor or exhausted
    return Cause(nonfinite_loss, nonfinite_forward, at_floor, exhausted, global_scale or not explained)
