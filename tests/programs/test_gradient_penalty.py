# SPDX-License-Identifier: Apache-2.0
"""A Wasserstein GAN whose critic pays for slopes other than 1: backward through a gradient."""

from __future__ import annotations

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
    start,
    updater_of,
)

BATCH = 32
NOISE = 4


def generator(z: nn.Variable) -> nn.Variable:
    with nn.parameter_scope("generator"):
        h = F.relu(PF.affine(z, 16, name="fc1"))
        return PF.affine(h, 2, name="fc2")


def critic(x: nn.Variable) -> nn.Variable:
    with nn.parameter_scope("critic"):
        h = F.tanh(PF.affine(x, 24, name="fc1"))
        h = F.tanh(PF.affine(h, 24, name="fc2"))
        return PF.affine(h, 1, name="fc3")


def penalty(x_mixed: nn.Variable) -> nn.Variable:
    x_mixed.need_grad = True
    gradients = nn.grad([critic(x_mixed)], [x_mixed])
    norms = [F.sum(g**2.0, axis=1) ** 0.5 for g in gradients]
    return sum(F.mean((norm - 1.0) ** 2.0) for norm in norms)


def real_data(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.standard_normal((count, 2)) * 0.5 + (2.0, -1.0)


def examination_of_the_generator() -> Examination:
    """How far the mean of what is generated is from that of the data."""
    fake = generator(nn.Variable.from_numpy_array(np.random.default_rng(3).standard_normal((1000, NOISE))))
    goal = nn.Variable.from_numpy_array(np.array([2.0, -1.0], np.float32))
    return Examination(F.sum(F.abs(F.mean(fake, axis=0) - goal)), fake)


def train(kind: str) -> Outcome:
    start()
    z, epsilon = nn.Variable((BATCH, NOISE)), nn.Variable((BATCH, 1))
    x_fake = generator(z)
    x_fake.persistent = True
    p_fake = critic(x_fake)
    loss_gen = -F.mean(p_fake)
    x_real = nn.Variable((BATCH, 2))
    x_mixed = F.broadcast(epsilon, x_real.shape) * x_real + F.broadcast(1.0 - epsilon, x_real.shape) * x_fake
    loss_critic = F.mean(p_fake) - F.mean(critic(x_real)) + 10.0 * penalty(x_mixed)
    solver_gen, solver_critic = S.Adam(0.002, beta1=0.5), S.Adam(0.01, beta1=0.5)
    with nn.parameter_scope("generator"):
        solver_gen.set_parameters(nn.get_parameters())
    with nn.parameter_scope("critic"):
        solver_critic.set_parameters(nn.get_parameters())

    stream_gen = Stream(80, overflow=(20, 60), seed=1)
    stream_critic = Stream(240, overflow=(30, 31, 100, 170), seed=2)

    def feed_gen() -> None:
        z.d = stream_gen.next().standard_normal(z.shape)

    def feed_critic() -> None:
        rng = stream_critic.next()
        z.d, epsilon.d = rng.standard_normal(z.shape), rng.random(epsilon.shape)
        x_real.d = real_data(rng, BATCH)

    updater_gen = updater_of(kind, solver_gen, stream_gen.gated(loss_gen), feed_gen)
    updater_critic = updater_of(kind, solver_critic, stream_critic.gated(loss_critic), feed_critic)
    of_gen = Progress(solver_gen, stream_gen, "generator")
    of_critic = Progress(solver_critic, stream_critic, "critic")
    examination = examination_of_the_generator()
    while stream_gen.left:
        x_fake.need_grad = False  # no gradient for the generator
        for _ in range(3):
            updater_critic.update()
            of_critic.note()
        x_fake.need_grad = True
        updater_gen.update()
        of_gen.note()
    return examination.outcome([*of_gen.learned, *of_critic.learned])


@pytest.mark.slow
def test_a_critic_with_a_gradient_penalty() -> None:
    # The two nets chase each other: small differences do not stay small.
    assert_same_or_better(train("adaptive"), train("dynamic"), tolerance=0.1)
