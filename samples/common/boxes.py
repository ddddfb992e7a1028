# SPDX-License-Identifier: Apache-2.0
"""Scenes with digits of two sizes, and the boxes around them."""

from __future__ import annotations

from typing import List, NamedTuple

import numpy as np
import numpy.typing as npt

from .digits import Examples

PAPER = -1.0


class Box(NamedTuple):
    """Position of a digit, in pixels; `x` and `y` are its centre's."""

    digit: int
    x: float
    y: float
    size: float


class BoxedScene(NamedTuple):
    """Canvas and its digits.

    Attributes:
        pixels: float32, shape (1, size, size), from -1 to 1 and noise.
        boxes: one for each digit; they do not overlap.
    """

    pixels: npt.NDArray[np.float32]
    boxes: List[Box]


def boxed_scene(
    source: Examples, random: np.random.Generator, size: int, digits: int, noise: float
) -> BoxedScene:
    """Draw up to `digits` digits without overlap: half of them as scanned, half twice as large."""
    pixels = np.full((1, size, size), PAPER, np.float32)
    taken = np.zeros((size, size), bool)
    boxes: List[Box] = []
    for _ in range(digits):
        chosen, side = int(random.integers(len(source.x))), int(random.choice((8, 16)))
        top, left = (int(corner) for corner in random.integers(0, size - side + 1, 2))
        area = np.s_[top : top + side, left : left + side]
        if taken[area].any():
            continue
        taken[area] = True
        pixels[0][area] = source.x[chosen, 0].repeat(side // 8, 0).repeat(side // 8, 1)
        boxes.append(Box(int(source.t[chosen, 0]), left + side / 2, top + side / 2, float(side)))
    pixels += noise * random.standard_normal(pixels.shape).astype(np.float32)
    return BoxedScene(pixels, boxes)


def overlap(a: Box, b: Box) -> float:
    """Intersection over union of two squares."""
    sides = [
        max(0.0, min(p + a.size / 2, q + b.size / 2) - max(p - a.size / 2, q - b.size / 2))
        for p, q in ((a.x, b.x), (a.y, b.y))
    ]
    both = sides[0] * sides[1]
    return both / (a.size**2 + b.size**2 - both)
