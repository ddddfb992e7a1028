# SPDX-License-Identifier: Apache-2.0
"""Trainings whose loss holds derivatives: differential equations."""

from __future__ import annotations

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np

from .task import Player, Task

_POINTS = 64


def _curve(x: nn.Variable) -> nn.Variable:
    h = x
    for index in range(2):
        h = F.tanh(PF.affine(h, 32, name=f"fc{index}"))
    return PF.affine(h, 1, name="out")


def _second_derivative(y: nn.Variable, x: nn.Variable) -> nn.Variable:
    (first,) = nn.grad([F.sum(y)], [x])
    (second,) = nn.grad([F.sum(first)], [x])
    return second


def residual(weight: float, seed: int) -> Task:
    """y'' = -pi^2 sin(pi x) with y(-1) = y(1) = 0; the square of the residual comes in times `weight`.

    Scored by minus the relative error of y.
    """
    x = nn.Variable((_POINTS, 1), need_grad=True)
    ends = nn.Variable.from_numpy_array(np.array([[-1.0], [1.0]], np.float32))
    y = _curve(x)
    rest = _second_derivative(y, x) / np.pi**2 + F.sin(np.pi * x)
    loss = F.mean(_curve(ends) ** 2) + F.mean(rest**2) * weight
    parameters, random = nn.get_parameters(), np.random.RandomState(seed)
    grid = np.linspace(-1.0, 1.0, 201, dtype=np.float32)[:, np.newaxis]
    told, right = _curve(nn.Variable.from_numpy_array(grid)), np.sin(np.pi * grid)

    def feed() -> None:
        x.d = random.uniform(-1.0, 1.0, x.shape)

    def score() -> float:
        told.forward(clear_buffer=True)
        return -float(np.linalg.norm(told.d - right) / np.linalg.norm(right))

    return Task([Player(loss, parameters, feed)], score)


def coefficient(weight: float, seed: int) -> Task:
    """Data of y = sin(pi x), and `weight` times the residual of y'' = -c pi^2 y, to learn c.

    Scored by minus the error of c, which is 1; it starts at 0. Only the small loss depends on it.
    """
    x = nn.Variable((_POINTS, 1), need_grad=True)
    wanted = nn.Variable((_POINTS, 1))
    y = _curve(x)
    c = nn.parameter.get_parameter_or_create("coefficient", (1, 1), np.zeros((1, 1)))
    rest = _second_derivative(y, x) / np.pi**2 + F.broadcast(c, y.shape) * y
    loss = F.mean(F.squared_error(y, wanted)) + F.mean(rest**2) * weight
    parameters, random = nn.get_parameters(), np.random.RandomState(seed)

    def feed() -> None:
        x.d = random.uniform(-1.0, 1.0, x.shape)
        wanted.d = np.sin(np.pi * x.d)

    return Task([Player(loss, parameters, feed)], lambda: -abs(1.0 - float(c.d[0, 0])))
