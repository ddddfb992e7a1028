# SPDX-License-Identifier: Apache-2.0
"""What goes by keys of one graph, for another graph that was built alike."""

from __future__ import annotations

from functools import cached_property
from typing import Dict, Set

from .plan import GraphPlan


class Renaming:
    """Which variables of two graphs of one structure stand in the same places.

    Args:
        before: the plan of the graph that keys are of.
        plan: that of the graph that they are wanted for.

    Attributes:
        kept: keys of the leaves that both graphs have.
    """

    def __init__(self, before: GraphPlan, plan: GraphPlan) -> None:
        self._before, self._plan = before, plan
        self.kept: Set[int] = plan.structure.kept_keys

    @cached_property
    def variables(self) -> Dict[int, int]:
        """Keys of the variables, by those before."""
        return dict(zip(self._before.keys, self._plan.keys))
