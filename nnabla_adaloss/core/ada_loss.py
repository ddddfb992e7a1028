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
from typing import Any, Dict, Mapping, NamedTuple, Optional

from numpy.typing import NDArray

from .bounds import overflow_limit
from .config import AdaLossConfig
from .layer_limits import LayerLimit, LayerLimits
from .layer_record import LayerRecord
from .loss_scale import applied_scale, checked_scale
from .methods import resolve_method
from .observation import LayerObserver
from .statistics import ArrayStatistics
from .validation import integer, number, positive_number


class LayerState(NamedTuple):
    """What is remembered of a layer between iterations.

    Attributes:
        computed_at: iteration in which the method was last asked; -1 before the first.
        unbounded: what it gave.
        accumulated_limit: overflow limit of S * alpha; unlike that of alpha, it outlives a change of S.
        alpha: the scale that was last applied.
    """

    computed_at: int = -1
    unbounded: float = 1.0
    accumulated_limit: float = math.inf
    alpha: float = 1.0

    def checked(self) -> LayerState:
        """The state itself; TypeError or ValueError when its numbers cannot come from a layer."""
        integer("computed_at", self.computed_at)
        positive_number("unbounded", self.unbounded)
        if not number("accumulated_limit", self.accumulated_limit) > 0.0:
            raise ValueError(f"accumulated_limit={self.accumulated_limit!r} must be positive")
        positive_number("alpha", self.alpha)
        return self


_NEW_LAYER = LayerState()


class AdaLoss(ABC):
    """The loss scale of every layer, computed every `update_per_n_iteration` iterations and kept in between.

    A subclass says how the framework's arrays are reduced to statistics and brought to NumPy.

    Args:
        config: method, range, bounds, recorder. None: the defaults.

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
        self.config = AdaLossConfig() if config is None else config
        self._function, self._takes_statistics = resolve_method(self.config.loss_scale_method)
        self._adaptive = self.config.loss_scale_method != "fixed"
        self._u_max = self.config.range[1]
        self._layers: Dict[str, LayerState] = {}
        self._observer = LayerObserver(self.config)
        self.limits = LayerLimits()

    @abstractmethod
    def statistics(self, array: Any) -> ArrayStatistics:
        """Statistics of one of the framework's arrays."""

    @abstractmethod
    def to_numpy(self, array: Any) -> NDArray[Any]:
        """One of the framework's arrays as a NumPy array; it is only read."""

    @property
    def adaptive(self) -> bool:
        """False for the method `"fixed"`, which asks for no statistics."""
        return self._adaptive

    @property
    def takes_statistics(self) -> bool:
        """True when the method needs no look at single elements."""
        return self._takes_statistics

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
        config = self.config
        computed_at, kept, accumulated_limit, _ = self._layers.get(layer, _NEW_LAYER)
        age = iteration - computed_at
        outdated = computed_at < 0 or not 0 <= age < config.update_per_n_iteration
        if outdated and self._adaptive:
            if g_statistics is None:
                g_statistics = self.statistics(g)
            if weight_statistics is None and W is not None:
                weight_statistics = self.statistics(W)
        if (g_statistics is not None and g_statistics.nonfinite) or (
            weight_statistics is not None and weight_statistics.nonfinite
        ):
            # Not kept: the layer's scale is computed from the next gradient that is finite.
            unbounded = alpha = 1.0
        else:
            # Statistics of no element: nothing is known yet, and nothing is kept.
            unknown = self._adaptive and g_statistics is not None and not g_statistics.count
            if outdated and not unknown:
                if self._takes_statistics:
                    kept = self._function(g_statistics, weight_statistics, config=config, fan_in=fan_in)
                else:
                    kept = self._from_arrays(g, W, fan_in)
                computed_at = iteration
            if g_statistics is not None and (W is None) == (weight_statistics is None):
                terms = fan_in if fan_in_bound is None else fan_in_bound
                accumulated_limit = previous_scale * overflow_limit(
                    g_statistics, weight_statistics, terms, self._u_max
                )
            unbounded = kept
            limit = accumulated_limit / previous_scale
            if self.limits:
                limit = min(limit, self.limits[layer])
            alpha = applied_scale(unbounded, limit, config, previous_scale / lift)
        self._layers[layer] = LayerState(computed_at, kept, accumulated_limit, alpha)
        if self._observer.needed:
            self._observer(
                LayerRecord(
                    iteration=iteration,
                    layer=layer,
                    alpha=alpha,
                    unbounded=unbounded,
                    previous_scale=previous_scale,
                    accumulated_scale=previous_scale * alpha,
                    fan_in=fan_in,
                    g=g_statistics,
                    weight=weight_statistics,
                )
            )
        return alpha

    def state_dict(self) -> Dict[str, Dict[str, Any]]:
        """Everything that decides the next scales, as plain lists by layer name."""
        return {
            "layers": {name: list(state) for name, state in self._layers.items()},
            "limits": {name: list(limit) for name, limit in self.limits.as_mapping().items()},
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what `state_dict` returned; nothing changes when it raises.

        Raises:
            KeyError, TypeError, ValueError: `state` is none that `state_dict` returned.
        """
        layers = {str(name): LayerState(*values).checked() for name, values in state["layers"].items()}
        limits = {str(name): LayerLimit(*values).checked() for name, values in state["limits"].items()}
        self._layers = layers
        self.limits.replace(limits)

    def forget(self) -> None:
        """Drop what was computed from gradients and weights, as after loading other weights."""
        self._layers.clear()

    def _from_arrays(self, g: Any, W: Optional[Any], fan_in: float) -> float:
        weight = None if W is None else self.to_numpy(W)
        scale = self._function(self.to_numpy(g), weight, config=self.config, fan_in=fan_in)
        return checked_scale(scale, self.config.loss_scale_method)
