# SPDX-License-Identifier: Apache-2.0
"""NdArrays as float32 messages: small ones packed together, large ones sent from where they are."""

from __future__ import annotations

from functools import lru_cache
from typing import Callable, List, Sequence, Tuple, Union

import numpy as np
import numpy.typing as npt
from nnabla import NdArray

from ..host_context import dtype_of, host_view

Arrays = Union[NdArray, Sequence[NdArray]]

SMALL_ARRAY = 1 << 16
"""Elements (256 kB in fp32) up to which an array is packed with others: below, the latency of a message
costs more than copying the array twice; above, the copies cost more."""

MESSAGE = 1 << 20
"""Elements (4 MB in fp32) at which a packed message is full."""


def array_list(name: str, data: Arrays, *, floating: bool = False) -> List[NdArray]:
    """List the NdArrays of an argument, one or a sequence; with `floating`, refuse integer arrays."""
    arrays = [data] if isinstance(data, NdArray) else list(data)
    for position, array in enumerate(arrays):
        if not isinstance(array, NdArray):
            kind = type(array).__name__
            raise TypeError(f"{name}[{position}] must be an NdArray, such as a Variable's .grad, got {kind}")
        if floating and dtype_of(array).kind != "f":
            raise TypeError(
                f"{name}[{position}] has dtype {dtype_of(array)}; only floating point arrays can be summed "
                "over the ranks (they travel as float32)"
            )
    return arrays


@lru_cache(maxsize=64)
def plan_messages(sizes: Tuple[int, ...]) -> Tuple[Tuple[int, ...], ...]:
    """Plan the messages: positions of the arrays in each, ordered by the first; empty arrays are skipped."""
    # The plan depends on the sizes alone: every rank makes the same one without communication.
    messages: List[List[int]] = []
    packed: List[int] = []
    filled = MESSAGE  # makes the first small array begin a message
    for position, size in enumerate(sizes):
        if size > SMALL_ARRAY:
            messages.append([position])
        elif size:
            if filled + size > MESSAGE:
                packed, filled = [], 0
                messages.append(packed)
            packed.append(position)
            filled += size
    return tuple(tuple(positions) for positions in messages)


class Packer:
    """Applies an exchange to the values of NdArrays through a buffer that is kept between calls."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.float32)  # a new one for every message takes twice as long

    def exchange(self, arrays: List[NdArray], function: Callable[[npt.NDArray[np.float32]], object]) -> None:
        """Change arrays in place by `function` of flat float32; small ones share messages."""
        for positions in plan_messages(tuple(array.size for array in arrays)):
            views = [host_view(arrays[position]) for position in positions]
            if len(views) == 1 and views[0].dtype == np.float32:
                function(views[0])
                continue
            size = sum(view.size for view in views)
            if self._buffer.size < size:
                self._buffer = np.empty(size, np.float32)
            values = np.concatenate(views, out=self._buffer[:size])
            function(values)
            ends = np.cumsum([view.size for view in views])
            with np.errstate(over="ignore"):  # a sum beyond an array's dtype is an infinity
                for view, part in zip(views, np.split(values, ends[:-1])):
                    view[...] = part
