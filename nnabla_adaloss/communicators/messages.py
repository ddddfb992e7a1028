# SPDX-License-Identifier: Apache-2.0
"""Float32 messages made of NdArrays: small arrays packed together, large ones sent from where they are."""

from __future__ import annotations

from functools import lru_cache
from typing import Callable, List, Tuple

import numpy as np
import numpy.typing as npt
from nnabla import NdArray

from ..host_context import host_view

SMALL_ARRAY = 1 << 16
"""Elements (256 kB in fp32) up to which an array is packed with others: below, the latency of a message
costs more than copying the array twice; above, the copies cost more."""

MESSAGE = 1 << 20
"""Elements (4 MB in fp32) at which a packed message is full."""


@lru_cache(maxsize=64)
def plan_messages(
    sizes: Tuple[int, ...], small_array: int = SMALL_ARRAY, message: int = MESSAGE
) -> Tuple[Tuple[int, ...], ...]:
    """Group array positions into messages.

    The plan depends on the sizes alone, so every rank makes the same one without asking the others.

    Args:
        sizes: number of elements of each array.
        small_array: arrays of at most this many elements share a message; 0 gives every array its own.
        message: no shared message is longer than this many elements.

    Returns:
        Positions per message, in the order of the first array of each. Empty arrays are in none.

    Example:
        >>> plan_messages((10, 0, 900, 20), small_array=100, message=100)
        ((0, 3), (2,))
    """
    messages: List[List[int]] = []
    packed: List[int] = []
    filled = 0
    for position, size in enumerate(sizes):
        if size == 0:
            continue
        if size > small_array:
            messages.append([position])
            continue
        if not packed or filled + size > message:
            packed = []
            messages.append(packed)
            filled = 0
        packed.append(position)
        filled += size
    return tuple(tuple(positions) for positions in messages)


class Packer:
    """Applies an exchange to the values of NdArrays, through one buffer that is kept between calls."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.float32)

    def exchange(
        self,
        arrays: List[NdArray],
        function: Callable[[npt.NDArray[np.float32]], None],
        *,
        pack: bool,
        keep_result: bool = True,
    ) -> None:
        """Apply `function` to float32 values of all arrays, message by message.

        An array alone in its message is exchanged in its own memory if it is float32; everything else is
        copied to the buffer and back, rounded to the array's dtype (overflow gives an infinity, without a
        warning).

        Args:
            arrays: NdArrays of floating point dtypes, which stay.
            function: changes a flat float32 array in place.
            pack: whether small arrays share messages.
            keep_result: False leaves the arrays that were copied as they are.
        """
        sizes = tuple(array.size for array in arrays)
        for positions in plan_messages(sizes, SMALL_ARRAY if pack else 0):
            views = [host_view(arrays[position]) for position in positions]
            if len(views) == 1 and views[0].dtype == np.float32:
                function(views[0])
                continue
            buffer = self._of_size(sum(view.size for view in views))
            np.concatenate(views, out=buffer)
            function(buffer)
            if not keep_result:
                continue
            begin = 0
            with np.errstate(over="ignore"):
                for view in views:
                    view[...] = buffer[begin : begin + view.size]
                    begin += view.size

    def _of_size(self, size: int) -> npt.NDArray[np.float32]:
        if self._buffer.size < size:
            self._buffer = np.empty(size, np.float32)
        return self._buffer[:size]
