# SPDX-License-Identifier: Apache-2.0
"""Growth and back-off of the scale of a `LossScaler`.

    after an overflow:  scale = max(scale * backoff_factor, min_scale);  good_updates = 0
    after an update:    good_updates = good_updates + 1
                        when that is growth_interval:
                            scale = min(scale * growth_factor, max_scale);  good_updates = 0

nnabla's own updater counts differently: see `nnabla_adaloss.core.scale_policy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class GrowthState(NamedTuple):
    """The scale, and the good updates since it last changed."""

    scale: float
    good_updates: int


@dataclass(frozen=True)
class GrowthPolicy:
    """Transitions of the scale of a `LossScaler`; its arguments of the same names, already checked.

    A scale that was set outside of [min_scale, max_scale] is not moved inside; it only goes no further.

    Example:
        >>> policy = GrowthPolicy(2, 2.0, 0.5, 1.0, 64.0)
        >>> state = policy.after_update(policy.after_update(GrowthState(32.0, 0)))
        >>> state
        GrowthState(scale=64.0, good_updates=0)
        >>> policy.after_overflow(state)
        GrowthState(scale=32.0, good_updates=0)
    """

    growth_interval: int
    growth_factor: float
    backoff_factor: float
    min_scale: float
    max_scale: float

    def after_overflow(self, state: GrowthState) -> GrowthState:
        """The state after gradients with an infinity or a NaN."""
        floor = min(self.min_scale, state.scale)
        return GrowthState(max(state.scale * self.backoff_factor, floor), 0)

    def after_update(self, state: GrowthState) -> GrowthState:
        """The state after a good update."""
        if state.good_updates + 1 < self.growth_interval:
            return state._replace(good_updates=state.good_updates + 1)
        ceiling = max(self.max_scale, state.scale)
        return GrowthState(min(state.scale * self.growth_factor, ceiling), 0)

    def at_floor(self, state: GrowthState) -> bool:
        """True when a further overflow will not lower the scale: the cause is not the scale."""
        return state.scale <= self.min_scale
