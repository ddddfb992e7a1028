# SPDX-License-Identifier: Apache-2.0
"""Digits, scenes, batches of them, and how far two sets are apart."""

from __future__ import annotations

import numpy as np
import pytest
from common.boxes import Box, boxed_scene, overlap
from common.data_files import DataError
from common.digits import enlarged, load
from common.discrepancy import discrepancy
from common.feeder import Feeder, in_epochs


def test_digits_are_enlarged() -> None:
    large = enlarged(16).train
    assert large.x.shape == (1437, 1, 16, 16)
    assert large.x.dtype == np.float32
    # Each scanned pixel is the mean of four: where nothing is cut off, what is between is between.
    np.testing.assert_allclose(large.x.mean(), load().train.x.mean(), atol=0.01)
    np.testing.assert_array_equal(enlarged(8).train.x, load().train.x)


def test_a_batch_that_cannot_be_filled_is_refused() -> None:
    assert len(in_epochs(8, 8, seed=0, number=5)) == 8
    with pytest.raises(DataError, match="a batch of 9 cannot be filled: there are 8 examples"):
        in_epochs(8, 9, seed=0, number=0)


def test_boxes_are_where_the_digits_are() -> None:
    scene = boxed_scene(load().test, np.random.default_rng(0), 48, 6, noise=0.0)
    assert len(scene.boxes) > 2
    outside = np.ones((48, 48), bool)
    for box in scene.boxes:
        left, top, side = int(box.x - box.size / 2), int(box.y - box.size / 2), int(box.size)
        inside = scene.pixels[0, top : top + side, left : left + side]
        assert inside.max() == 1.0
        outside[top : top + side, left : left + side] = False
        assert all(overlap(box, other) == 0.0 for other in scene.boxes if other is not box)
    assert (scene.pixels[0][outside] == -1.0).all()
    assert overlap(Box(0, 4.0, 4.0, 8.0), Box(0, 8.0, 4.0, 8.0)) == pytest.approx(1 / 3)


def test_the_distance_of_a_distribution_to_itself_is_small() -> None:
    random = np.random.RandomState(0)
    a, b = random.randn(300, 4).astype(np.float32), random.randn(300, 4).astype(np.float32)
    assert discrepancy(a, b) < 0.05 < discrepancy(a, b + 1.0) < discrepancy(a, b + 3.0)
    assert np.isnan(discrepancy(np.full_like(a, np.nan), b))
    many = 1.0 + random.randn(700, 64).astype(np.float16)  # whose sums do not fit into float16
    assert 0.0 < discrepancy(many, -many) < 2.0


def test_an_epoch_shows_each_example_once() -> None:
    epochs = [np.concatenate([in_epochs(10, 3, 0, 3 * epoch + n) for n in range(3)]) for epoch in (0, 1)]
    for epoch in epochs:
        assert len(set(epoch)) == 9
        assert set(epoch) < set(range(10))
    assert list(epochs[0]) != list(epochs[1])


def test_a_batch_follows_from_its_number_alone() -> None:
    found = []
    feed = Feeder(lambda number: found.append(list(in_epochs(10, 4, 7, number))))
    for _ in range(6):
        feed()
    assert feed.count == 6
    feed.count = 3
    feed()
    assert found[-1] == found[3]
    assert list(in_epochs(10, 4, 8, 3)) != found[3]
