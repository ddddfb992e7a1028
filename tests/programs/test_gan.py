# SPDX-License-Identifier: Apache-2.0
"""A GAN in one graph: a solver for each net, the generator's loss runs through the discriminator."""

from __future__ import annotations

from typing import List, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from tests.programs.programs import (
    Examination,
    Outcome,
    Progress,
    Stream,
    assert_same_or_better,
    planted,
    start,
    updater_of,
)

BATCH, BATCHES = 32, 1000
NOISE = 4


def generator(z: nn.Variable) -> nn.Variable:
    with nn.parameter_scope("generator"):
        h = F.leaky_relu(PF.affine(z, 24, name="fc1"), 0.2)
        h = F.leaky_relu(PF.affine(h, 24, name="fc2"), 0.2)
        return PF.affine(h, 2, name="fc3")


def discriminator(x: nn.Variable) -> nn.Variable:
    with nn.parameter_scope("discriminator"):
        h = F.leaky_relu(PF.affine(x, 32, name="fc1"), 0.2)
        h = F.leaky_relu(PF.affine(h, 32, name="fc2"), 0.2)
        return PF.affine(h, 1, name="fc3")


def real_data(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.standard_normal((count, 2)) * (0.8, 0.4) + (1.5, -1.0)


def distance() -> Tuple[nn.Variable, nn.Variable]:
    """How far mean and spread of what is generated are from those of the data."""
    z = nn.Variable.from_numpy_array(np.random.default_rng(3).standard_normal((1000, NOISE)))
    fake = generator(z)
    mean = F.mean(fake, axis=0, keepdims=True)
    spread = F.mean((fake - F.broadcast(mean, fake.shape)) ** 2, axis=0, keepdims=True) ** 0.5
    goal = nn.Variable.from_numpy_array(np.array([[1.5, -1.0, 0.8, 0.4]], np.float32))
    return F.sum(F.abs(F.concatenate(mean, spread, axis=1) - goal)), fake


def train(kind: str) -> Outcome:
    start()
    z = nn.Variable((BATCH, NOISE))
    fake = generator(z)
    fake.persistent = True
    score_of_fake = discriminator(fake)
    loss_gen = F.mean(F.sigmoid_cross_entropy(score_of_fake, F.constant(1, score_of_fake.shape)))
    x = nn.Variable((BATCH, 2))
    score_of_real = discriminator(x)
    loss_dis = F.mean(
        F.sigmoid_cross_entropy(score_of_real, F.constant(1, score_of_real.shape))
        + F.sigmoid_cross_entropy(score_of_fake, F.constant(0, score_of_fake.shape))
    )
    solver_gen, solver_dis = S.Adam(0.001, beta1=0.5), S.Adam(0.002, beta1=0.5)
    with nn.parameter_scope("generator"):
        solver_gen.set_parameters(nn.get_parameters())
    with nn.parameter_scope("discriminator"):
        solver_dis.set_parameters(nn.get_parameters())

    stream_gen = Stream(BATCHES, overflow=planted(BATCHES, seed=1), seed=1)
    stream_dis = Stream(BATCHES, overflow=planted(BATCHES, seed=2), seed=2)

    def feed_gen() -> None:
        z.d = stream_gen.next().standard_normal(z.shape)

    def feed_dis() -> None:
        rng = stream_dis.next()
        z.d, x.d = rng.standard_normal(z.shape), real_data(rng, BATCH)

    updater_gen = updater_of(kind, solver_gen, stream_gen.gated(loss_gen), feed_gen)
    updater_dis = updater_of(kind, solver_dis, stream_dis.gated(loss_dis), feed_dis)
    progress: List[Progress] = [
        Progress(solver_gen, stream_gen, "generator"),
        Progress(solver_dis, stream_dis, "discriminator"),
    ]
    examination = Examination(*distance())
    while stream_gen.left and stream_dis.left:
        fake.need_grad = False  # the discriminator's loss does not reach the generator
        updater_dis.update()
        fake.need_grad = True
        updater_gen.update()
        for one in progress:
            one.note()
    return examination.outcome([*progress[0].learned, *progress[1].learned])


@pytest.mark.slow
def test_a_gan_with_a_solver_for_each_net() -> None:
    # The two nets chase each other: small differences do not stay small.
    assert_same_or_better(train("adaptive"), train("dynamic"), tolerance=0.1)
