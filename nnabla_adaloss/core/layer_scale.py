# SPDX-License-Identifier: Apache-2.0
"""Which scale a layer's input gradient gets by itself, for functions that scale by hand. In a network, where
what was measured of all layers is known, scales follow from `nnabla_adaloss.engine.choose`.

    unbounded = method(g, W, range, K)              when it is due, else what it gave last
    scale     = min(unbounded, scale_upper_bound, accum_upper_bound / S)      never from above 1 to below
    scale     = min(scale, what could overflow)
    alpha     = largest power of two <= scale
    alpha     = min(alpha, what keeps alpha * W in range, but no less than 1)

Everything here is pure.
"""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple, Optional, Tuple

from .config import AdaLossConfig
from .layer_record import Reason
from .methods import Needs, Range
from .overflow import overflow_limit
from .power_of_two import clamp_scale, floor_power_of_two
from .statistics import ArrayStatistics
from .validation import integer, number, positive_number


class LayerState(NamedTuple):
    """What is remembered of a layer between iterations.

    Attributes:
        computed_at: iteration in which the method was last asked; -1 before the first.
        unbounded: what it gave.
        accumulated_limit: overflow limit of S * alpha; unlike that of alpha, it outlives a change of S.
        alpha: the scale that was last applied.
        history: for methods with `Needs.HISTORY`: the gradient's statistics in the last iterations in which
            the method was asked, divided by S, the newest last.
    """

    computed_at: int = -1
    unbounded: float = 1.0
    accumulated_limit: float = math.inf
    alpha: float = 1.0
    history: Tuple[ArrayStatistics, ...] = ()

    def as_list(self) -> list[Any]:
        """The state as plain numbers and lists, for saving."""
        return [*self[:4], *([[list(statistics) for statistics in self.history]] if self.history else [])]

    @classmethod
    def from_list(cls, values: list[Any]) -> LayerState:
        """The state that `as_list` returned; TypeError or ValueError when its numbers cannot come from a
        layer.
        """
        computed_at, unbounded, accumulated_limit, alpha, *rest = values
        history = rest[0] if rest else []
        for statistics in history:
            for value in statistics:
                number("history", value)
        known = tuple(ArrayStatistics(*statistics) for statistics in history)
        state = cls(computed_at, unbounded, accumulated_limit, alpha, known)
        integer("computed_at", state.computed_at)
        positive_number("unbounded", state.unbounded)
        if not number("accumulated_limit", state.accumulated_limit) > 0.0:
            raise ValueError(f"accumulated_limit={state.accumulated_limit!r} must be positive")
        positive_number("alpha", state.alpha)
        return state


NEW_LAYER = LayerState()


class Observed(NamedTuple):
    """What is known of a layer in this iteration.

    Attributes:
        iteration: number of the iteration; passes with the same number use the same answer of the method.
        previous_scale: S, the accumulated scale of the arriving gradient.
        fan_in: K, number of products summed into one element of the input gradient, on average.
        fan_in_bound: the largest such number, for the overflow guard.
        g: statistics of the output gradient, S included; None: not looked at.
        weight: statistics of the weight; None: not looked at, or there is none.
        has_weight: False for a function without a weight, such as a cast.
        lift: the part of S that makes up for a small loss; `accum_upper_bound` does not count it.
        arrays: for methods with `Needs.ARRAYS`: hands out gradient and weight as NumPy arrays.
    """

    iteration: int
    previous_scale: float
    fan_in: float
    fan_in_bound: float
    g: Optional[ArrayStatistics] = None
    weight: Optional[ArrayStatistics] = None
    has_weight: bool = True
    lift: float = 1.0
    arrays: Optional[Callable[[], Tuple[Any, Any]]] = None


class Decision(NamedTuple):
    """The scale of a layer in one backward pass.

    Attributes:
        alpha: what the input gradient is multiplied by; positive and finite.
        reason: what held it there.
        state: what to remember of the layer.
    """

    alpha: float
    reason: Reason
    state: LayerState


def is_due(state: LayerState, iteration: int, config: AdaLossConfig) -> bool:
    """Whether the method is to be asked anew in this iteration."""
    return state.computed_at < 0 or not 0 <= iteration - state.computed_at < config.update_per_n_iteration


def decide(
    state: LayerState, observed: Observed, config: AdaLossConfig, *, weight_max: float = math.inf
) -> Decision:
    """The scale of a layer's input gradient.

    The method is asked when the layer's scale is `update_per_n_iteration` iterations old. Bounds and guard
    apply each time; the guard takes the statistics that are given, and without any the last ones.

    Args:
        state: what was remembered of the layer; `NEW_LAYER` before the first time.
        observed: what is known of its gradient and weight now.
        config: method, range and bounds.
        weight_max: the largest magnitude that the scaled copy of the weight may hold.

    Returns:
        The decision; its alpha is a power of two if `config.power_of_two`, and 1 when the gradient or the
        weight holds an infinity or a NaN.

    Raises:
        ValueError: a method of the user's own returned a scale that is not positive and finite.

    Example:
        >>> import numpy as np
        >>> from nnabla_adaloss.core import AdaLossConfig, statistics_of
        >>> g, weight = statistics_of(np.array([1e-7, -1e-7])), statistics_of(np.array([0.1, -0.1]))
        >>> observed = Observed(0, previous_scale=128.0, fan_in=2.0, fan_in_bound=2.0, g=g, weight=weight)
        >>> alpha, reason, _ = decide(NEW_LAYER, observed, AdaLossConfig())
        >>> alpha, reason.value
        (8.0, 'accumulated bound')
    """
    iteration, S, _, fan_in_bound, g, weight, has_weight, lift, _ = observed
    computed_at, unbounded, accumulated_limit, _, history = state
    if (g is not None and g.nonfinite) or (weight is not None and weight.nonfinite):
        # Not kept: the layer's scale is computed from the next gradient that is finite.
        alpha, reason = 1.0, Reason.NONFINITE
    else:
        needs = config.method.needs
        # Statistics of no element: nothing is known yet, and nothing is kept.
        unknown = needs is not Needs.NOTHING and g is not None and not g.count
        if not unknown and is_due(state, iteration, config):
            if needs is Needs.HISTORY and g is not None:
                history = (*history, g.scaled(1.0 / S))[-(config.method.window or 1) :]
            computed_at, unbounded = iteration, _ask(observed, history, config)
        if g is not None and has_weight == (weight is not None):
            accumulated_limit = S * overflow_limit(g, weight, fan_in_bound, config.range.u_max)
        alpha, reason = _limited(unbounded, accumulated_limit / S, S / lift, config)
        if weight is not None and alpha > 1.0 and alpha * weight.abs_max > weight_max:
            # The scaled weight is stored in the same format.
            alpha = max(floor_power_of_two(weight_max / weight.abs_max), 1.0)
            reason = Reason.WEIGHT_RANGE
    return Decision(alpha, reason, LayerState(computed_at, unbounded, accumulated_limit, alpha, history))


def _ask(observed: Observed, history: Tuple[ArrayStatistics, ...], config: AdaLossConfig) -> float:
    """What the method says, from what it needs to see."""
    needs, inputs = config.method.needs, (observed.g, observed.weight)
    if needs is Needs.ARRAYS:
        if observed.arrays is None:
            raise TypeError(f"loss_scale_method={config.loss_scale_method!r} needs arrays; none were given")
        return asked(config, *observed.arrays(), config.range, observed.fan_in)
    if needs is Needs.HISTORY:
        looked_back = tuple(statistics.scaled(observed.previous_scale) for statistics in history)
        return asked(config, looked_back, observed.weight, config.range, observed.fan_in)
    return asked(config, *inputs, config.range, observed.fan_in)


def asked(config: AdaLossConfig, g: Any, W: Any, range: Range, fan_in: float) -> float:
    """What the method of a configuration says of a gradient and a weight.

    Raises:
        ValueError: it is not positive and finite.
        TypeError: it is no number.
    """
    found = config.method.scale(g, W, range=range, fan_in=fan_in)
    scale = float(found)
    if not 0.0 < scale < math.inf:
        raise ValueError(
            f"loss_scale_method={config.loss_scale_method!r} returned {found!r} for a finite gradient; "
            "a scale must be positive and finite"
        )
    return scale


def _limited(
    scale: float, overflow: float, previous_scale: float, config: AdaLossConfig
) -> Tuple[float, Reason]:
    """The scale under bounds and overflow guard, rounded down to a power of two."""
    reason = Reason.METHOD
    if config.use_bound and scale > 1.0:
        scale, reason = bounded(scale, previous_scale, config)
    if scale > overflow:
        scale, reason = clamp_scale(overflow), Reason.OVERFLOW_GUARD
    return floor_power_of_two(scale) if config.power_of_two else scale, reason


def bounded(scale: float, previous_scale: float, config: AdaLossConfig) -> Tuple[float, Reason]:
    """A scale above 1 under `scale_upper_bound` and `accum_upper_bound`, which never turn it below 1."""
    # Comparisons instead of min and max, which are several times slower: this runs per layer and iteration.
    upper, reason = config.accum_upper_bound / previous_scale, Reason.ACCUMULATED_BOUND
    if upper > config.scale_upper_bound:
        upper, reason = config.scale_upper_bound, Reason.SCALE_BOUND
    if upper < 1.0:
        upper = 1.0
    return (scale, Reason.METHOD) if scale < upper else (upper, reason)
