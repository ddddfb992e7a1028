# SPDX-License-Identifier: Apache-2.0
"""Scenes composed of handwritten digits."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .digits import Examples, load

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

# The test scenes must not depend on the seed of a training.
_TEST_SEED = 1


class Scenes(NamedTuple):
    """Digits on a canvas.

    Attributes:
        pixels: shape (n, 1, size, size), from -1 to 1.
        cells: the digit whose corner was drawn in each cell of a grid, 10 for none.
        ink: the digit whose ink is on a pixel, 10 for none; shape (n, 1, size, size).
    """

    pixels: Floats
    cells: Integers
    ink: Integers


def scenes(
    source: Examples,
    random: np.random.RandomState,
    count: int,
    grid: int,
    cell: int,
    density: float,
    noise: float,
) -> Scenes:
    """Draw canvases of `grid` x `grid` cells of `cell` pixels, a share `density` with a digit, and noise."""
    size = grid * cell
    pixels = np.full((count, 1, size, size), -1.0, np.float32)
    cells = np.full((count, 1, grid, grid), 10, np.int64)
    ink = np.full((count, 1, size, size), 10, np.int64)
    for n, row, column in np.argwhere(random.rand(count, grid, grid) < density):
        chosen = random.randint(len(source.x))
        dy, dx = random.randint(0, cell - 7, 2)
        area = np.s_[n, 0, row * cell + dy : row * cell + dy + 8, column * cell + dx : column * cell + dx + 8]
        scan, digit = source.x[chosen, 0], source.t[chosen, 0]
        pixels[area] = scan
        ink[area] = np.where(scan > 0.0, digit, 10)
        cells[n, 0, row, column] = digit
    pixels += noise * random.randn(*pixels.shape).astype(np.float32)
    return Scenes(pixels, cells, ink)


@cache
def test_scenes(count: int, grid: int, cell: int, density: float, noise: float) -> Scenes:
    """Draw always the same scenes, of digits that no training uses."""
    return scenes(load().test, np.random.RandomState(_TEST_SEED), count, grid, cell, density, noise)
