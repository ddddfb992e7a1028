# SPDX-License-Identifier: Apache-2.0
"""Statistics of a gradient as stored."""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

import numpy as np
from numpy.typing import NDArray

from ..core.formats import Format
from ..core.statistics import ArrayStatistics

_BIAS = 127  # bin e of an exponent histogram counts magnitudes from 2**(e - 127) on


class LayerArrays(NamedTuple):
    """Copies of a layer's arrays, in float32; None where nothing is stored any more.

    Attributes:
        output_gradient: what arrived from the loss, accumulated scale included.
        input_gradient: what the layer hands on, accumulated scale included.
        weight: the weight, without the layer's scale.
        input: what the weight is multiplied by.
    """

    output_gradient: Optional[NDArray[np.float32]]
    input_gradient: Optional[NDArray[np.float32]]
    weight: Optional[NDArray[np.float32]]
    input: Optional[NDArray[np.float32]]


class GradientSeen(NamedTuple):
    """A gradient as stored, accumulated scale included; or a weight or an activation.

    Attributes:
        statistics: sums, extremes and counts.
        exponents: how many elements have each binary exponent, shape (256,): bin e counts the magnitudes from
            2^(e - 127) to 2^(e - 126); bin 0 holds the zeros and what is smaller, bin 255 infinities and NaN.
        format: the format that it is stored in.
        underflowed: how many elements that were not zero became zero when it was stored; None where the
            storage does not count it: only emulated storage does.
        overflowed: how many finite ones became too large, likewise.
    """

    statistics: ArrayStatistics
    exponents: NDArray[np.int64]
    format: Format
    underflowed: Optional[int] = None
    overflowed: Optional[int] = None

    @property
    def subnormals(self) -> int:
        """How many elements are not zero and below the format's normal range: they have lost precision."""
        first_normal = math.frexp(self.format.smallest_normal)[1] - 1 + _BIAS
        return int(self.exponents[:first_normal].sum()) - self.statistics.zeros

    @property
    def headroom(self) -> float:
        """Bits that are left between the largest magnitude and the end of the format.

        0 where an element is not finite, infinity where all are zero.
        """
        if self.statistics.nonfinite:
            return 0.0
        abs_max = self.statistics.abs_max
        return math.log2(self.format.max / abs_max) if abs_max else math.inf
