# SPDX-License-Identifier: Apache-2.0
"""Global scale S0, measured or searched for, equal on all ranks.

A rank may lower its scales alone, as gradients are exchanged unscaled; then all take the lowest.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Optional, Tuple

from ..core.scale_history import HistoryPolicy
from ..core.scale_policy import ScalePolicy, ScaleState
from ..engine import AdaptiveLossScaling
from .exchange import GradientExchange

# Keys of messages between ranks: S0, and whether a rank's gradients must not be used.
_S0, _BAD = "S0", "bad"


class GlobalScale:
    """S0 and its counters; without a policy of measured scales, S0 is searched for."""

    undone = "state", "last_good"  # restored from a `savepoint`

    def __init__(self, scale: float, policy: ScalePolicy, history: Optional[HistoryPolicy]) -> None:
        self.policy = policy  # its `min_scale` limits measured scales, too
        self.state = policy.initial(scale if history is None else history.start_scale)
        self.last_good = math.nan  # S0 of the last update
        self.measured = history is not None

    def change(self, **fields: Any) -> None:
        """Change fields of the policy; ValueError, without any change, if they are invalid."""
        self.policy = replace(self.policy, **fields)
        left = min(self.state.hysteresis_left, self.policy.hysteresis)
        self.state = self.state._replace(hysteresis_left=left)

    def lower(self) -> bool:
        """Lower a searched S0 after an overflow; False if it cannot be lowered."""
        if self.measured or self.policy.at_floor(self.state):
            return False
        self.state = self.policy.after_overflow(self.state)
        return True

    def exchange(
        self, ranks: GradientExchange, scaling: AdaptiveLossScaling, *, average: bool, alike: bool, bad: bool
    ) -> Tuple[float, bool]:
        """Sum gradients, and adopt statistics and the lowest scale; return the scale, and if any are bad."""
        state = self.state._replace(scale=scaling.loss_scale) if self.measured else self.state
        measured = scaling.shared_statistics()
        # `alike`: S0 is equal on all ranks anyway, and not sent.
        own = {**(measured or {}), **({} if alike else {_S0: list(state)}), _BAD: [float(bad)]}
        messages, finite = ranks.sum_with(own, scaling.kernels, average=average)
        if not alike:
            # The lowest wins; of equal ones that next to go down: least hysteresis left, fewest good updates.
            rows = [one[_S0] for one in messages]
            scale, counter, hysteresis_left = min(rows, key=lambda row: (row[0], row[2], row[1]))
            state = ScaleState(scale, int(counter), int(hysteresis_left))
        if measured is not None:
            scaling.adopt_statistics(messages)
        if not self.measured:
            self.state = state
        return state.scale, not finite or any(one[_BAD][0] for one in messages)

    def after_update(self, used: float, *, overflowed: bool) -> None:
        """Count a good update; `used`: scale of its last batch; `overflowed`: a batch did, and ran again."""
        if self.measured:
            self.state = self.state._replace(scale=used)
        self.last_good = self.state.scale
        if not self.measured:
            self.state = self.policy.after_update(self.state, overflowed=overflowed)
