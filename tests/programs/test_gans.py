# SPDX-License-Identifier: Apache-2.0
"""Two nets, each with its own loss and solver: what they learn with our updaters, and with nnabla's."""

from __future__ import annotations

from typing import Any, Callable, List

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

BATCH, NOISE = 32, 4


def dense(x: nn.Variable, scope: str, widths: List[int], function: Callable[[Any], Any]) -> nn.Variable:
    with nn.parameter_scope(scope):
        for index, width in enumerate(widths, 1):
            x = PF.affine(x if index == 1 else function(x), width, name=f"fc{index}")
    return x


def solver_of(scope: str, learning_rate: float) -> Any:
    solver = S.Adam(learning_rate, beta1=0.5)
    with nn.parameter_scope(scope):
        solver.set_parameters(nn.get_parameters())
    return solver


def examination_of(generator: Callable[[nn.Variable], nn.Variable], goal: List[List[float]]) -> Examination:
    """How far the mean of what is generated is from that of the data, and the spread if `goal` has one."""
    fake = generator(nn.Variable.from_numpy_array(np.random.default_rng(3).standard_normal((1000, NOISE))))
    mean = F.mean(fake, axis=0, keepdims=True)
    spread = F.mean((fake - F.broadcast(mean, fake.shape)) ** 2, axis=0, keepdims=True) ** 0.5
    wanted = [nn.Variable.from_numpy_array(np.array([values], np.float32)) for values in goal]
    distances = [F.sum(F.abs(found - there)) for found, there in zip([mean, spread], wanted)]
    return Examination(F.add_n(*distances), fake)


class Player:
    """One of the two nets with its updater."""

    def __init__(
        self, kind: str, scope: str, rate: float, loss: nn.Variable, stream: Stream, feed: Callable[..., None]
    ) -> None:
        solver = solver_of(scope, rate)
        self.stream = stream
        self._updater = updater_of(kind, solver, stream.gated(loss), lambda: feed(stream.next()))
        self._progress = Progress(solver, stream, scope)

    def update(self) -> None:
        self._updater.update()
        self._progress.note()

    @property
    def learned(self) -> List[Any]:
        return self._progress.learned


def gan(kind: str) -> Outcome:
    """A GAN in one graph: the generator's loss runs through the discriminator."""

    def generator(z: nn.Variable) -> nn.Variable:
        return dense(z, "generator", [24, 24, 2], lambda h: F.leaky_relu(h, 0.2))

    def entropy(score: nn.Variable, real: int) -> nn.Variable:
        return F.sigmoid_cross_entropy(score, F.constant(real, score.shape))

    z, x = nn.Variable((BATCH, NOISE)), nn.Variable((BATCH, 2))
    fake = generator(z)
    fake.persistent = True
    of_fake, of_real = (
        dense(d, "discriminator", [32, 32, 1], lambda h: F.leaky_relu(h, 0.2)) for d in (fake, x)
    )

    def feed_generator(rng: np.random.Generator) -> None:
        z.d = rng.standard_normal(z.shape)

    def feed_discriminator(rng: np.random.Generator) -> None:
        z.d = rng.standard_normal(z.shape)
        x.d = rng.standard_normal((BATCH, 2)) * (0.8, 0.4) + (1.5, -1.0)

    streams = [Stream(1000, overflow=planted(1000, seed=seed), seed=seed) for seed in (1, 2)]
    one = Player(kind, "generator", 0.001, F.mean(entropy(of_fake, 1)), streams[0], feed_generator)
    loss = F.mean(entropy(of_real, 1) + entropy(of_fake, 0))
    other = Player(kind, "discriminator", 0.002, loss, streams[1], feed_discriminator)
    examination = examination_of(generator, [[1.5, -1.0], [0.8, 0.4]])
    while one.stream.left and other.stream.left:
        fake.need_grad = False  # the discriminator's loss does not reach the generator
        other.update()
        fake.need_grad = True
        one.update()
    return examination.outcome([*one.learned, *other.learned])


def gradient_penalty(kind: str) -> Outcome:
    """A Wasserstein GAN whose critic pays for slopes other than 1: backward through a gradient."""

    def generator(z: nn.Variable) -> nn.Variable:
        return dense(z, "generator", [16, 2], F.relu)

    def critic(x: nn.Variable) -> nn.Variable:
        return dense(x, "critic", [24, 24, 1], F.tanh)

    def penalty(mixed: nn.Variable) -> nn.Variable:
        mixed.need_grad = True
        (gradient,) = nn.grad([critic(mixed)], [mixed])
        return F.mean((F.sum(gradient**2.0, axis=1) ** 0.5 - 1.0) ** 2.0)

    z, epsilon, real = nn.Variable((BATCH, NOISE)), nn.Variable((BATCH, 1)), nn.Variable((BATCH, 2))
    fake = generator(z)
    fake.persistent = True
    of_fake = critic(fake)
    mixed = F.broadcast(epsilon, real.shape) * real + F.broadcast(1.0 - epsilon, real.shape) * fake
    loss = F.mean(of_fake) - F.mean(critic(real)) + 10.0 * penalty(mixed)

    def feed_generator(rng: np.random.Generator) -> None:
        z.d = rng.standard_normal(z.shape)

    def feed_critic(rng: np.random.Generator) -> None:
        z.d, epsilon.d = rng.standard_normal(z.shape), rng.random(epsilon.shape)
        real.d = rng.standard_normal((BATCH, 2)) * 0.5 + (2.0, -1.0)

    stream = Stream(80, overflow=(20, 60), seed=1)
    one = Player(kind, "generator", 0.002, -F.mean(of_fake), stream, feed_generator)
    stream = Stream(240, overflow=(30, 31, 100, 170), seed=2)
    other = Player(kind, "critic", 0.01, loss, stream, feed_critic)
    examination = examination_of(generator, [[2.0, -1.0]])
    while one.stream.left:
        fake.need_grad = False  # no gradient for the generator
        for _ in range(3):
            other.update()
        fake.need_grad = True
        one.update()
    return examination.outcome([*one.learned, *other.learned])


PROGRAMS: List[Callable[[str], Outcome]] = [gan, gradient_penalty]


@pytest.mark.slow
@pytest.mark.gate
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_learns_what_it_learns_with_nnablas_updater(program: Callable[[str], Outcome]) -> None:
    start()
    ours = program("adaptive")
    start()
    # The two nets chase each other: small differences do not stay small.
    assert_same_or_better(ours, program("dynamic"), tolerance=0.1)
