# SPDX-License-Identifier: Apache-2.0
"""Limits of single layers' scales that an overflow lowers and good updates raise again.

    after an overflow by a layer's own alpha > 1:  limit = max(alpha / 2, 1);  updates = 0
    after recovery_interval updates:               limit = limit * 2;          updates = 0
                                                   no limit any more when it is back where it overflowed

The state is apart from the policy, as that of the global scale is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Optional

from .validation import integer, number, positive_number


class LayerLimit(NamedTuple):
    """The limit of one layer.

    Attributes:
        limit: the largest scale the layer may have now.
        overflowed: the scale that overflowed; the limit ends when it would get back there.
        updates: good updates since the limit last changed.
    """

    limit: float
    overflowed: float
    updates: int

    def checked(self) -> LayerLimit:
        """The limit itself; TypeError or ValueError when its numbers cannot come from overflows."""
        if positive_number("limit", self.limit) < 1.0:
            raise ValueError(f"limit={self.limit!r} must be 1 or more")
        positive_number("overflowed", self.overflowed)
        if integer("updates", self.updates) < 0:
            raise ValueError(f"updates={self.updates!r} must be 0 or more")
        return self


@dataclass(frozen=True)
class LayerLimitPolicy:
    """Backs off a layer's own scale when that made its gradient overflow, in place of the global one.

    Attributes:
        recovery_interval: good updates after which a lowered limit is doubled. 2000, as the global scale's.

    Example:
        >>> policy = LayerLimitPolicy(recovery_interval=1)
        >>> limit = policy.after_overflow(None, 16.0)
        >>> limit
        LayerLimit(limit=8.0, overflowed=16.0, updates=0)
        >>> policy.after_update(limit) is None
        True
    """

    recovery_interval: float = 2000

    def __post_init__(self) -> None:
        if not number("recovery_interval", self.recovery_interval) >= 0:
            raise ValueError(
                f"recovery_interval={self.recovery_interval!r} must be 0 or more; "
                "math.inf never raises a limit"
            )

    def after_overflow(self, limit: Optional[LayerLimit], alpha: float) -> Optional[LayerLimit]:
        """The limit after `alpha` overflowed: half of it; None when it is 1 or less and not to blame."""
        if alpha <= 1.0:
            return None
        overflowed = alpha if limit is None else max(alpha, limit.overflowed)
        return LayerLimit(max(alpha / 2.0, 1.0), overflowed, 0)

    def after_update(self, limit: LayerLimit) -> Optional[LayerLimit]:
        """The limit after a good update: doubled when it is old enough, None when it reaches its top."""
        if limit.updates + 1 < self.recovery_interval:
            return limit._replace(updates=limit.updates + 1)
        if limit.limit * 2.0 >= limit.overflowed:
            return None
        return LayerLimit(limit.limit * 2.0, limit.overflowed, 0)
