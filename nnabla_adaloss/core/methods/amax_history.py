# SPDX-License-Identifier: Apache-2.0
"""Method "amax_history": each component at its scale limit, from amaxes over time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Dict, Optional

from ..scale_history import HistoryPolicy
from .method import Method, Needs, Range


@dataclass(frozen=True)
class AmaxHistory(Method):
    """One scale for each component of the gradients, from the largest magnitudes of the last iterations.

    All functions except matrix products pass the scale of a gradient on, so gradients that they connect have
    a common scale: a component. A matrix product's alpha is the ratio of the scales of two components.

    Attributes:
        margin: factor by which a gradient may exceed all in the window before it overflows. None: that of the
            global scale, 4.0.
        window: number of remembered iterations (see `HistoryPolicy`). None: likewise, 64.

    Raises:
        TypeError, ValueError: a parameter is not a number, or out of range.

    Example:
        >>> from nnabla_adaloss import AdaLossConfig, AmaxHistory
        >>> AdaLossConfig(loss_scale_method="amax_history").method
        AmaxHistory(margin=None, window=None)
        >>> config = AdaLossConfig(loss_scale_method=AmaxHistory(margin=16.0))
    """

    needs = Needs.COMPONENTS
    margin: Optional[float] = None
    window: Optional[int] = None

    def __post_init__(self) -> None:
        self.policy(HistoryPolicy())  # which checks both parameters

    def policy(self, of_global_scale: HistoryPolicy) -> HistoryPolicy:
        """The policy of the global scale, with this method's margin and window."""
        own: Dict[str, Any] = {"margin": self.margin, "window": self.window}
        return replace(of_global_scale, **{name: value for name, value in own.items() if value is not None})

    def scale(self, g: Any, W: Any, *, range: Range, fan_in: float) -> float:
        """Return 1.0: a single layer, without the components of a network, is not scaled."""
        return 1.0
