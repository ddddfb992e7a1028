# SPDX-License-Identifier: Apache-2.0
"""Real data that needs no download: digits of scikit-learn, alone and in scenes, and text of Python."""

from __future__ import annotations

from functools import cache
from typing import Callable, NamedTuple, Sequence, Tuple

import nnabla as nn
import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

_TEST_IMAGES = 360
# What is tested on must not depend on the seed of a training.
_SPLIT_SEED = 0
_TEST_SEED = 1
_SYMBOLS = 64
_TEXT_LENGTH = 200_000
_TEST_LENGTH = 20_000


class Examples(NamedTuple):
    """Inputs and what is to be told of them; the first axes are as long as each other."""

    x: Floats
    t: Integers


@cache
def digits() -> Tuple[Examples, Examples]:
    """1437 scans of 8x8 pixels to train on, 360 to test on; x from -1 (paper) to 1 (ink), t from 0 to 9."""
    bunch = load_digits()
    x = (bunch.images[:, np.newaxis] / 8.0 - 1.0).astype(np.float32)
    t = bunch.target[:, np.newaxis].astype(np.int64)
    order = np.random.RandomState(_SPLIT_SEED).permutation(len(x))
    test, train = order[:_TEST_IMAGES], order[_TEST_IMAGES:]
    return Examples(x[train], t[train]), Examples(x[test], t[test])


class Scenes(NamedTuple):
    """Digits on a canvas.

    Attributes:
        pixels: shape (n, 1, size, size), from -1 to 1.
        cells: the digit whose corner was drawn in each cell of a grid, 10 where there is none.
        ink: the digit that has put ink on a pixel, 10 where there is none; shape (n, 1, size, size).
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
    """Canvases of `grid` x `grid` cells of `cell` pixels, a digit in a share `density` of them, and noise."""
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
    """Always the same scenes, of digits that no training has seen."""
    return scenes(digits()[1], np.random.RandomState(_TEST_SEED), count, grid, cell, density, noise)


@cache
def text() -> Tuple[Integers, Integers, int]:
    """Python's own help on the language as numbers of symbols: to train on, to test on, how many symbols."""
    from pydoc_data.topics import topics

    whole = "\n".join(topics[name] for name in sorted(topics))[: _TEXT_LENGTH + _TEST_LENGTH]
    letters, counts = np.unique(list(whole), return_counts=True)
    # What is rare is one symbol.
    common = letters[np.argsort(-counts, kind="stable")][: _SYMBOLS - 1]
    number = {letter: index for index, letter in enumerate(common)}
    tokens = np.array([number.get(letter, _SYMBOLS - 1) for letter in whole], np.int64)
    return tokens[:-_TEST_LENGTH], tokens[-_TEST_LENGTH:], _SYMBOLS


def windows(tokens: Integers, starts: Integers, length: int) -> Tuple[Integers, Integers]:
    """Pieces of a text, and the symbol that follows each of theirs."""
    at = starts[:, np.newaxis] + np.arange(length)
    return tokens[at], tokens[at + 1]


def batches(source: Examples, x: nn.Variable, t: nn.Variable, seed: int) -> Callable[[], None]:
    """What fills two Variables with the next batch; the order depends on the seed alone."""
    random = np.random.RandomState(seed)
    size, order = x.shape[0], np.empty(0, np.int64)

    def feed() -> None:
        nonlocal order
        if len(order) < size:
            order = random.permutation(len(source.x))
        chosen, order = order[:size], order[size:]
        x.d, t.d = source.x[chosen], source.t[chosen]

    return feed


def in_batches(count: int, size: int) -> Sequence[slice]:
    """The whole batches of so many examples."""
    return [slice(start, start + size) for start in range(0, count - size + 1, size)]
