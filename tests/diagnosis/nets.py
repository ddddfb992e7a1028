# SPDX-License-Identifier: Apache-2.0
"""What the networks of these tests are made of, and what is said of those that something is wrong with."""

from __future__ import annotations

import random
from typing import Any, Callable, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.initializer as I
import nnabla.parametric_functions as PF
import numpy as np

from nnabla_adaloss import AdaptiveLossScalingUpdater, Way

Built = Tuple[Any, Any]
"""A loss, or an updater, and a feeder or None."""


class Trouble(NamedTuple):
    """A network that something is wrong with."""

    layer: str  # the layer, or the labels, that are to be named first
    kind: str
    remedy: str  # words of the remedy
    needs: Optional[Way]  # the least that keeps all gradients; None: no loss scale does
    build: Callable[[bool], Built]  # with True the remedy is applied
    beside: Sequence[str] = ()  # kinds of what is told after it


def trouble(
    layer: str, kind: str, remedy: str, needs: Optional[Way] = None, beside: Sequence[str] = ()
) -> Callable[[Callable[[bool], Built]], Trouble]:
    return lambda build: Trouble(layer, kind, remedy, needs, build, beside)


def affine(x: nn.Variable, size: int, name: str, factor: float = 1.0, bias: float = 0.0) -> nn.Variable:
    """Weights of a standard deviation of `factor` over the root of the fan-in."""
    std = factor / np.sqrt(np.prod(x.shape[1:]))
    rng = np.random.RandomState(sum(map(ord, name)))
    weights = I.NormalInitializer(std, rng=rng)
    return PF.affine(x, size, name=name, w_init=weights, b_init=I.ConstantInitializer(bias))


def inputs() -> Tuple[nn.Variable, nn.Variable]:
    return nn.Variable((32, 16)), nn.Variable((32, 1))


def feeder(x: nn.Variable, t: nn.Variable, spoil: Callable[[], None] = lambda: None) -> Callable[[], None]:
    rng = np.random.default_rng(0)

    def feed() -> None:
        x.d, t.d = rng.standard_normal(x.shape), rng.integers(0, 5, t.shape)
        spoil()

    return feed


def cross_entropy(y: nn.Variable, t: nn.Variable) -> nn.Variable:
    return F.mean(F.softmax_cross_entropy(y, t))


Layers = Callable[[nn.Variable], nn.Variable]


def classifier(layers: Layers, scores: Layers = lambda y: y) -> Built:
    x, t = inputs()
    return cross_entropy(scores(affine(layers(x), 5, "head")), t), feeder(x, t)


def updater_of(loss: nn.Variable, feed: Any, solver: Any, parameters: Any = None, **arguments: Any) -> Any:
    solver.set_parameters(nn.get_parameters() if parameters is None else parameters)
    return AdaptiveLossScalingUpdater(solver, loss, feed, **{"storage": "float16", **arguments})


def noisy_net() -> Built:
    """Everything that passes could leave a trace in."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    x, t = nn.Variable((8, 6)), nn.Variable((8, 1))
    h = PF.batch_normalization(affine(x, 6, "fc1"), name="bn")
    h = F.dropout(F.relu(h) + F.randn(shape=h.shape) * 0.1, 0.5)

    def feed() -> None:
        x.d, t.d = np.random.randn(*x.shape), np.random.randint(0, 3, t.shape)  # noqa: NPY002
        x.d += random.random()

    return cross_entropy(affine(h, 3, "fc2"), t), feed


def one_hot(t: nn.Variable) -> nn.Variable:
    return F.one_hot(t, (5,))
