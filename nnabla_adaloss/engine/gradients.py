# SPDX-License-Identifier: Apache-2.0
"""What is asked of the gradients of parameters as they are."""

from __future__ import annotations

from typing import Iterable

import nnabla as nn

from ..kernels import Kernels
from ..kernels.arrays import FLOAT16, FLOAT32, as_float32, stored_dtype


def gradients_are_finite(kernels: Kernels, parameters: Iterable[nn.Variable]) -> bool:
    """True when gradients hold no infinity and no NaN: a single wait for a GPU."""
    # A lazily zero gradient stays so: a solver skips its parameter.
    written = [v.grad for v in parameters if not v.grad.zeroing]
    return kernels.all_finite([as_float32(g, nn.NdArray(g.shape)) for g in written])


def gradients_are_zero(kernels: Kernels, parameters: Iterable[nn.Variable]) -> bool:
    """True when no gradient holds anything but zeros; on a GPU each read waits for the device."""
    for parameter in sorted(parameters, key=lambda v: v.size):
        stored = stored_dtype(parameter.grad)
        if stored in (FLOAT32, FLOAT16):
            if kernels.statistics(parameter.grad).abs_max:
                return False
        elif stored is not None:
            return False
    return True
