# SPDX-License-Identifier: Apache-2.0
"""What goes by keys of one graph, for another graph that was built alike."""

from __future__ import annotations

from functools import cached_property
from typing import Dict

import nnabla as nn

from .plan import GraphPlan


class Renaming:
    """Which functions and variables of two graphs of one structure stand in the same places.

    Args:
        before: the plan of the graph that keys are of.
        plan: that of the graph that they are wanted for.

    Attributes:
        plan: the latter.
        variables: its keys of variables, by those before.
        functions: likewise of functions.
    """

    def __init__(self, before: GraphPlan, plan: GraphPlan) -> None:
        self.plan = plan
        self.variables: Dict[int, int] = dict(zip(before.keys, plan.keys))
        self.functions: Dict[int, int] = dict(zip(before.function_keys, plan.function_keys))

    @cached_property
    def by_key(self) -> Dict[int, nn.Variable]:
        """The variables themselves, by their own keys."""
        return dict(zip(self.plan.keys, self.plan.all_variables))

    @cached_property
    def kept(self) -> Dict[int, nn.Variable]:
        """Those that both graphs have, by key."""
        return {key: self.by_key[key] for key, _ in self.plan.structure.described.kept.values()}
