# SPDX-License-Identifier: Apache-2.0
"""Solvers with and without a sense of how large a gradient is."""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping

import nnabla as nn
import nnabla.solvers as S

_TINY = 1e-30


def adam(learning_rate: float) -> Any:
    """Adam with an eps so small that it takes the same steps however small gradients are."""
    return S.Adam(learning_rate, eps=_TINY)


def lars(learning_rate: float) -> Any:
    """LARS: a step is a share of the weight's norm, however small the gradient is."""
    return S.Lars(learning_rate, 0.9, 0.02, _TINY)


def sgd(learning_rate: float) -> Any:
    """SGD with momentum."""
    return S.Momentum(learning_rate, 0.9)


class GroupRates:
    """Two SGD solvers as one: parameters of a group have a learning rate that is larger by a factor.

    Args:
        learning_rate: that of the others.
        group: what the names of the group begin with.
        factor: how many times larger its learning rate is.
    """

    def __init__(self, learning_rate: float, *, group: str, factor: float) -> None:
        self._group, self._factor = group, factor
        self._others, self._own = sgd(learning_rate), sgd(learning_rate * factor)

    def set_parameters(self, parameters: Mapping[str, nn.Variable]) -> None:
        """Share the parameters out."""
        own = {name: p for name, p in parameters.items() if name.startswith(self._group)}
        self._own.set_parameters(own)
        self._others.set_parameters({name: p for name, p in parameters.items() if name not in own})

    def get_parameters(self) -> Dict[str, nn.Variable]:
        """All parameters."""
        return {**self._others.get_parameters(), **self._own.get_parameters()}

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set that of the others, and that of the group with it."""
        self._others.set_learning_rate(learning_rate)
        self._own.set_learning_rate(learning_rate * self._factor)

    def check_inf_or_nan_grad(self) -> bool:
        """Whether a gradient of either is not finite."""
        return bool(self._others.check_inf_or_nan_grad() or self._own.check_inf_or_nan_grad())

    def zero_grad(self) -> None:
        """Zero all gradients."""
        self._both(lambda solver: solver.zero_grad())

    def scale_grad(self, factor: float) -> None:
        """Multiply all gradients."""
        self._both(lambda solver: solver.scale_grad(factor))

    def weight_decay(self, rate: float) -> None:
        """Decay all weights."""
        self._both(lambda solver: solver.weight_decay(rate))

    def update(self) -> None:
        """Update all parameters."""
        self._both(lambda solver: solver.update())

    def _both(self, call: Callable[[Any], Any]) -> None:
        call(self._others)
        call(self._own)
