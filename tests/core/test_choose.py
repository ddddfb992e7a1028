# SPDX-License-Identifier: Apache-2.0
"""Scales are chosen from numbers alone, one for each component."""

from __future__ import annotations

import math
from typing import AbstractSet, Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import hypothesis.strategies as st
import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest
from hypothesis import given, settings

from nnabla_adaloss.core.choose import Choice, ScaleLimits, Start, _equalize, choose, choose_merged
from nnabla_adaloss.core.components import Components, MergedComponents, merge_components
from nnabla_adaloss.core.layer_alpha import AlphaBounds
from nnabla_adaloss.core.layer_record import Reason
from nnabla_adaloss.core.power_of_two import is_power_of_two, within_float32
from tests.worlds import random_structures as graphs
from tests.worlds.random_structures import Drawn, structures

pytestmark = pytest.mark.any_context

S0, SPAN = 8.0, 2.0**14
FAR = 2.0**20


class Graph(graphs.Graph):
    """A graph that never runs, and what is known of its components; those that are not named are unknown."""

    def by_index(self, known: Mapping[nn.Variable, Any], other: Any) -> List[Any]:
        own = {self.index(v): value for v, value in known.items()}
        return [own.get(index, other) for index in range(len(self.components.names))]

    def weight(self, layer: str) -> int:
        return self.structure.layer_inputs[layer][1].weight

    def known(
        self,
        room: Mapping[nn.Variable, float],
        *,
        weights: Mapping[nn.Variable, float] = {},
        unit_amaxes: Mapping[nn.Variable, float] = {},
        assumed: Mapping[nn.Variable, float] = {},
        underflowed: Sequence[nn.Variable] = (),
        equalize: bool = False,
    ) -> ScaleLimits:
        return ScaleLimits(
            self.by_index(room, None),
            {self.index(v): own for v, own in assumed.items()},
            tuple(self.by_index(weights, 1.0)),
            self.by_index(unit_amaxes, None),
            {*map(self.index, underflowed)},
            equalize,
        )

    def choose(
        self,
        room: Mapping[nn.Variable, float],
        start: float = S0,
        *,
        method_alpha: Any = None,
        bounds: Mapping[str, Sequence[float]] = {},
        spare: float = 1.0,
        given: Optional[float] = None,
        power_of_two: bool = True,
        **known: Any,
    ) -> Choice:
        limits, begin = self.known(room, **known), Start(start, S0, SPAN, power_of_two)
        limits = limits._replace(
            bounds={self.weight(layer): AlphaBounds(*own) for layer, own in bounds.items()},
            floors={i: own / spare for i, own in enumerate(limits.limits) if own is not None},
        )
        if given is not None:
            limits, begin = limits.with_s0(self.components, given), Start(given, given, SPAN)
        found = choose(self.components, limits, begin, method_alpha)
        self.scales = found.scales
        return found

    def together(
        self, room: Mapping[nn.Variable, float], spread: float = FAR, **known: Any
    ) -> Optional[Choice]:
        """The scales with which what only hooks could part shares one; None: each needs one of its own."""
        own = self.known(room, unit_amaxes=dict.fromkeys(room, 1.0), **known)
        found = together(self.components, self.structure.merged, own, Start(S0, S0, SPAN), spread)
        self.scales = [] if found is None else found.scales
        return found

    def of(self, *variables: nn.Variable) -> List[float]:
        return [self.scales[self.index(v)] for v in variables]


def together(
    apart: Components, merged: MergedComponents, known: ScaleLimits, start: Start, spread: float
) -> Optional[Choice]:
    def choice_of(components: Components, own: ScaleLimits) -> Choice:
        return choose(components, own, start, None)

    return choose_merged(apart, merged, known, choice_of, spread)


def affine(x: nn.Variable, name: str, width: int = 5) -> nn.Variable:
    return PF.affine(x, width, name=name)


class Chain(Graph):
    """A mean, and three layers behind it."""

    def __init__(self) -> None:
        self.a = F.tanh(affine(nn.Variable((4, 3)), "a"))
        self.b = F.tanh(affine(self.a, "b"))
        self.c = affine(self.b, "c")
        self.loss = F.mean(self.c)
        super().__init__(self.loss)


def says(alpha: float, reason: Reason = Reason.METHOD) -> Any:
    return lambda layer, scale, base: (alpha, reason)


@pytest.mark.parametrize(
    ("weight", "unit_amax", "scale"),
    [(1.0, None, S0), (2.0**-20, None, S0 * 2.0**20), (4.0, 2.0**-9, S0 * 2.0**7), (1.0, 3.0, S0 / 4.0)],
)
def test_unmeasured_components_at_the_loss_start_from_their_loss_weight(
    weight: float, unit_amax: Any, scale: float
) -> None:
    n = Chain()
    weights = dict.fromkeys((n.c, n.b, n.a), weight)
    unit_amaxes = {} if unit_amax is None else {n.loss: unit_amax}
    n.choose({}, weights=weights, unit_amaxes=unit_amaxes)
    # Behind a layer with what arrives.
    assert n.of(n.loss, n.c, n.b, n.a) == [S0, scale, scale, scale]
    n.choose({}, weights=weights, unit_amaxes=unit_amaxes, assumed={n.c: 2.0**-30, n.a: 2.0**-40})
    assert n.of(n.c, n.b, n.a) == [2.0**-30, 2.0**-30, 2.0**-40]


def test_zeros_at_the_loss_are_measured_again_with_a_far_larger_scale() -> None:
    n = Chain()
    n.choose({}, unit_amaxes={n.loss: 1.0, n.c: 0.0, n.b: 0.0}, underflowed=[n.c, n.b, n.a])
    assert n.of(n.loss, n.c, n.b, n.a) == [S0, *[S0 * SPAN] * 3]
    # What lies behind a layer starts with what arrives, however underflowed it was.
    n.choose({n.c: 2.0**10}, underflowed=[n.b, n.a])
    assert n.of(n.c, n.b, n.a) == [2.0**10] * 3
    # A loss of several elements is weighed as any other.
    known = ScaleLimits([None] * 2, {}, (2.0**-3, 1.0), [0.0] * 2)
    assert known.root_scale(S0, SPAN) == S0 * 2.0**3
    assert known._replace(underflowed={0}).root_scale(S0, SPAN) == S0 * 2.0**3 * SPAN
    assert known._replace(limits=[2.0, None]).root_scale(S0, SPAN) == 2.0
    assert known._replace(underflowed={0}, provisional={0: 0.5}).root_scale(S0, SPAN) == 0.5


def test_a_start_scale_must_have_a_reciprocal_in_float32() -> None:
    n = Chain()
    for exponent in (-120, 120):
        n.choose({}, weights=dict.fromkeys((n.c, n.b, n.a), 2.0**exponent))
        assert n.of(n.c, n.a) == [2.0 ** math.copysign(100, -exponent)] * 2


def test_components_at_most_two_bits_apart_share_a_scale() -> None:
    n = Chain()
    room = {n.c: 2.0**20, n.b: 2.0**19, n.a: 2.0**18}
    found = n.choose(room, 2.0**18, equalize=True)
    # What is multiplied at a single element costs nothing: the loss takes no part.
    assert n.of(n.loss, n.c, n.b, n.a) == [2.0**18] * 4
    assert found.reasons == {"c/affine": Reason.EQUALIZED, "b/affine": Reason.SCALE_LIMIT}
    n.choose({**room, n.b: 2.0**23}, 2.0**18, equalize=True)
    assert n.of(n.c, n.b, n.a) == [2.0**20, 2.0**23, 2.0**18]
    y = affine(nn.Variable((4, 3)), "a")
    total = F.mean(y)
    graph = Graph(total * 0.5)
    graph.choose({total: 2.0**19, y: 2.0**20}, equalize=True)
    assert graph.of(total, y) == [2.0**19, 2.0**20]


@given(st.lists(st.integers(-24, 100)) | st.lists(st.integers(0, 8)))
def test_equalized_scales_are_at_most_two_bits_smaller_and_seldom_change(exponents: List[int]) -> None:
    scales, components = [2.0**e for e in exponents], Components({}, [], frozenset(), {}, [], frozenset())
    found = [one for one in _equalize(components, ScaleLimits(scales, {}, (), [])) if one is not None]
    assert len(found) == len(scales)
    assert all(scale / 4.0 <= one <= scale for one, scale in zip(found, scales))
    # From each change on, what follows could not have gone on with one scale.
    start = 0
    for index in range(1, len(found)):
        if found[index] != found[index - 1]:
            run = scales[start : index + 1]
            assert max(run) > 4.0 * min(run)
            start = index


@pytest.mark.parametrize(
    ("alpha", "scales", "reason"),
    [
        (16.0, [2.0**14, 2.0**18], Reason.METHOD),
        (0.25, [2.0**8, 2.0**6], Reason.METHOD),
        (1000.0, [2.0**19, 2.0**18], Reason.METHOD),
        (2.0**20, [2.0**20, 2.0**18], Reason.SCALE_LIMIT),
    ],
)
def test_a_method_is_followed_within_limits(alpha: float, scales: List[float], reason: Reason) -> None:
    n = Chain()
    found = n.choose({n.c: 2.0**10, n.b: 2.0**20, n.a: 2.0**18}, method_alpha=says(alpha))
    assert n.of(n.c, n.b, n.a) == [2.0**10, *scales]
    assert found.reasons["c/affine"] == reason


def test_scales_that_need_not_be_powers_of_two() -> None:
    n = Chain()
    n.choose({n.c: 2.0**10, n.b: 2.0**20}, method_alpha=says(3.0), power_of_two=False)
    assert n.of(n.c, n.b, n.a) == [2.0**10, 3.0 * 2.0**10, 9.0 * 2.0**10]


def test_a_method_decides_where_nothing_is_known() -> None:
    n = Chain()
    assert n.choose({}, method_alpha=says(4.0, Reason.UNKNOWN)).reasons["b/affine"] == Reason.UNKNOWN
    assert n.of(n.c, n.b, n.a) == [S0, 4.0 * S0, 16.0 * S0]


def test_methods_do_not_count_the_compensation_of_a_small_loss() -> None:
    n, heard = Chain(), []

    def method_alpha(layer: str, scale: float, base: float) -> Tuple[float, Reason]:
        heard.append((layer, scale, base))
        return 4.0, Reason.METHOD

    descendants = {n.b: 2.0**40, n.a: 2.0**40}
    n.choose({n.c: 2.0**30, **descendants}, 2.0**14, method_alpha=method_alpha)
    # A loss gradient of 2^14 and a mean are lifted by 2^27 beyond S0; what layers add is left.
    assert heard == [("c/affine", 2.0**30, S0), ("b/affine", 2.0**32, 4.0 * S0)]
    heard.clear()
    # What was lifted and lowered again counts for nothing; what was only lowered counts as it is.
    n.choose({n.c: 2.0, **descendants}, 2.0**14, method_alpha=method_alpha)
    assert heard == [("c/affine", 2.0, 2.0), ("b/affine", 8.0, 8.0)]


def skip() -> Tuple[Graph, nn.Variable, nn.Variable, nn.Variable, nn.Variable]:
    """Two layers beside a shortcut, and one before."""
    stem = F.tanh(affine(nn.Variable((4, 3)), "stem"))
    inner = F.tanh(affine(stem, "inner"))
    merged = stem + affine(inner, "outer")
    last = affine(F.tanh(merged), "last")
    return Graph(F.mean(last)), last, merged, inner, stem


def test_along_a_shortcut_there_is_one_scale() -> None:
    graph, last, merged, inner, stem = skip()
    found = graph.choose({last: 2.0**10, merged: 2.0**14, inner: 2.0**20})
    assert graph.of(last, merged, inner, stem) == [2.0**10, 2.0**14, 2.0**20, 2.0**14]
    assert set(found.reasons.values()) == {Reason.SCALE_LIMIT}
    # Its second layer would have it otherwise.
    found = graph.choose({last: 2.0**10}, method_alpha=says(4.0))
    assert graph.of(last, merged, inner, stem) == [2.0**10, 2.0**12, 2.0**14, 2.0**12]
    reasons = [found.reasons[f"{name}/affine"] for name in ("last", "outer", "inner")]
    assert reasons == [Reason.METHOD, Reason.METHOD, Reason.BRANCHES]


def test_scaled_copies_of_weights_stay_in_range_and_descendants_go_down_with_them() -> None:
    n = Chain()
    room = {n.c: 2.0**10, n.b: 2.0**20, n.a: 2.0**24}
    found = n.choose(room, bounds={"c/affine": (4.0,), "b/affine": (2.0**6,)})
    assert n.of(n.c, n.b, n.a) == [2.0**10, 2.0**12, 2.0**18]
    assert found.reasons == dict.fromkeys(["c/affine", "b/affine"], Reason.WEIGHT_RANGE)
    # Also where another way has brought the scale.
    graph, last, merged, inner, stem = skip()
    found = graph.choose({last: 2.0**10, merged: 2.0**20, inner: 2.0**10}, bounds={"inner/affine": (2.0,)})
    assert graph.of(last, merged, inner, stem) == [2.0**10, 2.0**11, 2.0**10, 2.0**11]
    assert found.reasons["inner/affine"] == Reason.WEIGHT_RANGE


def test_a_weight_that_lowers_a_shortcut_lowers_its_predecessors_too() -> None:
    stem = F.tanh(affine(nn.Variable((4, 3)), "stem"))
    first = F.tanh(affine(stem, "first in"))
    between = stem + affine(first, "first out")
    second = F.tanh(affine(between, "second in"))
    merged = between + affine(second, "second out")
    last = affine(F.tanh(merged), "last")
    graph = Graph(F.mean(last))
    room = {last: 2.0**20, merged: 2.0**20, second: 2.0**22, first: 2.0**10}
    graph.choose(room, bounds={"second out/affine": (4.0,), "first in/affine": (1.0,)})
    assert graph.of(merged, second, first, stem) == [2.0**10, 2.0**12, 2.0**10, 2.0**10]


# The scaled copy of a weight keeps its bits.


FULL = 2.0**10, 2.0**-4, 2.0**-14  # the largest alpha, one that leaves all bits, and one that leaves a few


def test_the_scale_goes_down_before_a_weight_that_would_lose_its_bits() -> None:
    n = Chain()
    room = {n.c: 2.0**10, n.b: 2.0**20, n.a: 2.0**10}
    n.choose(room, bounds={"b/affine": FULL}, spare=2.0**12)
    assert n.of(n.loss, n.c, n.b, n.a) == [S0, 2.0**10, 2.0**14, 2.0**10]
    # As far as there is something to spare.
    n.choose(room, bounds={"b/affine": FULL}, spare=4.0)
    assert n.of(n.c, n.b, n.a) == [2.0**10, 2.0**18, 2.0**10]
    # A scale that something else has lowered has no more than that.
    n.choose(room, bounds={"b/affine": FULL}, spare=2.0**5, assumed={n.b: 2.0**17})
    assert n.of(n.c, n.b, n.a) == [2.0**10, 2.0**15, 2.0**10]
    # A single bit is enough.
    n.choose({**room, n.a: 2.0**15}, bounds={"b/affine": FULL}, spare=2.0**12)
    assert n.of(n.c, n.b, n.a) == [2.0**10, 2.0**19, 2.0**15]
    # What has all its bits stays, and so does what would have none.
    for last in (2.0**16, 2.0**-4):
        n.choose({**room, n.a: last}, bounds={"b/affine": FULL}, spare=2.0**9)
        assert n.of(n.c, n.b, n.a) == [2.0**10, 2.0**20, last]


def test_a_scale_goes_down_further_for_the_last_bits_of_a_weight() -> None:
    n = Chain()
    room = {n.c: 2.0**10, n.b: 2.0**20, n.a: 2.0**-6}
    bounds = {"b/affine": (*FULL, 2.0**8)}
    # At the floor, 2**11, the copy would keep fewer than a few bits; at 2**8 it keeps these.
    n.choose(room, bounds=bounds, spare=2.0**9)
    assert n.of(n.c, n.b, n.a) == [2.0**10, 2.0**8, 2.0**-6]
    # Not even that helps: nothing is lowered.
    n.choose({**room, n.a: 2.0**-12}, bounds=bounds, spare=2.0**9)
    assert n.of(n.c, n.b, n.a) == [2.0**10, 2.0**20, 2.0**-12]


def test_lowered_components_may_have_to_lower_their_predecessors() -> None:
    n = Chain()
    room = {n.c: 2.0**18, n.b: 2.0**20, n.a: 2.0**6}
    n.choose(room, bounds=dict.fromkeys(["c/affine", "b/affine"], FULL), spare=2.0**12)
    assert n.of(n.c, n.b, n.a) == [2.0**14, 2.0**10, 2.0**6]
    # The weights of other layers behind it stay in range.
    trunks = [F.tanh(affine(nn.Variable((4, 3)), name)) for name in "de"]
    top = affine(trunks[0], "f") + affine(trunks[1], "g")
    graph = Graph(F.mean(top))
    room = {top: 2.0**20, trunks[0]: 2.0**10, trunks[1]: 2.0**21}
    graph.choose(room, bounds={"f/affine": FULL, "g/affine": (2.0**3,)}, spare=2.0**12)
    assert graph.of(top, *trunks) == [2.0**18, 2.0**10, 2.0**21]


def test_neither_the_loss_nor_a_given_s0_goes_down_for_a_weight() -> None:
    x = F.tanh(affine(nn.Variable((4, 3)), "a"))
    y = affine(x, "b")
    n = Graph(y)
    # Also a loss of several elements, which is measured as anything else.
    for room in ({x: 2.0**4}, {x: 2.0**4, y: 2.0**20}):
        n.choose(room, 2.0**20, bounds={"b/affine": FULL}, spare=2.0**12)
        assert n.of(y, x) == [2.0**20, 2.0**4]
    c = Chain()
    room = {c.c: 2.0**20, c.b: 2.0**4, c.a: 2.0**4}
    c.choose(room, bounds={"c/affine": FULL}, spare=2.0**12)
    assert c.of(c.c, c.b) == [2.0**8, 2.0**4]
    c.choose(room, given=2.0**20, bounds={"c/affine": FULL}, spare=2.0**12)
    assert c.of(c.c, c.b) == [2.0**20, 2.0**4]


# Losses that are absent from a batch.


class Heads(Graph):
    """A trunk of two layers, and two heads, of which the first is the first in backward order, too."""

    def __init__(self) -> None:
        self.bottom = F.tanh(affine(nn.Variable((4, 3)), "bottom"))
        self.trunk = F.tanh(affine(self.bottom, "trunk"))
        self.tops = [affine(self.trunk, name) for name in ("first", "second")]
        self.means = [F.mean(top) for top in self.tops]
        self.loss = self.means[0] * 0.5 + self.means[1] * 2.0
        super().__init__(self.loss)

    def without(self, absent: int) -> Dict[nn.Variable, float]:
        return {self.tops[absent]: 0.0, self.means[absent]: 0.0}


@pytest.mark.parametrize("absent", [0, 1])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("start", [S0, 2.0**20])
def test_an_inactive_head_decides_nothing_for_the_other(start: float, absent: int, known: bool) -> None:
    n = Heads()
    other = n.tops[1 - absent]
    room = {other: 2.0**10, n.tops[absent]: 2.0**-10}
    descendants = {n.trunk: 2.0**12, n.bottom: 2.0**9} if known else {}
    assumed = {n.tops[absent]: 2.0**-20}
    found = n.choose({**room, **descendants}, start, weights=n.without(absent), assumed=assumed)
    trunk, bottom = (2.0**12, 2.0**9) if known else (2.0**10, 2.0**10)
    # An absent one takes what is behind it, so that its layer has an alpha of 1, and copies no weight.
    assert n.of(other, n.trunk, n.bottom, n.tops[absent]) == [2.0**10, trunk, bottom, trunk]
    assert found.reasons.keys() == {f"{('second', 'first')[absent]}/affine", "trunk/affine"}


def test_a_way_from_a_single_element_of_which_nothing_is_known_brings_no_gradients() -> None:
    """A scalar that is zero is absent from the batch, whatever its loss weight says."""
    n = Heads()
    n.choose({n.tops[1]: 2.0**20}, unit_amaxes={n.loss: 1.0})
    assert n.of(*n.tops, n.trunk) == [S0, 2.0**20, 2.0**20]
    n.choose({n.means[0]: 2.0**10, n.tops[1]: 2.0**20}, unit_amaxes={n.loss: 1.0})
    assert n.of(*n.tops, n.trunk) == [S0, 2.0**20, S0]


def test_descendants_of_a_trunk_wait_for_the_active_head() -> None:
    """Backward comes to what is behind the trunk between the heads: first to the absent one."""
    descendants = F.tanh(F.tanh(F.tanh(affine(nn.Variable((4, 3)), "behind"))))
    trunk = affine(nn.Variable((4, 3)), "trunk")
    heads = [affine(trunk + affine(descendants, "joins"), "absent"), affine(trunk, "present")]
    means = [F.mean(head) for head in heads]
    n = Graph(means[0] * 0.5 + means[1] * 2.0)
    ways = [edge.layer for edge in n.components.edges if edge.layer is not None]
    assert ways == ["absent/affine", "joins/affine", "present/affine"]
    n.choose({heads[1]: 2.0**10, trunk: 2.0**12}, weights={heads[0]: 0.0, means[0]: 0.0})
    assert n.of(heads[1], trunk, descendants, heads[0]) == [2.0**10, 2.0**12, 2.0**12, 2.0**12]


@pytest.mark.parametrize("small", [0, 1])
def test_an_unmeasured_component_after_a_layer_starts_lower_if_another_edge_brings_more(small: int) -> None:
    n = Heads()
    weights = {**dict.fromkeys((n.trunk, n.bottom), 1.0), n.tops[small]: 2.0**-10}
    n.choose({n.tops[0]: 2.0**20, n.tops[1]: 2.0**20}, weights=weights)
    # The first way counts, and what arrives on the other one is 2**10 times larger, or smaller.
    arrives = 2.0**10 if small == 0 else 2.0**20
    assert n.of(n.trunk, n.bottom) == [arrives] * 2


@pytest.mark.parametrize("small", [0, 1])
def test_unmeasured_components_after_layers_follow_the_largest_predecessors(small: int) -> None:
    """A loss weight that cannot be read counts as 1, and its head has shown that it is smaller."""
    n = Heads()
    weights = {**dict.fromkeys((n.trunk, n.bottom), 1.0), n.tops[small]: 2.0**-40}
    unit_amaxes = {n.tops[small]: 1.0, n.tops[1 - small]: 2.0**-44}
    n.choose({n.tops[small]: 2.0**50, n.tops[1 - small]: 2.0**54}, weights=weights, unit_amaxes=unit_amaxes)
    assert n.of(n.trunk, n.bottom) == [2.0**50] * 2


def test_a_branch_that_has_underflowed_does_not_lower_the_trunk_that_it_ends_in() -> None:
    """In backward it comes after the trunk, whose gradient it adds to: a cycle of zeros."""
    trunk = affine(nn.Variable((4, 3)), "a")
    gated = F.tanh(affine(trunk, "b")) * F.sigmoid(affine(trunk, "c"))
    y = affine(trunk + affine(gated, "d"), "e", 1)
    n = Graph(F.mean(y))
    n.choose({y: 2.0**23}, unit_amaxes={y: 2.0**-10, trunk: 0.0, gated: 0.0})
    assert n.of(y, trunk, gated) == [2.0**23] * 3


def test_an_unmeasured_component_after_a_layer_at_the_loss_starts_from_the_loss() -> None:
    x = F.tanh(affine(nn.Variable((1, 3)), "a"))
    n = Graph(affine(x, "single", 1))
    n.choose({}, 2.0**14, unit_amaxes={n.graph.variables[n.structure.roots[0]]: 4.0}, weights={x: 2.0**-3})
    assert n.of(x) == [S0 * 2.0]


@pytest.mark.parametrize("absent", [0, 1])
def test_a_weight_behind_an_absent_loss_limits_nothing(absent: int) -> None:
    n = Heads()
    names = "first/affine", "second/affine"
    room = dict.fromkeys(n.tops, 2.0**10)
    n.choose({**room, n.trunk: 2.0**16}, weights=n.without(absent), bounds={names[absent]: (1.0,)})
    assert n.of(n.trunk) == [2.0**16]
    n.choose({**room, n.trunk: 2.0**16}, weights=n.without(absent), bounds={names[1 - absent]: (1.0,)})
    assert n.of(n.trunk) == [2.0**10]


def test_every_layer_has_an_alpha_of_1_if_all_components_are_inactive() -> None:
    n = Chain()
    absent = dict.fromkeys((n.c, n.b, n.a), 0.0)
    n.choose({n.c: 2.0**20, n.b: 2.0**4, n.a: 2.0**7}, weights=absent, bounds={"c/affine": (1.0,)})
    assert n.of(n.c, n.b) == n.of(n.a) * 2


@pytest.mark.parametrize("scales", [(2.0**8, 2.0**12), (2.0**12, 2.0**8)])
def test_an_absent_loss_takes_the_largest_scale_of_several_trunks(scales: Tuple[float, float]) -> None:
    trunks = [F.tanh(affine(nn.Variable((4, 3)), name)) for name in "ab"]
    absent = affine(trunks[0], "c") + affine(trunks[1], "d")
    present = [affine(trunk, name) for trunk, name in zip(trunks, "ef")]
    mean = F.mean(absent)
    n = Graph(mean * 0.5 + F.mean(present[0] + present[1]))
    n.choose(dict(zip(trunks, scales)), weights={absent: 0.0, mean: 0.0})
    assert n.of(absent, *trunks) == [2.0**12, *scales]


def test_absent_losses_take_the_scale_behind_them_whatever_backward_visits_first() -> None:
    deep = affine(nn.Variable((4, 3)), "deep")
    for _ in range(4):
        deep = F.tanh(deep)
    shallow = affine(nn.Variable((4, 3)), "shallow")
    both = affine(deep, "both") + shallow
    heads = [affine(both, "first"), affine(shallow, "late"), affine(deep, "present")]
    means = [F.mean(head) for head in heads]
    n = Graph(means[0] * 0.5 + means[1] * 2.0 + means[2])
    absent = dict.fromkeys((both, *heads[:2], *means[:2]), 0.0)
    n.choose({heads[2]: 2.0**10, deep: 2.0**12}, weights=absent)
    assert n.of(*heads[:2], both) == [2.0**12] * 3


# A given S0.


def test_a_given_s0_limits_scales_at_the_loss_and_none_behind_a_layer() -> None:
    n = Chain()
    n.choose({n.loss: 2.0**14, n.c: 2.0**10, n.b: 2.0**9}, given=S0)
    assert n.of(n.loss, n.c, n.b, n.a) == [S0, S0, 2.0**9, 2.0**9]
    # Less is left by what was measured, and after an overflow.
    n.choose({n.c: 2.0, n.b: 2.0**9}, given=S0)
    assert n.of(n.loss, n.c, n.b) == [S0, 2.0, 2.0**9]
    n.choose({n.c: 2.0**10, n.b: 2.0**9}, given=S0, assumed={n.c: 2.0**-3})
    assert n.of(n.loss, n.c, n.b) == [S0, 2.0**-3, 2.0**9]
    # A method goes on from there.
    n.choose({n.c: 2.0**10, n.b: 2.0**9}, given=S0, method_alpha=says(0.5))
    assert n.of(n.loss, n.c, n.b, n.a) == [S0, S0, 0.5 * S0, 0.25 * S0]


@pytest.mark.parametrize("weight", [2.0**-20, 2.0**-4, 1.0, 2.0**6])
@pytest.mark.parametrize("method_alpha", [None, says(2.0)])
def test_no_scale_at_the_loss_times_its_loss_weight_exceeds_a_given_s0(
    weight: float, method_alpha: Any
) -> None:
    y = affine(nn.Variable((4, 3)), "a")
    total = F.sum(y)
    graph = Graph(total * weight)
    weights = {total: weight, y: weight}
    graph.choose({}, given=S0, weights=weights, method_alpha=method_alpha)
    assert graph.of(total, y) == [S0 / weight] * 2
    graph.choose({y: 2.0**-7}, given=S0, weights=weights, method_alpha=method_alpha)
    assert graph.of(total, y) == [S0 / weight, 2.0**-7]


def test_each_of_several_losses_has_the_limit_of_its_own_weight() -> None:
    x = affine(nn.Variable((4, 3)), "stem")
    small, large = affine(F.tanh(x), "small"), affine(F.sigmoid(x), "large")
    one, other = F.sum(small), F.sum(large)
    graph = Graph(one * 2.0**-20 + other)
    known = {small: 2.0**34, large: 2.0**14, x: 2.0**14}
    graph.choose(known, given=2.0**10, weights={one: 2.0**-20, small: 2.0**-20})
    assert graph.of(small, large, x) == [2.0**30, 2.0**10, 2.0**14]


# What holds for any graph and whatever is known.


class Case(NamedTuple):
    """A graph, and what is known of it."""

    drawn: Drawn
    components: Components
    known: ScaleLimits
    start: Start
    alphas: Optional[Dict[str, float]]

    def choose(self, **changes: Any) -> Choice:
        case = self._replace(**changes)
        said = case.alphas
        method_alpha = None if said is None else lambda layer, *_: (said[layer], Reason.METHOD)
        return choose(case.components, case.known, case.start, method_alpha)

    @property
    def present(self) -> Set[int]:
        """The components that get a gradient."""
        return {index for index, weight in enumerate(self.known.loss_weights) if weight}

    @property
    def decided_by_room(self) -> List[int]:
        """The components that neither the start nor a given S0 decides about."""
        return sorted(self.present - {self.components.root})


powers = st.integers(-20, 40).map(lambda e: 2.0**e)
spares = st.integers(0, 16).map(lambda e: 2.0**e)
alpha_bounds = st.tuples(st.integers(0, 12), st.integers(-30, 0), st.integers(0, 20), st.integers(0, 9)).map(
    lambda e: AlphaBounds(2.0 ** e[0], 2.0 ** e[1], 2.0 ** (e[1] - e[2]), 2.0 ** e[3])
)


def reached(components: Components, absent: AbstractSet[int]) -> Set[int]:
    """The components that get a gradient where single elements at the loss take that of some away."""
    ways = [edge for edge in components.edges if edge.layer is not None or edge.successor not in absent]
    found = {components.root}
    for _ in ways:
        found.update(edge.successor for edge in ways if edge.predecessor in found)
    return found


@st.composite
def cases(draw: Any) -> Case:
    drawn = draw(structures())
    components = drawn.components()
    count = len(components.names)

    def for_each(one: Any) -> List[Any]:
        return draw(st.lists(one, min_size=count, max_size=count))

    absent = frozenset(draw(st.sets(st.integers(1, count)), label="absent"))
    present = reached(components, absent)
    weights = tuple(weight if index in present else 0.0 for index, weight in enumerate(for_each(powers)))
    limits, ceilings = for_each(st.none() | powers), for_each(st.none() | powers)
    assumed = {index: own for index, own in enumerate(ceilings) if own is not None}
    unit_amaxes = for_each(st.none() | st.just(0.0) | st.floats(2.0**-20, 2.0**20))
    underflowed, equalize = draw(st.sets(st.integers(0, count - 1))), draw(st.booleans())
    known = ScaleLimits(limits, assumed, weights, unit_amaxes, underflowed, equalize)
    scale = draw(powers)
    start = Start(scale, draw(powers), SPAN)
    given = draw(st.booleans())
    if given:
        known, start = known.with_s0(components, scale), Start(scale, scale, SPAN)
    layers = [slot for node in drawn.nodes for slot in node.layer_inputs]
    wanted = st.floats(2.0**-4, 2.0**12)
    alphas = draw(st.none() | st.fixed_dictionaries({slot.layer: wanted for slot in layers}))
    bounds = {slot.weight: draw(alpha_bounds) for slot in layers if draw(st.booleans())}
    held = components.at_loss if given else {}
    lowerable = [(i, own) for i, own in enumerate(known.limits) if own is not None and i not in held]
    floors = {i: own / draw(spares) for i, own in lowerable}
    return Case(drawn, components, known._replace(bounds=bounds, floors=floors), start, alphas)


def check_no_scale_leaves_its_room(case: Case) -> None:
    found = case.choose()
    assert found.scales[case.components.root] <= case.start.root_scale
    for index in case.decided_by_room:
        scale, room = found.scales[index], case.known.limits[index]
        assert scale <= case.known.provisional.get(index, math.inf)
        # The chosen scale is the start times a power of two, so that it may be less.
        assert room is None or scale <= room
        assert is_power_of_two(scale / case.start.root_scale)
        assert scale <= 2.0**100
    for edge in case.components.edges:
        if edge.layer is not None and edge.predecessor in case.present:
            alpha = found.scales[edge.successor] / found.scales[edge.predecessor]
            assert edge.weight not in case.known.bounds or alpha <= case.known.bounds[edge.weight].highest
            assert edge.layer in found.reasons


def check_a_scaled_weight_keeps_its_bits_where_there_is_something_to_spare(case: Case) -> None:
    known, root = case.known, case.components.root
    found, before = case.choose(), case.choose(known=known._replace(floors={}))
    edges = [e for e in case.components.edges if e.weight in known.bounds and e.predecessor in case.present]
    assert found.reasons == before.reasons
    for index in case.present:
        scale, unspared = found.scales[index], before.scales[index]
        floor = unspared if index == root else known.floors.get(index, unspared)
        further = max([e.beyond_floor for e in known.bounds.values()], default=1.0)
        assert min(floor / further, unspared) <= scale <= unspared
    for edge in edges:
        scale, after = found.scales[edge.predecessor], found.scales[edge.successor]
        own, may_be_lowered = known.bounds[edge.weight], known.floors.keys() - {root}
        if edge.predecessor in may_be_lowered and after < scale * own.least_for_bits:
            # Nothing more can be spared, or nothing would be left of the weight anyway.
            beside = [e for e in edges if e.predecessor == edge.predecessor]
            least = max(found.scales[e.successor] / known.bounds[e.weight].highest for e in beside)
            least = max(least, known.floors[edge.predecessor])
            assert scale < 2.0 * least or after < least * own.least_for_few_bits


def check_no_scale_rises_with_more_to_spare(case: Case, exponent: int) -> None:
    # Whether anything is left of a weight can change both ways.
    bounds = {f: own._replace(least_for_few_bits=0.0) for f, own in case.known.bounds.items()}
    known = case.known._replace(bounds=bounds)
    more = known._replace(floors={index: floor / 2.0**exponent for index, floor in known.floors.items()})
    found, further = case.choose(known=known).scales, case.choose(known=more).scales
    assert all(further[index] <= found[index] for index in case.present)


def check_scales_that_were_lowered_for_weights_are_chosen_again(case: Case) -> None:
    found = case.choose().scales
    known = case.known._replace(limits=found, provisional={}, equalize=False)
    start = case.start._replace(root_scale=found[0])
    again = case.choose(known=known, start=start, alphas=None).scales
    # A layer that leads back to the loss may lower S0, which components out of use follow then.
    followed = case.decided_by_room if found[0] < case.start.root_scale else range(len(found))
    assert [again[index] for index in followed] == [found[index] for index in followed]


def check_components_without_incoming_edges_have_the_scale_of_the_loss(case: Case) -> None:
    found = case.choose(known=case.known._replace(bounds={}))
    led_to = {end for edge in case.components.edges for end in (edge.successor, edge.predecessor)}
    for index, scale in enumerate(found.scales):
        assert index in led_to or scale == case.start.root_scale


def check_a_given_s0_is_a_limit_at_the_loss_and_the_smaller_of_two_counts(case: Case, exponent: int) -> None:
    s0, known = 2.0**exponent, case.known
    limits = known.with_s0(case.components, s0)
    for index, (before, after) in enumerate(zip(known.limits, limits.limits)):
        if index in case.components.at_loss & case.present:
            own = within_float32(s0 / known.loss_weights[index])
            assert after == (own if before is None else min(own, before))
        else:
            assert after == before
    assert limits.with_s0(case.components, 2.0 * s0) == limits


def check_inactive_components_take_the_largest_scale_of_their_successors(case: Case) -> None:
    scales = case.choose().scales
    for index in set(range(len(scales))) - case.present:
        descendants = [scales[edge.successor] for edge in case.components.edges if edge.predecessor == index]
        assert not descendants or scales[index] == max(descendants)


def check_remembered_amaxes_of_inactive_components_change_nothing(case: Case) -> None:
    def without(values: Sequence[Any]) -> List[Any]:
        return [value if index in case.present else None for index, value in enumerate(values)]

    # What follows each other shares a scale in the order of all.
    known = case.known._replace(equalize=False)
    assumed = {index: own for index, own in known.provisional.items() if index in case.present}
    limits, unit_amaxes = without(known.limits), without(known.unit_amaxes)
    forgotten = known._replace(limits=limits, unit_amaxes=unit_amaxes, provisional=assumed)
    assert case.choose(known=forgotten) == case.choose(known=known)


def check_loss_weights_that_grow_together_move_scales_and_leave_alphas(case: Case, power: int) -> None:
    # What underflowed is looked at with no more than the scale before it, which may be that of the loss.
    # Limits of inactive components do not move, so that others could no longer be close to them.
    limits = [limit if index in case.present else None for index, limit in enumerate(case.known.limits)]
    components, known = case.components, case.known._replace(underflowed=frozenset(), limits=limits)
    present = case.present - {components.root}
    moved = present if components.root in components.scalar_components else case.present
    by = [2.0**power if index in moved else 1.0 for index in range(len(known.loss_weights))]
    grown = known._replace(
        limits=[None if room is None else room / own for room, own in zip(known.limits, by)],
        provisional={index: assumed / by[index] for index, assumed in known.provisional.items()},
        floors={index: floor / by[index] for index, floor in known.floors.items()},
        loss_weights=tuple(weight * own for weight, own in zip(known.loss_weights, by)),
    )
    start, again = (Start(2.0**10, 8.0, SPAN),) * 2
    if components.root in moved:
        start, again = (Start(one.root_scale(8.0, SPAN), 8.0, SPAN) for one in (known, grown))
    before, after = (case.choose(known=k, start=s) for k, s in ((known, start), (grown, again)))
    assert after.reasons == before.reasons
    for index in moved:
        assert after.scales[index] == before.scales[index] / by[index]


@settings(max_examples=120)
@given(cases(), st.integers(0, 30), st.integers(-40, 40))
def test_scales_of_any_graph(case: Case, exponent: int, power: int) -> None:
    """All that is checked above: cases take longer to draw than to check."""
    check_no_scale_leaves_its_room(case)
    check_a_scaled_weight_keeps_its_bits_where_there_is_something_to_spare(case)
    check_no_scale_rises_with_more_to_spare(case, exponent)
    check_scales_that_were_lowered_for_weights_are_chosen_again(case)
    check_components_without_incoming_edges_have_the_scale_of_the_loss(case)
    check_a_given_s0_is_a_limit_at_the_loss_and_the_smaller_of_two_counts(case, power)
    check_inactive_components_take_the_largest_scale_of_their_successors(case)
    check_remembered_amaxes_of_inactive_components_change_nothing(case)
    check_loss_weights_that_grow_together_move_scales_and_leave_alphas(case, power)


# Components that only hooks could part share a scale.


class Steps(Graph):
    """Steps with one weight, from a state that a layer of its own computes, and a layer behind them."""

    def __init__(self, start: Optional[nn.Variable] = None, steps: int = 3) -> None:
        self.states = [affine(nn.Variable((4, 3)), "start") if start is None else start]
        for _ in range(steps):
            self.states.append(F.tanh(affine(self.states[-1], "cell")))
        if start is not None and not (start.need_grad or start.parent):
            del self.states[0]
        self.last = affine(self.states[-1], "last")
        super().__init__(F.mean(self.last**2))

    def shared(self, room: Mapping[nn.Variable, float], spread: float = FAR, **known: Any) -> Any:
        """The scales of the states, last one first; None: each needs one of its own."""
        return self.together(room, spread, **known) and self.of(*reversed(self.states))


def falling(n: Steps, *exponents: int) -> Dict[nn.Variable, float]:
    """Rooms, by state, last one first: gradients become smaller, and rooms larger."""
    return {v: 2.0**e for v, e in zip(reversed(n.states), exponents)}


def test_components_that_share_a_scale_have_the_smallest_limit() -> None:
    n = Steps()
    assert n.shared({n.last: 2.0**5, **falling(n, 12, 10, 14, 13)}) == [2.0**10] * 4
    # What is behind a layer of its own is none of it.
    assert n.of(n.last) == [2.0**5]
    assert n.shared(falling(n, 12, 10, 14, 13), assumed={n.states[0]: 2.0**7}) == [2.0**7] * 4
    assert n.shared(falling(n, 12, 10, 14, 13), assumed={n.states[0]: 2.0**11}) == [2.0**10] * 4


def test_members_without_a_gradient_in_this_batch_limit_nothing() -> None:
    inner = [F.tanh(affine(nn.Variable((4, 3)), name)) for name in ("left", "right")]
    outer = [affine(h, "shared") for h in inner]
    means = [F.mean(y**2) for y in outer]
    n = Graph(means[0] * 0.5 + means[1] * 2.0)
    room = {outer[0]: 2.0**4, outer[1]: 2.0**10, inner[0]: 2.0**9, inner[1]: 2.0**15}
    for absent in (None, 0, 1):
        gone = [] if absent is None else [outer[absent], inner[absent], means[absent]]
        here = {v: own for v, own in room.items() if v not in gone}
        assert n.together(here, weights=dict.fromkeys(gone, 0.0), equalize=True) is not None
        expected = [2.0**10, 2.0**15] if absent == 0 else [2.0**4, 2.0**9]
        assert n.of(outer[0], inner[0]) == n.of(outer[1], inner[1]) == expected


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(("apart", "kept"), [(19, True), (20, True), (21, False)])
def test_a_leaf_reached_only_by_components_beyond_the_spread_would_be_lost(
    trained: bool, apart: int, kept: bool
) -> None:
    n = Steps(nn.Variable((4, 5), need_grad=True) if trained else None)
    room = falling(n, 5, 10, 15, 5 + apart)
    assert (n.shared(room, 2.0**20) is not None) == kept
    # However far that is, what is not measured is not lost.
    del room[n.states[0]]
    assert n.shared(room, 2.0**20) is not None


def test_the_first_step_without_a_leaf_of_its_own_may_be_of_any_size() -> None:
    n = Steps(nn.Variable((4, 5)), 4)
    assert n.shared(falling(n, 5, 20, 40, 60), 2.0**4) == [2.0**5] * 4


def test_descendants_of_lost_gradients_only_are_lost_at_any_scale() -> None:
    stem = F.tanh(affine(nn.Variable((4, 3)), "stem"))
    # It has nothing to lose itself.
    n = Steps(PF.affine(stem, 5, name="start", fix_parameters=True), 2)
    room = {n.last: 2.0**5, **falling(n, 5, 15, 30)}
    for own in (2.0**5, 2.0**30, 2.0**60):
        assert n.shared({**room, stem: own}, 2.0**24) is None
        assert n.shared({**room, stem: own}, 2.0**25) == [2.0**5] * 3
        assert n.of(stem) == [own]


def test_losses_at_most_four_bits_apart_share_a_scale() -> None:
    trunk = F.tanh(affine(nn.Variable((4, 3)), "trunk"))
    tops = [affine(trunk, name) for name in "abc"]
    means = [F.mean(top) for top in tops]
    n = Graph(means[0] * 0.5 + means[1] * 2.0 + means[2])
    rooms = dict(zip(tops, [2.0**14, 2.0**10, 2.0**15]))
    n.choose(rooms, equalize=True)
    assert n.of(*tops) == [2.0**10, 2.0**10, 2.0**15]
    n.choose({**rooms, tops[2]: 2.0**14}, equalize=True)
    assert n.of(*tops) == [2.0**10] * 3
    # After an overflow each goes as low as it has to.
    n.choose({**rooms, tops[2]: 2.0**14}, equalize=False)
    assert n.of(*tops) == [2.0**14, 2.0**10, 2.0**14]
    # Of what nothing is known nothing is said.
    n.choose({tops[0]: 2.0**14, tops[2]: 2.0**12}, equalize=True)
    assert n.of(*tops)[::2] == [2.0**12] * 2


def test_components_that_are_not_losses_are_equalized_within_two_bits_only() -> None:
    n = Heads()
    room = {n.tops[0]: 2.0**10, n.tops[1]: 2.0**14, n.trunk: 2.0**18, n.bottom: 2.0**22}
    n.choose(room, equalize=True)
    assert n.of(*n.tops, n.trunk, n.bottom) == [2.0**10, 2.0**10, 2.0**18, 2.0**22]


class Together(NamedTuple):
    """A graph of which some components are joined, and what is known of it."""

    apart: Components
    merged: MergedComponents
    known: ScaleLimits
    start: Start

    def choose(self, spread: float, **changes: Any) -> Optional[Choice]:
        case = self._replace(**changes)
        return together(*case, spread)

    @property
    def limited(self) -> List[Optional[float]]:
        """The smallest room of each joined component, and what an overflow has left."""
        found: List[Optional[float]] = [None] * len(self.merged.components.names)
        for own, index in enumerate(self.merged.of):
            for limit in (self.known.limits[own], self.known.provisional.get(own)):
                if limit is not None:
                    found[index] = min(limit, found[index] or math.inf)
        return found


@st.composite
def together_cases(draw: Any) -> Together:
    drawn = draw(structures())
    factors = sorted({slot.weight for node in drawn.nodes for slot in node.layer_inputs})
    swappable = set(factors) - (draw(st.sets(st.sampled_from(factors))) if factors else set())
    apart = drawn.components()
    count = len(apart.names)
    rooms = draw(st.lists(st.none() | powers, min_size=count, max_size=count))
    ceilings = enumerate(draw(st.lists(st.none() | powers, min_size=count, max_size=count)))
    assumed = {index: own for index, own in ceilings if own is not None}
    known = ScaleLimits(rooms, assumed, (1.0,) * count, [None] * count, equalize=False)
    merged = merge_components(apart, drawn.nodes, drawn.sizes, swappable)
    return Together(apart, merged, known, Start(2.0**15, S0, SPAN))


def test_the_smallest_gradients_that_share_a_scale_have_the_least_to_spare() -> None:
    n = Steps()
    own = n.known({n.last: 2.0**5, **falling(n, 12, 10, 14, 13)})
    own = own._replace(floors={i: room / 2.0**12 for i, room in enumerate(own.limits) if room is not None})
    merged = n.structure.merged
    found = own.merged(merged.of).floors
    assert found == {merged.of[n.index(n.last)]: 2.0**-7, merged.of[n.index(n.states[0])]: 2.0**2}
    # What a given S0 decides is not lowered.
    assert own.with_s0(n.components, S0).floors.keys() == own.floors.keys() - n.components.at_loss


def check_no_shared_scale_leaves_the_smallest_room(case: Together) -> None:
    found = case.choose(math.inf)
    assert found is not None
    limits = case.limited
    for own, index in enumerate(case.merged.of):
        scale, limit = found.scales[own], limits[index]
        assert scale == found.scales[list(case.merged.of).index(index)]
        if own != case.apart.root and index != case.merged.components.root:
            assert limit is None or scale <= limit
            led_to = any(edge.successor == index for edge in case.merged.components.edges)
            room = [case.known.limits[i] for i, to in enumerate(case.merged.of) if to == index]
            # As large as it may be, where something is known.
            assert not led_to or limit is None or not any(room) or scale == limit


def check_a_larger_spread_allows_no_less_and_changes_no_scale(case: Together, exponent: int) -> None:
    found = case.choose(2.0**exponent)
    assert found is None or found == case.choose(2.0 ** (exponent + 1)) == case.choose(math.inf)


def check_the_largest_contribution_to_a_leaf_keeps_its_gradient(case: Together, exponent: int) -> None:
    spread = 2.0**exponent
    found = case.choose(spread)
    shared = case.choose(math.inf)
    assert shared is not None
    own = choose(case.apart, case.known, case.start, None).scales

    def far(index: int) -> bool:
        room, scale = case.known.limits[index], shared.scales[index]
        # Hooks are worth it only where a gradient gets clearly larger.
        return room is not None and room > spread * scale and own[index] > 2.0**6 * scale

    lost = case.apart.with_descendants({index for index in range(len(own)) if far(index)})
    largest = []
    for writers in case.apart.leaves.values():
        rooms = {room: index for index in sorted(writers) for room in [case.known.limits[index]] if room}
        largest += [rooms[min(rooms)]] if rooms else []
    if lost.isdisjoint(largest):
        assert found == shared
    # Two that have written as much stand in for each other.
    elif len(case.apart.leaves) == sum(len(writers) for writers in case.apart.leaves.values()):
        assert found is None


def check_merging_components_of_equal_scale_limits_makes_no_difference(case: Together, room: float) -> None:
    count = len(case.apart.names)
    known = ScaleLimits([room] * count, {}, (1.0,) * count, [1.0] * count)
    start = Start(room, S0, SPAN)
    found = case.choose(1.0, known=known, start=start)
    assert found is not None
    assert found.scales == choose(case.apart, known, start, None).scales == [room] * count


@settings(max_examples=120)
@given(together_cases(), st.integers(0, 40), powers)
def test_merged_components_of_any_graph(case: Together, exponent: int, room: float) -> None:
    """All that is checked above."""
    check_no_shared_scale_leaves_the_smallest_room(case)
    check_a_larger_spread_allows_no_less_and_changes_no_scale(case, exponent)
    check_the_largest_contribution_to_a_leaf_keeps_its_gradient(case, exponent)
    check_merging_components_of_equal_scale_limits_makes_no_difference(case, room)


def test_an_unmeasured_root_with_a_loss_weight_of_0_has_the_start_scale() -> None:
    limits = ScaleLimits(limits=[None], provisional={}, loss_weights=(0.0,), unit_amaxes=[None])
    assert limits.root_scale(8.0, 2.0**30) == 8.0
