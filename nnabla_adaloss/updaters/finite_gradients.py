# SPDX-License-Identifier: Apache-2.0
"""Whether the gradients that a solver would use are finite."""

from __future__ import annotations

from typing import Any

import nnabla as nn

from ..kernels import Kernels
from ..kernels.arrays import as_float32


def gradients_are_finite(kernels: Kernels, solver: Any) -> bool:
    """Whether there is no infinity or NaN in the gradients of the solver's parameters.

    On a GPU that is one wait, where `solver.check_inf_or_nan_grad()` waits for one parameter after another.

    Args:
        kernels: the kernels for the gradients' arrays.
        solver: the solver.
    """
    # What is lazily zero stays so: a solver passes over it.
    written = [v.grad for v in solver.get_parameters().values() if not v.grad.zeroing]
    return kernels.all_finite([as_float32(g, nn.NdArray(g.shape)) for g in written])
