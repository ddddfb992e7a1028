# SPDX-License-Identifier: Apache-2.0
"""Networks for scenes: a detector with heads at two depths, and a segmentation."""

from __future__ import annotations

from typing import List, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.initializer as I
import nnabla.parametric_functions as PF
import numpy as np
from common.digits import load
from common.scenes import Floats, Integers, Scenes, scenes, test_scenes

from .task import Player, Task

_BATCH = 16
_TEST_SCENES = 128
_CLASSES = 11
_SMALL_WEIGHT = 1e-4
# Number of scenes, drawn once and used in rotation: drawing takes as long as training.
_STOCK = 40


def detector(seed: int) -> Task:
    """Detect the digit in each cell (loss weight 1), and, from a lower layer, the ink (1e-4).

    The score is the mean of two: the share of correct digits, and the intersection over union of predicted
    and true ink.
    """
    grid, cell, density, noise = 2, 10, 0.7, 0.1
    size = grid * cell
    pool = _Stock(seed, grid, cell, density, noise)
    x, t = nn.Variable((_BATCH, 1, size, size)), nn.Variable((_BATCH, 1, grid, grid))
    ink = nn.Variable((_BATCH, 1, size // 4, size // 4))
    told, inked = _detect(x)
    loss = F.mean(F.softmax_cross_entropy(told, t, axis=1)) + _SMALL_WEIGHT * F.mean(
        F.sigmoid_cross_entropy(inked, ink)
    )
    parameters = nn.get_parameters()

    def feed() -> None:
        scene = pool.next()
        x.d, t.d, ink.d = scene.pixels, scene.cells, _coarse(scene.ink)

    test = test_scenes(_TEST_SCENES, grid, cell, density, noise)
    test_told, test_inked = _detect(nn.Variable.from_numpy_array(test.pixels))
    both = F.sink(test_told, test_inked)
    test_told.persistent = test_inked.persistent = True

    def score() -> float:
        both.forward(clear_buffer=True)
        there = test.cells[:, 0] < 10
        right = float((test_told.d.argmax(axis=1) == test.cells[:, 0])[there].mean())
        given, wanted = test_inked.d > 0.0, _coarse(test.ink) > 0.5
        return 0.5 * (right + float((given & wanted).sum() / max(1, (given | wanted).sum())))

    return Task([Player(loss, parameters, feed)], score)


def _detect(x: nn.Variable) -> Tuple[nn.Variable, nn.Variable]:
    h = F.max_pooling(_conv(x, 12, "conv1"), (2, 2))
    h = F.max_pooling(_conv(h, 16, "conv2"), (2, 2))
    # The branch with the small loss weight. Its layer's output is multiplied by 100, so that it learns as
    # fast as the others: gradients and effects of steps are 100 times as large.
    limit = 0.01 * float(np.sqrt(3.0 / 16))
    inked = 100.0 * PF.convolution(
        h, 1, (1, 1), w_init=I.UniformInitializer((-limit, limit)), with_bias=False, name="ink"
    )
    h = _conv(h, 32, "conv3")
    h = F.max_pooling(_conv(h, 32, "conv4"), (2, 2))
    return PF.convolution(h, _CLASSES, (1, 1), name="digits"), inked


def _coarse(ink: Integers) -> Floats:
    """Find the squares of 4 x 4 pixels with ink."""
    n, _, size, _ = ink.shape
    squares = (ink < 10).reshape(n, 1, size // 4, 4, size // 4, 4)
    return squares.any(axis=(3, 5)).astype(np.float32)  # type: ignore[no-any-return]


def segmentation(seed: int) -> Task:
    """Segment ink under strong noise; the loss is the mean over the pixels of a mask.

    The mask keeps about as many pixels of paper as of ink. The score is the intersection over union of
    predicted and true ink, on all pixels.
    """
    grid, cell, density, noise = 2, 8, 0.7, 0.8
    pool = _Stock(seed, grid, cell, density, noise)
    random = np.random.RandomState(seed)
    x, t, mask = (nn.Variable((_BATCH, 1, grid * cell, grid * cell)) for _ in range(3))
    loss = F.sum(F.sigmoid_cross_entropy(_segment(x), t) * mask) / F.sum(mask)
    parameters = nn.get_parameters()

    def feed() -> None:
        scene = pool.next()
        inked = scene.ink < 10
        keep = inked | (random.rand(*inked.shape) < inked.mean() / (1.0 - inked.mean()))
        x.d, t.d, mask.d = scene.pixels, inked, keep

    test = test_scenes(_TEST_SCENES, grid, cell, density, noise)
    told = _segment(nn.Variable.from_numpy_array(test.pixels))

    def score() -> float:
        told.forward(clear_buffer=True)
        given, wanted = told.d > 0.0, test.ink < 10
        return float((given & wanted).sum() / max(1, (given | wanted).sum()))

    return Task([Player(loss, parameters, feed)], score)


def _segment(x: nn.Variable) -> nn.Variable:
    fine = _conv(x, 8, "down1")
    middle = _conv(F.max_pooling(fine, (2, 2)), 16, "down2")
    coarse = _conv(F.max_pooling(middle, (2, 2)), 24, "down3")
    h = F.interpolate(coarse, output_size=middle.shape[2:], mode="nearest")
    h = _conv(F.concatenate(h, middle, axis=1), 16, "up2")
    h = F.interpolate(h, output_size=fine.shape[2:], mode="nearest")
    h = _conv(F.concatenate(h, fine, axis=1), 8, "up1")
    return PF.convolution(h, 1, (1, 1), name="ink")


def _conv(h: nn.Variable, maps: int, name: str) -> nn.Variable:
    w_init = I.NormalInitializer(float(np.sqrt(2.0 / (9 * h.shape[1]))))
    return F.relu(PF.convolution(h, maps, (3, 3), pad=(1, 1), w_init=w_init, name=name))


class _Stock:
    """Batches of scenes, drawn at first use."""

    def __init__(self, seed: int, grid: int, cell: int, density: float, noise: float) -> None:
        self._random = np.random.RandomState(seed)
        self._canvas = grid, cell, density, noise
        self._drawn: List[Scenes] = []
        self._count = 0

    def next(self) -> Scenes:
        if len(self._drawn) < _STOCK:
            self._drawn.append(scenes(load().train, self._random, _BATCH, *self._canvas))
        self._count += 1
        return self._drawn[(self._count - 1) % _STOCK]
