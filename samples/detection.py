# SPDX-License-Identifier: Apache-2.0
"""SSD-like detection of digits of two sizes, with heads at two depths of a network (Liu et al. 2016).

The finer head finds digits of 8 pixels; the coarser one, a stage deeper, those of 16. For every place of
its map, a head predicts the digit, if any, and its box. The loss sums cross entropy and the smooth L1
distance of boxes over both heads; of the backgrounds, only the hardest count. The heads' gradients meet in
the shared stages.

  python samples/detection.py --picture boxes.png        half a minute; draws the boxes in 8 scenes
  python samples/detection.py --storage fp8_hybrid       matrix products of 8 bits: an F score of 0.858
  python samples/detection.py -c cudnn -t half           on a GPU (fails on an H100: docs/gpu.md)

The first one printed, in emulated fp16 on one CPU core:

  F score of digits and boxes on unseen scenes: 0.848
  loss scale 16384 at the end, 1 batches repeated, 0 lost
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import numpy.typing as npt
from common import options as common_options
from common import pictures
from common.boxes import Box, BoxedScene, boxed_scene, overlap
from common.digits import load
from common.feeder import Feeder
from common.scores import fate
from common.session import run
from matplotlib.patches import Rectangle

from nnabla_adaloss import AdaptiveLossScalingUpdater

SIZE, DIGITS, NOISE = 48, 6, 0.1
BACKGROUND = 10
HARD_PER_DIGIT = 3
TEST_SCENES = 64


class Head(NamedTuple):
    """Predictions at one depth.

    Attributes:
        side: of the boxes it detects, in pixels; its map has a position every half a side.
        classes: logits, shape (batch, 11, places, places).
        boxes: offset of the box's centre from its position, in sides, and the logarithm of its size in sides;
            shape (batch, 3, places, places).
    """

    side: int
    classes: nn.Variable
    boxes: nn.Variable


class Targets(NamedTuple):
    """Targets of a head: digits, boxes, and 1 where there is a digit."""

    classes: nn.Variable
    boxes: nn.Variable
    there: nn.Variable


def detect(x: nn.Variable, training: bool) -> List[Head]:
    """Build heads at a quarter and at an eighth of the resolution."""

    def layer(h: nn.Variable, maps: int, name: str) -> nn.Variable:
        h = PF.convolution(h, maps, (3, 3), pad=(1, 1), with_bias=False, name=name)
        return F.relu(PF.batch_normalization(h, decay_rate=0.8, batch_stat=training, name=name))

    def head(h: nn.Variable, side: int) -> Head:
        with nn.parameter_scope(f"head{side}"):
            classes = PF.convolution(h, BACKGROUND + 1, (3, 3), pad=(1, 1), name="classes")
            return Head(side, classes, PF.convolution(h, 3, (3, 3), pad=(1, 1), name="boxes"))

    h = F.max_pooling(layer(x, 16, "conv1"), (2, 2))
    h = F.max_pooling(layer(h, 32, "conv2"), (2, 2))
    fine = layer(h, 48, "conv3")
    coarse = layer(F.max_pooling(fine, (2, 2)), 64, "conv4")
    return [head(fine, 8), head(coarse, 16)]


def targets_of(head: Head) -> Targets:
    """Make Variables for the targets of a head."""
    batch, _, places, _ = head.classes.shape
    return Targets(
        nn.Variable((batch, 1, places, places)),
        nn.Variable(head.boxes.shape),
        nn.Variable((batch, 1, places, places)),
    )


def multibox(head: Head, targets: Targets) -> nn.Variable:
    """Sum the cross entropy of digits and the hardest backgrounds, and the distance of boxes, per digit."""
    there = targets.there
    digits = F.maximum_scalar(F.sum(there), 1.0)
    entropy = F.softmax_cross_entropy(head.classes, targets.classes, axis=1)
    background = F.reshape(entropy * (1.0 - there), (1, entropy.size))
    hardest = F.top_k_data(background, HARD_PER_DIGIT * DIGITS * entropy.shape[0] // 2)
    distance = F.huber_loss(head.boxes, targets.boxes) * F.broadcast(there, head.boxes.shape)
    return (F.sum(entropy * there) + F.sum(hardest) + F.sum(distance)) / digits


def fill_targets(targets: Targets, head: Head, drawn: Sequence[BoxedScene]) -> None:
    """Assign each digit to the position nearest to its centre, in the head of its size."""
    classes = np.full(targets.classes.shape, BACKGROUND)
    boxes, there = np.zeros(targets.boxes.shape), np.zeros(targets.there.shape)
    step = head.side / 2
    for number, scene in enumerate(drawn):
        for box in scene.boxes:
            if box.size != head.side:
                continue
            row, column = int(box.y // step), int(box.x // step)
            classes[number, 0, row, column] = box.digit
            there[number, 0, row, column] = 1.0
            dx, dy = box.x / step - column - 0.5, box.y / step - row - 0.5
            boxes[number, :, row, column] = dx, dy, np.log(box.size / head.side)
    targets.classes.d, targets.boxes.d, targets.there.d = classes, boxes, there


def boxes_of(head: Head, number: int) -> List[Tuple[float, Box]]:
    """Boxes that a head predicts for one image, with their probabilities."""
    logits: npt.NDArray[np.float32] = head.classes.d[number]
    shares = np.exp(logits - logits.max(0))
    shares /= shares.sum(0)
    step = head.side / 2
    found = []
    for row, column in np.argwhere(logits.argmax(0) != BACKGROUND):
        dx, dy, log_size = head.boxes.d[number, :, row, column]
        digit = int(logits[:, row, column].argmax())
        box = Box(
            digit, (column + 0.5 + dx) * step, (row + 0.5 + dy) * step, head.side * float(np.exp(log_size))
        )
        found.append((float(shares[digit, row, column]), box))
    return found


def without_doubles(found: List[Tuple[float, Box]]) -> List[Box]:
    """Suppress non-maxima: keep the most probable of overlapping boxes."""
    kept: List[Box] = []
    for _, box in sorted(found, key=lambda pair: -pair[0]):
        if all(overlap(box, other) < 0.3 for other in kept):
            kept.append(box)
    return kept


def found_in(heads: Sequence[Head], number: int) -> List[Box]:
    """Find the boxes of both heads in one image."""
    return without_doubles([pair for head in heads for pair in boxes_of(head, number)])


def is_among(box: Box, others: Sequence[Box]) -> bool:
    """True if a box of the same digit has an intersection over union of at least a half."""
    return any(other.digit == box.digit and overlap(other, box) >= 0.5 for other in others)


def f_score(found: Sequence[Sequence[Box]], scenes: Sequence[BoxedScene]) -> float:
    """Score of boxes: the harmonic mean of precision and recall."""
    right = sum(is_among(box, boxes) for boxes, scene in zip(found, scenes) for box in scene.boxes)
    return 2.0 * right / max(1, sum(map(len, found)) + sum(len(scene.boxes) for scene in scenes))


def draw(path: Path, found: Sequence[Sequence[Box]], scenes: Sequence[BoxedScene], columns: int = 4) -> None:
    """Draw two rows of scenes with the boxes that were found, and those that were missed."""
    figure, axes = pictures.panels(2, columns, 2.5)
    for panel, boxes, scene in zip(axes.flat, found, scenes):
        pictures.show(panel, scene.pixels)
        shown = [(box, "tab:blue" if is_among(box, scene.boxes) else "tab:orange") for box in boxes]
        shown += [(box, "grey") for box in scene.boxes if not is_among(box, boxes)]
        for box, color in shown:
            left, top = box.x - box.size / 2 - 0.5, box.y - box.size / 2 - 0.5
            panel.add_patch(Rectangle((left, top), box.size, box.size, fill=False, color=color, lw=2))
            panel.text(left + 0.4, top, box.digit, color="white", backgroundcolor=color, fontsize=8)
    figure.suptitle("blue: digit and box are right; orange: wrong; grey: missed")
    figure.savefig(path, dpi=100)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Train and test; return the exit status."""
    parser = common_options.parser(__doc__, iterations=500, batch_size=16, lr=0.004)
    pictures.add_option(parser, "scenes and the boxes found in them")
    options = common_options.start(parser, arguments)
    train, test = load()
    x = nn.Variable((options.batch_size, 1, SIZE, SIZE))
    heads = detect(x, training=True)
    targets = [targets_of(head) for head in heads]
    loss = F.add_n(*[multibox(head, wanted) for head, wanted in zip(heads, targets)])
    rate = common_options.cosine(options.lr, options.iterations)
    solver = S.Adam(rate(0))
    solver.set_parameters(nn.get_parameters())

    def fill(number: int) -> None:
        random = np.random.default_rng((options.seed, number))
        drawn = [boxed_scene(train, random, SIZE, DIGITS, NOISE) for _ in range(options.batch_size)]
        x.d = np.stack([scene.pixels for scene in drawn])
        for head, wanted in zip(heads, targets):
            fill_targets(wanted, head, drawn)

    updater = AdaptiveLossScalingUpdater(
        solver, loss, Feeder(fill), storage=options.storage, weight_decay=1e-4
    )
    run(options, updater, rate)

    random = np.random.default_rng(0)
    scenes = [boxed_scene(test, random, SIZE, DIGITS, NOISE) for _ in range(TEST_SCENES)]
    predicted = detect(
        nn.Variable.from_numpy_array(np.stack([scene.pixels for scene in scenes])), training=False
    )
    nn.forward_all([output for head in predicted for output in (head.classes, head.boxes)])
    found = [found_in(predicted, number) for number in range(TEST_SCENES)]
    print(f"F score of digits and boxes on unseen scenes: {f_score(found, scenes):.3f}")
    print(fate(updater))
    if options.picture is not None:
        draw(options.picture, found, scenes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
