# SPDX-License-Identifier: Apache-2.0
"""Random training data for small models of published kinds."""

from __future__ import annotations

from typing import Sequence, Tuple

import numpy as np

Batch = Tuple[np.ndarray, ...]


def phrases(random: np.random.Generator, batch: int, length: int, symbols: int) -> np.ndarray:
    """Make symbols that count up in steps of 1 to 3."""
    first, step = random.integers(0, symbols, (batch, 1)), random.integers(1, 4, (batch, 1))
    return (first + step * np.arange(length)) % symbols


def next_symbols(batch: int, length: int, symbols: int, random: np.random.Generator) -> Batch:
    """Make phrases, and the symbol that follows each one."""
    told = phrases(random, batch, length + 1, symbols)
    return told[:, :-1], told[:, 1:, np.newaxis]


def padded(batch: int, length: int, symbols: int, random: np.random.Generator) -> Batch:
    """Make padded phrases, their masks, and whether most symbols are of the upper half."""
    told = phrases(random, batch, length, symbols)
    there = np.arange(length) < random.integers(length // 2, length + 1, (batch, 1))
    return told * there, there.reshape(batch, 1, 1, length), told[:, :1] >= symbols // 2


def images(shape: Sequence[int], classes: int, random: np.random.Generator) -> Batch:
    """Make noise that is brighter in one band, and the number of the band."""
    x, label = random.standard_normal(shape), random.integers(0, classes, (shape[0], 1))
    rows = np.arange(shape[2]) * classes // shape[2]
    return x + (rows == label)[:, np.newaxis, :, np.newaxis], label


def pairs(shape: Sequence[int], random: np.random.Generator) -> Batch:
    """Make pairs of images of bands, and whether they show the same band."""
    (one, first), (other, second) = images(shape, 2, random), images(shape, 2, random)
    return one, other, first == second


def heatmaps(shape: Sequence[int], joints: int, random: np.random.Generator) -> Batch:
    """Make images of blobs, and a map of each blob."""
    size = shape[2]
    where = random.uniform(2, size - 2, (2, shape[0], joints, 1, 1))
    rows, columns = np.arange(size)[:, np.newaxis], np.arange(size)
    maps = np.exp(-((rows - where[0]) ** 2 + (columns - where[1]) ** 2) / 4.0)
    return random.normal(0.0, 0.1, shape) + maps.sum(1, keepdims=True), maps


def waves(batch: int, length: int, levels: int, random: np.random.Generator) -> Batch:
    """Make quantized sines, and the successor of each sample, shape (batch, 1, length)."""
    phase = random.uniform(0.0, 6.0, (batch, 1)) + random.uniform(0.2, 0.6, (batch, 1)) * np.arange(
        length + 1
    )
    told = ((np.sin(phase) + 1.0) * 0.499 * levels).astype(np.int64)
    return told[:, :-1], told[:, np.newaxis, 1:]


def pictures(shape: Sequence[int], levels: int, random: np.random.Generator) -> Batch:
    """Make slopes of few levels, and the same as floats."""
    slope = random.integers(0, levels, (shape[0], 1, 1, 1)) + np.arange(shape[2])[:, np.newaxis] // 2
    found = np.broadcast_to(slope % levels, shape)
    return found / (levels - 1.0), found


def masks(shape: Sequence[int], random: np.random.Generator) -> Batch:
    """Make noise with a bright rectangle, and its mask."""
    first, last = np.sort(random.integers(0, shape[2], (2, shape[0], 1, 1, 1)), axis=0)
    rows, columns = np.arange(shape[2])[:, np.newaxis], np.arange(shape[3])
    inside = (rows >= first) & (rows <= last) & (columns >= first) & (columns <= last)
    return random.standard_normal(shape) + 2.0 * inside, inside


def vectors(batch: int, width: int, random: np.random.Generator) -> Batch:
    """Make sines of different frequencies."""
    return (np.sin(random.uniform(0.1, 1.0, (batch, 1)) * np.arange(width)),)


def half_labelled(batch: int, width: int, random: np.random.Generator) -> Batch:
    """Make vectors with their classes, others without, and a unit direction for each of the latter."""
    x, label = random.standard_normal((2, batch, width)), random.integers(0, 4, (batch, 1))
    x[0] += 2.0 * (np.arange(width) % 4 == label)
    direction = random.standard_normal((batch, width))
    return x[0], label, x[1], direction / np.linalg.norm(direction, axis=1, keepdims=True)


def real_and_noise(batch: int, size: int, random: np.random.Generator) -> Batch:
    """Make images of bands, and noise for generating others."""
    return np.tanh(images((batch, 1, size, size), 4, random)[0]), random.standard_normal((batch, 16))


# Models
