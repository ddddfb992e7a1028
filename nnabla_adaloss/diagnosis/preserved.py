# SPDX-License-Identifier: Apache-2.0
"""Passes that leave no trace: leaves, their gradients and random state are put back afterwards."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Dict, Iterator

import nnabla as nn

from ..engine.kept_gradients import KeptGradients
from ..engine.leaf_arrays import leaf_arrays
from ..kernels import Kernels
from ..kernels.copies import copy_arrays
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
    data = [(leaf.data, nn.NdArray(leaf.shape)) for leaf in leaves.values()]
    copy_arrays(kernels, data)
    try:
        yield state
    finally:
        copy_arrays(kernels, [(copy, array) for array, copy in data])
        gradients.restore()
        state.restore()
