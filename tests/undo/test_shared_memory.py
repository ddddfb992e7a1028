# SPDX-License-Identifier: Apache-2.0
"""Leaves that share memory with outputs, and what of that is carried from one forward to the next."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any, Callable, List, Optional, Sequence

import nnabla as nn
import nnabla.functions as F
import numpy as np
import pytest

from nnabla_adaloss.undo.shared_memory import SharedMemory

pytestmark = pytest.mark.any_context

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


def shared_memory(
    leaves: Sequence[Any], outputs: Sequence[Any], reads: Optional[Sequence[int]] = None
) -> SharedMemory:
    """Of leaves, each with the function that reads it, by default the first, and functions with an output."""
    uses = SimpleNamespace(
        leaves=dict(enumerate(reads or [0] * len(leaves))),
        outputs={len(leaves) + index: index for index in range(len(outputs))},
    )
    graph: Any = SimpleNamespace(variables=[*leaves, *outputs])
    plan: Any = SimpleNamespace(memory_uses=uses)
    return SharedMemory(graph, plan)


@pytest.mark.parametrize("share", WAYS)
@pytest.mark.parametrize("looked", [0, 2])
@pytest.mark.parametrize("references", [0, 20])
def test_a_leaf_is_found_as_soon_as_it_shares_memory(share: Share, looked: int, references: int) -> None:
    x, *outputs = chain(4)
    other = nn.Variable((2, 3))
    kept = [outputs[0].get_unlinked_variable() for _ in range(references)]
    shared = shared_memory([x, other], outputs)
    for _ in range(looked):
        assert shared.find() == ([], [])
    share(other, outputs[2])
    for _ in range(2):
        assert shared.find() == ([outputs[2]], [other])
    fresh = nn.NdArray((2, 3))
    outputs[2].data = fresh
    assert shared.find() == ([], [])
    share(x, outputs[0])
    assert shared.find() == ([outputs[0]], [x])
    assert len(kept) == references


def test_all_leaves_and_outputs_that_share_the_memory_are_named() -> None:
    x, *outputs = chain(4)
    one, other = nn.Variable((2, 3)), nn.Variable((6,))
    one.data = outputs[3].data = outputs[1].data
    other.data = one.data.view((6,))
    assert shared_memory([x, one, other], outputs).find() == ([outputs[1], outputs[3]], [one, other])


@pytest.mark.parametrize(("read", "carried"), [(0, True), (2, True), (3, False), (4, False)])
@pytest.mark.parametrize("share", WAYS)
def test_arrays_read_after_they_are_written_are_not_carried(share: Share, read: int, carried: bool) -> None:
    x, *outputs = chain(4)
    leaf = nn.Variable((2, 3))
    share(leaf, outputs[2])
    shared = shared_memory([x, leaf], outputs, [0, read])
    assert shared.find() == ([outputs[2]], [leaf] if carried else [])


def test_memory_that_is_written_once_more_is_carried() -> None:
    """Perhaps the first function writes another part of it."""
    _, *outputs = chain(4)
    leaf = nn.Variable((2, 3))
    leaf.data = outputs[1].data = outputs[3].data
    shared = shared_memory([leaf], outputs, [2])
    assert shared.find() == ([outputs[1], outputs[3]], [leaf])


def test_one_of_two_leaves_that_share_memory_may_be_read_before() -> None:
    _, *outputs = chain(4)
    early, late, other = (nn.Variable((2, 3)) for _ in range(3))
    early.data = late.data = outputs[1].data
    other.data = outputs[2].data
    shared = shared_memory([late, early, other], outputs, [3, 0, 3])
    assert shared.find() == (outputs[1:3], [late, early])


def test_leaves_that_share_memory_with_each_other_alone_are_not_found() -> None:
    x, *outputs = chain(3)
    other = nn.Variable((2, 3))
    other.data = x.data
    shared = shared_memory([x, other], outputs)
    assert shared.find() == shared.find() == ([], [])


class Counted:
    """A Variable that counts what it is asked for."""

    asked = 0

    def __init__(self, variable: nn.Variable) -> None:
        self._variable = variable

    def __getattr__(self, name: str) -> Any:
        Counted.asked += 1
        return getattr(self._variable, name)


def asked(functions: int, arrange: Callable[[List[Any], List[Any]], Any], looks: int) -> int:
    """How often leaves and outputs, one per function, are asked in the last of several looks."""
    leaves, outputs = ([nn.Variable((2,)) for _ in range(functions)] for _ in range(2))
    kept = arrange(leaves, outputs)
    shared = shared_memory([*map(Counted, leaves)], [*map(Counted, outputs)], range(functions))
    for _ in range(looks):
        Counted.asked = 0
        shared.find()
    del kept
    return Counted.asked


def share_all(leaves: List[Any], outputs: List[Any]) -> None:
    for leaf, output in zip(leaves, outputs):
        leaf.data = output.data


ARRANGEMENTS = [
    lambda leaves, outputs: [outputs[0].get_unlinked_variable() for _ in range(20)],
    lambda leaves, outputs: share_all(leaves[:1], outputs[-1:]),
    lambda leaves, outputs: share_all(leaves, outputs[:1] * len(leaves)),
    share_all,
]


@pytest.mark.parametrize("looks", [1, 5])
@pytest.mark.parametrize("arrange", ARRANGEMENTS)
def test_the_request_of_a_look_grows_with_the_graph(arrange: Any, looks: int) -> None:
    few, many = (asked(functions, arrange, looks) for functions in (20, 200))
    assert many <= 11 * few
    # As a rule each is asked once.
    assert arrange is not ARRANGEMENTS[0] or looks == 1 or few == 40


def test_nothing_is_read_or_allocated_to_find_out() -> None:
    x, *outputs = chain(3)
    outputs[-1].forward(clear_buffer=True)
    shared = shared_memory([x], outputs)
    shared.find()
    x.data = outputs[1].data
    x.data.zero()
    outputs[0].data.clear()
    assert shared.find() == ([outputs[1]], [x])
    assert x.data.zeroing
    assert outputs[0].data.clear_called


@pytest.mark.parametrize("allocations", range(1, 40))
def test_a_garbage_collection_in_the_middle_of_it_hides_nothing(allocations: int) -> None:
    x, *outputs = chain(4)
    leaf = nn.Variable((2, 3))
    leaf.data = outputs[2].data
    shared, thresholds = shared_memory([x, leaf], outputs), gc.get_threshold()
    gc.collect()
    # As an exception leaves behind it: variables in a cycle, which only the collector drops.
    garbage: List[Any] = [outputs[2].get_unlinked_variable(), x.get_unlinked_variable()]
    garbage.append(garbage)
    del garbage
    gc.set_threshold(allocations + gc.get_count()[0])
    try:
        assert shared.find() == ([outputs[2]], [leaf])
    finally:
        gc.set_threshold(*thresholds)
