# SPDX-License-Identifier: Apache-2.0
"""The functions of a graph, in the order in which forward visits them."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, List, NamedTuple, Set

import nnabla as nn

_parent = attrgetter("parent")


class Visited(NamedTuple):
    """The functions of a graph in forward order, and what they read.

    Attributes:
        functions: the functions.
        inputs: the inputs of each.
        parents: the function that computes each of these; None for leaves.
    """

    functions: List[Any]
    inputs: List[List[nn.Variable]]
    parents: List[List[Any]]


def visited(loss: nn.Variable) -> Visited:
    """The functions behind `loss`, in the order of `Variable.visit`.

    That itself would keep what it is called with, and so the graph, in a reference cycle.

    Example:
        >>> import nnabla.functions as F
        >>> x = nn.Variable((2, 3), need_grad=True)
        >>> [f.info.type_name for f in visited(F.mean(F.tanh(x))).functions]
        ['Tanh', 'Mean']
    """
    found = Visited([], [], [])
    functions, inputs, parents = found
    seen: Set[Any] = set()
    waiting: List[Any] = [loss.parent]
    # What a function reads comes before it, first inputs first.
    while waiting:
        f = waiting.pop()
        if type(f) is tuple:
            functions.append(f[0])
            inputs.append(f[1])
            parents.append(f[2])
        elif f not in seen:
            seen.add(f)
            own = f.inputs
            behind = list(map(_parent, own))
            waiting.append((f, own, behind))
            for parent in reversed(behind):
                if parent is not None:
                    waiting.append(parent)
    return found
