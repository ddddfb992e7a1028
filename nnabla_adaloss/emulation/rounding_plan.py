# SPDX-License-Identifier: Apache-2.0
"""Which arrays of a graph are rounded, and when."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Tuple

import nnabla as nn

from ..graph.node import unique
from ..graph.order import forward_order
from ..graph.watch import GraphWatch
from .rules import fp32_leaves, half_gradients, half_leaves, half_outputs

Keyed = List[Tuple[int, nn.Variable]]


class Rounding(NamedTuple):
    """What is rounded when one function has run: its outputs, and in backward its input gradients."""

    outputs: Keyed
    gradients: Keyed


class RoundingPlan:
    """The roundings of every function of the graph behind `loss`, by function key."""

    def __init__(self, loss: nn.Variable) -> None:
        functions = forward_order(loss)
        self.roundings: Dict[int, Rounding] = {hash(f): rounding_of(f) for f in functions}
        in_fp32 = {hash(v) for f in functions for v in fp32_leaves(f)}
        leaves = {hash(v): v for f in functions for v in half_leaves(f)}
        # A leaf that is also read in fp32 stays as it is for both.
        self.leaves: Keyed = [(key, v) for key, v in leaves.items() if key not in in_fp32]
        self._watch = GraphWatch(unique([loss, *(v for f in functions for v in f.inputs)]))

    @property
    def is_current(self) -> bool:
        """True while the graph is what it was: nothing rewired, no `need_grad` changed."""
        return not self._watch.changed


def rounding_of(f: Any) -> Rounding:
    """What is rounded when `f` has run."""
    return Rounding(_keyed(half_outputs(f)), _keyed(half_gradients(f)))


def _keyed(variables: List[nn.Variable]) -> Keyed:
    return [(hash(v), v) for v in variables]
