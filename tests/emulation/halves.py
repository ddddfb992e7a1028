# SPDX-License-Identifier: Apache-2.0
"""What half precision makes of arrays, by NumPy."""

from __future__ import annotations

import numpy as np


def half(array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(array, np.float32).astype(np.float16).astype(np.float32)


def is_half(array: np.ndarray) -> bool:
    return bool(np.array_equal(array, half(array), equal_nan=True))
