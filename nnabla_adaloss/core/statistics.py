# SPDX-License-Identifier: Apache-2.0
"""Statistics of an array for loss scale methods."""

from __future__ import annotations

import math
from typing import Any, List, NamedTuple, Optional, Sequence

import numpy as np
from numpy.typing import NDArray

from .validation import number


class ArrayStatistics(NamedTuple):
    """Sums and extremes of an array's finite elements, as Python numbers.

    Infinities and NaNs count in `nonfinite` only.

    Attributes:
        count: number of elements, non-finite ones included.
        sum: sum of the finite elements (float64); infinite if it overflows, 0.0 if parts do with both signs.
        sum_of_squares: sum of the squares of the finite elements (float64), infinite if it overflows.
        abs_max: largest finite magnitude; 0.0 when there is none.
        abs_min: smallest non-zero finite magnitude; 0.0 when there is none.
        zeros: number of elements equal to zero, -0.0 included.
        nonfinite: number of infinities and NaNs.

    Example:
        >>> import numpy as np
        >>> from nnabla_adaloss.core.statistics import statistics_of
        >>> statistics_of(np.array([1.0, -2.0, 0.0, np.nan]))
        ArrayStatistics(count=4, sum=-1.0, sum_of_squares=5.0, abs_max=2.0, abs_min=1.0, zeros=1, nonfinite=1)
    """

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody asks of statistics
    sum: float
    sum_of_squares: float
    abs_max: float
    abs_min: float
    zeros: int
    nonfinite: int

    @classmethod
    def of_zeros(cls, count: int) -> ArrayStatistics:
        """Statistics of an array of `count` zeros, which may be 0."""
        return cls(count, 0.0, 0.0, 0.0, 0.0, count, 0)

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> ArrayStatistics:
        """Load statistics from a saved list; TypeError or ValueError if no array can have them."""
        loaded = cls(*values) if len(values) == len(cls._fields) else None
        # Only the sum may be negative; sums may be infinite. NaN fails all comparisons.
        if loaded is None or not (
            number("sum", loaded.sum) <= math.inf
            and all(number("statistics", value) >= 0.0 for value in loaded._replace(sum=0.0))
        ):
            raise ValueError(f"statistics {values} cannot be those of an array")
        return loaded

    @property
    def finite(self) -> bool:
        """True when no element is an infinity or a NaN."""
        return not self.nonfinite

    @property
    def mean(self) -> float:
        """Mean of the finite elements; 0.0 when there is none."""
        return self.sum / max(self.count - self.nonfinite, 1)

    @property
    def mean_square(self) -> float:
        """M(X) = std(X)^2 + mean(X)^2, the mean of the squares of the finite elements."""
        return self.sum_of_squares / max(self.count - self.nonfinite, 1)

    @property
    def std(self) -> float:
        """Population standard deviation of the finite elements; inexact if below 1e-8 of the mean."""
        # Float64 elements beyond 1e154: `mean**2` could raise an OverflowError.
        if self.mean_square == math.inf:
            return math.inf
        return math.sqrt(max(self.mean_square - self.mean**2, 0.0))

    def scaled(self, factor: float) -> ArrayStatistics:
        """Statistics of the array multiplied by `factor`, which is not 0; exact for powers of two."""
        count, total, squares, abs_max, abs_min, zeros, nonfinite = self
        size = abs(factor)
        # `_replace` takes four times as long, and this runs per layer.
        scaled = total * factor, squares * factor * factor, abs_max * size, abs_min * size
        return ArrayStatistics(count, *scaled, zeros, nonfinite)


def combine(parts: Sequence[ArrayStatistics]) -> Optional[ArrayStatistics]:
    """Combine the statistics of several arrays; None for no arrays."""
    if not parts:
        return None
    return ArrayStatistics(
        count=sum(p.count for p in parts),
        sum=_sum([p.sum for p in parts]),
        sum_of_squares=_sum([p.sum_of_squares for p in parts]),
        abs_max=max(p.abs_max for p in parts),
        abs_min=min((p.abs_min for p in parts if p.abs_min > 0.0), default=0.0),
        zeros=sum(p.zeros for p in parts),
        nonfinite=sum(p.nonfinite for p in parts),
    )


def _sum(values: List[float]) -> float:
    """Exact sum, rounded once; if it overflows, as `ArrayStatistics.sum`."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # numbers near the end of float64, and infinities
        total = sum(values)
        return 0.0 if math.isnan(total) else total


def statistics_of(x: NDArray[Any]) -> ArrayStatistics:
    """Statistics of a NumPy array, accumulated in float64: the reference for compiled kernels."""
    with np.errstate(invalid="ignore"):  # that flag is raised by converting a signalling NaN
        values = np.asarray(x, dtype=np.float64).ravel()
    is_finite = np.isfinite(values)
    finite = values if is_finite.all() else values[is_finite]
    magnitudes = np.abs(finite)
    nonzero = magnitudes[magnitudes > 0]
    # Sums of float64 inputs may overflow to infinity, and parts of one sum to infinities of both signs.
    with np.errstate(over="ignore", invalid="ignore"):
        total, total_of_squares = float(finite.sum()), float(np.dot(finite, finite))
    return ArrayStatistics(
        count=values.size,
        sum=0.0 if math.isnan(total) else total,
        sum_of_squares=total_of_squares,
        abs_max=float(nonzero.max()) if nonzero.size else 0.0,
        abs_min=float(nonzero.min()) if nonzero.size else 0.0,
        zeros=finite.size - nonzero.size,
        nonfinite=values.size - finite.size,
    )
