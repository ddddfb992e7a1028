# SPDX-License-Identifier: Apache-2.0
"""Adaptive loss scaling of a whole network's layers, with the framework's part left abstract.

for each layer, from the loss backwards:
    alpha = ada_loss.loss_scale(layer, g, W, fan_in=K, previous_scale=S, iteration=i)
    input gradient  = backward(alpha * W, g)      carries S * alpha
    weight gradient = backward(g) / S             in float32
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Dict, Mapping, Optional

from numpy.typing import NDArray

from .config import AdaLossConfig
from .layer_log import LayerObserver
from .layer_record import LayerRecord, Reason
from .layer_scale import NEW_LAYER, Decision, LayerState, Observed, decide, is_due
from .methods import Needs
from .statistics import ArrayStatistics
from .validation import instance_or_none


class AdaLoss(ABC):
    """The loss scale of every layer, computed every `update_per_n_iteration` iterations and kept in between.

    It remembers what `decide` needs to know of each layer, and reports what was decided. A subclass says how
    the framework's arrays are reduced to statistics and brought to NumPy.

    Args:
        config: method, range, bounds, recorder. None: the defaults.

    Attributes:
        adaptive: False for a method such as `"fixed"`, which asks for no statistics.
        takes_statistics: True when the method needs no look at single elements.

    Example:
        >>> import numpy as np
        >>> from nnabla_adaloss.core import AdaLoss, AdaLossConfig, statistics_of
        >>> class NumpyAdaLoss(AdaLoss):
        ...     def statistics(self, array):
        ...         return statistics_of(array)
        ...     def to_numpy(self, array):
        ...         return array
        >>> g, W = np.array([[1e-7, -1e-7]]), np.array([[0.1, -0.1], [0.1, 0.1]])
        >>> ada_loss = NumpyAdaLoss(AdaLossConfig())
        >>> ada_loss.loss_scale("fc", g, W, fan_in=2, previous_scale=128.0, iteration=0)
        8.0
    """

    def __init__(self, config: Optional[AdaLossConfig] = None) -> None:
        self.config = instance_or_none("config", config, AdaLossConfig) or AdaLossConfig()
        # The configuration never changes, and these are asked for per layer and iteration.
        self.adaptive = self.config.method.needs is not Needs.NOTHING
        self.takes_statistics = self.config.method.needs is not Needs.ARRAYS
        self._layers: Dict[str, LayerState] = {}
        self._observer = LayerObserver(self.config)

    @abstractmethod
    def statistics(self, array: Any) -> ArrayStatistics:
        """Statistics of one of the framework's arrays."""

    @abstractmethod
    def to_numpy(self, array: Any) -> NDArray[Any]:
        """One of the framework's arrays as a NumPy array; it is only read."""

    @property
    def layer_scales(self) -> Dict[str, float]:
        """Per layer name the scale that was last applied."""
        return {layer: state.alpha for layer, state in self._layers.items()}

    def loss_scale(
        self,
        layer: str,
        g: Any,
        W: Optional[Any],
        *,
        fan_in: float,
        fan_in_bound: Optional[float] = None,
        previous_scale: float,
        iteration: int,
        g_statistics: Optional[ArrayStatistics] = None,
        weight_statistics: Optional[ArrayStatistics] = None,
        lift: float = 1.0,
    ) -> float:
        """The scale to multiply a layer's input gradient by.

        The method is asked anew when the layer's scale is `update_per_n_iteration` iterations old. The bounds
        and the overflow guard apply each time; the guard takes the statistics that are given, and without any
        the last ones it saw. Statistics that are not given are computed when an adaptive method is asked.

        Args:
            layer: name of the layer; its state is kept under this name.
            g: gradient of the layer's output, carrying `previous_scale`.
            W: the layer's weight; None for a function without weight.
            fan_in: K, number of products summed into one element of the input gradient, on average.
            fan_in_bound: the largest such number, for the overflow guard. None: `fan_in`.
            previous_scale: S, the accumulated scale of `g`.
            iteration: number of the iteration; calls with the same number use the same scale of the method.
            g_statistics: statistics of `g`, if known.
            weight_statistics: statistics of `W`, if known.
            lift: the part of `previous_scale` that makes up for a small loss; `accum_upper_bound` does not
                count it.

        Returns:
            A positive finite float, a power of two if `config.power_of_two`; 1 when `g` or `W` holds an
            infinity or a NaN.

        Raises:
            ValueError: a method of the user's own returned a scale that is not positive and finite.
        """
        if self.adaptive and is_due(self._layers.get(layer, NEW_LAYER), iteration, self.config):
            if g_statistics is None:
                g_statistics = self.statistics(g)
            if weight_statistics is None and W is not None:
                weight_statistics = self.statistics(W)
        observed = Observed(
            iteration=iteration,
            previous_scale=previous_scale,
            fan_in=fan_in,
            fan_in_bound=fan_in if fan_in_bound is None else fan_in_bound,
            g=g_statistics,
            weight=weight_statistics,
            has_weight=W is not None,
            lift=lift,
            arrays=lambda: (self.to_numpy(g), None if W is None else self.to_numpy(W)),
        )
        return self.decide(layer, observed).alpha

    def decide(self, layer: str, observed: Observed, *, weight_max: float = math.inf) -> Decision:
        """The scale that the layer gets, by `nnabla_adaloss.core.layer_scale.decide`; remembered and
        reported.

        Args:
            layer: name of the layer.
            observed: what is known of it in this iteration.
            weight_max: the largest magnitude that the scaled copy of its weight may hold.

        Returns:
            What is to be applied.

        Raises:
            ValueError: a method of the user's own returned a scale that is not positive and finite.
        """
        state = self._layers.get(layer, NEW_LAYER)
        decision = decide(state, observed, self.config, weight_max=weight_max)
        self._layers[layer] = decision.state
        if self._observer.needed:
            self._observer(_record(layer, observed, decision))
        return decision

    def state_dict(self) -> Dict[str, Dict[str, Any]]:
        """Everything that decides the next scales, as plain lists by layer name."""
        return {"layers": {name: state.as_list() for name, state in self._layers.items()}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what `state_dict` returned; nothing changes when it raises.

        Raises:
            KeyError, TypeError, ValueError: `state` is none that `state_dict` returned.
        """
        self._layers = {str(name): LayerState.from_list(values) for name, values in state["layers"].items()}

    def forget(self) -> None:
        """Drop what was computed from gradients and weights, as after loading other weights."""
        self._layers = {}


def _record(layer: str, observed: Observed, decision: Decision) -> LayerRecord:
    return LayerRecord(
        iteration=observed.iteration,
        layer=layer,
        alpha=decision.alpha,
        unbounded=1.0 if decision.reason is Reason.NONFINITE else decision.state.unbounded,
        previous_scale=observed.previous_scale,
        accumulated_scale=observed.previous_scale * decision.alpha,
        fan_in=observed.fan_in,
        g=observed.g,
        weight=observed.weight,
        reason=decision.reason,
    )
