# SPDX-License-Identifier: Apache-2.0
"""What a training shows after each update."""

from __future__ import annotations

import math
from typing import Any, Dict, List

from .training import Trainee, rounded


class Trace:
    """Called after each update of a training in an emulated storage.

    Attributes:
        exponents: binary logarithm of the loss scale.
        underflow: share of the elements of gradients that became zero.
        fed: how many batches there were.
    """

    def __init__(self) -> None:
        self.exponents: List[float] = []
        self.underflow: List[float] = []
        self.fed: List[int] = []

    def __call__(self, trainee: Trainee) -> None:
        """Take note of the last update."""
        emulation = trainee.loop.emulation
        assert emulation is not None
        elements, flushed = rounded(emulation)
        self.exponents.append(math.log2(trainee.loop.updater.scale))
        self.underflow.append(float(f"{flushed / elements:.4g}"))
        self.fed.append(trainee.fed)

    def as_dict(self) -> Dict[str, List[Any]]:
        """All of it, for a line of results."""
        return dict(vars(self))
