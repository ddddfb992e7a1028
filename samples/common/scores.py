# SPDX-License-Identifier: Apache-2.0
"""How good a trained network is, and what its scales did."""

from __future__ import annotations

import math
from typing import Any, Callable, Iterator, Tuple

import nnabla as nn
import numpy as np

from .digits import Examples


def accuracy(logits: Callable[[nn.Variable], nn.Variable], examples: Examples) -> float:
    """The share of examples that are classified correctly."""
    size = whole_batches(len(examples.x))
    batches = (
        (examples.x[at : at + size], examples.t[at : at + size]) for at in range(0, len(examples.x), size)
    )
    return accuracy_of_batches(logits, batches)


def whole_batches(examples: int, most: int = 120) -> int:
    """The size of batches that leave no example out; one that divides `most`."""
    return math.gcd(examples, most)


def accuracy_of_batches(
    logits: Callable[[nn.Variable], nn.Variable], batches: Iterator[Tuple[Any, Any]]
) -> float:
    """The same over batches of inputs and targets, all of one size."""
    told, right = None, []
    for x, t in batches:
        if told is None:
            seen = nn.Variable(x.shape)
            told = logits(seen)
        seen.d = x
        told.forward(clear_buffer=True)
        right.append(told.d.argmax(axis=1) == t[:, 0])
    return float(np.concatenate(right).mean())


def fate(updater: Any) -> str:
    """What became of the loss scale of an adaptive updater, in words."""
    lost, repeats = sum(updater.counters.lost.values()), updater.counters.repeats
    return f"loss scale {updater.scale:g} at the end, {repeats} batches repeated, {lost} lost"


def print_result(network: str, right: float, updater: Any) -> None:
    """Print a classifier's accuracy and its loss scale.

    Args:
        network: its name.
        right: the share of the test images that it classifies correctly.
        updater: the adaptive updater that has trained it.
    """
    print(f"{network}: {right:.1%} of the test images correct")
    print(fate(updater))
