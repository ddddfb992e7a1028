# SPDX-License-Identifier: Apache-2.0
"""Passes that leave no trace: leaves, their gradients and random state are put back afterwards."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Dict, Iterator, List, Tuple

import nnabla as nn

from ..engine.kept_gradients import KeptGradients
from ..kernels import Kernels
from ..kernels.copies import copy_array
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
    gradients.save(leaves)
    data: List[Tuple[nn.NdArray, nn.NdArray]] = []
    for leaf in leaves.values():
        copy = nn.NdArray(leaf.shape)
        copy_array(kernels, leaf.data, copy)
        data.append((leaf.data, copy))
    try:
        yield state
    finally:
        for array, copy in data:
            copy_array(kernels, copy, array)
        gradients.restore()
        state.restore()
