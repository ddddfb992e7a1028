# SPDX-License-Identifier: Apache-2.0
"""Limits of single layers' scales that an overflow lowers and good updates raise again."""

from __future__ import annotations

import math
from typing import Dict, Mapping, NamedTuple

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


class LayerLimits:
    """Backs off a layer's own scale when that made its gradient overflow, in place of the global one.

    Args:
        recovery_interval: good updates after which a lowered limit is doubled. 2000, as the global scale's.

    Example:
        >>> limits = LayerLimits(recovery_interval=1)
        >>> limits.back_off("conv1", 16.0)
        True
        >>> limits["conv1"]
        8.0
        >>> limits.after_update()
        >>> limits["conv1"]
        inf
    """

    def __init__(self, recovery_interval: float = 2000) -> None:
        self.recovery_interval = number("recovery_interval", recovery_interval)
        self._limits: Dict[str, LayerLimit] = {}

    def __getitem__(self, layer: str) -> float:
        found = self._limits.get(layer)
        return math.inf if found is None else found.limit

    def __bool__(self) -> bool:
        return bool(self._limits)

    def back_off(self, layer: str, alpha: float) -> bool:
        """Halve the scale that `layer` may have; False when `alpha` is 1 or less and not to blame."""
        if alpha <= 1.0:
            return False
        before = self._limits.get(layer)
        overflowed = alpha if before is None else max(alpha, before.overflowed)
        self._limits[layer] = LayerLimit(max(alpha / 2.0, 1.0), overflowed, 0)
        return True

    def after_update(self) -> None:
        """Count a good update; double the limits that are old enough, and drop those that reach the top."""
        for layer, (limit, overflowed, updates) in list(self._limits.items()):
            if updates + 1 < self.recovery_interval:
                self._limits[layer] = LayerLimit(limit, overflowed, updates + 1)
            elif limit * 2.0 >= overflowed:
                del self._limits[layer]
            else:
                self._limits[layer] = LayerLimit(limit * 2.0, overflowed, 0)

    def as_mapping(self) -> Dict[str, LayerLimit]:
        """The limits by layer name, for saving."""
        return dict(self._limits)

    def replace(self, limits: Mapping[str, LayerLimit]) -> None:
        """Take the limits of `limits` in place of the present ones."""
        self._limits = dict(limits)
