# SPDX-License-Identifier: Apache-2.0
"""Parameters that are to be trained, and that the loss does not depend on."""

from __future__ import annotations

from typing import AbstractSet, Any, List, Mapping, Optional, Set, Tuple

import nnabla as nn

from ..graph.plan import GraphPlan
from .numbers import Untrained


def untrained_parameters(
    plan: GraphPlan,
    by_solver: Optional[Mapping[str, nn.Variable]],
    registered: Mapping[str, nn.Variable],
    fed: AbstractSet[int],
) -> Optional[Untrained]:
    """The parameters that need a gradient and get none from this loss.

    What a solver has is to be trained. Of a loss alone it is not known what is: a discriminator's loss
    reaches no generator, and a frozen part has no gradient on purpose. Registered parameters are spoken of
    when they share their outermost scope with one that is trained, or when no data comes to any trained layer
    but by way of something that is cut off.

    Args:
        plan: the graph.
        by_solver: the solver's parameters; None without a solver.
        registered: nnabla's.
        fed: keys of the leaves that data is fed to.
    """
    trained, reached = _reached(plan)
    leaves = [v for f in plan.functions for v in f.inputs if v.parent is None]
    # With `fix_parameters=True` it is the leaf of the graph that needs no gradient. A solver does not know.
    frozen = {hash(v) for v in (*leaves, *registered.values()) if not v.need_grad}
    wanted = registered if by_solver is None else by_solver
    names = [name for name, v in wanted.items() if hash(v) not in reached | frozen]
    if not names:
        return None
    if by_solver is not None:
        return Untrained(tuple(names), True)
    if _cut_from_data(plan, trained, fed):
        return Untrained(tuple(names), False)
    scopes = {name.split("/")[0] for name, v in registered.items() if hash(v) in reached}
    names = [name for name in names if name.split("/")[0] in scopes]
    return Untrained(tuple(names), False) if names else None


def _reached(plan: GraphPlan) -> Tuple[Set[int], Set[int]]:
    """Keys of the functions and of the leaves that the gradient of the loss comes to."""
    functions: Set[int] = set()
    leaves: Set[int] = set()
    waiting: List[Any] = [plan.functions[-1]]
    while waiting:
        f = waiting.pop()
        if hash(f) in functions or f.info.type_name == "Unlink":
            continue
        functions.add(hash(f))
        for v in f.inputs:
            if not v.need_grad:
                continue
            if v.parent is None:
                leaves.add(hash(v))
            else:
                waiting.append(v.parent)
    return functions, leaves


def _cut_from_data(plan: GraphPlan, trained: AbstractSet[int], fed: AbstractSet[int]) -> bool:
    """Whether no trained layer reads data, but what comes from parts that the gradient does not come to."""
    if not fed:
        return False
    carries: Set[int] = set(fed)
    for f in plan.functions:
        if carries.isdisjoint(map(hash, f.inputs)):
            continue
        node = plan.nodes.get(hash(f))
        if hash(f) in trained:
            if node is not None and node.leaves:
                return False
            carries.update(map(hash, f.outputs))
        elif not any(v.need_grad for v in f.inputs) and f.info.type_name != "Unlink":
            # Nothing to train yet: it only prepares the data.
            carries.update(map(hash, f.outputs))
    return True
