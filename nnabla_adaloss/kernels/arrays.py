# SPDX-License-Identifier: Apache-2.0
"""State of nnabla arrays, checks of kernels' arguments, float32 copies, and a pool of arrays for reuse."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Dict, List, Optional, Sequence, Tuple

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..host_context import FLOAT32 as FLOAT32
from ..host_context import dtype_of, host_view

FLOAT16 = np.dtype(np.float16)

memory_dtype = attrgetter("dtype")  # RuntimeError for an array without memory, as after fill()
is_zeroing, size_of = attrgetter("zeroing"), attrgetter("size")
_IS_HALF = {FLOAT32: False, FLOAT16: True}

_Key = Tuple[Tuple[int, ...], str, int]

Arrays = Sequence[nn.NdArray]
Halves = Optional[NDArray[np.bool_]]
"""Mask of the arrays that are float16, the others being float32; None if all are float32."""


def stored_dtype(array: nn.NdArray) -> Optional[np.dtype[Any]]:
    """Stored dtype; None if nothing was written since `zero()`."""
    # A value set with fill() has no memory until it is read, on the host or on a device.
    return None if array.zeroing else dtype_of(array)


def is_readable(array: nn.NdArray) -> bool:
    """True if an array was written and has a dtype that kernels read."""
    return stored_dtype(array) in (FLOAT32, FLOAT16)


def are_readable(arrays: Arrays) -> bool:
    """`is_readable` of all, four times as fast; but False if one has no memory yet, as after `fill()`."""
    try:
        return not any(map(is_zeroing, arrays)) and {*map(memory_dtype, arrays)} <= {FLOAT32, FLOAT16}
    except RuntimeError:
        return False


def places_of(gradients: Arrays, context: nn.Context) -> List[Tuple[int, int]]:
    """Begin and end of gradients in the memory of `context`; unwritten ones become lazy zeros."""
    # nnabla does not add to these either.
    lazy = [x for x in gradients if x.zeroing or not x.modification_count]
    for x in lazy:
        x.zero()
    dtypes = [stored_dtype(x) or FLOAT32 for x in gradients]
    starts = [x.data_ptr(dtype, context) for x, dtype in zip(gradients, dtypes)]
    # zero() frees memory, which the next array would get.
    for x in lazy:
        x.zero()
    sizes = [x.size * dtype.itemsize for x, dtype in zip(gradients, dtypes)]
    return [(start, start + size) for start, size in zip(starts, sizes)]


def as_float32(array: nn.NdArray, copy: nn.NdArray) -> nn.NdArray:
    """Return `array` if the kernels can read it, else `copy` with its values in float32."""
    # `variable.d = numpy_array` may store float64 or integers, which the user sees: no cast in place.
    return array if is_readable(array) else float32_copy(array, copy)


def float32_copy(array: nn.NdArray, copy: nn.NdArray) -> nn.NdArray:
    """Fill `copy` with the values of `array` in float32 and return it; larger ones become infinite."""
    with np.errstate(over="ignore"):
        host_view(copy, FLOAT32, write_only=True)[:] = host_view(array)
    return copy


def prepare_master(master: nn.NdArray, context: nn.Context) -> None:
    """Prepare a gradient in `context` for accumulation: float32, unless it is lazily zero."""
    if not master.zeroing and dtype_of(master) != FLOAT32:
        master.data_ptr(FLOAT32, context)


def is_half(x: nn.NdArray, argument: str = "x") -> bool:
    """True if `x` is float16, False if float32; TypeError for any other dtype."""
    try:
        return _IS_HALF[x.dtype]
    except KeyError:
        raise TypeError(f"{argument} is {x.dtype}; the kernels work on float32 and float16 arrays") from None
    except RuntimeError:
        return False  # an array set with fill() gets memory in float32


def which_are_half(arrays: Arrays) -> Halves:
    """`is_half` of many arrays, bool of shape (n,); None if all are float32."""
    try:
        dtypes = list(map(memory_dtype, arrays))
    except RuntimeError:
        dtypes = list(map(dtype_of, arrays))
    if {*dtypes} <= {FLOAT32}:
        return None
    flags = list(map(_IS_HALF.get, dtypes))
    if None in flags:
        is_half(arrays[flags.index(None)])  # raises TypeError
    return np.array(flags, np.bool_)


def require_float32(x: nn.NdArray, argument: str) -> None:
    """Raise TypeError unless `x` is float32."""
    if is_half(x, argument):
        raise TypeError(f"{argument} is float16; a float32 array is needed here")


def require_same_size(sources: Arrays, targets: Arrays) -> List[int]:
    """Sizes of the sources; ValueError unless their targets have the same."""
    sizes = list(map(size_of, sources))
    if sizes != list(map(size_of, targets)):
        source, target = next(pair for pair in zip(sources, targets) if pair[0].size != pair[1].size)
        raise ValueError(f"arrays of different sizes: {source.shape} and {target.shape}")
    return sizes


class ScratchPool:
    """Scratch arrays, kept while graphs use them; `get` returns the same one again, whatever it holds."""

    def __init__(self) -> None:
        self._arrays: Dict[_Key, nn.NdArray] = {}
        # Arrays of the previous graph that this one has not used yet.
        self._before: Dict[_Key, nn.NdArray] = {}

    def __len__(self) -> int:
        return len(self._arrays) + len(self._before)

    def get(self, shape: Tuple[int, ...], purpose: str, index: int = 0) -> nn.NdArray:
        """Return the array of these arguments; `index` distinguishes arrays that are in use at once."""
        key = (shape, purpose, index)
        array = self._arrays.get(key)
        if array is None:
            array = self._arrays[key] = self._before.pop(key, None) or nn.NdArray(shape)
        return array

    def end_graph(self) -> None:
        """Drop arrays that this graph has not used; a graph of other shapes may follow."""
        # Scaled weights are the same for sentences of all lengths; scaled activations would grow in number.
        self._before, self._arrays = self._arrays, {}
