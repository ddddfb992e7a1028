# SPDX-License-Identifier: Apache-2.0
"""Copies of nnabla arrays that keep their dtype."""

from __future__ import annotations

import nnabla as nn

from .arrays import FLOAT16, FLOAT32, stored_dtype
from .interface import Kernels


def copy_array(kernels: Kernels, source: nn.NdArray, target: nn.NdArray) -> None:
    """Write `source` to `target`, an array of the same shape; what is lazily zero, or was never written,
    stays lazily zero.
    """
    stored = stored_dtype(source)
    if stored is None:
        target.zero()
    elif stored in (FLOAT32, FLOAT16):
        kernels.scaled_copy(source, target, 1.0)
    else:
        target.data = source.data
