# SPDX-License-Identifier: Apache-2.0
"""Values that hurt, and a function that puts them into a gradient."""

from __future__ import annotations

from typing import Any, Tuple

import hypothesis.strategies as st
import numpy as np

from tests.tampering import Tampering

# Infinities, NaN, subnormals of float16 and float32, zero, the edges of float16 and of float32.
VALUES: Tuple[float, ...] = (
    np.inf,
    -np.inf,
    np.nan,
    2.0**-24,
    -(2.0**-25),
    1e-40,
    0.0,
    -0.0,
    65504.0,
    -65520.0,
    1e38,
    3e-5,
)
values = st.sampled_from(VALUES)
places = st.sampled_from(["nowhere", "one element", "everywhere"])


def spoil(array: np.ndarray, place: str, value: float) -> np.ndarray:
    """Return a copy of ``array`` with ``value`` in it."""
    spoilt = np.array(array, np.float32)
    if place == "everywhere":
        spoilt[...] = value
    elif place == "one element" and spoilt.size:
        spoilt.flat[spoilt.size // 2] = value
    return spoilt


class SpoilGradient(Tampering):
    """Identity whose gradient is spoilt on its way back, in proportion to the scale that it carries."""

    def __init__(self, place: str, value: float, ctx: Any = None) -> None:
        super().__init__(ctx)
        self.place, self.value = place, value

    def changed(self, g: np.ndarray) -> np.ndarray:
        # Multiplied, not replaced: all functions that the engine takes for linear are linear.
        return g * spoil(np.ones_like(g), self.place, self.value)
