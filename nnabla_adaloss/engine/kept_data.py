# SPDX-License-Identifier: Apache-2.0
"""What some variables held at one moment, to be put back."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, List, Optional, Sequence

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..kernels import Kernels, PackedArrays
from ..kernels.arrays import are_readable

_data = attrgetter("data")

Contents = Optional[NDArray[Any]]
"""A copy of an array in host memory; None of one that is lazily zero."""


class KeptData:
    """Keeps what variables hold, each in the dtype that it has.

    Where all are float32 or float16, as nearly always, a kernel copies them, and none is waited for.

    Args:
        kernels: the kernels that copy.
        variables: the variables, each once.

    Attributes:
        variables: the variables.
    """

    def __init__(self, kernels: Kernels, variables: Sequence[nn.Variable]) -> None:
        self.variables = list(variables)
        self._kernels = kernels
        self._packed: Optional[PackedArrays] = None
        self._contents: Optional[List[Contents]] = None

    def save(self) -> None:
        """Keep what they hold now."""
        arrays = self._arrays
        if not are_readable(arrays):
            self.put(list(map(contents_of, self.variables)))
            return
        if self._packed is None:
            self._packed = PackedArrays([x.size for x in arrays])
        self._kernels.pack(arrays, self._packed)
        self._contents = None

    def put(self, contents: List[Contents]) -> None:
        """Keep this, of each variable, in place of what it holds."""
        self._contents = contents

    def restore(self) -> None:
        """Put back what was kept."""
        if self._contents is not None:
            for array, contents in zip(self._arrays, self._contents):
                if contents is None:
                    array.zero()
                else:
                    array.data = contents
        elif self._packed is not None:
            self._kernels.unpack(self._packed, self._arrays)

    @property
    def _arrays(self) -> List[nn.NdArray]:
        return list(map(_data, self.variables))


def contents_of(variable: nn.Variable) -> Contents:
    """What a variable holds."""
    return None if variable.data.zeroing else np.array(variable.data.data)
