# SPDX-License-Identifier: Apache-2.0
"""Scratch arrays are used again, and dropped when no graph needs them."""

from __future__ import annotations

from nnabla_adaloss.kernels.arrays import ScratchPool


def test_one_array_per_shape_and_purpose() -> None:
    pool = ScratchPool()
    first = pool.get((2, 3), "factor")
    assert first.shape == (2, 3)
    assert pool.get((2, 3), "factor") is first
    others = [pool.get((3, 2), "factor"), pool.get((2, 3), "gradient"), pool.get((2, 3), "factor", 1)]
    assert len({id(array) for array in (first, *others)}) == len(pool) == 4


def test_unused_entries_of_a_graph_are_dropped_with_the_next() -> None:
    pool = ScratchPool()
    weight = pool.get((2,), "factor")
    for length in range(3, 20):
        pool.get((length,), "factor")
        assert pool.get((2,), "factor") is weight
        pool.end_graph()
        assert len(pool) == 2
    pool.end_graph()
    assert len(pool) == 0
    assert pool.get((2,), "factor") is not weight
