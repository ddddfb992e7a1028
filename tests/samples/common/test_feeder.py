# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np


def test_an_epoch_shows_each_example_once() -> None:
    from common.feeder import in_epochs

    epochs = [np.concatenate([in_epochs(10, 3, 0, 3 * epoch + n) for n in range(3)]) for epoch in (0, 1)]
    for epoch in epochs:
        assert len(set(epoch)) == 9
        assert set(epoch) < set(range(10))
    assert list(epochs[0]) != list(epochs[1])


def test_a_batch_follows_from_its_number_alone() -> None:
    from common.feeder import Feeder, in_epochs

    found = []
    feed = Feeder(lambda number: found.append(list(in_epochs(10, 4, 7, number))))
    for _ in range(6):
        feed()
    assert feed.count == 6
    feed.count = 3
    feed()
    assert found[-1] == found[3]
    assert list(in_epochs(10, 4, 8, 3)) != found[3]
