# SPDX-License-Identifier: Apache-2.0
"""Loss scale from the extreme magnitudes of the gradient and of the weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from ..overflow import overflow_limit
from ..power_of_two import clamp_scale
from ..statistics import ArrayStatistics
from .method import Method, Needs, Range

# Products below this are not chased: two tiny elements that never meet would ask for an enormous scale.
_SMALLEST_PRODUCT = 1e-15


@dataclass(frozen=True)
class AbsRange(Method):
    """The scale that lifts the smallest possible non-zero sum of products to u_min, within overflow.

    Over the non-zero elements: min(max((u_min / K) / max(min|g| min|W|, 1e-15), 1), (u_max / K) / (max|g|
    max|W|)); 1 when the gradient or the weight is all zero.

    Example:
        >>> import numpy as np
        >>> from nnabla_adaloss.core import statistics_of
        >>> g, W = statistics_of(np.array([1e-7, 1e-3])), statistics_of(np.array([0.1, 0.5]))
        >>> round(AbsRange().scale(g, W, range=Range(6e-8, 65504.0), fan_in=2), 3)
        3.0
    """

    needs = Needs.STATISTICS

    def scale(
        self, g: ArrayStatistics, W: Optional[ArrayStatistics], *, range: Range, fan_in: float
    ) -> float:
        """The scale from statistics; without `W`, `fan_in` is not looked at."""
        if g.abs_max == 0.0 or (W is not None and W.abs_max == 0.0):
            return 1.0
        weight_min, terms = (1.0, 1.0) if W is None else (W.abs_min, fan_in)
        lower = range.u_min / terms / max(g.abs_min * weight_min, _SMALLEST_PRODUCT)
        return clamp_scale(min(max(lower, 1.0), overflow_limit(g, W, terms, range.u_max)))
