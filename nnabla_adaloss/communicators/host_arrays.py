# SPDX-License-Identifier: Apache-2.0
"""NdArrays seen from the host, without copies and without a change of dtype."""

from __future__ import annotations

from typing import Any, List, Sequence, Tuple, Union

import numpy as np
import numpy.typing as npt
from nnabla import NdArray

from ..host_context import dtype_of, host_view


def array_list(data: Union[NdArray, Sequence[NdArray]]) -> List[NdArray]:
    """The NdArrays of an argument that is one NdArray or a sequence of them."""
    arrays = [data] if isinstance(data, NdArray) else list(data)
    for position, array in enumerate(arrays):
        if not isinstance(array, NdArray):
            raise TypeError(
                f"`data`: element {position} is a {type(array).__name__}, not an NdArray; "
                "pass a Variable's `.data` or `.grad`"
            )
    return arrays


def floating_list(data: Union[NdArray, Sequence[NdArray]]) -> List[NdArray]:
    """`array_list` for arrays that are sent as float32.

    Raises:
        TypeError: a dtype is not a floating point type: integers would be rounded.
    """
    arrays = array_list(data)
    for position, array in enumerate(arrays):
        if dtype_of(array).kind != "f":
            raise TypeError(
                f"`data`: element {position} has dtype {dtype_of(array)}; only floating point arrays can be "
                "summed over the ranks (they travel as float32)"
            )
    return arrays


def shapes_of(arrays: Sequence[NdArray]) -> Tuple[Tuple[int, ...], ...]:
    """The shape of every array."""
    return tuple(tuple(array.shape) for array in arrays)


def host_values(value: Union[NdArray, npt.ArrayLike]) -> npt.NDArray[Any]:
    """The values of an NdArray, NumPy array or number, for reading; a lazily zero NdArray stays so."""
    if not isinstance(value, NdArray):
        return np.asarray(value)
    return np.zeros(value.size, np.float32) if value.zeroing else host_view(value)
