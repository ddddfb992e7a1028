# SPDX-License-Identifier: Apache-2.0
"""Which scale a layer's input gradient gets by itself, for functions that scale by hand.

unbounded = method(g, W, range, K)              when it is due, else what it gave last
scale     = min(unbounded, scale_upper_bound, accum_upper_bound / S)      never from above 1 to below
scale     = min(scale, what could overflow)
alpha     = largest power of two <= scale
alpha     = min(alpha, what keeps alpha * W in range, but no less than 1)

input gradient  = backward(alpha * W, g)        carries S * alpha
weight gradient = backward(g) / S               in float32
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from numpy.typing import NDArray

from ..core.config import AdaLossConfig, bounded, scale_by_method
from ..core.layer_record import LayerObserver, LayerRecord, Reason
from ..core.methods import Needs, overflow_limit
from ..core.power_of_two import clamp_scale, floor_power_of_two
from ..core.statistics import ArrayStatistics
from ..core.validation import instance_or_none, integer, number, positive_number


class LayerState(NamedTuple):
    """What is remembered of a layer between iterations."""

    computed_at: int = -1  # iteration in which the method was last asked; -1 before the first
    unbounded: float = 1.0  # what it gave
    accumulated_limit: float = math.inf  # overflow limit of S * alpha; unlike that of alpha, it outlives S
    alpha: float = 1.0  # the scale that was last applied
    # For methods with `Needs.HISTORY`: statistics of g / S when the method was asked, the newest last.
    history: Tuple[ArrayStatistics, ...] = ()

    def as_list(self) -> List[Any]:
        """The state as plain numbers and lists, for saving."""
        return [*self[:4], *([[list(statistics) for statistics in self.history]] if self.history else [])]

    @classmethod
    def from_list(cls, values: List[Any]) -> LayerState:
        """The state that `as_list` returned; TypeError or ValueError when its numbers come from no layer."""
        computed_at, unbounded, accumulated_limit, alpha, *rest = values
        history = rest[0] if rest else []
        for value in (value for statistics in history for value in statistics):
            number("history", value)
        if not number("accumulated_limit", accumulated_limit) > 0.0:
            raise ValueError(f"accumulated_limit={accumulated_limit!r} must be positive")
        return cls(
            integer("computed_at", computed_at),
            positive_number("unbounded", unbounded),
            accumulated_limit,
            positive_number("alpha", alpha),
            tuple(ArrayStatistics(*statistics) for statistics in history),
        )


_NEW_LAYER = LayerState()


class AdaLoss(ABC):
    """The loss scale of every layer, computed every `update_per_n_iteration` iterations and kept in between.

    A subclass says how the framework's arrays are reduced to statistics and brought to NumPy.

    Args:
        config: method, range, bounds, recorder. None: the defaults.

    Attributes:
        adaptive: False for a method such as `"fixed"`, which asks for no statistics.
        takes_statistics: True when the method needs no single elements.

    Example:
        >>> import numpy as np
        >>> from nnabla_adaloss.core import AdaLossConfig, statistics_of
        >>> from nnabla_adaloss import AdaLoss
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
        self._observer = LayerObserver(self.config.recorder, self.config.debug_level)

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
        weight_max: float = math.inf,
    ) -> float:
        """The scale to multiply a layer's input gradient by.

        The method is asked anew when the layer's scale is `update_per_n_iteration` iterations old. The bounds
        and the overflow guard apply each time; the guard takes the statistics that are given, or else the
        last ones. Those that are not given are computed when an adaptive method is asked.

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
            weight_max: the largest magnitude that the scaled copy of `W` may hold.

        Returns:
            A positive finite float, a power of two if `config.power_of_two`; 1 when `g` or `W` holds an
            infinity or a NaN.

        Raises:
            ValueError: a method of the user's own returned a scale that is not positive and finite.
        """
        state, config = self._layers.get(layer, _NEW_LAYER), self.config
        due = state.computed_at < 0 or not 0 <= iteration - state.computed_at < config.update_per_n_iteration
        if self.adaptive and due:
            if g_statistics is None:
                g_statistics = self.statistics(g)
            if weight_statistics is None and W is not None:
                weight_statistics = self.statistics(W)
        if any(known is not None and known.nonfinite for known in (g_statistics, weight_statistics)):
            # Not kept: the layer's scale is computed from the next gradient that is finite.
            alpha, reason = 1.0, Reason.NONFINITE
        else:
            # Statistics of no element: nothing is known yet, and nothing is kept.
            if due and not (self.adaptive and g_statistics is not None and not g_statistics.count):
                inputs: Tuple[Any, Any] = g_statistics, weight_statistics
                if config.method.needs is Needs.ARRAYS:
                    inputs = self.to_numpy(g), None if W is None else self.to_numpy(W)
                elif config.method.needs is Needs.HISTORY and g_statistics is not None:
                    past = (*state.history, g_statistics.scaled(1.0 / previous_scale))
                    state = state._replace(history=past[-(config.method.window or 1) :])
                    inputs = tuple(s.scaled(previous_scale) for s in state.history), weight_statistics
                unbounded = scale_by_method(config, *inputs, config.range, fan_in)
                state = state._replace(computed_at=iteration, unbounded=unbounded)
            if g_statistics is not None and (W is None) == (weight_statistics is None):
                bound = fan_in if fan_in_bound is None else fan_in_bound
                limit = overflow_limit(g_statistics, weight_statistics, bound, config.range.u_max)
                state = state._replace(accumulated_limit=previous_scale * limit)
            alpha, reason = state.unbounded, Reason.METHOD
            if config.use_bound and alpha > 1.0:
                alpha, reason = bounded(alpha, previous_scale / lift, config)
            if alpha > state.accumulated_limit / previous_scale:
                alpha = clamp_scale(state.accumulated_limit / previous_scale)
                reason = Reason.OVERFLOW_GUARD
            alpha = floor_power_of_two(alpha) if config.power_of_two else alpha
            largest = 0.0 if weight_statistics is None else weight_statistics.abs_max
            if alpha > 1.0 and alpha * largest > weight_max:
                # The scaled weight is stored in the same format.
                alpha = max(floor_power_of_two(weight_max / largest), 1.0)
                reason = Reason.WEIGHT_RANGE
        self._layers[layer] = state._replace(alpha=alpha)
        if self._observer.needed:
            self._observer(
                LayerRecord(
                    iteration=iteration,
                    layer=layer,
                    alpha=alpha,
                    unbounded=1.0 if reason is Reason.NONFINITE else state.unbounded,
                    previous_scale=previous_scale,
                    accumulated_scale=previous_scale * alpha,
                    fan_in=fan_in,
                    g=g_statistics,
                    weight=weight_statistics,
                    reason=reason,
                )
            )
        return alpha

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
