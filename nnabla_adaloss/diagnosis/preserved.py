# SPDX-License-Identifier: Apache-2.0
"""Passes that leave no trace: leaves, their gradients and random state are put back afterwards."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Dict, Iterator

import nnabla as nn

from ..kernels import Kernels
from ..undo import ArraySnapshot, DataSnapshot
from .random_state import RandomState


@contextmanager
def preserved(leaves: Dict[int, nn.Variable], kernels: Kernels) -> Iterator[RandomState]:
    """Keep the data and the gradients of `leaves` and the random state, and put all back at the end.

    Args:
        leaves: inputs, parameters, running statistics, by key.
        kernels: the kernels that copy.

    Yields:
        The random state at the beginning.
    """
    state = RandomState.now()
    gradients = ArraySnapshot(kernels)
    gradients.save([leaf.grad for leaf in leaves.values()])
    data = DataSnapshot(kernels, list(leaves.values()))
    data.save()
    try:
        yield state
    finally:
        data.restore()
        gradients.restore()
        state.restore()
