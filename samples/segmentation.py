# SPDX-License-Identifier: Apache-2.0
"""SegNet-like segmentation of digits in noise, with features cast to 8 bits inside the network.

An encoder halves the scene twice; a decoder restores it and classifies each pixel as one of the digits or as
paper. Paper pixels count a tenth, to balance the classes as SegNet does (Badrinarayanan et al. 2017).

Between encoder and decoder, `round_to_format` rounds features and their gradients to float8_e5m2. Gradients
below 8e-6 are lost there, and the loss is multiplied by 0.01, like one term of several.

  python samples/segmentation.py --picture scenes.png              half a minute; draws 8 predictions
  python samples/segmentation.py --scaling none                    without a loss scale
  python samples/segmentation.py --scaling none --cast none        without a cast either
  python samples/segmentation.py -c cudnn -t half                  on a GPU (fails on an H100: docs/gpu.md)

The first three printed, on one CPU core (everything else in emulated fp16):

  mean IoU of the ten digits 0.513, loss scale 4.1943e+06
  mean IoU of the ten digits 0.391, loss scale 1
  mean IoU of the ten digits 0.509, loss scale 1
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Optional, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
from common import options as common_options
from common import pictures
from common.digits import load
from common.feeder import Feeder
from common.scenes import Scenes, scenes, test_scenes
from common.session import Session
from option_values import positive_number

from nnabla_adaloss import AdaptiveLossScalingUpdater, FixedLossScalingUpdater, round_to_format

GRID, CELL, DENSITY, NOISE = 2, 10, 0.7, 0.1
CLASSES, PAPER = 11, 10


def segment(x: nn.Variable, cast: str, training: bool) -> nn.Variable:
    """Logits of 11 classes for each pixel of images whose sides are multiples of 4."""

    def layer(h: nn.Variable, maps: int, name: str) -> nn.Variable:
        h = PF.convolution(h, maps, (3, 3), pad=(1, 1), with_bias=False, name=name)
        return F.relu(PF.batch_normalization(h, decay_rate=0.8, batch_stat=training, name=name))

    h = F.max_pooling(layer(x, 16, "down1"), (2, 2))
    h = F.max_pooling(layer(h, 32, "down2"), (2, 2))
    h = layer(layer(h, 64, "code1"), 64, "code2")
    if cast != "none":
        h = round_to_format(h, cast)
    h = layer(F.interpolate(h, scale=(2, 2), mode="nearest"), 32, "up2")
    h = layer(F.interpolate(h, scale=(2, 2), mode="nearest"), 16, "up1")
    return PF.convolution(h, CLASSES, (1, 1), name="classes")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Train and test; return the exit status."""
    parser = common_options.parser(__doc__, iterations=600, batch_size=16, lr=0.1)
    add = parser.add_argument
    add("--cast", default="float8_e5m2", metavar="FORMAT", help="of the code, or none (default: float8_e5m2)")
    add(
        "--loss-weight",
        type=positive_number,
        default=1e-2,
        metavar="W",
        help="multiplies the loss (default: 0.01)",
    )
    add("--scaling", choices=("adaptive", "none"), default="adaptive")
    pictures.add_option(parser, "scenes and the digits predicted for their pixels")
    options = common_options.start(parser, arguments)

    x = nn.Variable((options.batch_size, 1, GRID * CELL, GRID * CELL))
    t, weight = nn.Variable(x.shape), nn.Variable(x.shape)
    predicted = segment(x, options.cast, training=True)
    loss = F.sum(F.softmax_cross_entropy(predicted, t, axis=1) * weight) / F.sum(weight) * options.loss_weight
    # SGD moves weights by learning rate times gradient: this cancels the loss weight.
    rate = common_options.cosine(options.lr / options.loss_weight, options.iterations)
    solver = S.Momentum(rate(0))
    solver.set_parameters(nn.get_parameters())

    def fill(number: int) -> None:
        random = np.random.RandomState((options.seed, number))
        drawn = scenes(load().train, random, options.batch_size, GRID, CELL, DENSITY, NOISE)
        x.d, t.d = drawn.pixels, drawn.ink
        weight.d = np.where(drawn.ink == PAPER, 0.1, 1.0)

    updater = updater_of(options, solver, loss, Feeder(fill))
    with Session(options, updater) as session:
        for iteration in session:
            solver.set_learning_rate(rate(iteration))
            updater.update()
            session.show(updater.scale, loss)
    test = test_scenes(128, GRID, CELL, DENSITY, NOISE)
    predicted = segment(nn.Variable.from_numpy_array(test.pixels), options.cast, training=False)
    predicted.forward(clear_buffer=True)
    given = predicted.d.argmax(axis=1)
    print(f"mean IoU of the ten digits {mean_iou(given, test):.3f}, loss scale {updater.scale:g}")
    if options.picture is not None:
        draw(options.picture, given, test)
    return 0


def updater_of(options: Any, solver: Any, loss: nn.Variable, feed: Feeder) -> Any:
    """Make the training loop."""
    if options.scaling == "none":
        return FixedLossScalingUpdater(solver, loss, feed, scale=1.0, storage=options.storage)
    return AdaptiveLossScalingUpdater(solver, loss, feed, storage=options.storage)


def mean_iou(given: np.ndarray, test: Scenes) -> float:
    """Mean intersection over union of a digit's predicted and actual pixels."""
    wanted = test.ink[:, 0]
    both = [((given == digit) & (wanted == digit)).sum() for digit in range(10)]
    either = [((given == digit) | (wanted == digit)).sum() for digit in range(10)]
    return float(np.mean(np.divide(both, either)))


def draw(path: Path, given: np.ndarray, test: Scenes, count: int = 8) -> None:
    """Draw scenes, the digit at each of their pixels, and the predicted one."""
    figure, axes = pictures.panels(3, count)
    for column, (scene, right, predicted) in zip(axes.T, zip(test.pixels, test.ink[:, 0], given)):
        pictures.show(column[0], scene)
        for panel, classes in zip(column[1:], (right, predicted)):
            colors = panel.imshow(np.ma.masked_equal(classes, PAPER), cmap="tab10", vmin=-0.5, vmax=9.5)
    for panel, title in zip(axes[:, 0], ("scene", "digits", "predicted")):
        panel.set_ylabel(title)
    figure.colorbar(colors, ax=axes[1:], ticks=range(10))
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    sys.exit(main())
