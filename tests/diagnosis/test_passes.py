# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import nnabla as nn
import numpy as np

from nnabla_adaloss.diagnosis.passes import Layer, StorageEffect, Tally

FP32 = {1: np.array([1.0, 2.0, 0.0, 4.0]), 2: np.array([3.0, 4.0]), 3: np.zeros(2)}


def test_losses_are_counted_against_unrounded_gradients_and_errors_against_fp32() -> None:
    tally = Tally([1, 2])
    unstored = {1: np.array([1.0, 0.0, 0.0, 4.0]), 2: np.array([3.0, 4.0])}
    for _ in range(2):
        tally.add({1: np.array([0.0, 0.0, 0.0, np.inf]), 2: np.array([3.0, 3.0])}, FP32, unstored)
    assert tally.effect([1], [1]) == StorageEffect(0.5, 0.25, math.inf)
    layer = Layer("a", "Affine", {1: nn.Variable((4,))}, {2: nn.Variable((2, 1))})
    assert tally.of(layer) == StorageEffect(0.25, 1 / 6, 0.2)
    assert (tally.nonzero(layer), tally.worst(layer, set())) == (4, StorageEffect(0.0, 0.0, 0.2))
    both = layer._replace(outputs={}, weights={1: nn.Variable((4,)), 2: nn.Variable((2, 1))})
    assert tally.worst(both, {1}) == StorageEffect(0.0, 0.25, 0.2)


def test_errors_of_a_bias_that_cancels_are_left_out() -> None:
    """A gradient of a hundredth of its weight's, element by element, is what is left of a sum."""
    layer = Layer("a", "Affine", {}, {1: nn.Variable((2,)), 2: nn.Variable((2, 2))})
    for size, error in ((0.5, 0.0), (2.0, 0.5)):
        tally, exact = Tally([1, 2]), {1: np.full(2, size), 2: np.full((2, 2), 100.0)}
        tally.add({1: np.full(2, 0.5 * size), 2: exact[2]}, exact)
        assert tally.worst(layer, set()) == StorageEffect(0.0, 0.0, error)


def test_units_lost_in_all_batches_are_counted_by_row_and_by_column() -> None:
    layer = Layer("a", "Affine", {}, {1: nn.Variable((2, 4))})
    tally, exact = Tally([1]), np.array([[1.0, 1.0, 1e-9, 0.0], [1.0, 1.0, 1e-9, 0.0]])
    for column in (0, 1):
        stored = np.where(exact < 1e-8, 0.0, exact)
        stored[:, column] = 0.0
        tally.add({1: stored}, {1: exact})
    assert tally.worst(layer, set()).lost_units == 1 / 3
    assert tally.worst(layer, {1}).lost_units == 0.0
    assert Tally([1]).worst(layer, set()).lost_units == 0.0


def test_differences_are_finite_and_zeros_exact() -> None:
    tally = Tally([1, 2, 3])
    tally.add({1: np.full(4, np.inf), 2: np.array([3.0, 3.0]), 3: np.zeros(2)}, FP32)
    assert tally.differing(0.19) == {2}
    assert tally.differing(0.21) == set()
    assert tally.zeros() == {3}
