# SPDX-License-Identifier: Apache-2.0
"""Snapshots of arrays, from which their contents are restored."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Dict, List, Mapping, Optional, Sequence

import nnabla as nn
from numpy.typing import NDArray

from ..host_context import host_view
from ..kernels import Kernels, PackedArrays
from ..kernels.arrays import FLOAT16, FLOAT32, are_readable, stored_dtype

_data = attrgetter("data")

Contents = Optional[NDArray[Any]]
"""A copy of an array in host memory; None of one that is lazily zero."""


class ArraySnapshot:
    """The contents of arrays, each in its own dtype; an array that was lazily zero becomes so again.

    Arrays of float32 and float16, as nearly all are, are copied by a kernel where they are, without a wait
    for the device. Others, such as labels, are copied by the host.

    Args:
        kernels: the kernels that copy.

    Example:
        >>> import numpy as np, nnabla as nn
        >>> from nnabla_adaloss.kernels import CpuKernels
        >>> x = nn.NdArray.from_numpy_array(np.array([1.0, 2.0], np.float32))
        >>> snapshot = ArraySnapshot(CpuKernels())
        >>> snapshot.save([x])
        >>> x.fill(5.0)
        >>> snapshot.restore()
        >>> x.data.tolist()
        [1.0, 2.0]
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._arrays: Sequence[nn.NdArray] = ()
        self._all_zero = False
        self._packed: Optional[PackedArrays] = None
        # Whether `_packed` is in use, and, by index, the contents of the arrays that are not in it.
        self._holds = False
        self._others: Dict[int, Contents] = {}

    def save(self, arrays: Sequence[nn.NdArray], *, all_zero: bool = False) -> None:
        """Copy the contents of `arrays`, in place of those saved before.

        Args:
            arrays: the arrays.
            all_zero: whether all of them are known to be lazily zero; then nothing is copied.
        """
        if all_zero:
            self._arrays, self._all_zero = arrays, True
            return
        # What is saved counts when all of it is: a signal may interrupt us between any two lines.
        self.drop()
        others = {} if are_readable(arrays) else _contents_of_others(arrays)
        readable = _without(arrays, others)
        if readable:
            self._pack(readable)
        self._arrays, self._holds, self._others = arrays, bool(readable), others

    def _pack(self, readable: Sequence[nn.NdArray]) -> None:
        if self._packed is None:
            self._packed = PackedArrays([x.size for x in readable])
        try:
            self._kernels.pack(readable, self._packed)
        except ValueError:
            # Sizes differ from those saved before, which is rare.
            self._packed = PackedArrays([x.size for x in readable])
            self._kernels.pack(readable, self._packed)

    def put(self, contents: Sequence[Contents]) -> None:
        """Replace the saved contents of each array."""
        self._all_zero, self._holds, self._others = False, False, dict(enumerate(contents))

    def drop(self) -> None:
        """Forget what was saved."""
        self._arrays, self._all_zero, self._holds, self._others = (), False, False, {}

    def restore(self, arrays: Optional[Sequence[nn.NdArray]] = None) -> None:
        """Write the saved contents back; before anything was saved, do nothing.

        Args:
            arrays: as many other arrays to write to. None: those that were saved.
        """
        arrays = self._arrays if arrays is None else arrays
        if self._all_zero:
            for array in arrays:
                array.zero()
            return
        if self._holds and self._packed is not None:
            self._kernels.unpack(self._packed, _without(arrays, self._others))
        for index, contents in self._others.items():
            if contents is None:
                arrays[index].zero()
            else:
                arrays[index].data = contents


class DataSnapshot:
    """The data of variables, which may be held by other arrays by the time that it is restored.

    Args:
        kernels: the kernels that copy.
        variables: the variables, each once.

    Attributes:
        variables: the variables.
    """

    def __init__(self, kernels: Kernels, variables: Sequence[nn.Variable]) -> None:
        self.variables = list(variables)
        self._snapshot = ArraySnapshot(kernels)

    def save(self) -> None:
        """Copy the data, in place of what was saved before."""
        self._snapshot.save(self._arrays)

    def put(self, contents: Sequence[Contents]) -> None:
        """Replace the saved contents of each variable."""
        self._snapshot.put(contents)

    def restore(self) -> None:
        """Write the saved data back."""
        self._snapshot.restore(self._arrays)

    @property
    def _arrays(self) -> List[nn.NdArray]:
        return list(map(_data, self.variables))


def _without(arrays: Sequence[nn.NdArray], others: Mapping[int, Contents]) -> Sequence[nn.NdArray]:
    return [x for index, x in enumerate(arrays) if index not in others] if others else arrays


def contents_of(array: nn.NdArray) -> Contents:
    """A copy of the contents of `array`; None when it is lazily zero."""
    return None if array.zeroing else host_view(array).reshape(array.shape).copy()


def _contents_of_others(arrays: Sequence[nn.NdArray]) -> Dict[int, Contents]:
    """The contents of the arrays that no kernel reads, by index."""
    return {i: contents_of(x) for i, x in enumerate(arrays) if stored_dtype(x) not in (FLOAT32, FLOAT16)}
