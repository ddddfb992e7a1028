# SPDX-License-Identifier: Apache-2.0
"""Leaves whose memory forward overwrites are found, in whatever way they share it, and no others."""

from __future__ import annotations

from typing import Any, Callable, List

import nnabla as nn
import nnabla.functions as F
import numpy as np
import pytest

from nnabla_adaloss.engine.shared_arrays import SharedArrays

Share = Callable[[nn.Variable, nn.Variable], Any]

WAYS: List[Share] = [
    lambda leaf, output: setattr(leaf, "data", output.data),
    lambda leaf, output: setattr(output, "data", leaf.data),
    lambda leaf, output: setattr(leaf, "data", output.data.view(leaf.shape)),
    lambda leaf, output: setattr(leaf, "data", output.data.narrow(0, 0, leaf.shape[0])),
]


def chain(length: int) -> List[nn.Variable]:
    """A leaf, and what is computed of it."""
    found = [nn.Variable.from_numpy_array(np.ones((2, 3), np.float32))]
    for _ in range(length):
        found.append(F.tanh(found[-1]))
    return found


@pytest.mark.parametrize("share", WAYS)
@pytest.mark.parametrize("looked", [0, 1, 3])
def test_a_leaf_is_found_as_soon_as_it_shares_memory(share: Share, looked: int) -> None:
    x, *outputs = chain(4)
    other = nn.Variable((2, 3))
    shared = SharedArrays([x, other], outputs)
    for _ in range(looked):
        assert shared.find() == []
    share(other, outputs[2])
    for _ in range(2):
        assert shared.find() == [(other, [outputs[2]])]
    fresh = nn.NdArray((2, 3))
    outputs[2].data = fresh
    assert shared.find() == []


def test_all_outputs_that_share_the_memory_are_named() -> None:
    x, h, last = chain(2)
    flat = F.reshape(h, (6,), inplace=True)
    leaf = nn.Variable((6,))
    leaf.data = flat.data
    assert SharedArrays([x, leaf], [h, last, flat]).find() == [(leaf, [h, flat])]


def test_leaves_that_share_memory_with_each_other_alone_are_not_found() -> None:
    x, *outputs = chain(3)
    other = nn.Variable((2, 3))
    other.data = x.data
    shared = SharedArrays([x, other], outputs)
    assert shared.find() == shared.find() == []


def test_many_references_to_an_output_are_no_sharing() -> None:
    x, *outputs = chain(3)
    shared = SharedArrays([x], outputs)
    assert shared.find() == []
    kept = [outputs[0].get_unlinked_variable() for _ in range(20)]
    assert shared.find() == []
    assert len(kept) == 20


def test_nothing_is_read_or_allocated_to_find_out() -> None:
    x, *outputs = chain(3)
    outputs[-1].forward(clear_buffer=True)
    shared = SharedArrays([x], outputs)
    shared.find()
    x.data = outputs[1].data
    assert len(shared.find()) == 1
    assert x.data.clear_called
    assert outputs[0].data.clear_called


@pytest.mark.parametrize(("leaves", "outputs"), [(0, 2), (2, 0), (0, 0)])
def test_nothing_is_found_in_nothing(leaves: int, outputs: int) -> None:
    made = chain(4)
    assert SharedArrays(made[:leaves], made[-outputs:] if outputs else []).find() == []
