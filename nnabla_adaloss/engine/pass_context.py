# SPDX-License-Identifier: Apache-2.0
"""What all backward passes of one engine work with."""

from __future__ import annotations

from typing import NamedTuple, Optional

from ..graph.plan import GraphPlan
from ..kernels.interface import Kernels
from ..kernels.scratch import ScratchPool
from .emulated_storage import EmulatedStorage
from .gradient_ranges import GradientRanges
from .statistics_source import StatisticsSource


class PassContext(NamedTuple):
    """What all passes of one engine share.

    Attributes:
        plan: the graph.
        kernels: passes over memory.
        pool: where scratch arrays come from.
        statistics: where the statistics of arrays come from.
        storage: an emulated storage, or None.
        u_max: the largest magnitude of the storage format; of the narrowest, where layers differ.
        by_layer: whether layers separate components.
        ranges: the range of each gradient, where layers differ; None: they do not.
    """

    plan: GraphPlan
    kernels: Kernels
    pool: ScratchPool
    statistics: StatisticsSource
    storage: Optional[EmulatedStorage]
    u_max: float
    by_layer: bool = False
    ranges: Optional[GradientRanges] = None
