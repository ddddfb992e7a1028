# SPDX-License-Identifier: Apache-2.0
"""Snapshots of arrays and of attributes, from which they are restored."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import nnabla as nn
from numpy.typing import NDArray

from ..kernels import Kernels, ScaledCopies
from ..kernels.arrays import are_readable, is_readable

Contents = Optional[NDArray[Any]]
"""Copy of an array in host memory; None for a lazily zero one."""


class ArraySnapshot:
    """Saved contents of arrays, or of variables' data, restored to the arrays that these have by then."""

    def __init__(self, kernels: Kernels, variables: Sequence[nn.Variable] = ()) -> None:
        self._kernels, self.variables = kernels, list(variables)
        self._arrays: Sequence[nn.NdArray] = ()
        # Copies, in memory that the next `save` reuses; of arrays that kernels do not read, by their index.
        self._memory: List[nn.NdArray] = []
        self._copies: List[nn.NdArray] = []
        self._others: Dict[int, Contents] = {}

    def save(self, arrays: Optional[Sequence[nn.NdArray]] = None, *, all_zero: bool = False) -> None:
        """Copy the contents of `arrays`, or of the variables' data; lazy zeros are only noted."""
        arrays = [v.data for v in self.variables] if arrays is None else arrays
        if all_zero:
            self._arrays, self._copies, self._others = arrays, [], dict.fromkeys(range(len(arrays)))
            return
        # Valid only when all is saved: a signal may interrupt between any two lines.
        self._arrays, self._copies, self._others = (), [], {}
        others: Dict[int, Contents] = {}
        if not are_readable(arrays):
            others = {index: contents_of(x) for index, x in enumerate(arrays) if not is_readable(x)}
        readable = _without(arrays, others)
        if [x.size for x in readable] != [x.size for x in self._memory]:
            self._memory = [nn.NdArray((x.size,)) for x in readable]
        self._copy(readable, self._memory)
        self._arrays, self._copies, self._others = arrays, self._memory, others

    def put(self, contents: Sequence[Contents]) -> None:
        """Replace the saved contents; with none, `restore` does nothing."""
        self._copies, self._others = [], dict(enumerate(contents))

    def restore(self) -> None:
        """Write the contents back; do nothing before `save`."""
        arrays = [v.data for v in self.variables] or self._arrays
        self._copy(self._copies, _without(arrays, self._others))
        for index, contents in self._others.items():
            put_back(arrays[index], contents)

    def _copy(self, sources: Sequence[nn.NdArray], targets: Sequence[nn.NdArray]) -> None:
        if sources:
            self._kernels.scaled_copy_all(ScaledCopies(sources, targets, [1.0] * len(sources)))


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
