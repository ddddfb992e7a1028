# SPDX-License-Identifier: Apache-2.0
"""Values that hurt, and a function that puts them into a gradient."""

from __future__ import annotations

from typing import Any, Tuple

import hypothesis.strategies as st
import numpy as np
from nnabla.function import PythonFunction

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


class SpoilGradient(PythonFunction):
    """Identity whose gradient is spoilt on its way back, in proportion to the scale that it carries."""

    def __init__(self, place: str, value: float, ctx: Any = None) -> None:
        super().__init__(ctx)
        self.place, self.value = place, value

    @property
    def name(self) -> str:
        return "SpoilGradient"

    def min_outputs(self) -> int:
        return 1

    def setup_impl(self, inputs: Any, outputs: Any) -> None:
        outputs[0].reset_shape(inputs[0].shape, True)

    def forward_impl(self, inputs: Any, outputs: Any) -> None:
        outputs[0].data.copy_from(inputs[0].data)

    def backward_impl(self, inputs: Any, outputs: Any, propagate_down: Any, accum: Any) -> None:
        g = outputs[0].g
        # Multiplied, not replaced: all functions that the engine takes for linear are linear.
        factor = spoil(np.ones_like(g), self.place, self.value)
        with np.errstate(all="ignore"):
            g = g * factor
            inputs[0].g = inputs[0].g + g if accum[0] else g

    def grad_depends_output_data(self, i: int, o: int) -> bool:
        return False

    def grad_depends_input_data(self, i: int, j: int) -> bool:
        return False
