# SPDX-License-Identifier: Apache-2.0
"""Checks that every kernel backend makes of what it is given."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import List, Sequence

import numpy as np
from nnabla import NdArray
from numpy.typing import NDArray

from .arrays import FLOAT16, FLOAT32, are_float32

_size = attrgetter("size")
_IS_HALF = {FLOAT32: False, FLOAT16: True}


def is_half(x: NdArray, argument: str = "x") -> bool:
    """Whether `x` holds float16 rather than float32.

    Raises:
        TypeError: it holds something else.
    """
    try:
        return _IS_HALF[x.dtype]
    except KeyError:
        raise TypeError(f"{argument} is {x.dtype}; the kernels work on float32 and float16 arrays") from None


def which_are_half(arrays: Sequence[NdArray]) -> NDArray[np.bool_]:
    """`is_half` of many arrays, bool of shape (n,).

    Raises:
        TypeError: one of them holds something else.
    """
    if are_float32(arrays):
        return np.zeros(len(arrays), np.bool_)
    return np.array([is_half(x) for x in arrays], np.bool_)


def require_float32(x: NdArray, argument: str) -> None:
    """Raise TypeError unless `x` is float32."""
    if is_half(x, argument):
        raise TypeError(f"{argument} is float16; a float32 array is needed here")


def require_same_size(source: NdArray, target: NdArray) -> int:
    """The size that both arrays have.

    Raises:
        ValueError: they have different sizes.
    """
    size: int = source.size
    if target.size != size:
        raise ValueError(f"arrays of different sizes: {source.shape} and {target.shape}")
    return size


def require_same_sizes(sources: Sequence[NdArray], targets: Sequence[NdArray]) -> List[int]:
    """`require_same_size` of many pairs of arrays."""
    sizes = list(map(_size, sources))
    if sizes != list(map(_size, targets)):
        for source, target in zip(sources, targets):
            require_same_size(source, target)
    return sizes


def require_sizes(arrays: Sequence[NdArray], sizes: NDArray[np.int64]) -> None:
    """Raise ValueError unless the arrays have these sizes."""
    found = list(map(_size, arrays))
    if found != sizes.tolist():
        raise ValueError(f"arrays of other sizes: {found}, not {sizes.tolist()}")


def unscaling_factor(scale: float) -> float:
    """1 / scale.

    Raises:
        ValueError: `scale` is not a positive finite number.
    """
    scale = float(scale)
    if not 0.0 < scale < math.inf:
        raise ValueError(f"scale={scale} must be a positive finite number")
    return 1.0 / scale


def unscaling_factors(scales: Sequence[float]) -> NDArray[np.float64]:
    """1 / scale of each, float64 of shape (n,).

    Raises:
        ValueError: a scale is not a positive finite number.
    """
    found = np.array(scales, np.float64)
    wrong = ~((found > 0.0) & (found < math.inf))
    if wrong.any():
        raise ValueError(f"scale={found[wrong][0]} must be a positive finite number")
    return 1.0 / found
