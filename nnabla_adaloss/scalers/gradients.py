# SPDX-License-Identifier: Apache-2.0
"""Reading and dividing gradients that are NumPy arrays, NdArrays or Variables."""

from __future__ import annotations

from typing import Any, Iterable, List, Optional, Union

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..host_context import host_view

# The gradient of a Variable is its `.grad`.
Gradient = Union[NDArray[Any], "nn.NdArray", "nn.Variable"]
_KINDS = (np.ndarray, np.generic, nn.NdArray, nn.Variable)


def gradient_list(gradients: Union[Gradient, Iterable[Gradient]]) -> List[Gradient]:
    """One gradient, or an iterable of them, as a list; TypeError or ValueError names what is none."""
    if isinstance(gradients, _KINDS):
        items: List[Gradient] = [gradients]
    elif isinstance(gradients, Iterable):
        items = list(gradients)
    else:
        raise TypeError(
            f"gradients={gradients!r} must be a NumPy array, an NdArray, a Variable or a list of these"
        )
    if not items:
        raise ValueError("gradients is empty; pass at least one gradient")
    for i, item in enumerate(items):
        _check(item, f"gradients[{i}]")
    return items


def has_nonfinite(gradient: Gradient) -> bool:
    """True when the gradient holds an infinity or a NaN."""
    return not np.isfinite(_elements(gradient)).all()


def largest(gradient: Gradient) -> float:
    """The largest magnitude in a gradient that is finite."""
    return float(np.max(np.abs(_elements(gradient)), initial=0.0))


def _elements(gradient: Gradient) -> NDArray[Any]:
    """The elements of a gradient; none of one that is lazily zero, which stays so."""
    stored = _stored(gradient)
    if stored is None:
        return np.asarray(gradient)
    return np.zeros(0) if stored.zeroing else host_view(stored)


def unscaled(gradient: Gradient, scale: float) -> Gradient:
    """The gradient divided by `scale` in float32 or float64: in place, but for a NumPy array."""
    stored = _stored(gradient)
    if stored is None:
        values = np.asarray(gradient)
        return np.asarray(np.divide(values, scale, dtype=_wide(values.dtype)))
    # A lazily zero gradient must stay so: solvers skip its parameter.
    if not stored.zeroing:
        values = host_view(stored, np.dtype(_wide(stored.dtype)))
        np.divide(values, scale, out=values)
    return gradient


def divisible_in_place(gradient: Gradient) -> bool:
    """True when the gradient itself can hold the result of `unscaled`."""
    if isinstance(gradient, np.ndarray):
        return bool(gradient.flags.writeable) and gradient.dtype == _wide(gradient.dtype)
    return _stored(gradient) is not None


def _stored(gradient: Gradient) -> Optional[nn.NdArray]:
    """The NdArray that holds the gradient; None for a NumPy array."""
    if isinstance(gradient, nn.Variable):
        return gradient.grad
    return gradient if isinstance(gradient, nn.NdArray) else None


def _wide(dtype: Any) -> Any:
    """The dtype to unscale in."""
    return np.float64 if dtype == np.float64 else np.float32


def _check(item: Any, name: str) -> None:
    if not isinstance(item, _KINDS):
        raise TypeError(
            f"{name} is of type {type(item).__name__}; a gradient is a NumPy array, an NdArray or a Variable"
        )
    stored = _stored(item)
    try:
        dtype = np.dtype(item.dtype if stored is None else stored.dtype)
    except RuntimeError:
        raise ValueError(
            f"{name} holds nothing yet: run backward first (for a Variable, its .grad is the gradient)"
        ) from None
    if not np.issubdtype(dtype, np.floating):
        raise TypeError(f"{name} is of dtype {dtype}; gradients are of a floating dtype")
