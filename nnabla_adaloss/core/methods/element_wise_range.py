# SPDX-License-Identifier: Apache-2.0
"""Loss scale from products of gradient and weight: of their extremes, or of all elements.

The formulas are those of `get_loss_scale_by_abs_range` and `get_loss_scale_by_element_wise_range`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Optional, Tuple

import numpy as np
from numpy.typing import NDArray

from ..power_of_two import clamp_scale
from ..statistics import ArrayStatistics
from ..validation import number
from .method import Method, Needs, Range, overflow_limit

Magnitudes = NDArray[np.float64]

# Smaller products are taken for this one: two tiny elements that never meet would demand a huge scale.
_SMALLEST_PRODUCT = 1e-15


@dataclass(frozen=True)
class AbsRange(Method):
    """Scale that lifts a sum of K products, each as small as possible, to u_min, unless it overflows."""

    needs = Needs.STATISTICS

    def scale(
        self, g: ArrayStatistics, W: Optional[ArrayStatistics], *, range: Range, fan_in: float
    ) -> float:
        """Compute the scale from statistics; without `W`, `fan_in` is not used."""
        if g.abs_max == 0.0 or (W is not None and W.abs_max == 0.0):
            return 1.0
        smallest, terms = (g.abs_min, 1.0) if W is None else (g.abs_min * W.abs_min, fan_in)
        lower = range.u_min / terms / max(smallest, _SMALLEST_PRODUCT)
        return clamp_scale(min(max(lower, 1.0), overflow_limit(g, W, fan_in, range.u_max)))


@dataclass(frozen=True)
class ElementWiseRange(Method):
    """Scale that lifts every product of the backward pass to u_min, unless a sum of K products overflows."""

    needs = Needs.ARRAYS
    max_rescue_ratio: Optional[float] = None

    def __post_init__(self) -> None:
        q = self.max_rescue_ratio
        if q is not None and not 0.0 < number("max_rescue_ratio", q) <= 1.0:
            raise ValueError(f"max_rescue_ratio={q!r} must lie in (0, 1]; None keeps every product")

    def scale(self, g: NDArray[Any], W: Optional[NDArray[Any]], *, range: Range, fan_in: float) -> float:
        """Compute the scale of a gradient (N, C) or (N, C, ...) and a weight (C, M) or (C, ...)."""
        pairs = _pairs(g, W)
        if not pairs:
            return 1.0
        terms = 1.0 if W is None else fan_in
        # Products of extreme float64 inputs may be 0 or infinite; the clamp makes the scale finite again.
        with np.errstate(all="ignore"):
            # The extreme products are the products of extremes, exactly, as rounding keeps the order.
            smallest, largest = min(a[0] * b[0] for a, b in pairs), max(a[-1] * b[-1] for a, b in pairs)
            if self.max_rescue_ratio is not None:
                products = sum(a.size * b.size for a, b in pairs)
                rescued = max(int(self.max_rescue_ratio * products), 1)
                # The smallest of the `rescued` largest products.
                smallest = _product_at(pairs, products - rescued, smallest, largest)
            # As a Python float, a product of 0 would raise ZeroDivisionError.
            lower, upper = range.u_min / np.float64(smallest), range.u_max / largest / terms
        return clamp_scale(float(min(max(lower, 1.0), upper)))


def _pairs(g: NDArray[Any], W: Optional[NDArray[Any]]) -> List[Tuple[Magnitudes, Magnitudes]]:
    """Sorted nonzero finite magnitudes of gradient and weight, a pair per common channel that has both."""
    if W is None:
        magnitudes = _sorted_nonzero(g)
        return [(magnitudes, np.ones(1))] if magnitudes.size else []
    if g.ndim < 2 or W.ndim < 2 or g.shape[1] != W.shape[0]:
        raise ValueError(
            f"g of shape {g.shape} and W of shape {W.shape} do not meet: "
            "axis 1 of g (N, C, ...) and axis 0 of W (C, ...) are the same channels"
        )
    pairs = ((_sorted_nonzero(g[:, c]), _sorted_nonzero(W[c])) for c in range(W.shape[0]))
    return [(a, b) for a, b in pairs if a.size and b.size]


def _sorted_nonzero(x: NDArray[Any]) -> Magnitudes:
    magnitudes = np.abs(x.astype(np.float64)).ravel()
    return np.sort(magnitudes[(magnitudes > 0) & np.isfinite(magnitudes)])


def _product_at(
    pairs: List[Tuple[Magnitudes, Magnitudes]], position: int, smallest: float, largest: float
) -> float:
    """Find the product at `position` in ascending order by bisection, without an array of all products."""
    ordered = [(a, b) if a.size < b.size else (b, a) for a, b in pairs]
    # The bits of positive floats, read as integers, have the same order: bisection takes at most 63 steps.
    low, high = (int(np.float64(product).view(np.int64)) for product in (smallest, largest))
    # The product at `position` is the largest number with at most `position` products below it.
    while low < high:
        middle = (low + high + 1) // 2
        threshold = float(np.int64(middle).view(np.float64))
        # For each element of the shorter array: the elements of the longer one with a smaller product.
        below = sum(int(np.searchsorted(many, threshold / few).sum()) for few, many in ordered)
        low, high = (middle, high) if below <= position else (low, middle - 1)
    return float(np.int64(low).view(np.float64))
