# SPDX-License-Identifier: Apache-2.0
"""What the next update of a solver does to the weights of layers."""

from __future__ import annotations

import math
from typing import Any, FrozenSet, List, Mapping, Optional, Sequence

import numpy as np

from .layers import Layer
from .numbers import Training, WeightStep

# Their step is the learning rate times the gradient.
_BY_GRADIENT: FrozenSet[str] = frozenset({"Sgd", "SgdW", "Momentum", "Nesterov"})
# Theirs is about the learning rate, however large the gradient.
_BY_SIGN: FrozenSet[str] = frozenset(
    {"Adam", "AdamW", "Adamax", "AMSGRAD", "AMSBound", "AdaBound", "AdaBelief", "Lion", "RMSprop"}
)


def training_of(
    solver: Optional[Any], layers: Sequence[Layer], gradients: Mapping[int, float]
) -> Optional[Training]:
    """What `solver` is about to do; None without one.

    Args:
        solver: nnabla's.
        layers: the layers, in forward order.
        gradients: the root of the mean square of each weight's gradient, by key.
    """
    if solver is None or not hasattr(solver, "learning_rate"):
        return None
    rate = float(solver.learning_rate())
    states = solver.get_states().values() if hasattr(solver, "get_states") else ()
    updates = max((int(state.t) for state in states), default=0)
    held = {hash(v) for v in solver.get_parameters().values()}
    steps: List[WeightStep] = []
    for layer in layers:
        for key, v in layer.weights.items():
            fan_in = _fan_in(layer.type_name, v.shape)
            if fan_in and key in held:
                weight = float(np.sqrt(np.mean(np.asarray(v.data.data, np.float64) ** 2)))
                update = _step(solver, rate, gradients.get(key, 0.0))
                steps.append(WeightStep(layer.name, weight, 1.0 / math.sqrt(fan_in), update))
    return Training(rate, updates, steps)


def _step(solver: Any, rate: float, gradient: float) -> float:
    name = solver.name
    if name in _BY_GRADIENT:
        # Momentum adds up to this.
        return rate * gradient / (1.0 - min(float(solver.info.get("momentum", 0.0)), 0.999))
    return rate if name in _BY_SIGN and gradient else 0.0


def _fan_in(type_name: str, shape: Sequence[int]) -> int:
    """Of a weight; 0 for biases and where it is not known."""
    if len(shape) < 2 or not math.prod(shape):
        return 0
    if type_name == "Affine":
        return shape[0]
    return math.prod(shape[1:]) if type_name == "Convolution" else 0
