# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other beside their gradients, so that all go on with the same scales.

A rank that repeats a batch lowers scales without asking, and one that measures holds its scale where its own
scalars fit. Gradients are exchanged unscaled, so that does no harm; after the exchange all take the lowest.
"""

from __future__ import annotations

import math
from typing import Any, List, Optional, Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.layer_limits import LayerLimit
from ..core.scale_history import HistoryPolicy
from ..core.scale_policy import ScaleState
from ..engine import AdaptiveLossScaling

_NO_LIMIT = LayerLimit(math.inf, math.inf, 0)
_STATE = len(ScaleState._fields)


class Sharing(Protocol):
    """What of an updater is shared."""

    scaling: AdaptiveLossScaling
    on_overflow: str
    history: Optional[HistoryPolicy]

    @property
    def scale_state(self) -> ScaleState:
        """The global loss scale with its counters."""


def _tells_its_scales(updater: Sharing) -> bool:
    return updater.on_overflow == "repeat" or updater.history is not None


def reached_state(updater: Sharing) -> ScaleState:
    """The global scale with which the last batch was run, with its counters."""
    state = updater.scale_state
    return state if updater.history is None else state._replace(scale=updater.scaling.loss_scale)


def shared_state(updater: Sharing) -> Optional[NDArray[np.float64]]:
    """What this rank tells the others; None when that is nothing."""
    measured = updater.scaling.shared_statistics()
    if not _tells_its_scales(updater):
        return measured
    limits = [updater.scaling.limits.get(layer, _NO_LIMIT) for layer in updater.scaling.layers]
    own = np.array([*reached_state(updater), *(x for limit in limits for x in limit)], np.float64)
    return own if measured is None else np.concatenate([own, measured.ravel()])


def adopt_shared_state(updater: Sharing, tables: NDArray[np.float64]) -> ScaleState:
    """Take over what all ranks have told, in the order of ranks; return the lowest of their global scales."""
    scaling, state = updater.scaling, updater.scale_state
    if _tells_its_scales(updater):
        rows: List[List[float]] = tables.tolist()
        state = _lowest_state(rows)
        for index, layer in enumerate(scaling.layers):
            start = _STATE + index * len(_NO_LIMIT)
            limit, overflowed, updates = min(row[start : start + len(_NO_LIMIT)] for row in rows)
            if limit < math.inf:
                scaling.limits[layer] = LayerLimit(limit, overflowed, int(updates))
        tables = tables[:, _STATE + len(scaling.layers) * len(_NO_LIMIT) :]
    if tables.size:
        scaling.adopt_statistics(tables)
    return state


def _lowest_state(rows: List[List[float]]) -> ScaleState:
    scale, counter, hysteresis_left = min((row[0], row[2], row[1]) for row in rows)
    return ScaleState(scale, int(hysteresis_left), int(counter))


def agreed_scales(updater: Any) -> List[float]:
    """Scales that must be the same on every rank between two iterations."""
    scaling = updater.scaling
    own = [updater.scale_state.scale, *(limit.limit for _, limit in sorted(scaling.limits.items()))]
    learned = [amax for _, amax in sorted(scaling.components.amaxes().items())]
    # A repeated batch may have had scales of its own on one rank, and so may the second one of an iteration:
    # what the first has shown of components counts at once.
    delayed = scaling.delay and updater.on_overflow != "repeat" and not learned
    return [*own, *learned, *(scaling.layer_scales.values() if delayed else ())]
