# SPDX-License-Identifier: Apache-2.0
"""Copies of nnabla arrays that keep their dtype."""

from __future__ import annotations

from typing import Sequence, Tuple

import nnabla as nn

from .arrays import FLOAT16, FLOAT32, are_readable, stored_dtype
from .interface import Kernels, ScaledCopy


def copy_arrays(kernels: Kernels, pairs: Sequence[Tuple[nn.NdArray, nn.NdArray]]) -> None:
    """Write the first array of each pair to the second, of the same shape; what is lazily zero, or was never
    written, stays lazily zero.
    """
    if are_readable([source for source, _ in pairs]):
        kernels.scaled_copy_all([ScaledCopy(source, target, 1.0) for source, target in pairs])
        return
    copies = []
    for source, target in pairs:
        stored = stored_dtype(source)
        if stored is None:
            target.zero()
        elif stored in (FLOAT32, FLOAT16):
            copies.append(ScaledCopy(source, target, 1.0))
        else:
            target.data = source.data
    kernels.scaled_copy_all(copies)
