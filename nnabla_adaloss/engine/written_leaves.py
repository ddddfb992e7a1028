# SPDX-License-Identifier: Apache-2.0
"""Leaf gradients written by a pass, and their largest magnitudes by component."""

from __future__ import annotations

import math
from functools import cached_property
from typing import AbstractSet, Any, Dict, FrozenSet, List, NamedTuple, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ..core.components import Components, component_of_contribution
from ..graph.plan import GraphPlan
from .leaf_gradients import Contribution


class CountedLeaf(NamedTuple):
    """Contribution that consists of this batch's gradient only."""

    contribution: Contribution
    place: int  # index of its largest magnitude, among those of all contributions
    component: int  # component of its gradient


class WrittenLeaves:
    """Contributions of a pass, in the order of unscaling; shared by passes with equal ones."""

    def __init__(
        self, contributions: Sequence[Contribution], plan: GraphPlan, components: Components
    ) -> None:
        self.contributions, self.components, self._plan = contributions, components, plan
        # By leaves: their components, the start of each one's places among the sorted places, and these.
        self._groups: Dict[AbstractSet[int], Tuple[List[int], NDArray[np.intp], NDArray[np.intp]]] = {}

    @cached_property
    def counted(self) -> List[CountedLeaf]:
        """Contributions whose largest magnitudes are known."""
        return [
            CountedLeaf(one, place, self.component(one.leaf, one.function))
            for one, place in places_of_contributions(self.contributions)
        ]

    def component(self, leaf: int, function: int) -> int:
        """Component of the gradient that a function writes to a leaf."""
        return component_of_contribution(self._plan.by_number[function], leaf, self.components.of)

    def amax_of_components(self, largest: Sequence[float], leaves: FrozenSet[int]) -> Dict[int, float]:
        """Largest finite magnitude of each component in these leaves, from the `largest` of all."""
        if leaves not in self._groups:
            counted = [one for one in self.counted if one.contribution.leaf in leaves]
            counted.sort(key=lambda one: one.component)
            places = np.array([one.place for one in counted], np.intp)
            of_places, starts = np.unique([one.component for one in counted], return_index=True)
            self._groups[leaves] = of_places.tolist(), starts, places
        components, starts, places = self._groups[leaves]
        if not components:
            return {}
        magnitudes = np.array(largest)[places]
        # A component whose contributions are all infinite has no amax: -1 removes it below.
        if math.inf in largest:
            magnitudes[magnitudes == math.inf] = -1.0
        amaxes: Any = np.maximum.reduceat(magnitudes, starts).tolist()
        return {index: amax for index, amax in zip(components, amaxes) if amax >= 0.0}


def places_of_contributions(written: Sequence[Contribution]) -> List[Tuple[Contribution, int]]:
    """List contributions without gradients of earlier batches, each with the index of its magnitude."""
    # The magnitude of a contribution that is not `alone` is that of the sum with the leaf's former gradient.
    # It is left out if earlier batches may be in the sum, as no contribution of this pass came before. After
    # one at the same scale the two count as one, as the sum of several functions does in a pass without
    # hooks.
    result: List[Tuple[Contribution, int]] = []
    latest: Dict[int, int] = {}  # by leaf, in the result
    for index, contribution in enumerate(written):
        alone, earlier = contribution.alone, latest.get(contribution.leaf)
        if earlier is not None and not alone and result[earlier][0].scale == contribution.scale:
            result[earlier] = result[earlier][0], index
        elif alone or earlier is not None:
            latest[contribution.leaf] = len(result)
            result.append((contribution, index))
    return result
