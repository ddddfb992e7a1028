# SPDX-License-Identifier: Apache-2.0
"""Gradients and decisions that ranks share."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import nnabla as nn
import numpy as np


class GradientExchange:
    """Sums gradients over the ranks of a communicator, and agrees on flags.

    Args:
        comm: nnabla's communicator or one of its duck type; None for a single process.
        grads: The gradients to exchange; None or empty means those of all the solver's parameters.
        solver: The solver whose parameters are trained.
    """

    def __init__(self, comm: Optional[Any], grads: Optional[Sequence[nn.NdArray]], solver: Any) -> None:
        self.comm = comm
        self._grads = list(grads) if grads is not None else []
        self._solver = solver

    @property
    def grads(self) -> List[nn.NdArray]:
        """The gradients that are exchanged, in an order that is the same on every rank."""
        if self._grads:
            return self._grads
        parameters = self._solver.get_parameters()
        return [parameters[name].grad for name in sorted(parameters)]

    def sum(self, *, average: bool) -> None:
        """Sum the gradients over all ranks, or average them."""
        if self.comm is not None:
            self.comm.all_reduce(self.grads, division=average, inplace=False)

    def any(self, flag: bool) -> bool:
        """Tell whether ``flag`` is set on any rank. Every rank must call this."""
        if self.comm is None:
            return flag
        array = nn.NdArray.from_numpy_array(np.full(1, float(flag), np.float32))
        self.comm.all_reduce([array], division=False, inplace=True)
        return bool(array.data[0] > 0.0)
