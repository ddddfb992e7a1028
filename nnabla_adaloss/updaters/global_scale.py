# SPDX-License-Identifier: Apache-2.0
"""The global loss scale S0 of a training: measured, or searched for by growth and back-off."""

from __future__ import annotations

import math
from typing import Optional, Union

from ..core.scale_history import HistoryPolicy
from ..core.scale_policy import ScalePolicy, ScaleState
from ..graph.loss import check_scale


class GlobalScale:
    """S0 and its counters; without a policy of measured scales, S0 is searched for."""

    undone = "state", "last_good", "_used"

    def __init__(self, scale: float, policy: ScalePolicy, history: Optional[HistoryPolicy]) -> None:
        self.policy = policy  # its `min_scale` holds for measured scales, too
        self.state = policy.initial(scale if history is None else history.start_scale)
        self.last_good = math.nan  # S0 of the last update
        self.measured = history is not None
        self._used = self.state.scale

    @property
    def scale(self) -> float:
        """S0."""
        return self.state.scale

    @property
    def seed(self) -> Optional[float]:
        """The scale to give to `AdaptiveLossScaling.backward`; None: it chooses a measured one."""
        return None if self.measured else self.state.scale

    def set(self, scale: float) -> None:
        """Set S0; the counters stay."""
        self.state = self.state._replace(scale=check_scale(scale))

    def change_policy(self, policy: ScalePolicy) -> None:
        """Go on with another policy."""
        hysteresis_left = min(self.state.hysteresis_left, policy.hysteresis)
        self.policy, self.state = policy, self.state._replace(hysteresis_left=hysteresis_left)

    def lower(self) -> bool:
        """Lower a searched S0 after an overflow; False: nothing can be lowered here."""
        if self.measured or self.policy.at_floor(self.state):
            return False
        self.state = self.policy.after_overflow(self.state)
        return True

    def in_use(self, measured: float) -> ScaleState:
        """The state with the scale of the last batch, which the engine has used where it is measured."""
        return self.state._replace(scale=measured) if self.measured else self.state

    def agree_on(self, state: ScaleState) -> None:
        """Take over what all ranks go on with: a measured scale counts once its batch was good."""
        self._used = state.scale
        if not self.measured:
            self.state = state

    def after_update(self) -> None:
        """Count a good update."""
        if self.measured:
            self.state = self.state._replace(scale=self._used)
        self.last_good = self.state.scale
        if not self.measured:
            self.state = self.policy.after_update(self.state)

    def restore(self, state: ScaleState, last_good: Optional[float] = None) -> None:
        """Return to an earlier state, or to a saved one with its last good scale."""
        self.state = state
        if last_good is not None:
            self.last_good = last_good


def history_of(global_scale: Union[str, HistoryPolicy], **fields: float) -> Optional[HistoryPolicy]:
    """The policy of measured scales for an argument `global_scale`; None for `"dynamic"`."""
    if isinstance(global_scale, HistoryPolicy):
        return global_scale
    # An array compares with a string element by element.
    if isinstance(global_scale, str) and global_scale == "history":
        return HistoryPolicy(**fields)  # type: ignore[arg-type]  # `window` is the only integer
    if isinstance(global_scale, str) and global_scale == "dynamic":
        return None
    raise ValueError(f"global_scale={global_scale!r} must be 'history', 'dynamic' or a HistoryPolicy")
