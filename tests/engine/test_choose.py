# SPDX-License-Identifier: Apache-2.0
"""Scales are chosen from numbers alone, one for each component."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import hypothesis.strategies as st
import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest
from hypothesis import given, settings

from nnabla_adaloss.core.layer_record import Reason
from nnabla_adaloss.core.power_of_two import is_power_of_two
from nnabla_adaloss.engine.choose import Choice, Room, Start, choose
from nnabla_adaloss.graph.components import Components
from tests.engine import random_structures as graphs
from tests.engine.random_structures import Drawn, structures

pytestmark = pytest.mark.any_context

S0, U_MAX = 8.0, 65504.0


class Graph(graphs.Graph):
    """A graph that never runs, and what is known of its components; those that are not named are unknown."""

    def by_index(self, known: Mapping[nn.Variable, Any], other: Any) -> List[Any]:
        found = [other] * len(self.components.names)
        for v, own in known.items():
            found[self.index(v)] = own
        return found

    def weight(self, layer: str) -> int:
        return self.plan.structure.layer_slots[layer][1].factor

    def choose(
        self,
        room: Mapping[nn.Variable, float],
        start: float = S0,
        *,
        tried: Mapping[nn.Variable, float] = {},
        ceiling: Mapping[nn.Variable, float] = {},
        level: bool = False,
        wish: Any = None,
        weight_room: Mapping[str, float] = {},
        given: Optional[Start] = None,
        power_of_two: bool = True,
    ) -> Choice:
        known = Room(
            self.by_index(room, None), self.by_index(ceiling, math.inf), self.by_index(tried, None), level
        )
        found = choose(
            self.components,
            known,
            given or Start(start, S0),
            wish,
            {self.weight(layer): own for layer, own in weight_room.items()},
            power_of_two=power_of_two,
        )
        self.scales = found.scales
        return found

    def of(self, *variables: nn.Variable) -> List[float]:
        return [self.scales[self.index(v)] for v in variables]


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


def test_each_component_has_the_scale_that_it_has_room_for() -> None:
    n = Chain()
    found = n.choose({n.c: 2.0**20, n.b: 2.0**26, n.a: 2.0**10}, 2.0**14)
    assert n.of(n.loss, n.c, n.b, n.a) == [2.0**14, 2.0**20, 2.0**26, 2.0**10]
    assert found.reasons == {"c/affine": Reason.ROOM, "b/affine": Reason.ROOM}


def test_what_nothing_is_known_of_has_the_scale_of_what_it_comes_from() -> None:
    n = Chain()
    n.choose({n.c: 2.0**20})
    assert n.of(n.loss, n.c, n.b, n.a) == [S0, 2.0**20, 2.0**20, 2.0**20]
    n.choose({})
    assert n.of(n.loss, n.c, n.b, n.a) == [S0] * 4


@pytest.mark.parametrize("tried", [2.0**10, 2.0**20])
def test_where_all_was_zero_a_far_larger_scale_is_tried_or_what_arrives_if_that_is_larger(
    tried: float,
) -> None:
    n = Chain()
    n.choose({n.c: 2.0**16, n.a: 2.0**4}, tried={n.b: tried})
    assert n.of(n.b, n.a) == [2.0**16 if tried < 2.0**16 else tried * 2.0**24, 2.0**4]
    # float32 holds the reciprocal of no larger one.
    n.choose({}, tried={n.b: 2.0**90})
    assert n.of(n.b) == [2.0**100]


def test_components_at_most_two_bits_apart_share_a_scale() -> None:
    n = Chain()
    room = {n.c: 2.0**20, n.b: 2.0**19, n.a: 2.0**18}
    found = n.choose(room, 2.0**18, level=True)
    # What is multiplied at a single element costs nothing: the loss takes no part.
    assert n.of(n.loss, n.c, n.b, n.a) == [2.0**18] * 4
    assert found.reasons == {"c/affine": Reason.LEVEL, "b/affine": Reason.ROOM}
    n.choose({**room, n.b: 2.0**23}, 2.0**18, level=True)
    assert n.of(n.c, n.b, n.a) == [2.0**20, 2.0**23, 2.0**18]
    y = affine(nn.Variable((4, 3)), "a")
    total = F.mean(y)
    graph = Graph(total * 0.5)
    graph.choose({total: 2.0**19, y: 2.0**20}, level=True)
    assert graph.of(total, y) == [2.0**19, 2.0**20]


@pytest.mark.parametrize(
    ("alpha", "scales", "reason"),
    [
        (16.0, [2.0**14, 2.0**18], Reason.METHOD),
        (0.25, [2.0**8, 2.0**6], Reason.METHOD),
        (1000.0, [2.0**19, 2.0**18], Reason.METHOD),
        (2.0**20, [2.0**20, 2.0**18], Reason.ROOM),
    ],
)
def test_a_wish_is_followed_as_far_as_there_is_room(
    alpha: float, scales: List[float], reason: Reason
) -> None:
    n = Chain()
    found = n.choose({n.c: 2.0**10, n.b: 2.0**20, n.a: 2.0**18}, wish=says(alpha))
    assert n.of(n.c, n.b, n.a) == [2.0**10, *scales]
    assert found.reasons["c/affine"] == reason


def test_scales_that_need_not_be_powers_of_two() -> None:
    n = Chain()
    n.choose({n.c: 2.0**10, n.b: 2.0**20}, wish=says(3.0), power_of_two=False)
    assert n.of(n.c, n.b, n.a) == [2.0**10, 3.0 * 2.0**10, 9.0 * 2.0**10]


def test_a_wish_where_nothing_is_known_says_how_far() -> None:
    n = Chain()
    assert n.choose({}, wish=says(4.0, Reason.UNKNOWN)).reasons["b/affine"] == Reason.UNKNOWN
    assert n.of(n.c, n.b, n.a) == [S0, 4.0 * S0, 16.0 * S0]


def test_wishes_do_not_count_what_makes_up_for_a_small_loss() -> None:
    n, heard = Chain(), []

    def wish(layer: str, scale: float, base: float) -> Tuple[float, Reason]:
        heard.append((layer, scale, base))
        return 4.0, Reason.METHOD

    behind = {n.b: 2.0**40, n.a: 2.0**40}
    n.choose({n.c: 2.0**30, **behind}, 2.0**14, wish=wish)
    # A loss gradient of 2^14 and a mean are lifted by 2^27 beyond S0; what layers add is left.
    assert heard == [("c/affine", 2.0**30, S0), ("b/affine", 2.0**32, 4.0 * S0)]
    heard.clear()
    # What was lifted and lowered again counts for nothing; what was only lowered counts as it is.
    n.choose({n.c: 2.0, **behind}, 2.0**14, wish=wish)
    assert heard == [("c/affine", 2.0, 2.0), ("b/affine", 8.0, 8.0)]


def skip() -> Tuple[Graph, nn.Variable, nn.Variable, nn.Variable, nn.Variable]:
    """Two layers beside a shortcut, and one before."""
    stem = F.tanh(affine(nn.Variable((4, 3)), "stem"))
    inner = F.tanh(affine(stem, "inner"))
    joined = stem + affine(inner, "outer")
    last = affine(F.tanh(joined), "last")
    return Graph(F.mean(last)), last, joined, inner, stem


def test_along_a_shortcut_there_is_one_scale() -> None:
    graph, last, joined, inner, stem = skip()
    found = graph.choose({last: 2.0**10, joined: 2.0**14, inner: 2.0**20})
    assert graph.of(last, joined, inner, stem) == [2.0**10, 2.0**14, 2.0**20, 2.0**14]
    assert set(found.reasons.values()) == {Reason.ROOM}
    # Its second layer would have it otherwise.
    found = graph.choose({last: 2.0**10}, wish=says(4.0))
    assert graph.of(last, joined, inner, stem) == [2.0**10, 2.0**12, 2.0**14, 2.0**12]
    assert [found.reasons[f"{name}/affine"] for name in ("last", "outer", "inner")] == [
        Reason.METHOD,
        Reason.METHOD,
        Reason.BRANCHES,
    ]


def test_scaled_copies_of_weights_stay_in_range_and_what_follows_goes_down_with_them() -> None:
    n = Chain()
    room = {n.c: 2.0**10, n.b: 2.0**20, n.a: 2.0**24}
    found = n.choose(room, weight_room={"c/affine": 4.0, "b/affine": 2.0**6})
    assert n.of(n.c, n.b, n.a) == [2.0**10, 2.0**12, 2.0**18]
    assert found.reasons == dict.fromkeys(["c/affine", "b/affine"], Reason.WEIGHT_RANGE)
    # Also where another way has brought the scale.
    graph, last, joined, inner, stem = skip()
    found = graph.choose({last: 2.0**10, joined: 2.0**20, inner: 2.0**10}, weight_room={"inner/affine": 2.0})
    assert graph.of(last, joined, inner, stem) == [2.0**10, 2.0**11, 2.0**10, 2.0**11]
    assert found.reasons["inner/affine"] == Reason.WEIGHT_RANGE


def test_a_weight_that_lowers_a_shortcut_lowers_what_came_before_it_too() -> None:
    stem = F.tanh(affine(nn.Variable((4, 3)), "stem"))
    first = F.tanh(affine(stem, "first in"))
    between = stem + affine(first, "first out")
    second = F.tanh(affine(between, "second in"))
    joined = between + affine(second, "second out")
    last = affine(F.tanh(joined), "last")
    graph = Graph(F.mean(last))
    room = {last: 2.0**20, joined: 2.0**20, second: 2.0**22, first: 2.0**10}
    graph.choose(room, weight_room={"second out/affine": 4.0, "first in/affine": 1.0})
    assert graph.of(joined, second, first, stem) == [2.0**10, 2.0**12, 2.0**10, 2.0**10]


# A given S0.


def given_s0(graph: Graph, amax: Mapping[nn.Variable, float], scale: float = S0) -> Start:
    return Start(scale, scale, True, graph.by_index(amax, None), U_MAX)


def test_a_given_s0_governs_what_is_before_any_layer() -> None:
    n = Chain()
    start = given_s0(n, {n.loss: 1.0, n.c: 1.0})
    n.choose({n.loss: 2.0**14, n.c: 2.0**10, n.b: 2.0**9}, given=start, ceiling={n.c: 2.0})
    # However much room there is, and whatever an overflow has left; behind the layer it is as ever.
    assert n.of(n.loss, n.c, n.b, n.a) == [S0, S0, 2.0**9, 2.0**9]
    n.choose({n.c: 2.0**10, n.b: 2.0**9}, given=start, wish=says(0.5))
    assert n.of(n.loss, n.c, n.b, n.a) == [S0, S0, 0.5 * S0, 0.25 * S0]


@pytest.mark.parametrize("weight", [2.0**-20, 2.0**-4, 1.0, 2.0**6])
def test_it_is_lifted_where_a_loss_weight_shrinks_the_gradient(weight: float) -> None:
    y = affine(nn.Variable((4, 3)), "a")
    total = F.sum(y)
    loss = total * weight
    graph = Graph(loss)
    amax = {loss: 1.0, total: weight, y: weight}
    graph.choose({}, given=given_s0(graph, amax))
    # What arrives at the layer is what it would be with a weight of 1; a large one is not lowered below S0.
    assert graph.of(loss, y) == [S0, S0 / min(weight, 1.0)]
    assert graph.of(total)[0] >= S0
    assert graph.of(total)[0] * weight <= U_MAX
    # While nothing is known of the weight, a scalar is brought to the middle of float16's range.
    graph.choose({}, given=given_s0(graph, {loss: 1.0}))
    assert graph.of(total, y) == [2.0**7] * 2


def test_a_mean_that_leaves_little_is_lifted_behind_it() -> None:
    n = Chain()
    n.choose({}, given=given_s0(n, {n.loss: 1.0, n.c: 2.0**-20}))
    # Below S0 * 2^-16, that is where a gradient of float16 that began with 8 is subnormal.
    assert n.of(n.c) == [S0 * 2.0**4]
    n.choose({}, given=given_s0(n, {n.loss: 1.0, n.c: 2.0**-15}))
    assert n.of(n.c) == [S0]


def test_where_several_losses_meet_a_small_one_is_not_lifted_all_the_way() -> None:
    x = affine(nn.Variable((4, 3)), "stem")
    small, large = affine(F.tanh(x), "small"), affine(F.sigmoid(x), "large")
    one, other = F.sum(small), F.sum(large)
    loss = one * 2.0**-20 + other
    graph = Graph(loss)
    amax = {loss: 1.0, one: 2.0**-20, other: 1.0, small: 2.0**-20, large: 1.0}
    start = 2.0**10
    graph.choose({}, given=given_s0(graph, amax, start))
    assert graph.components.loss_exits == 2
    assert graph.of(large) == [start]
    assert graph.of(small)[0] * 2.0**-20 <= 2.0**7


# What holds for any graph and whatever is known.


class Case(NamedTuple):
    """A graph, and what is known of it."""

    drawn: Drawn
    components: Components
    known: Room
    start: Start
    wishes: Optional[Dict[str, float]]
    weight_room: Dict[int, float]

    def choose(self, **changes: Any) -> Choice:
        case = self._replace(**changes)
        said = case.wishes
        wish = None if said is None else lambda layer, *_: (said[layer], Reason.METHOD)
        return choose(case.components, case.known, case.start, wish, case.weight_room)

    @property
    def decided_by_room(self) -> List[int]:
        """The components that neither the start nor a given S0 decides about."""
        governed = self.components.governed if self.start.fixed else frozenset()
        reached = {edge.after for edge in self.components.edges}
        return sorted(reached - governed - {self.components.root})


few = settings(max_examples=60, deadline=None)
powers = st.integers(-20, 40).map(lambda e: 2.0**e)


@st.composite
def cases(draw: Any) -> Case:
    drawn = draw(structures())
    components = drawn.components()
    count = len(components.names)

    def for_each(one: Any) -> List[Any]:
        return draw(st.lists(one, min_size=count, max_size=count))

    known = Room(
        for_each(st.none() | powers),
        for_each(st.just(math.inf) | powers),
        for_each(st.none() | st.none() | powers),
        draw(st.booleans()),
    )
    scale = draw(powers)
    fixed = draw(st.booleans())
    start = Start(scale, scale if fixed else draw(powers))
    if fixed:
        amax = for_each(st.none() | st.just(0.0) | powers)
        start = Start(scale, scale, True, [1.0, *amax[1:]], U_MAX)
    layers = [slot for node in drawn.nodes for slot in node.slots]
    wanted = st.floats(2.0**-4, 2.0**12)
    wishes = draw(st.none() | st.fixed_dictionaries({slot.layer: wanted for slot in layers}))
    room = st.integers(0, 12).map(lambda e: 2.0**e)
    weights = {slot.factor: draw(room) for slot in layers if draw(st.booleans())}
    return Case(drawn, components, known, start, wishes, weights)


@few
@given(cases())
def test_no_scale_leaves_its_room(case: Case) -> None:
    found = case.choose()
    assert found.scales[case.components.root] <= case.start.scale
    for index in case.decided_by_room:
        scale, room = found.scales[index], case.known.room[index]
        assert scale <= case.known.ceiling[index]
        # The chosen scale is the start times a power of two, so that it may be less.
        assert room is None or scale <= room
        assert is_power_of_two(scale / case.start.scale)
        assert scale <= 2.0**100
    for edge in case.components.edges:
        if edge.layer is not None:
            alpha = found.scales[edge.after] / found.scales[edge.before]
            assert alpha <= case.weight_room.get(edge.factor, math.inf)
            assert edge.layer in found.reasons


@few
@given(cases())
def test_what_nothing_leads_to_has_the_scale_of_the_loss_and_a_given_s0_is_only_ever_lifted(
    case: Case,
) -> None:
    found = case.choose(weight_room={})
    reached = {edge.after for edge in case.components.edges}
    for index, scale in enumerate(found.scales):
        assert index in reached or scale == case.start.scale
        if case.start.fixed and index in case.components.governed:
            assert scale >= case.start.scale
