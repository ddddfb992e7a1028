# SPDX-License-Identifier: Apache-2.0
"""GAN of handwritten digits: two losses, two solvers, two updaters.

Each updater measures its own loss's gradients, so each has its own scale.

  python samples/gan.py --picture digits.png           half a minute; draws 64 of them beside real ones
  python samples/gan.py -c cudnn -t half               on a GPU

The first one printed, in emulated fp16 on one CPU core:

  distance of generated to real digits: 0.083
  critic: loss scale 32768 at the end, 1 batches repeated, 0 lost
  generator: loss scale 16384 at the end, 1 batches repeated, 0 lost

The distance is the maximum mean discrepancy (Gretton et al. 2012) to the test images: 0.000 for
training images, 0.689 for an untrained generator.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Optional, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
from common import options as common_options
from common import pictures
from common.digits import load
from common.discrepancy import discrepancy
from common.feeder import Feeder
from common.scores import fate
from common.session import Session

from nnabla_adaloss import AdaptiveLossScalingUpdater

NOISE = 16


def generator(noise: nn.Variable) -> nn.Variable:
    """Generate images of 64 pixels from noise."""
    with nn.parameter_scope("generator"):
        h = F.relu(PF.affine(noise, 96, name="fc1"))
        h = F.relu(PF.affine(h, 96, name="fc2"))
        return F.tanh(PF.affine(h, 64, name="pixels"))


def critic(pixels: nn.Variable) -> nn.Variable:
    """Logits of images being real."""
    with nn.parameter_scope("critic"):
        h = F.leaky_relu(PF.affine(pixels, 96, name="fc1"), 0.2)
        h = F.leaky_relu(PF.affine(h, 96, name="fc2"), 0.2)
        return PF.affine(h, 1, name="real")


def loss_against(logits: nn.Variable, truth: float) -> nn.Variable:
    """Loss of logits against real (1) or generated (0)."""
    return F.mean(F.sigmoid_cross_entropy(logits, F.constant(truth, logits.shape)))


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Train both and compare generated with real digits; return the exit status."""
    parser = common_options.parser(__doc__, iterations=3000, batch_size=64, lr=0.1)
    pictures.add_option(parser, "64 digits, beside real ones,")
    options = common_options.start(parser, arguments)
    train, test = load()
    size = options.batch_size

    noise, other_noise = nn.Variable((size, NOISE)), nn.Variable((size, NOISE))
    real, made = nn.Variable((size, 64)), nn.Variable((size, 64))
    source = generator(other_noise)
    fooled = loss_against(critic(generator(noise)), 1.0)
    caught = loss_against(critic(real), 1.0) + loss_against(critic(made), 0.0)

    def fill_critic(number: int) -> None:
        random = np.random.default_rng((options.seed, 0, number))
        real.d = train.x[random.integers(0, len(train.x), size)].reshape(size, 64)
        other_noise.d = random.standard_normal((size, NOISE))
        source.forward(clear_buffer=True)
        made.d = source.d

    def fill_generator(number: int) -> None:
        noise.d = np.random.default_rng((options.seed, 1, number)).standard_normal((size, NOISE))

    updaters = []
    for scope, loss, fill in (("critic", caught, fill_critic), ("generator", fooled, fill_generator)):
        solver = S.Momentum(options.lr, 0.5)
        with nn.parameter_scope(scope):
            solver.set_parameters(nn.get_parameters())
        updaters.append(AdaptiveLossScalingUpdater(solver, loss, Feeder(fill), storage=options.storage))

    rate = common_options.cosine(options.lr, options.iterations)
    with Session(options, *updaters) as session:
        for iteration in session:
            for updater in updaters:
                updater.solver.set_learning_rate(rate(iteration))
                result = updater.update()
            session.show(result.scale, fooled)

    drawn = generator(nn.Variable.from_numpy_array(np.random.default_rng(0).standard_normal((720, NOISE))))
    drawn.forward(clear_buffer=True)
    print(f"distance of generated to real digits: {discrepancy(drawn.d, test.x.reshape(-1, 64)):.3f}")
    for name, updater in zip(("critic", "generator"), updaters):
        print(f"{name}: {fate(updater)}")
    if options.picture is not None:
        draw(options.picture, drawn.d[:64], test.x[:64])
    return 0


def draw(path: Path, *sets: np.ndarray) -> None:
    """Draw 64 generated and 64 real images."""
    figure, axes = pictures.panels(1, 2, 4.0)
    for panel, images, title in zip(axes[0], sets, ("generated", "real")):
        # A line of paper separates them.
        framed = np.pad(images.reshape(8, 8, 8, 8), ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-1.0)
        pictures.show(panel, framed.transpose(0, 2, 1, 3).reshape(1, 80, 80))
        panel.set_title(title)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    sys.exit(main())
