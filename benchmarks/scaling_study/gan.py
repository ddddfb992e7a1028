# SPDX-License-Identifier: Apache-2.0
"""A generator of digits and its critic: two losses, two updaters."""

from __future__ import annotations

import nnabla as nn
import numpy as np
from common.digits import load
from common.discrepancy import discrepancy
from gan import NOISE, critic, generator, loss_against

from .task import Player, Task

_BATCH = 64
_DRAWN = 720


def gan(seed: int) -> Task:
    """Make a training scored by minus the distance between the distributions of drawn and real digits.

    The distance is the maximum mean discrepancy (Gretton et al. 2012) in the space of pixels, with Gaussian
    kernels of a half, one and two times the median distance of real digits, to those of the test set.
    """
    train, test = load()
    real, made = nn.Variable((_BATCH, 64)), nn.Variable((_BATCH, 64))
    noise, other_noise = nn.Variable((_BATCH, NOISE)), nn.Variable((_BATCH, NOISE))
    drawn, source = generator(noise), generator(other_noise)
    fooled = loss_against(critic(drawn), 1.0)
    caught = loss_against(critic(real), 1.0) + loss_against(critic(made), 0.0)
    with nn.parameter_scope("generator"):
        generators = nn.get_parameters()
    with nn.parameter_scope("critic"):
        critics = nn.get_parameters()
    random = np.random.RandomState(seed)

    def feed_critic() -> None:
        real.d = train.x[random.randint(0, len(train.x), _BATCH)].reshape(_BATCH, 64)
        other_noise.d = random.randn(_BATCH, NOISE)
        source.forward(clear_buffer=True)
        made.d = source.d

    def feed_generator() -> None:
        noise.d = random.randn(_BATCH, NOISE)

    test_noise = np.random.RandomState(0).randn(_DRAWN, NOISE)
    shown = generator(nn.Variable.from_numpy_array(test_noise))
    wanted = test.x.reshape(-1, 64)

    def score() -> float:
        shown.forward(clear_buffer=True)
        return -discrepancy(shown.d, wanted)

    return Task([Player(caught, critics, feed_critic), Player(fooled, generators, feed_generator)], score)
