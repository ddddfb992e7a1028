# SPDX-License-Identifier: Apache-2.0
"""Leaf gradients written by a pass, and their largest magnitudes by component."""

from __future__ import annotations

import math
from functools import cached_property
from typing import AbstractSet, Any, Dict, FrozenSet, List, NamedTuple, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ..core.components import Components
from ..graph.plan import GraphPlan
from .leaf_gradients import Contribution


class CountedLeaf(NamedTuple):
    """Contribution that consists of this batch's gradient only."""

    contribution: Contribution
    place: int  # index of its largest magnitude, among those of all contributions
    component: int  # component of its gradient


class _Groups(NamedTuple):
    """Places of magnitudes, sorted by component, and the start of each component's places."""

    places: NDArray[np.intp]
    starts: NDArray[np.intp]
    components: Sequence[int]


class WrittenLeaves:
    """Contributions of a pass, in the order of unscaling; shared by passes with equal ones."""

    def __init__(
        self, contributions: Sequence[Contribution], plan: GraphPlan, components: Components
    ) -> None:
        self.contributions, self.components, self._plan = contributions, components, plan
        self._groups: Dict[AbstractSet[int], _Groups] = {}

    @cached_property
    def counted(self) -> List[CountedLeaf]:
        """Contributions whose largest magnitudes are known."""
        return [
            CountedLeaf(one, place, self.component(one.leaf, one.function))
            for one, place in places_of_contributions(self.contributions)
        ]

    def component(self, leaf: int, function: int) -> int:
        """Component of the gradient that a function writes to a leaf."""
        of = self.components.of
        if leaf in of and any(one.input == leaf for one in self._plan.by_number[function].layer_inputs):
            return of[leaf]
        return self.components.producers[function]

    def amax_of_components(self, largest: Sequence[float], leaves: FrozenSet[int]) -> Dict[int, float]:
        """Largest finite magnitude of each component in these leaves, from the `largest` of all."""
        groups = self._groups.get(leaves)
        if groups is None:
            groups = self._groups[leaves] = _grouped(
                [one for one in self.counted if one.contribution.leaf in leaves]
            )
        if not groups.components:
            return {}
        magnitudes = np.array(largest)[groups.places]
        if math.inf in largest:
            magnitudes[magnitudes == math.inf] = -1.0
        amaxes: Any = np.maximum.reduceat(magnitudes, groups.starts).tolist()
        return {index: amax for index, amax in zip(groups.components, amaxes) if amax >= 0.0}


def _grouped(counted: Sequence[CountedLeaf]) -> _Groups:
    """Sort places by component, for `np.maximum.reduceat`."""
    ordered = sorted(counted, key=lambda one: one.component)
    places = np.array([one.place for one in ordered], np.intp)
    components, starts = np.unique([one.component for one in ordered], return_index=True)
    return _Groups(places, starts, components.tolist())


def places_of_contributions(written: Sequence[Contribution]) -> List[Tuple[Contribution, int]]:
    """List contributions without gradients of earlier batches, each with the index of its magnitude."""
    # Contributions summed at one scale, as in a pass without hooks, are one. Left out is the first one that
    # was added to a leaf's own gradient, which earlier batches may have written.
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
