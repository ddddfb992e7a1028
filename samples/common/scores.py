# SPDX-License-Identifier: Apache-2.0
"""Accuracy of a trained network, and a summary of its scales."""

from __future__ import annotations

import math
from typing import Any, Callable, Iterator, Tuple

import nnabla as nn
import numpy as np

from .digits import Examples


def accuracy(logits: Callable[[nn.Variable], nn.Variable], examples: Examples) -> float:
    """Share of examples that are classified correctly."""
    size = whole_batches(len(examples.x))
    batches = (
        (examples.x[at : at + size], examples.t[at : at + size]) for at in range(0, len(examples.x), size)
    )
    return accuracy_of_batches(logits, batches)


def whole_batches(examples: int, most: int = 120) -> int:
    """Largest batch size that divides both `most` and the number of examples."""
    return math.gcd(examples, most)


def accuracy_of_batches(
    logits: Callable[[nn.Variable], nn.Variable], batches: Iterator[Tuple[Any, Any]]
) -> float:
    """Accuracy over batches of inputs and targets, all of one size."""
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
    """Summary of an adaptive updater's loss scale, as text."""
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
