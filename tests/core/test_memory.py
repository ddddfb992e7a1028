# SPDX-License-Identifier: Apache-2.0
"""Measurements of components, and the scale limits that follow from them."""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import pytest

from nnabla_adaloss.core.choose import ScaleLimits
from nnabla_adaloss.core.components import Components, Edge
from nnabla_adaloss.core.memory import Memory, Observations, PassMeasurements
from nnabla_adaloss.core.scale_history import HistoryPolicy
from nnabla_adaloss.core.schedule import ScaleSchedule

pytestmark = pytest.mark.any_context

NAMES = ["loss", "a", "b", "c"]
# A layer leads from each component to the next.
EDGES = [Edge(index, index + 1, f"layer {index}", -1) for index in range(3)]
COMPONENTS = Components({}, NAMES, frozenset({0}), {}, EDGES, frozenset({0}))
# Ends of the ranges: the loss is a scalar, in a wider format.
LIMITS = 2.0**16, 2.0**10, 2.0**10, 2.0**10
ONES = 1.0, 1.0, 1.0, 1.0
# The scales for gradients of 1.
SCALES = 2.0**14, 2.0**8, 2.0**8, 2.0**8


class ComponentScales:
    """The latest `Observations`: methods that return new ones replace them."""

    def __init__(self, policy: HistoryPolicy) -> None:
        self.seen = Observations(Memory(policy))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.seen, name)
        if not callable(found):
            return found

        def called(*given: Any, **options: Any) -> Any:
            result = found(*given, **options)
            if isinstance(result, Observations):
                self.seen = result
            return result

        return called


def shown(
    used: Sequence[float],
    weights: Tuple[float, ...] = ONES,
    largest: Sequence[float] = (1.0,),
    amax: Mapping[int, float] = {},  # it is only read
    components: Components = COMPONENTS,
    **found: Any,
) -> PassMeasurements:
    """Measurements of a pass with these scales; `largest`: the gradients of parameters."""
    schedule = ScaleSchedule((), components, used, given_scale=None, loss_weights=weights)
    return PassMeasurements(schedule, LIMITS, amax, has_gradients=any(largest), **found)


def limits(scales: ComponentScales, weights: Tuple[float, ...] = ONES) -> ScaleLimits:
    return scales.limits(COMPONENTS, weights, LIMITS)


def of_all(scales: ComponentScales, weights: Tuple[float, ...] = ONES) -> List[Optional[float]]:
    return list(limits(scales, weights).limits)


def scales_with(*magnitudes: Optional[float], window: int = 64, **policy: Any) -> ComponentScales:
    scales = ComponentScales(HistoryPolicy(window=window, **policy))
    see(scales, *magnitudes)
    scales.after_iteration()
    return scales


def see(
    scales: ComponentScales,
    *magnitudes: Optional[float],
    weights: Tuple[float, ...] = ONES,
    measured_all: bool = False,
    completes_entry: bool = True,
    informative: bool = True,
) -> None:
    """A pass at the scale limits, or at 1 where there is none, that measures these amaxes by component."""
    scales.before_pass(scales.iteration)
    used = [scale or 1.0 for scale in of_all(scales, weights)]
    amax = {index: magnitude for index, magnitude in enumerate(magnitudes) if magnitude is not None}
    scales.after_pass(
        shown(used, weights, amax=amax, measured_all=measured_all),
        completes_entry=completes_entry,
        informative=informative,
    )


def overflow(
    scales: ComponentScales, name: str, *used: float, weights: Tuple[float, ...] = ONES, **found: Any
) -> bool:
    overflowed = shown(used, weights, overflowed=NAMES.index(name), finite=False, **found)
    scales.seen, lowered = scales.seen.after_overflow(overflowed)
    return lowered


def message(
    *, completes_entry: bool = False, lost: Mapping[str, float] = {}, **amaxes: float
) -> Dict[str, List[float]]:
    """Message of a rank with these amaxes of components."""
    return {
        "completes entry": [float(completes_entry)],
        **{f"component {name}": [amax] for name, amax in amaxes.items()},
        **{f"lost {name}": [amax] for name, amax in lost.items()},
    }


def test_a_scale_follows_from_the_window_and_this_iterations_amaxes() -> None:
    scales = scales_with(1.0, 1.0, 4.0)
    assert of_all(scales) == [2.0**14, 2.0**8, 2.0**6, None]
    see(scales, 1.0, 8.0, 1.0)
    assert of_all(scales) == [2.0**14, 2.0**5, 2.0**6, None]
    scales.without_iteration()
    assert of_all(scales) == [2.0**14, 2.0**8, 2.0**6, None]


# Loss weights.


def test_remembered_amaxes_are_divided_by_the_loss_weight_of_their_batch() -> None:
    scales = ComponentScales(HistoryPolicy())
    see(scales, 1.0, 3.0 * 2.0**-20, 2.0**20, weights=(1.0, 2.0**-20, 2.0**10, 1.0))
    assert scales.unit_amaxes_of(NAMES) == [1.0, 3.0, 2.0**10, None]
    scales.after_iteration()
    assert scales.unit_amaxes() == {"loss": 1.0, "a": 3.0, "b": 2.0**10}


@pytest.mark.parametrize("weight", [2.0**-60, 2.0**-3, 1.0, 2.0**40])
def test_a_loss_weight_moves_the_scale_at_once(weight: float) -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    found = limits(scales, (1.0, weight, weight, weight))
    assert found.limits == [2.0**14] + 3 * [2.0**8 / weight]
    assert found.unit_amaxes == [1.0] * 4
    assert found.loss_weights == (1.0, weight, weight, weight)


def test_a_large_loss_weight_lowers_the_lowest_scale_and_a_small_one_raises_none() -> None:
    scales = scales_with(1.0, 2.0**30, 2.0**-30, 1.0, min_scale=2.0**-10, max_scale=2.0**20)
    for weight in (2.0**-8, 1.0, 2.0**8):
        lowest, highest = of_all(scales, (1.0, weight, weight, weight))[1:3]
        assert lowest == 2.0**-10 / max(weight, 1.0)
        assert highest == 2.0**20 / max(weight, 1.0)
    # float32 holds the reciprocals of all scales.
    assert of_all(scales, (1.0, 2.0**-120, 2.0**120, 2.0**120)) == [2.0**14, 2.0**20, 2.0**-100, 2.0**-100]


def test_an_inactive_component_is_neither_measured_nor_reported() -> None:
    scales = scales_with(1.0, 1.0, 1.0)
    inactive = 1.0, 0.0, 1.0, 0.0
    see(scales, 1.0, 2.0**5, 2.0, 2.0**5, weights=inactive, measured_all=True)
    assert scales.calibrated
    assert limits(scales, inactive).limits == [2.0**14, None, 2.0**7, None]
    assert scales.unit_amaxes_of(NAMES) == [1.0, 1.0, 2.0, None]
    scales.after_iteration()
    assert windows(scales) == {"loss": [1.0], "a": [1.0], "b": [2.0]}


def test_an_overflow_does_not_lower_inactive_components() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    weights = 1.0, 2.0**-4, 0.0, 2.0**-4
    assert overflow(scales, "a", 2.0**14, 2.0**12, 1.0, 2.0**12, weights=weights)
    assert limits(scales, weights).provisional == {1: 2.0**8, 3: 2.0**8}
    assert of_all(scales, weights) == [2.0**14, 2.0**8, None, 2.0**8]
    assert scales.unit_amaxes_of(["b"])[0] == 1.0
    # A larger loss weight in the next batch lowers the scale in proportion.
    scales.after_lost_batch()
    assert of_all(scales) == [2.0**14, 2.0**4, 2.0**8, 2.0**4]
    assert limits(scales).provisional == {}


# Overflows.


def test_an_overflow_lowers_its_component_and_all_descendants() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    assert overflow(scales, "a", *SCALES)
    assert of_all(scales) == [2.0**14, 2.0**4, 2.0**4, 2.0**4]
    # The scale that the pass has used is lowered, also if it is below the limit.
    assert overflow(scales, "b", 2.0**14, 2.0**4, 2.0**4, 2.0**2)
    assert of_all(scales) == [2.0**14, 2.0**4, 1.0, 2.0**-2]
    assert scales.provisional
    # The scale of an unmeasured component follows from its predecessor.
    scales = scales_with(1.0, 1.0, 1.0)
    overflow(scales, "a", *SCALES)
    assert limits(scales).provisional == {1: 2.0**4, 2: 2.0**4}


@pytest.mark.parametrize("kept", [False, True])
def test_a_finite_pass_over_the_same_batch_replaces_provisional_amaxes(kept: bool) -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    overflow(scales, "a", *SCALES)
    see(scales, 1.0, 2.0**4, 2.0, 1.0, measured_all=kept)
    if kept:
        assert not scales.provisional
        assert of_all(scales) == [2.0**14, 2.0**4, 2.0**7, 2.0**8]
    scales.after_iteration(good=not kept)
    assert of_all(scales) == [2.0**14, 2.0**4, 2.0**7, 2.0**8]


@pytest.mark.parametrize("end", [Observations.after_lost_batch, Observations.after_iteration])
def test_a_lost_batch_leaves_its_provisional_amaxes(end: Callable[[Observations], Observations]) -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    overflow(scales, "a", *SCALES)
    scales.seen = end(scales.seen)
    assert not scales.provisional
    assert of_all(scales) == [2.0**14, 2.0**4, 2.0**4, 2.0**4]
    # A smaller amax in the next batch does not replace them.
    see(scales, 1.0, 2.0**2, 2.0**2, 2.0**2)
    scales.after_iteration()
    assert of_all(scales) == [2.0**14, 2.0**4, 2.0**4, 2.0**4]


def test_both_lost_batches_of_an_iteration_stay() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    for magnitude in (2.0**8, 2.0):
        see(scales, 1.0, magnitude, 1.0, 1.0)
        scales.after_lost_batch()
    assert scales.message()["lost a"] == [2.0**8]
    assert of_all(scales)[1] == 1.0


def test_a_pass_that_measures_a_part_keeps_provisional_amaxes_of_the_rest() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    overflow(scales, "a", *SCALES)
    see(scales, 1.0, 2.0**2)
    assert scales.provisional
    assert of_all(scales) == [2.0**14, 2.0**4, 2.0**4, 2.0**4]


def test_measurements_of_all_ranks_replace_provisional_ones_of_a_lost_batch() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    overflow(scales, "a", *SCALES)
    scales.after_lost_batch()
    scales.after_exchange([message(completes_entry=True, a=2.0), message(lost={"b": 4.0})])
    scales.after_iteration()
    assert windows(scales) == {"loss": [1.0], "a": [2.0], "b": [4.0], "c": [1.0]}


def lose(scales: ComponentScales, name: str = "a") -> None:
    """Lose a batch in an iteration of its own."""
    scales.before_pass(scales.iteration + 1)
    overflow(scales, name, *[scale or 1.0 for scale in of_all(scales)])
    scales.after_lost_batch()


def good(scales: ComponentScales, iterations: int, unit_amax: float = 1.0) -> None:
    for _ in range(iterations):
        scales.before_pass(scales.iteration + 1)
        see(scales, 1.0, unit_amax, 1.0, 1.0)


def test_the_amaxes_of_a_lost_batch_are_remembered_for_2000_iterations() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0, window=2)
    lose(scales, "b")
    assert scales.lost_recently
    good(scales, 2000)
    assert of_all(scales) == [2.0**14, 2.0**8, 2.0**4, 2.0**4]
    good(scales, 2)
    assert of_all(scales) == [2.0**14, 2.0**8, 2.0**8, 2.0**8]
    assert not scales.lost_recently


def test_the_larger_of_two_losses_is_remembered() -> None:
    memory = scales_with(1.0, 1.0, 1.0, 1.0).memory
    for iteration, unit_amax in enumerate([2.0**8, 2.0**7]):
        memory = memory.after({}, completes_entry=False, lost={"a": unit_amax}, iteration=iteration)
    assert memory.lost["a"][:2] == (2.0**8, 2001)


@pytest.mark.parametrize(("unit_amax", "renewed"), [(2.0, True), (1.99, False)])
def test_a_batch_that_comes_near_a_lost_one_confirms_its_amax(unit_amax: float, renewed: bool) -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0, window=2)
    lose(scales)
    good(scales, 1500)
    good(scales, 1, unit_amax)
    good(scales, 1500)
    assert scales.unit_amaxes_of(["a"])[0] == (2.0**4 if renewed else 1.0)
    # Its descendants did not come near theirs.
    assert scales.unit_amaxes_of(["c"])[0] == 1.0


@pytest.mark.parametrize(("unit_amax", "falls_to"), [(4.5, 36.0), (3.9, 1.0)])
def test_a_lost_amax_that_no_batch_confirms_falls_to_what_the_largest_confirms(
    unit_amax: float, falls_to: float
) -> None:
    """A rare batch whose gradients shrink as it is learned; the margin is 4."""
    scales = scales_with(1.0, 1.0, 1.0, 1.0, window=2)
    scales.before_pass(scales.iteration + 1)
    for _ in range(2):
        overflow(scales, "a", *[scale or 1.0 for scale in of_all(scales)])
    scales.after_lost_batch()
    for _ in range(40):
        good(scales, 1, unit_amax)
        good(scales, 149)
        assert scales.unit_amaxes_of(["a"])[0] == (2.0**8 if scales.iteration <= 2003 else falls_to)
    good(scales, 2001)
    assert scales.unit_amaxes_of(["a"])[0] == 1.0


def test_a_batch_confirms_a_lost_amax_for_one_term() -> None:
    memory = scales_with(1.0, 1.0, 1.0, 1.0).memory
    terms = [
        (1, {}, {"a": 2.0**8}, (2.0**8, 2001, 0.0)),
        (2, {"a": 4.5}, {}, (2.0**8, 2001, 4.5)),
        # A smaller batch is lost when it falls.
        (2002, {}, {"a": 5.0}, (40.0, 4002, 0.0)),
        (2003, {"a": 4.5}, {}, (40.0, 4002, 4.5)),
        (4003, {}, {}, (36.0, 6003, 0.0)),
        (6004, {}, {}, None),
    ]
    for iteration, unit_amaxes, lost, expected in terms:
        memory = memory.after(unit_amaxes, completes_entry=False, lost=lost, iteration=iteration)
        assert memory.lost.get("a") == expected


def test_amaxes_of_a_lost_batch_within_the_margin_are_not_remembered() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    see(scales, 1.0, 4.0, 5.0)
    scales.after_lost_batch()
    scales.after_iteration()
    assert {name: one.unit_amax for name, one in scales.memory.lost.items()} == {"b": 5.0}
    # Nor are those of a first batch.
    scales = ComponentScales(HistoryPolicy())
    lose(scales)
    scales.after_iteration()
    assert not scales.memory.lost


def test_earlier_losses_stay_after_a_batch_that_no_scale_helps() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    lose(scales)
    see(scales, 2.0**9, 2.0**9)
    scales.without_batch()
    assert of_all(scales) == [2.0**14, 2.0**4, 2.0**4, 2.0**4]
    scales.without_iteration()
    assert of_all(scales) == [2.0**14, 2.0**8, 2.0**8, 2.0**8]


def test_lost_amaxes_are_saved_and_older_states_lack_them() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0, window=2)
    lose(scales)
    good(scales, 3)
    scales.after_iteration()
    state = json.loads(json.dumps(scales.next_memory().state_dict()))
    assert scales.memory.with_state(state) == scales.memory
    older = {name: state[name] for name in ("windows", "partial")}
    assert scales.memory.with_state(older) == scales.memory._replace(lost={})
    for damaged in ([-1.0, 9, 0.0], [1.0, 9], [1.0, 1.5, 0.0], [1.0, 9, "0"]):
        with pytest.raises((KeyError, TypeError, ValueError)):
            scales.memory.with_state({**state, "lost": {"a": damaged}})


@pytest.mark.parametrize(("unit_amaxes", "learned"), [((1.0, 1.0, 1.0), True), ((2.0**5, 1.0, 1.0), False)])
def test_an_overflow_within_a_function_is_remembered(
    unit_amaxes: Tuple[float, float, float], learned: bool
) -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    scales.before_pass(1)
    for _ in range(2):
        overflow(scales, "a", *[scale or 1.0 for scale in of_all(scales)])
    see(scales, 1.0, *unit_amaxes, measured_all=True)
    scales.after_iteration()
    # Its descendants were only lowered with it.
    assert [(name, one.unit_amax) for name, one in scales.memory.lost.items()] == [("a", 2.0**8)] * learned
    assert of_all(scales) == [2.0**14, 2.0**0 if learned else 2.0**3, 2.0**8, 2.0**8]


def test_an_overflow_is_explained_by_any_component_where_it_may_have_begun() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    scales.before_pass(1)
    overflow(scales, "b", *SCALES, suspected={NAMES.index("a")})
    see(scales, 1.0, 2.0**4, 1.0, 1.0, measured_all=True)
    scales.after_iteration()
    assert not scales.memory.lost


def test_overflows_of_one_batch_are_all_remembered_if_no_gradient_explains_one() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    overflow(scales, "a", *SCALES)
    overflow(scales, "b", *[scale or 1.0 for scale in of_all(scales)])
    see(scales, 1.0, 1.0, 1.0, 1.0, measured_all=True)
    assert scales.lost_now == {"a": 2.0**4, "b": 2.0**8}


@pytest.mark.parametrize(
    "end",
    [
        lambda scales: see(scales, 1.0, 1.0, 2.0**4, 1.0, measured_all=True),
        lambda scales: scales.after_lost_batch(),
        lambda scales: scales.after_exchange([message(completes_entry=True)]),
    ],
    ids=["finite", "lost", "exchanged"],
)
def test_an_overflow_is_not_explained_by_where_that_of_an_earlier_batch_began(
    end: Callable[[ComponentScales], None],
) -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    overflow(scales, "b", *SCALES)
    end(scales)
    overflow(scales, "a", *[scale or 1.0 for scale in of_all(scales)])
    see(scales, 1.0, 1.0, 2.0**5, 1.0, measured_all=True)
    assert scales.lost_now["a"] == 2.0**4


@pytest.mark.parametrize("b", [1.0, 0.0, None])
def test_predecessors_that_the_pass_did_not_measure_are_lowered_with_an_overflow(b: Optional[float]) -> None:
    scales = scales_with(1.0, 1.0, b, 1.0)
    assert overflow(scales, "c", *SCALES, suspected={NAMES.index("b")})
    assert limits(scales).provisional == {2: 2.0**4, 3: 2.0**4}
    assert scales.message() == message(lost={"b": 2.0**4, "c": 2.0**4})


@pytest.mark.parametrize("weight", [2.0**-10, 1.0, 2.0**10])
def test_an_overflow_at_the_lowest_scale_lowers_none(weight: float) -> None:
    scales = scales_with(1.0, 1.0)
    weights, lowest = (1.0, weight, 1.0, 1.0), scales.memory.policy.min_scale / max(weight, 1.0)
    assert overflow(scales, "a", 1.0, 2.0 * lowest, 1.0, 1.0, weights=weights)
    assert not overflow(scales, "a", 1.0, lowest, 1.0, 1.0, weights=weights)


def test_a_loss_weight_that_a_logarithm_undoes_is_no_reason_to_give_up() -> None:
    """Of `log(loss * 2**-46)`: the unit amax is 2**46, and a scale divided by the weight would overflow."""
    scales = scales_with(1.0, 2.0**46)
    weights = 1.0, 2.0**-46, 1.0, 1.0
    assert of_all(scales, weights)[1] == 2.0**8
    scale, lowered = 2.0**30, 0
    while overflow(scales, "a", 1.0, scale, 1.0, 1.0, weights=weights):
        scale, lowered = limits(scales, weights).provisional[1], lowered + 1
    assert scale == scales.memory.policy.min_scale
    assert lowered == 14


def test_descendants_of_an_overflow_start_from_their_limit_if_the_pass_used_more() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    overflow(scales, "b", 2.0**14, 2.0**8, 2.0**10, 2.0**12)
    assert limits(scales).provisional == {2: 2.0**6, 3: 2.0**4}


def test_no_scale_rises_after_an_overflow_and_none_is_equalized() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    overflow(scales, "b", 2.0**14, 2.0**8, 2.0**6, 2.0**7)
    found = limits(scales)
    assert found.provisional == {2: 2.0**2, 3: 2.0**3}
    assert found.limits == [2.0**14, 2.0**8, 2.0**2, 2.0**3]
    assert not found.equalize
    scales.without_iteration()
    assert limits(scales).equalize


# Reruns of a batch.


def test_a_batch_is_calibrated_unless_a_first_measurement_shows_a_far_higher_limit() -> None:
    scales = ComponentScales(HistoryPolicy())
    see(scales, 2.0**12, 2.0**6)
    assert scales.calibrated
    see(scales, 2.0**12, 2.0**6, 2.0**5)
    assert not scales.calibrated
    # The limits at the batch's loss weights decide.
    scales = ComponentScales(HistoryPolicy())
    see(scales, 2.0**12, 2.0**6, 2.0**5, weights=(1.0, 2.0**-3, 2.0**-3, 1.0))
    assert not scales.calibrated
    see(scales, 2.0**12, 2.0**6, 2.0**5, 2.0**6, weights=(1.0, 2.0**-3, 2.0**-3, 2.0**3))
    assert scales.calibrated


@pytest.mark.parametrize(
    ("passes", "calibrated"),
    [
        # All is zero, and would be zero again.
        ([(0.0, 0.0, 0.0)], [True]),
        # One after the other becomes nonzero, until a pass shows nothing new.
        ([(2.0**6, 0.0, 0.0), (2.0**6, 2.0**6, 0.0), (2.0**6, 2.0**6, 0.0)], [False, False, True]),
        ([(2.0**6, 0.0, 0.0), (2.0**6, 0.0, 0.0)], [False, True]),
        # A successor's scale does not change zeros of its predecessors.
        ([(0.0, 0.0, 2.0**6), (0.0, 0.0, 2.0**6)], [True, True]),
        ([(2.0**6, 2.0**6, 2.0**6)], [True]),
    ],
)
def test_a_first_nonzero_gradient_may_reveal_descendants_in_one_more_run(
    passes: Sequence[Tuple[float, ...]], calibrated: Sequence[bool]
) -> None:
    scales, found = ComponentScales(HistoryPolicy()), []
    for magnitudes in passes:
        see(scales, None, *magnitudes, measured_all=True)
        found.append(scales.calibrated)
    assert found == calibrated
    # In the next batch, components that stayed zero are no longer new.
    scales.after_iteration()
    see(scales, None, *passes[-1], measured_all=True)
    assert scales.calibrated


@pytest.mark.parametrize("layer", [None, "first"])
def test_underflow_at_the_loss_is_measured_once_more_only(layer: Optional[str]) -> None:
    """The loss gradient itself is not zero: what follows from it without a layer may have underflowed."""
    edges = [Edge(index, index + 1, f"layer{index}" if index else layer, -1) for index in range(3)]
    components, scales, found = COMPONENTS._replace(edges=edges), ComponentScales(HistoryPolicy()), []
    for iteration in range(2):
        for _ in range(2):
            scales.before_pass(iteration)
            scales.after_pass(
                shown(SCALES, amax={1: 0.0}, components=components, measured_all=True),
                completes_entry=True,
            )
            found.append(scales.calibrated)
            # From the second iteration on, a window has the zero.
            known = layer is not None or iteration > 0
            assert scales.limits(components, ONES, LIMITS).underflowed == (set() if known else {1})
        scales.after_iteration()
    assert found == [layer is not None, True, True, True]


def test_a_second_measurement_in_an_iteration_is_not_repeated_for_inactive_components() -> None:
    """Heads that take turns within an iteration: only the first batch of each runs once more."""
    edges = [Edge(0, 1, None, -1), Edge(0, 2, None, -1)]
    components, scales, found = COMPONENTS._replace(edges=edges), ComponentScales(HistoryPolicy()), []
    for weights in (ONES, (1.0, 0.0, 1.0, 1.0), ONES):
        scales.before_pass(0)
        amax = {1: 0.0, 2: 0.0, 3: 0.0}
        passed = shown(SCALES, weights, amax=amax, components=components, measured_all=True)
        scales.after_pass(passed, completes_entry=True)
        found.append(scales.calibrated)
    assert found == [False, True, True]


@pytest.mark.parametrize(
    ("known", "largest", "measured_all", "calibrated"),
    [
        # A zero is measured again by a pass that measures all, or has a nonzero gradient.
        (0.0, [0.0, 1.0], False, False),
        (0.0, [0.0, 0.0], True, False),
        (0.0, [0.0, 0.0], False, True),
        (None, [0.0, 0.0], False, False),
        (1.0, [0.0, 1.0], True, True),
    ],
)
def test_a_zero_that_becomes_nonzero_repeats_a_batch(
    known: Optional[float], largest: Sequence[float], *, measured_all: bool, calibrated: bool
) -> None:
    scales = scales_with(1.0, 1.0, known)
    scales.before_pass(1)
    found = shown([1.0] * 4, largest=largest, amax={2: 2.0**-9}, measured_all=measured_all)
    scales.after_pass(found, completes_entry=True)
    assert scales.calibrated is calibrated


def test_zeros_of_inactive_components_do_not_count() -> None:
    scales = ComponentScales(HistoryPolicy())
    see(scales, None, 2.0**6, 0.0, 0.0, weights=(1.0, 1.0, 0.0, 0.0), measured_all=True)
    assert scales.calibrated


def test_a_pass_that_measures_a_part_repeats_no_batch_for_zeros() -> None:
    for found in ({"measured_all": False}, {"measured_all": True, "finite": False}):
        scales = ComponentScales(HistoryPolicy())
        passed = shown(SCALES, amax={1: 1.0, 2: 0.0}, **found)
        scales.after_pass(passed, completes_entry=False)
        assert scales.calibrated


def test_arrays_that_backward_does_not_write_count_as_zeros_in_a_full_measurement() -> None:
    scales = ComponentScales(HistoryPolicy())
    assert limits(scales).unit_amaxes == [None] * 4
    see(scales, 1.0, 2.0)
    # An overflow hides the gradients of descendants.
    found = shown([1.0] * 4, measured_all=True, finite=False, overflowed=1)
    scales.after_pass(found, completes_entry=True)
    assert limits(scales).unit_amaxes == [1.0, 2.0, None, None]
    see(scales, None, 2.0, measured_all=True)
    assert limits(scales).unit_amaxes == [1.0, 2.0, 0.0, 0.0]
    assert of_all(scales)[2:] == [None, None]


# Windows.


def measure_slice(
    scales: ComponentScales, *magnitudes: Optional[float], completes_entry: bool = False, **options: Any
) -> None:
    """An iteration that measures one slice."""
    see(scales, *magnitudes, completes_entry=completes_entry, **options)
    scales.after_iteration()


def windows(scales: ComponentScales) -> Dict[str, List[float]]:
    """Entries of each window, the older ones first, without those that a newer one exceeds."""
    return {n: [v for _, v in w[1]] for n, w in scales.next_memory().state_dict()["windows"].items()}


def test_batches_whose_loss_is_zero_push_nothing_out_of_a_window() -> None:
    scales = scales_with(1.0, 4.0, 0.0, window=2)
    measure_slice(scales, 1.0, 2.0, 0.0, 3.0, completes_entry=True)
    before = windows(scales)
    assert before == {"loss": [1.0], "a": [4.0, 2.0], "b": [0.0], "c": [3.0]}
    for _ in range(1000):
        # Nor do their nonzero gradients, such as that of a mean.
        measure_slice(scales, None, 9.0, 0.0, 0.0, completes_entry=True, informative=False)
    assert windows(scales) == before
    # Inactive components push nothing out, either.
    measure_slice(scales, None, 9.0, 9.0, 9.0, completes_entry=True, weights=(1.0, 0.0, 0.0, 0.0))
    assert windows(scales) == before
    # With a loss, zeros are gradients that have underflowed.
    for _ in range(2):
        measure_slice(scales, 1.0, 1.0, 0.0, 0.0, completes_entry=True)
    assert windows(scales) == {"loss": [1.0], "a": [1.0], "b": [0.0], "c": [0.0]}


def test_a_first_batch_with_a_loss_of_zero_shows_components_and_nothing_else() -> None:
    scales = ComponentScales(HistoryPolicy())
    see(scales, None, 2.0**6, 0.0, informative=False, measured_all=True)
    assert limits(scales).unit_amaxes == [None, 2.0**6, 0.0, 0.0]
    scales.after_iteration()
    assert limits(scales).unit_amaxes == [None, 0.0, 0.0, 0.0]
    assert scales.message() == message()


@pytest.mark.parametrize("informative", [(True, False), (False, True)])
def test_one_batch_with_a_loss_among_several_of_an_iteration_suffices(informative: Tuple[bool, bool]) -> None:
    scales = scales_with(1.0, 1.0, window=1)
    for one in informative:
        see(scales, 1.0, 0.25, informative=one)
    scales.after_iteration()
    assert windows(scales) == {"loss": [1.0], "a": [0.25]}


def test_the_slices_of_a_cycle_make_one_entry() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0, window=2)
    before = windows(scales)
    # Their loss weights may differ.
    measure_slice(scales, None, 2.0**-9, weights=(1.0, 2.0**-10, 1.0, 1.0))
    measure_slice(scales, None, 0.5, 0.25)
    assert windows(scales) == before
    assert scales.next_memory().state_dict()["partial"] == {"a": 2.0, "b": 0.25}
    # A larger amax lowers a scale at once; a smaller one raises it when the larger have left the window.
    assert of_all(scales) == [2.0**14, 2.0**7, 2.0**8, 2.0**8]
    measure_slice(scales, 0.5, None, None, 0.125, completes_entry=True)
    assert scales.next_memory().state_dict()["partial"] == {}
    assert windows(scales) == {"loss": [1.0, 0.5], "a": [2.0], "b": [1.0, 0.25], "c": [1.0, 0.125]}
    for _ in range(2):
        measure_slice(scales, None, 0.25, 0.25)
        measure_slice(scales, 0.5, None, None, 0.125, completes_entry=True)
    assert of_all(scales) == [2.0**15, 2.0**10, 2.0**10, 2.0**11]


def test_a_state_may_be_saved_in_the_middle_of_a_cycle() -> None:
    scales = scales_with(1.0, 1.0, 1.0)
    measure_slice(scales, None, 2.0)
    see(scales, None, None, 4.0, completes_entry=False)
    state = json.loads(json.dumps(scales.next_memory().state_dict()))
    # The iteration has ended in the state, but not in the running training.
    assert state["partial"] == {"a": 2.0, "b": 4.0}
    assert scales.message() == message(b=4.0)
    other = ComponentScales(HistoryPolicy())
    other.seen = Observations(other.memory.with_state(state))
    scales.after_iteration()
    for one in (scales, other):
        assert of_all(one) == [2.0**14, 2.0**7, 2.0**6, None]
        measure_slice(one, 0.5, completes_entry=True)
    assert other.next_memory().state_dict() == scales.next_memory().state_dict()
    assert windows(other) == {"loss": [1.0, 0.5], "a": [2.0], "b": [4.0]}


def test_other_ranks_do_not_know_of_single_batches_until_the_iteration_ends() -> None:
    scales = scales_with(1.0, 1.0)
    assert not scales.measured_all
    # Two batches of one iteration: the second one measures a slice.
    see(scales, 1.0, 2.0, measured_all=True)
    see(scales, 1.0, 1.0)
    assert scales.measured_all
    scales.after_iteration()
    assert not scales.measured_all


def test_measurements_of_all_ranks_replace_ones_own() -> None:
    scales = scales_with(1.0, 1.0, 1.0)
    see(scales, 1.0, 2.0, weights=(1.0, 2.0, 1.0, 1.0), completes_entry=False)
    own = scales.message()
    assert own == message(loss=1.0, a=1.0)
    # Also what this rank has no gradients of, and whether an entry ends here.
    scales.after_exchange([own, message(completes_entry=True, a=8.0, b=4.0, d=5.0), message(b=2.0)])
    assert of_all(scales) == [2.0**14, 2.0**5, 2.0**6, None]
    scales.after_iteration()
    assert windows(scales) == {"loss": [1.0], "a": [8.0], "b": [4.0], "d": [5.0]}


def test_passes_over_one_iteration_are_numbered_and_one_may_ask_for_the_next() -> None:
    scales = ComponentScales(HistoryPolicy())
    measured = shown(SCALES, amax={1: 1.0, 2: 1.0, 3: 1.0}, measured_all=True)
    attempts, calibrated = [], []
    for iteration, again in ((0, True), (0, False), (0, False), (1, False)):
        scales.before_pass(iteration)
        attempts.append(scales.attempt)
        scales.after_pass(measured, completes_entry=True, rerun=again)
        calibrated.append(scales.calibrated)
    assert attempts == [0, 1, 2, 0]
    assert calibrated == [False, True, True, True]


def test_zeros_after_an_overflow_inside_a_function_are_no_first_measurement() -> None:
    """The provisional amax of the overflow is remembered, but it is not a gradient of this pass."""
    observations = Observations(Memory(HistoryPolicy())).before_pass(0)
    overflowed = shown(SCALES, amax={0: 1.0, 1: 1.0}, finite=False, overflowed=2)
    observations = observations.after_pass(overflowed, completes_entry=False)
    observations, lowered = observations.after_overflow(overflowed)
    assert lowered
    observations = observations.before_pass(0)
    amaxes = {0: 1.0, 1: 1.0, 2: 0.0, 3: 0.0}
    zeros = shown(SCALES, amax=amaxes, measured_all=True)
    observations = observations.after_pass(zeros, completes_entry=True)
    assert observations.lost_now
    assert observations.calibrated
