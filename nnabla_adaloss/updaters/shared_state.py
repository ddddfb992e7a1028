# SPDX-License-Identifier: Apache-2.0
"""Statistics and scales that ranks send along with their gradients, so that all go on with the same scales.

A rank that repeats a batch lowers scales on its own, and one that measures holds its scale where its own
scalars fit. Gradients are exchanged unscaled, so that does no harm; after the exchange all take the lowest.
"""

from __future__ import annotations

import math
from typing import List, Optional

import numpy as np
from numpy.typing import NDArray

from ..core.layer_limits import LayerLimit
from ..core.scale_policy import ScaleState
from ..engine import AdaptiveLossScaling
from .exchange import GradientExchange

_NO_LIMIT = LayerLimit(math.inf, math.inf, 0)
_STATE = len(ScaleState._fields)


def exchange_scales(
    exchange: GradientExchange,
    scaling: AdaptiveLossScaling,
    state: ScaleState,
    *,
    average: bool,
    alike: bool,
) -> ScaleState:
    """Sum the gradients over all ranks, with statistics and scales in the same message, and adopt the lowest.

    Args:
        exchange: sums the gradients.
        scaling: the engine.
        state: the global scale of the last batch.
        average: average the gradients instead.
        alike: whether all ranks have the same scales, so that none are sent.

    Returns:
        The state of the rank with the lowest global scale.
    """
    own = _message(scaling, None if alike else state)
    if own is None:
        exchange.sum(average=average)
        return state
    messages = exchange.sum_with(own, average=average)
    if not alike:
        state = _adopt_scales(scaling, messages.tolist())
        messages = messages[:, _STATE + len(scaling.layers) * len(_NO_LIMIT) :]
    if messages.size:
        scaling.adopt_statistics(messages)
    return state


def _message(scaling: AdaptiveLossScaling, state: Optional[ScaleState]) -> Optional[NDArray[np.float64]]:
    """The message of this rank; None when it has nothing to send. Without a state, there are no scales."""
    measured = scaling.shared_statistics()
    if state is None:
        return measured
    limits = [scaling.limits.get(layer, _NO_LIMIT) for layer in scaling.layers]
    own = np.array([*state, *(x for limit in limits for x in limit)], np.float64)
    return own if measured is None else np.concatenate([own, measured.ravel()])


def _adopt_scales(scaling: AdaptiveLossScaling, rows: List[List[float]]) -> ScaleState:
    """Adopt the lowest limit of each layer; return the lowest global scale."""
    limits = dict(scaling.limits)
    for index, layer in enumerate(scaling.layers):
        start = _STATE + index * len(_NO_LIMIT)
        limit, overflowed, updates = min(row[start : start + len(_NO_LIMIT)] for row in rows)
        if limit < math.inf:
            limits[layer] = LayerLimit(limit, overflowed, int(updates))
    scaling.limits = limits
    scale, hysteresis_left, counter = min((row[0], row[2], row[1]) for row in rows)
    return ScaleState(scale, int(counter), int(hysteresis_left))


def agreed_scales(scaling: AdaptiveLossScaling, scale: float, *, repeat: bool) -> List[float]:
    """Scales that must be the same on every rank between two iterations."""
    own = [scale, *(limit.limit for _, limit in sorted(scaling.limits.items()))]
    learned = [amax for _, amax in sorted(scaling.components.amaxes().items())]
    # A repeated batch may have had scales of its own on one rank, and so may the second one of an iteration:
    # what the first has shown of components counts at once.
    delayed = scaling.delay and not repeat and not learned
    return [*own, *learned, *(scaling.layer_scales.values() if delayed else ())]
