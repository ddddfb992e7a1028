# SPDX-License-Identifier: Apache-2.0
"""Passes that leave no trace: leaves, their gradients and random state are put back afterwards."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Dict, Iterator

import nnabla as nn

from ..engine.kept_data import KeptData
from ..engine.kept_gradients import KeptGradients
from ..engine.leaf_arrays import leaf_arrays
from ..kernels import Kernels
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
    gradients = KeptGradients(kernels)
    gradients.save(leaf_arrays(leaves))
    data = KeptData(kernels, list(leaves.values()))
    data.save()
    try:
        yield state
    finally:
        data.restore()
        gradients.restore()
        state.restore()
