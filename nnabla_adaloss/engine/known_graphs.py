# SPDX-License-Identifier: Apache-2.0
"""What is kept of a network's graphs, so that one that is built again need not be planned again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Mapping, Optional, Sequence

import nnabla as nn

from ..graph.reading import GraphDescription
from ..graph.structure import GraphStructure, PlanOptions
from .schedule_cache import ScheduleCache

# Both losses of an adversarial network, or recurrent networks of so many lengths.
_REMEMBERED = 16


@dataclass
class KnownGraph:
    """A way in which graphs are wired; no graph itself, nor any array of it, is kept.

    Attributes:
        structure: what follows from it, and from the shapes of the last one.
        cache: the schedule in use when the network's graph was last built otherwise; or None.
        statistics: what `StatisticsSource.state` returned then; or None.
    """

    structure: GraphStructure
    cache: Optional[ScheduleCache] = None
    statistics: Optional[Sequence[Any]] = None


class KnownGraphs:
    """The ways in which the graphs of a network were built last."""

    def __init__(self) -> None:
        # The one that was used last is the last.
        self._known: List[KnownGraph] = []

    def __len__(self) -> int:
        return len(self._known)

    def of(
        self, described: GraphDescription, options: PlanOptions, leaves: Mapping[int, nn.Variable]
    ) -> KnownGraph:
        """What is known of a graph; all is found out, if none that was wired alike is remembered.

        Args:
            described: the graph.
            options: what else its structure depends on.
            leaves: its leaves, by position.

        Raises:
            ValueError: a pattern of the selection matches no layer.
        """
        for index in reversed(range(len(self._known))):
            known = self._known[index]
            found = known.structure.of_alike(described) if known.structure.options == options else None
            if found is not None:
                known.structure = found
                self._known.append(self._known.pop(index))
                return known
        known = KnownGraph(GraphStructure(described, options, [leaves[p] for p in described.kept]))
        self._known = [*self._known[1 - _REMEMBERED :], known]
        return known

    def drop_schedules(self) -> None:
        """Have scales chosen again."""
        for known in self._known:
            known.cache = None

    def forget(self) -> None:
        """Forget what was measured, too."""
        for known in self._known:
            known.cache = known.statistics = None
