# SPDX-License-Identifier: Apache-2.0
"""Scale of a single layer, kept between iterations, for functions that scale by hand.

unbounded = method(g, W, range, K)              when it is due, else the last one
scale     = min(unbounded, scale_upper_bound, accum_upper_bound / S)      never from above 1 to below
scale     = min(scale, overflow limit)
alpha     = largest power of two <= scale
alpha     = min(alpha, limit that keeps alpha * W in range, but no less than 1)

input gradient  = backward(alpha * W, g)        carries S * alpha
weight gradient = backward(g) / S               in float32
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.config import AdaLossConfig
from ..core.layer_alpha import History, alpha_bounds, bound_alpha, unbounded_alpha, with_newest
from ..core.layer_record import LayerRecord, Reason
from ..core.methods import Needs, overflow_limit
from ..core.power_of_two import clamp_scale, floor_power_of_two
from ..core.statistics import ArrayStatistics, statistics_of
from ..core.validation import instance, instance_or_none, integer, nonnegative_number, number, positive_number
from ..kernels import Kernels
from ..monitor.audience import Audience, audience_of
from ..monitor.events import LayerLook, LayerScaled


class LayerState(NamedTuple):
    """State of a layer between iterations."""

    computed_at: int = -1  # iteration of the last call of the method; -1 before the first
    unbounded: float = 1.0  # result of that call
    accumulated_limit: float = math.inf  # overflow limit of S * alpha; unlike that of alpha, it outlives S
    alpha: float = 1.0  # the last applied scale
    history: History = ()  # for methods with `Needs.HISTORY`

    def as_list(self) -> List[Any]:
        """State as plain numbers and lists, for saving."""
        return [*self[:4], [list(g) for _, g in self.history]]

    @classmethod
    def from_list(cls, values: List[Any]) -> LayerState:
        """Restore the state from `as_list`; TypeError or ValueError if no layer can have its numbers."""
        computed_at, unbounded, accumulated_limit, alpha, history = values
        if not number("accumulated_limit", accumulated_limit) > 0.0:
            raise ValueError(f"accumulated_limit={accumulated_limit!r} must be positive")
        return cls(
            integer("computed_at", computed_at),
            positive_number("unbounded", unbounded),
            accumulated_limit,
            positive_number("alpha", alpha),
            tuple((computed_at, ArrayStatistics.from_list(g)) for g in history),
        )


class AdaLoss:
    """Loss scale of every layer, computed every `update_per_n_iteration` iterations and kept in between.

    It reads NumPy arrays; a subclass for a framework defines the statistics of its arrays and their
    conversion to NumPy.

    Args:
        config: method, range, bounds. None: the defaults.
        monitors: `on_layer_scaled` receives each scale; its `look` shows no arrays.

    Example:
        >>> import numpy as np
        >>> from nnabla_adaloss import AdaLoss
        >>> g, W = np.array([[1e-7, -1e-7]]), np.array([[0.1, -0.1], [0.1, 0.1]])
        >>> AdaLoss().loss_scale("fc", g, W, fan_in=2, previous_scale=128.0, iteration=0)
        8.0
    """

    def __init__(
        self, config: Optional[AdaLossConfig] = None, monitors: Union[Sequence[Any], Audience] = ()
    ) -> None:
        self.config = instance_or_none("config", config, AdaLossConfig) or AdaLossConfig()
        self._layers: Dict[str, LayerState] = {}
        self._audience = audience_of(monitors)

    def statistics(self, array: Any) -> ArrayStatistics:
        """Statistics of one of the framework's arrays."""
        return statistics_of(array)

    def to_numpy(self, array: Any) -> NDArray[Any]:
        """Convert one of the framework's arrays to a NumPy array for reading."""
        return np.asarray(array)

    @property
    def layer_scales(self) -> Dict[str, float]:
        """The last applied scale of each layer, by name."""
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
        weight_max: float = math.inf,
    ) -> float:
        """Scale that multiplies a layer's input gradient.

        The method is called again when the layer's scale is `update_per_n_iteration` iterations old. The
        bounds and the overflow guard apply each time; the guard takes the given statistics, or else the last
        ones. Statistics that are not given are computed when the method is called, if it needs any.

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
            weight_max: the largest magnitude that the scaled copy of `W` may hold.

        Returns:
            A positive finite float, a power of two if `config.power_of_two`; 1 when `g` or `W` holds an
            infinity or a NaN.

        Raises:
            TypeError, ValueError: a number cannot be that of a layer, such as a NaN.
            ValueError: a user-defined method returned anything but a positive finite number.
        """
        previous_scale = positive_number("previous_scale", previous_scale)
        fan_in = nonnegative_number("fan_in", fan_in)
        terms = fan_in if fan_in_bound is None else nonnegative_number("fan_in_bound", fan_in_bound)
        iteration = integer("iteration", iteration)
        state, config = self._layers.get(layer, LayerState()), self.config
        needs, age = config.method.needs, iteration - state.computed_at
        # Also if iterations are counted from the start again.
        due = state.computed_at < 0 or not 0 <= age < config.update_per_n_iteration
        if due and needs is not Needs.NOTHING:
            if g_statistics is None:
                g_statistics = self.statistics(g)
            if weight_statistics is None and W is not None:
                weight_statistics = self.statistics(W)
        if any(one is not None and one.nonfinite for one in (g_statistics, weight_statistics)):
            # Not stored: the next finite gradient determines the layer's scale.
            alpha, unbounded, reason = 1.0, 1.0, Reason.NONFINITE
        else:
            # The method, if it is due; statistics of an empty array determine no scale.
            if due and (needs is Needs.NOTHING or (g_statistics is not None and g_statistics.count)):
                inputs: Tuple[Any, Any] = g_statistics, weight_statistics
                if needs is Needs.ARRAYS:
                    inputs = self.to_numpy(g), None if W is None else self.to_numpy(W)
                elif needs is Needs.HISTORY and g_statistics is not None:
                    newest = g_statistics.scaled(1.0 / previous_scale)
                    state = state._replace(history=with_newest(state.history, iteration, newest, config))
                    inputs = tuple(g.scaled(previous_scale) for _, g in state.history), weight_statistics
                unbounded = unbounded_alpha(config, layer, *inputs, config.range, fan_in)
                state = state._replace(computed_at=iteration, unbounded=unbounded)
            # The overflow guard, from these statistics if both are known, else from the last ones.
            if g_statistics is not None and (W is None) == (weight_statistics is None):
                limit = overflow_limit(g_statistics, weight_statistics, terms, config.range.u_max)
                state = state._replace(accumulated_limit=previous_scale * limit)
            # Bounds, the guard, a power of two, and the range of the scaled weight.
            unbounded = state.unbounded
            alpha, reason = bound_alpha(unbounded, previous_scale, config)
            if alpha > state.accumulated_limit / previous_scale:
                alpha = clamp_scale(state.accumulated_limit / previous_scale)
                reason = Reason.OVERFLOW_GUARD
            alpha = floor_power_of_two(alpha) if config.power_of_two else alpha
            weight_amax = 0.0 if weight_statistics is None else weight_statistics.abs_max
            if alpha > 1.0 and alpha * weight_amax > weight_max:
                alpha = alpha_bounds(weight_amax, weight_max, None).highest
                reason = Reason.WEIGHT_RANGE
        self._layers[layer] = state._replace(alpha=alpha)
        if self._audience is not None:
            record = LayerRecord(
                iteration=iteration,
                layer=layer,
                alpha=alpha,
                unbounded=unbounded,
                previous_scale=previous_scale,
                accumulated_scale=previous_scale * alpha,
                fan_in=fan_in,
                g=g_statistics,
                weight=weight_statistics,
                reason=reason,
            )
            self._audience.tell(LayerScaled(record, LayerLook()))
        return alpha

    def state_dict(self) -> Dict[str, Dict[str, Any]]:
        """State that determines the next scales, as plain lists by layer name."""
        return {"layers": {name: state.as_list() for name, state in self._layers.items()}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load a state of `state_dict`; nothing changes if this raises.

        Raises:
            KeyError, TypeError, ValueError: `state` was not returned by `state_dict`.
        """
        layers = instance("layers", state["layers"], dict)
        self._layers = {str(name): LayerState.from_list(values) for name, values in layers.items()}

    def forget(self) -> None:
        """Drop all measurements of gradients and weights, as after loading other weights."""
        self._layers = {}


class NNablaAdaLoss(AdaLoss):
    """Loss scale of each layer, computed from NNabla arrays.

    Args:
        config: how scales are computed and bounded.
        kernels: the kernels that read the arrays.
        monitors: as `AdaLoss` takes them.

    Example:
        >>> import numpy as np, nnabla as nn
        >>> from nnabla_adaloss.kernels import CpuKernels
        >>> from nnabla_adaloss import AdaLossConfig, NNablaAdaLoss
        >>> g, W = (nn.NdArray.from_numpy_array(np.full((2, 2), v, np.float32)) for v in (1e-7, 0.1))
        >>> NNablaAdaLoss(AdaLossConfig(), CpuKernels()).loss_scale(
        ...     "fc", g, W, fan_in=2, previous_scale=128.0, iteration=0)
        8.0
    """

    def __init__(
        self, config: AdaLossConfig, kernels: Kernels, monitors: Union[Sequence[Any], Audience] = ()
    ) -> None:
        super().__init__(config, monitors)
        self.kernels = kernels

    def statistics(self, array: nn.NdArray) -> ArrayStatistics:
        """Statistics of `array`, from one pass over it."""
        return self.kernels.statistics(array)

    def to_numpy(self, array: nn.NdArray) -> NDArray[Any]:
        """`array` in host memory."""
        return np.asarray(array.data)
