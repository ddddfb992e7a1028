# SPDX-License-Identifier: Apache-2.0
"""Range of each gradient, where layers have different formats."""

from __future__ import annotations

import math
from typing import Dict

from ..core.components import Components, LayerInput
from ..core.config import AdaLossConfig
from ..core.methods import Range
from ..emulation.rounded_storage import RoundedStorage
from ..graph.graph import Graph
from ..graph.plan import GraphPlan


class GradientRanges:
    """Range of each gradient in its format, unless the user gave a range."""

    def __init__(self, config: AdaLossConfig, storage: RoundedStorage, graph: Graph, plan: GraphPlan) -> None:
        self._config, self._storage = config, storage
        self._keys, self._shapes = graph.keys, plan.described.shapes

    def of(self, position: int) -> Range:
        """Range of the format in which the gradient at `position` is stored."""
        return self._config.range_in(self._storage.precision_of(self._keys[position]).stored_gradients)

    def u_max_scalar(self, position: int) -> float:
        """Largest magnitude that the gradient of a scalar may have."""
        return max(self.of(position).u_max, self._storage.gradient_format(self._keys[position], 1).max)

    def of_components(self, components: Components) -> Dict[int, float]:
        """Largest magnitude that fits the formats of all gradients of a component, by its index."""
        u_maxes: Dict[int, float] = {}
        for position, index in components.of.items():
            u_max = self.u_max_scalar(position) if index in components.scalars else self.of(position).u_max
            u_maxes[index] = min(u_max, u_maxes.get(index, u_max))
        return u_maxes

    def of_weight(self, layer_input: LayerInput) -> float:
        """Largest magnitude that the scaled copy of a layer's weight may have."""
        size = math.prod(self._shapes[layer_input.weight])
        weight_max = self._storage.data_format(self._keys[layer_input.weight], size).max
        return min(self.of(layer_input.input).u_max, weight_max)
