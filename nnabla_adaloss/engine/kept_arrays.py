# SPDX-License-Identifier: Apache-2.0
"""What some arrays held at one moment, to be put back."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..kernels import Kernels, PackedArrays
from ..kernels.arrays import FLOAT16, FLOAT32, are_readable, stored_dtype

Contents = Optional[NDArray[Any]]
"""A copy of an array in host memory; None of one that is lazily zero."""


class KeptArrays:
    """Keeps what arrays hold, each in the dtype that it has; what is lazily zero becomes so again.

    A kernel copies those of float32 and float16, as nearly all are, where they are, and none is waited for.
    Others, such as labels, are copied by the host.

    Args:
        kernels: the kernels that copy.

    Example:
        >>> import numpy as np, nnabla as nn
        >>> from nnabla_adaloss.kernels import CpuKernels
        >>> x = nn.NdArray.from_numpy_array(np.array([1.0, 2.0], np.float32))
        >>> kept = KeptArrays(CpuKernels())
        >>> kept.save([x])
        >>> x.fill(5.0)
        >>> kept.restore([x])
        >>> x.data.tolist()
        [1.0, 2.0]
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._packed: Optional[PackedArrays] = None
        # Whether that holds anything, and by index what the arrays held that are not in it.
        self._holds = False
        self._others: Dict[int, Contents] = {}

    def save(self, arrays: Sequence[nn.NdArray]) -> None:
        """Keep what arrays hold now, in place of what was kept before."""
        self._others = {} if are_readable(arrays) else _contents_of_others(arrays)
        readable = self._readable(arrays)
        self._holds = bool(readable)
        if not readable:
            return
        if self._packed is None:
            self._packed = PackedArrays([x.size for x in readable])
        try:
            self._kernels.pack(readable, self._packed)
        except ValueError:
            # For arrays of other sizes; as a rule they have those of the last time.
            self._packed = PackedArrays([x.size for x in readable])
            self._kernels.pack(readable, self._packed)

    def put(self, contents: Sequence[Contents]) -> None:
        """Keep this, of each array, in place of what it holds."""
        self._holds, self._others = False, dict(enumerate(contents))

    def restore(self, arrays: Sequence[nn.NdArray]) -> None:
        """Put back what was kept, to as many arrays; nothing is, before anything was kept."""
        if self._holds and self._packed is not None:
            self._kernels.unpack(self._packed, self._readable(arrays))
        for index, contents in self._others.items():
            if contents is None:
                arrays[index].zero()
            else:
                arrays[index].data = contents

    def _readable(self, arrays: Sequence[nn.NdArray]) -> Sequence[nn.NdArray]:
        others = self._others
        return [x for index, x in enumerate(arrays) if index not in others] if others else arrays


def contents_of(array: nn.NdArray) -> Contents:
    """What an array holds."""
    return None if array.zeroing else np.array(array.data)


def _contents_of_others(arrays: Sequence[nn.NdArray]) -> Dict[int, Contents]:
    """What those arrays hold that no kernel reads, by index."""
    return {i: contents_of(x) for i, x in enumerate(arrays) if stored_dtype(x) not in (FLOAT32, FLOAT16)}
