# SPDX-License-Identifier: Apache-2.0
"""Leaves show how large the gradients of their components are: from lists that passes share."""

from __future__ import annotations

import math
from typing import Any, Dict, FrozenSet, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScaling
from nnabla_adaloss.engine.leaf_gradients import Contribution, WrittenLeaves, places_of_contributions
from nnabla_adaloss.engine.passes import hookless
from tests.worlds.networks import layers
from tests.worlds.passes import run, settle
from tests.worlds.tampering import Sometimes


def entry(leaf: int, function: int, scale: float = 2.0, *, alone: bool = True) -> Contribution:
    v = nn.Variable((2,), need_grad=True)
    return Contribution(leaf, function, v, scale, half=False, own_references=False, exact=True, alone=alone)


def test_contributions_to_a_leaf_are_reported_singly_or_as_a_sum_for_the_first() -> None:
    def told(*written: Contribution) -> List[Any]:
        return [(one.leaf, one.function, place) for one, place in places_of_contributions(written)]

    first = entry(0, 7), entry(1, 6)
    assert told(*first, entry(0, 5, 8.0)) == [(0, 7, 0), (1, 6, 1), (0, 5, 2)]
    # With another scale a sum counts for who has added: the first component's scale says nothing about it.
    assert told(*first, entry(0, 5, 8.0, alone=False)) == [(0, 7, 0), (1, 6, 1), (0, 5, 2)]
    assert told(*first, entry(0, 5, alone=False)) == [(0, 7, 2), (1, 6, 1)]
    # What an earlier batch has left in a gradient is not told apart either, and is no matter of this one.
    assert told(*[entry(0, 7, alone=False)] * 2) == []


def written_by(scaling: AdaptiveLossScaling, leaves: FrozenSet[int]) -> WrittenLeaves:
    """A contribution to each of some leaves."""
    plan = scaling.plan
    return WrittenLeaves(
        [entry(leaf, node.number) for node in plan.nodes for leaf in node.leaves if leaf in leaves],
        plan,
        plan.components(by_layer=True),
    )


def test_a_component_has_the_largest_finite_magnitude_of_the_leaves_that_count() -> None:
    scaling = AdaptiveLossScaling(F.mean(layers(2, 3, 4) ** 2))
    everything = frozenset(scaling.plan.leaves)
    written = written_by(scaling, everything)
    of = [written.component(one.leaf, one.function) for one in written.contributions]
    assert sorted(of) == sorted([*set(of)] * 2)
    random = np.random.default_rng(0)
    for leaves in (everything, frozenset(sorted(everything)[::2]), everything, frozenset()):
        for _ in range(5):
            largest = random.random(6).tolist()
            largest[random.integers(6)] = math.inf
            expected: Dict[int, float] = {}
            for one, component, amax in zip(written.contributions, of, largest):
                if one.leaf in leaves and amax < math.inf:
                    expected[component] = max(amax, expected.get(component, 0.0))
            assert written.amax_of_components(largest, leaves) == expected


def test_passes_that_write_the_same_leaves_share_them_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: List[WrittenLeaves] = []
    end = hookless.HooklessPass.end
    monkeypatch.setattr(hookless.HooklessPass, "end", lambda self: taken.append(end(self)) or taken[-1])
    function = Sometimes()
    function.writes = True
    h = F.mean(layers(5, 2) ** 2)
    scaling = AdaptiveLossScaling(h + F.mean(function(PF.get_parameter_or_create("w", (3,)))))
    settle(scaling)
    for _ in range(3):
        run(scaling)
    first, *others = taken[-3:]
    assert all(one is first for one in others)
    function.writes = False
    run(scaling)
    assert taken[-1] is not first
    assert len(taken[-1].contributions) == len(first.contributions) - 1 == 4
