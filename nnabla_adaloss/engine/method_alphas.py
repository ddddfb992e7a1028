# SPDX-License-Identifier: Apache-2.0
"""Alpha of each layer from a method, before scale limits."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ..core.choose import MethodAlpha
from ..core.components import NodeStructure
from ..core.config import AdaLossConfig
from ..core.layer_alpha import History, bound_alpha, unbounded_alpha, with_newest
from ..core.layer_record import Reason
from ..core.methods import Needs
from ..core.statistics import ArrayStatistics
from ..core.validation import integer
from ..graph.functions import properties_of
from ..graph.graph import Graph
from .prepared_graph import PreparedGraph


class MethodAlphas:
    """Calls the method of a configuration for layers."""

    undone = "_histories", "_arrays"  # restored from a `savepoint`

    def __init__(self, config: AdaLossConfig) -> None:
        self._config, self._needs = config, config.method.needs
        needs_arrays = self._needs is Needs.ARRAYS
        # Called for each function in a pass that measures, if the method needs arrays.
        self.copier = self.copy_arrays if needs_arrays else None
        # With delay=1 the last iteration's statistics save a batch's second pass, the only use of arrays.
        self.delay = (0 if needs_arrays else 1) if config.delay is None else config.delay
        if self.delay and needs_arrays:
            raise ValueError(
                f"delay=1 keeps statistics, not arrays, and loss_scale_method={config.loss_scale_method!r} "
                "needs arrays; choose delay=0 or another method"
            )
        # Statistics of each layer's unscaled gradients, divided by the loss weight, for `Needs.HISTORY`.
        self._histories: Dict[str, History] = {}
        # Unscaled gradient and weight of each layer for `Needs.ARRAYS`, of the last pass with both finite.
        self._arrays: Dict[str, Tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
        # Alphas of the last choice before they were bounded, by layer.
        self.unbounded_alphas: Dict[str, float] = {}

    def copy_arrays(self, graph: Graph, node: NodeStructure, scale: float) -> None:
        """Copy the unscaled gradient and the weight of each layer of a function, if finite."""
        product = properties_of(node.type_name).product
        for layer_input in node.layer_inputs:
            assert product is not None, "only products have layers"
            output, weight = graph.variables[node.outputs[0]], graph.variables[layer_input.weight]
            g, w = product.matrices(output.grad.data, weight.data.data, node.args, layer_input.scaled)
            if np.isfinite(g).all() and np.isfinite(w).all():
                copies = np.array(g, np.float32) / np.float32(scale), np.array(w, np.float32)
                # A new dict, as a savepoint keeps the old one.
                self._arrays = {**self._arrays, layer_input.layer: copies}

    def alpha_function(
        self, prepared: PreparedGraph, iteration: int, loss_weights: Sequence[float], *, s0_measured: bool
    ) -> Optional[MethodAlpha]:
        """Make the method's alpha a function of layer and scale; None: scale limits determine all alphas."""
        self.unbounded_alphas = {}
        if self._needs is Needs.COMPONENTS:
            return None
        # From a measured S0, which fits the largest gradients, only limits lower a scale, and alphas are 1 or
        # more. A given S0 may be too large for a layer, whose method then returns less than 1.
        lowest = 1.0 if s0_measured else 0.0

        # `uncompensated`: `scale` without the factor that makes up for a small loss weight, as of `1e-6 *
        # loss`. With that factor `accum_upper_bound` would leave no alpha above 1.
        def method_alpha(layer: str, scale: float, uncompensated: float) -> Tuple[float, Reason]:
            node, layer_input = prepared.plan.layer_inputs[layer]
            loss_weight = loss_weights[prepared.components.of[node.outputs[0]]]
            inputs = self._inputs(prepared, layer, scale, loss_weight, iteration)
            if inputs is None:
                # Without measurements the layer passes its scale on.
                return 1.0, Reason.UNKNOWN
            input_range, fan_in = prepared.range_of(layer_input.input), layer_input.scaled.fan_in
            alpha = unbounded_alpha(self._config, layer, *inputs, input_range, fan_in)
            self.unbounded_alphas[layer] = alpha
            return bound_alpha(max(alpha, lowest), uncompensated, self._config)

        return method_alpha

    def _inputs(
        self, prepared: PreparedGraph, layer: str, scale: float, loss_weight: float, iteration: int
    ) -> Optional[Tuple[Any, Any]]:
        """Gradient, at S = `scale`, and weight of a layer as the method needs them; None: unmeasured."""
        if self._needs is Needs.NOTHING:
            return None, None
        if self._needs is Needs.ARRAYS:
            if layer not in self._arrays:
                return None
            unscaled, weight = self._arrays[layer]
            return unscaled * np.float32(scale), weight
        node, layer_input = prepared.plan.layer_inputs[layer]
        g, w = prepared.statistics.gradient(node.outputs[0]), prepared.statistics.data(layer_input.weight)
        if g is None or w is None or not g.count:
            return None  # unmeasured, or the batch was empty
        factor = scale * loss_weight  # unlike the arrays, statistics are divided by the loss weight, too
        if self._needs is not Needs.HISTORY:
            return g.scaled(factor), w
        history = with_newest(self._histories.get(layer, ()), iteration, g, self._config)
        self._histories = {**self._histories, layer: history}
        return tuple(one.scaled(factor) for _, one in history), w

    def state_dict(self) -> Dict[str, List[Any]]:
        """Histories by layer, as plain numbers and lists, for `read_state`."""
        return {layer: [[i, list(g)] for i, g in history] for layer, history in self._histories.items()}

    @staticmethod
    def read_state(state: Mapping[str, Sequence[Any]]) -> Dict[str, History]:
        """Read histories from a `state_dict`, for `load`."""
        return {
            str(layer): tuple((integer("iteration", i), ArrayStatistics.from_list(g)) for i, g in history)
            for layer, history in state.items()
        }

    def load(self, histories: Dict[str, History]) -> None:
        """Replace all state computed from gradients and weights."""
        self._histories, self._arrays = histories, {}
