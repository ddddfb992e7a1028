# SPDX-License-Identifier: Apache-2.0
"""How large gradients really are: those of the same network in fp32, on the same batches."""

from __future__ import annotations

from typing import Any, Callable, Dict, FrozenSet, List, Optional, Tuple

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from nnabla_adaloss.graph.plan import GraphPlan

WINDOW = 128
"""How many batches back a scale remembers, at most."""

# What was zero has grown beyond measure, which is a number in a file of results, too.
_TINY = 1e-200


class TrueGradients:
    """The largest gradient of each component in each batch, in a twin of the graph that computes in fp32.

    The twin is built as the graph is, in the same parameter scope, so that it always has its parameters.
    Gradients of parameters are zero afterwards, as they are when a batch is fed.
    """

    def __init__(self, loss: nn.Variable, feed: Callable[[], Any]) -> None:
        self._loss, self._feed = loss, feed
        plan = GraphPlan(loss)
        structure = plan.structure
        components = structure.components(by_layer=True)
        self._leaves = list(plan.leaves.values())
        self._seen: List[Tuple[int, nn.Variable]] = [
            (components.of[position], plan.all_variables[position]) for position in structure.gradients
        ]
        self._of_layer: Dict[str, FrozenSet[int]] = {}
        for node in structure.nodes:
            written = {components.of[position] for position in node.inputs}
            for leaf in node.leaves:
                component = components.producers[node.number]
                written.add(component)
                self._seen.append((component, plan.all_variables[leaf]))
            self._of_layer[node.label] = frozenset(written)
        self._history: List[NDArray[np.float64]] = []
        self._count = len(components.names)

    def __call__(self) -> None:
        """Compute the gradients of the next batch."""
        self._feed()
        self._zero()
        self._loss.forward()
        self._loss.backward()
        found = np.zeros(self._count)
        for component, variable in self._seen:
            found[component] = max(found[component], float(np.abs(variable.g).max()))
        self._history.append(found)
        self._zero()

    def growth(self, batch: int, layer: str) -> Optional[float]:
        """How many times larger the gradients that a layer writes are in a batch than in any of the window.

        Of several components the one that has grown most counts.
        """
        now, before = self._history[batch - 1], self._history[max(0, batch - 1 - WINDOW) : batch - 1]
        if layer not in self._of_layer or not before:
            return None
        largest = np.max(before, axis=0)
        return max(float(now[c] / max(largest[c], _TINY)) for c in self._of_layer[layer])

    def _zero(self) -> None:
        for variable in self._leaves:
            variable.grad.zero()
