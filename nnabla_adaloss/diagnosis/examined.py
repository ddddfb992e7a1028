# SPDX-License-Identifier: Apache-2.0
"""The network that a diagnosis runs: its plan and batches, and all put back as it was afterwards."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Dict, Iterator, NamedTuple

import nnabla as nn

from ..graph.names import named, registered_names
from ..graph.plan import GraphPlan
from ..kernels import Kernels, select_kernels
from ..undo import ArraySnapshot, DataSnapshot
from .batches import Batches
from .random_state import RandomState
from .target import Target


class Examined(NamedTuple):
    """A network under examination.

    Attributes:
        plan: its graph, as the feeder has built it.
        batches: what it is fed.
        state: the random numbers that come after those of the feeder.
        kernels: what reads arrays.
    """

    plan: GraphPlan
    batches: Batches
    state: RandomState
    kernels: Kernels


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
    gradients = ArraySnapshot(kernels)
    gradients.save([leaf.grad for leaf in leaves.values()])
    data = DataSnapshot(kernels, list(leaves.values()))
    data.save()
    try:
        yield state
    finally:
        data.restore()
        gradients.restore()
        state.restore()


@contextmanager
def examined(target: Target) -> Iterator[Examined]:
    """Plan the network of a target and record its batches; the network is as before afterwards."""
    fed = target.loss()
    kernels = select_kernels(fed.parent.context)
    names = {**named(target.parameters), **registered_names()}
    with ExitStack() as kept:
        kept.enter_context(target.loss_kept())
        kept.enter_context(preserved(_leaves_of(GraphPlan(fed, names=names)), kernels))
        batches = Batches(target, names)
        plan = GraphPlan(batches.loss, names={**names, **registered_names()})
        state = kept.enter_context(preserved(_leaves_of(plan), kernels))
        yield Examined(plan, batches, state, kernels)


def _leaves_of(plan: GraphPlan) -> Dict[int, nn.Variable]:
    """The leaves of a graph, by key."""
    return {hash(v): v for f in plan.functions for v in f.inputs if v.parent is None}
