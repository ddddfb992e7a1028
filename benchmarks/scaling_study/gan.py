# SPDX-License-Identifier: Apache-2.0
"""A generator of digits and its critic: two losses, two updaters."""

from __future__ import annotations

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
from common.digits import load
from common.scenes import Floats

from .task import Player, Task

_BATCH = 64
_NOISE = 16
_DRAWN = 720


def gan(seed: int) -> Task:
    """A training that is scored by minus the distance between the distributions of drawn and real digits.

    The distance is the maximum mean discrepancy (Gretton et al. 2012) in the space of pixels, with Gaussian
    kernels of a half, one and two times the median distance of real digits, to those of the test set.
    """
    train, test = load()
    real, made = nn.Variable((_BATCH, 64)), nn.Variable((_BATCH, 64))
    noise, other_noise = nn.Variable((_BATCH, _NOISE)), nn.Variable((_BATCH, _NOISE))
    drawn, source = _generator(noise), _generator(other_noise)
    fooled = _mean_loss(_critic(drawn), 1.0)
    caught = _mean_loss(_critic(real), 1.0) + _mean_loss(_critic(made), 0.0)
    with nn.parameter_scope("generator"):
        generator = nn.get_parameters()
    with nn.parameter_scope("critic"):
        critic = nn.get_parameters()
    random = np.random.RandomState(seed)

    def feed_critic() -> None:
        real.d = train.x[random.randint(0, len(train.x), _BATCH)].reshape(_BATCH, 64)
        other_noise.d = random.randn(_BATCH, _NOISE)
        source.forward(clear_buffer=True)
        made.d = source.d

    def feed_generator() -> None:
        noise.d = random.randn(_BATCH, _NOISE)

    test_noise = np.random.RandomState(0).randn(_DRAWN, _NOISE)
    shown = _generator(nn.Variable.from_numpy_array(test_noise))
    wanted = test.x.reshape(-1, 64)

    def score() -> float:
        shown.forward(clear_buffer=True)
        return -discrepancy(shown.d, wanted)

    return Task([Player(caught, critic, feed_critic), Player(fooled, generator, feed_generator)], score)


def _generator(noise: nn.Variable) -> nn.Variable:
    with nn.parameter_scope("generator"):
        h = F.relu(PF.affine(noise, 96, name="fc1"))
        h = F.relu(PF.affine(h, 96, name="fc2"))
        return F.tanh(PF.affine(h, 64, name="pixels"))


def _critic(pixels: nn.Variable) -> nn.Variable:
    with nn.parameter_scope("critic"):
        h = F.leaky_relu(PF.affine(pixels, 96, name="fc1"), 0.2)
        h = F.leaky_relu(PF.affine(h, 96, name="fc2"), 0.2)
        return PF.affine(h, 1, name="real")


def _mean_loss(told: nn.Variable, truth: float) -> nn.Variable:
    return F.mean(F.sigmoid_cross_entropy(told, F.constant(truth, told.shape)))


def discrepancy(a: Floats, b: Floats) -> float:
    """The maximum mean discrepancy of two samples; 0 where they are of one distribution."""

    def squares(p: Floats, q: Floats) -> Floats:
        return np.maximum((p**2).sum(1)[:, None] + (q**2).sum(1)[None] - 2.0 * p @ q.T, 0.0)  # type: ignore[no-any-return]

    if not np.isfinite(a).all():
        return float("nan")
    median = float(np.median(squares(b, b)[np.triu_indices(len(b), 1)]))

    def mean_kernel(p: Floats, q: Floats, *, same: bool) -> float:
        distances = squares(p, q)
        kernel = sum(np.exp(-distances / (2.0 * width**2 * median)) for width in (0.5, 1.0, 2.0)) / 3.0
        if same:
            # Without the distance of each to itself the estimate is unbiased.
            return float((kernel.sum() - np.trace(kernel)) / (len(p) * (len(p) - 1)))
        return float(kernel.mean())

    squared = (
        mean_kernel(a, a, same=True) + mean_kernel(b, b, same=True) - 2.0 * mean_kernel(a, b, same=False)
    )
    return float(np.sqrt(max(0.0, squared)))
