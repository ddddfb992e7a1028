# SPDX-License-Identifier: Apache-2.0
"""Snapshots of arrays and of attributes, from which they are restored."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import nnabla as nn
from numpy.typing import NDArray

from ..kernels import Kernels, PackedArrays
from ..kernels.arrays import are_readable, is_readable

_data = attrgetter("data")

Contents = Optional[NDArray[Any]]
"""Copy of an array in host memory; None for a lazily zero one."""


class ArraySnapshot:
    """Contents of arrays, or of the data of variables, which may be in other arrays when restored."""

    def __init__(self, kernels: Kernels, variables: Sequence[nn.Variable] = ()) -> None:
        self._kernels, self.variables = kernels, list(variables)
        self._arrays: Sequence[nn.NdArray] = ()
        self._packed = PackedArrays()
        # True if `_packed` is in use; contents of the arrays that are not in it, by index.
        self._holds = False
        self._others: Dict[int, Contents] = {}

    def save(self, arrays: Optional[Sequence[nn.NdArray]] = None, *, all_zero: bool = False) -> None:
        """Copy the contents of `arrays`, or of the variables' data; lazy zeros are only noted."""
        arrays = list(map(_data, self.variables)) if arrays is None else arrays
        if all_zero:
            self._arrays, self._holds, self._others = arrays, False, dict.fromkeys(range(len(arrays)))
            return
        # Valid only when all is saved: a signal may interrupt between any two lines.
        self._arrays, self._holds, self._others = (), False, {}
        others: Dict[int, Contents] = {}
        if not are_readable(arrays):
            others = {index: contents_of(x) for index, x in enumerate(arrays) if not is_readable(x)}
        readable = _without(arrays, others)
        if readable:
            self._kernels.pack(readable, self._packed)
        self._arrays, self._holds, self._others = arrays, bool(readable), others

    def put(self, contents: Sequence[Contents]) -> None:
        """Replace the saved contents; with none, `restore` does nothing."""
        self._holds, self._others = False, dict(enumerate(contents))

    def restore(self, arrays: Optional[Sequence[nn.NdArray]] = None) -> None:
        """Write the contents back, or to the same number of other `arrays`; do nothing before `save`."""
        if arrays is None:
            arrays = list(map(_data, self.variables)) or self._arrays
        if self._holds:
            self._kernels.unpack(self._packed, _without(arrays, self._others))
        for index, contents in self._others.items():
            put_back(arrays[index], contents)


def _without(arrays: Sequence[nn.NdArray], others: Mapping[int, Contents]) -> Sequence[nn.NdArray]:
    return [x for index, x in enumerate(arrays) if index not in others] if others else arrays


def contents_of(array: nn.NdArray) -> Contents:
    """Copy the contents of `array` without moving it; None when it is lazily zero."""
    return None if array.zeroing else array.get_data("r").copy()


def put_back(array: nn.NdArray, contents: Contents) -> None:
    """Write a result of `contents_of` to `array`."""
    if contents is None:
        array.zero()
    else:
        array.data = contents


def savepoint(objects: Sequence[Any]) -> Callable[[], None]:
    """Make a function that restores the present values of the attributes that objects list as `undone`."""
    # Values are replaced, never changed in place, so it may be called again after an interruption. Copying
    # all attributes is faster than selecting some.
    saved: List[Dict[str, Any]] = list(map(dict, map(vars, objects)))

    def restore() -> None:
        for one, before in zip(objects, saved):
            vars(one).update({name: before[name] for name in one.undone})

    return restore
