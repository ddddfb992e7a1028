# SPDX-License-Identifier: Apache-2.0
"""Distance between the distributions of two samples."""

from __future__ import annotations

import numpy as np

from .scenes import Floats


def discrepancy(a: Floats, b: Floats) -> float:
    """Maximum mean discrepancy of two samples (Gretton et al. 2012); 0 for equal distributions.

    Args:
        a: shape (n, k): vectors.
        b: shape (m, k). The kernels are Gaussian, of a half, one and two times the median distance in `b`.
    """

    def squares(p: Floats, q: Floats) -> Floats:
        return np.maximum((p**2).sum(1)[:, None] + (q**2).sum(1)[None] - 2.0 * p @ q.T, 0.0)

    if not np.isfinite(a).all():
        return float("nan")
    a, b = a.astype(np.float32), b.astype(np.float32)  # the sums below exceed float16
    median = float(np.median(squares(b, b)[np.triu_indices(len(b), 1)]))

    def mean_kernel(p: Floats, q: Floats, *, same: bool) -> float:
        distances = squares(p, q)
        kernel = sum(np.exp(-distances / (2.0 * width**2 * median)) for width in (0.5, 1.0, 2.0)) / 3.0
        if same:
            # The estimate is unbiased without the distance of each vector to itself.
            return float((kernel.sum() - np.trace(kernel)) / (len(p) * (len(p) - 1)))
        return float(kernel.mean())

    squared = (
        mean_kernel(a, a, same=True) + mean_kernel(b, b, same=True) - 2.0 * mean_kernel(a, b, same=False)
    )
    return float(np.sqrt(max(0.0, squared)))
