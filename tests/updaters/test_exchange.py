# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other, with a thread for each rank. `tests/distributed` has processes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

import nnabla as nn
import nnabla.solvers as S
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnabla_adaloss import BatchThrownAway, Counters
from nnabla_adaloss.communicators.agreement import RankDisagreementError
from nnabla_adaloss.core.verdict import Facts, PassVerdict
from nnabla_adaloss.engine import Outcome
from nnabla_adaloss.kernels import CpuKernels
from nnabla_adaloss.updaters.exchange import GradientExchange
from tests.worlds.networks import two_layers
from tests.worlds.ranks import Pair
from tests.worlds.trainings import solver_of, updater_of
from tests.worlds.values import assert_equal, constant, snapshot

pytestmark = pytest.mark.any_context

SIZE = 3


class Rank:
    """A communicator of one of several threads; it writes down which messages there were."""

    def __init__(self, rank: int, meeting: threading.Barrier, held: List[np.ndarray]) -> None:
        self.rank, self.size = rank, meeting.parties
        self.messages: List[Tuple[Any, ...]] = []
        self._meeting, self._held = meeting, held

    def all_reduce(self, arrays: Sequence[nn.NdArray], division: bool = False, inplace: bool = False) -> None:
        self.messages.append(("all_reduce", len(arrays), division, inplace))
        for array in arrays:
            assert array.dtype == np.float32  # as nnabla's communicators sum it
            total = np.sum(self._all(array), axis=0, dtype=np.float32)
            array.data = total / np.float32(self.size) if division else total

    def bcast(self, arrays: Sequence[nn.NdArray], src: int, inplace: bool = False) -> None:
        self.messages.append(("bcast", len(arrays), src, inplace))
        for array in arrays:
            array.data = self._all(array)[src]

    def _all(self, array: nn.NdArray) -> List[np.ndarray]:
        self._held[self.rank] = array.data.copy()
        self._meeting.wait(10.0)
        found = list(self._held)
        self._meeting.wait(10.0)
        return found


def exchanges(names: Sequence[str] = ("b", "a")) -> List[GradientExchange]:
    """One per rank. What a rank holds tells which rank it is, and which parameter."""
    meeting, held = threading.Barrier(SIZE), [np.zeros(0)] * SIZE
    made = []
    for rank in range(SIZE):
        # Each rank has the parameters in another order.
        parameters = {name: nn.Variable((2,), need_grad=True) for name in sorted(names, reverse=rank % 2 > 0)}
        for name, v in parameters.items():
            v.d = np.float32([rank, ord(name[-1])])
            v.g = np.float32([rank + 1.0, ord(name[-1])])
        solver = solver_of(S.Sgd(1.0), parameters)
        made.append(GradientExchange(Rank(rank, meeting, held), None, solver))
    return made


def on_all(call: Callable[[GradientExchange], Any], made: Sequence[GradientExchange]) -> List[Any]:
    """What a call returns on each rank, or raises."""

    def result(exchange: GradientExchange) -> Any:
        try:
            return call(exchange)
        except RankDisagreementError as error:
            return error

    with ThreadPoolExecutor(SIZE) as ranks:
        return list(ranks.map(result, made))


def gradients(exchange: GradientExchange) -> Dict[str, List[float]]:
    return {name: v.g.tolist() for name, v in exchange.parameters.items()}


def test_gradients_are_summed_in_one_message() -> None:
    made = exchanges()
    on_all(lambda exchange: exchange.sum_with({}, CpuKernels(), average=False), made)
    expected = {name: [6.0, ord(name) * SIZE] for name in "ab"}
    assert [gradients(exchange) for exchange in made] == [expected] * SIZE
    assert made[0].comm.messages == [("all_reduce", 3, False, False)]


def told_by(made: Sequence[GradientExchange], owns: Sequence[Any], *, average: bool = False) -> int:
    """Have each rank tell its own, and see that it comes to all bit for bit; in how many messages."""
    before = len(made[0].comm.messages)
    found = on_all(lambda e: e.sum_with(owns[e.comm.rank], CpuKernels(), average=average), made)
    for told, finite in found:
        assert finite
        assert [exact(one) for one in told] == [exact(own) for own in owns]
    sums = made[0].comm.messages[before:]
    # Gradients come with the first.
    assert [count for _, count, _, _ in sums] == [3, 1][: len(sums)]
    assert [division for _, _, division, _ in sums] == [average, False][: len(sums)]
    return len(sums)


def exact(own: Mapping[str, Sequence[float]]) -> Dict[str, bytes]:
    return {name: np.array(values, np.float64).tobytes() for name, values in own.items()}


def test_an_iteration_begins_with_the_number_and_the_first_with_the_parameters_of_the_first_rank() -> None:
    made = exchanges()
    found = on_all(lambda e: [e.begin_iteration(number, 2) for number in (4, 5, 6)], made)
    assert found == [[False, False, True]] * SIZE
    for exchange in made:
        values = {name: v.d.tolist() for name, v in exchange.parameters.items()}
        assert values == {"a": [0.0, ord("a")], "b": [0.0, ord("b")]}
    # The first shows that it keeps float32.
    assert made[0].comm.messages == [("bcast", 1, 0, True), ("bcast", 2, 0, False)]
    assert not hasattr(made[0].comm, "iteration")
    made[0].comm.iteration = None
    assert not made[0].begin_iteration(8, 0)
    assert made[0].comm.iteration == 8


def test_a_flag_is_set_where_any_rank_sets_it() -> None:
    made = exchanges()
    flags = {0: [False, True, False], 1: [False, False, False], 2: [False, True, True]}
    found = on_all(lambda exchange: exchange.any(flags[exchange.comm.rank]), made)
    assert found == [[False, True, True]] * SIZE
    # Few flags, and nothing is divided: no buffer is needed for them.
    assert made[0].comm.messages == [("all_reduce", 1, False, True)]


LOWERED = Outcome(PassVerdict.OVERFLOW, Facts(overflowed=True, lowered=True))
NOT_LOWERED = Outcome(PassVerdict.OVERFLOW, Facts(overflowed=True, lowered=False))
NONFINITE = Outcome(PassVerdict.NONFINITE_LOSS, Facts(overflowed=True))
HOPELESS = Outcome(PassVerdict.HOPELESS, Facts(overflowed=True, lowered=False))


@pytest.mark.parametrize(
    ("outcomes", "verdict", "lowered"),
    [
        # The sum overflows where no rank's own gradients did.
        ([Outcome()] * 3, PassVerdict.OVERFLOW, False),
        ([LOWERED, Outcome(), Outcome()], PassVerdict.OVERFLOW, True),
        # What one has lowered is no help to another.
        ([LOWERED, NOT_LOWERED, Outcome()], PassVerdict.OVERFLOW, False),
        ([HOPELESS, Outcome(), LOWERED], PassVerdict.HOPELESS, False),
        ([HOPELESS, NONFINITE, LOWERED], PassVerdict.NONFINITE_LOSS, False),
    ],
)
def test_ranks_agree_on_the_cause_and_on_whether_a_scale_was_lowered_for_all_of_it(
    outcomes: List[Outcome], verdict: PassVerdict, lowered: bool
) -> None:
    made = exchanges()
    found = on_all(lambda e: e.agree(outcomes[e.comm.rank], repeat=False), made)
    assert found == [(verdict, lowered)] * SIZE


@pytest.mark.parametrize("verdict", [*PassVerdict][[*PassVerdict].index(PassVerdict.GOOD) + 1 :])
def test_ranks_agree_on_every_cause_of_a_lost_batch(verdict: PassVerdict) -> None:
    outcomes = [Outcome(), Outcome(verdict, Facts(overflowed=True)), LOWERED]
    found = on_all(lambda e: e.agree(outcomes[e.comm.rank], repeat=True)[0], exchanges())
    assert found == [verdict] * SIZE
    for docstring in (BatchThrownAway.__doc__, Counters.__doc__):
        assert f'`"{verdict.value}"`' in str(docstring)


numbers = st.lists(st.floats(allow_nan=False), min_size=1, max_size=3)
tellings = st.dictionaries(st.sampled_from(["a", "b", "\u00e4 \u2603"]), numbers)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(tellings, min_size=SIZE, max_size=SIZE), min_size=1, max_size=3), st.booleans())
def test_all_ranks_learn_each_ranks_measurements_bit_for_bit(steps: List[List[Any]], average: bool) -> None:
    made = exchanges()
    for number, owns in enumerate(steps):
        assert told_by(made, owns, average=average) <= 2
        if not number:
            assert gradients(made[1])["a"][0] == (2.0 if average else 6.0)
        counts = {name: {len(own[name]) for own in owns if name in own} for own in owns for name in own}
        if all(len(lengths) == 1 for lengths in counts.values()):
            # All know these names by now, in any order, and of any rank.
            turned = [dict(reversed([*own.items()])) for own in reversed(owns)]
            assert told_by(made, turned, average=average) == 1


def equal(names: Sequence[str]) -> List[GradientExchange]:
    made = exchanges(names)
    for exchange in made:
        for v in exchange.parameters.values():
            v.d = np.pi
    return made


def test_ranks_that_agree_are_left_alone() -> None:
    # That one counts in integers is no difference.
    scales = [[8, 2], [8.0, 2.0], [np.float32(8.0), 2]]
    made = equal("ab")
    assert on_all(lambda e: e.check_ranks_agree(scales[e.comm.rank], 7), made) == [None] * SIZE
    # A checksum each, whatever the parameters' sizes.
    assert made[0].comm.messages == [("all_reduce", 1, False, False)]


def test_scales_that_differ_in_the_last_bit_are_told_of() -> None:
    scales = [[8.0, 0.1], [8.0, np.nextafter(0.1, 1.0)], [8.0, 0.1]]
    found = on_all(lambda e: e.check_ranks_agree(scales[e.comm.rank], 7), equal("ab"))
    stay = "ranks disagree in iteration 7: the loss scales (rank {} {} rank 0). Resume from a checkpoint"
    here = ["agrees with", "differs from", "agrees with"]
    for rank, error in enumerate(found):
        assert str(error).startswith(stay.format(rank, here[rank]))


@pytest.mark.parametrize(
    ("count", "told"), [(1, "p0 ("), (5, "p0, p1, p2, p3, p4 ("), (6, "p4 and others (")]
)
def test_parameters_that_differ_are_named_on_every_rank(count: int, told: str) -> None:
    made = equal([f"p{number}" for number in range(7)])
    for number in range(count):
        made[2].parameters[f"p{number}"].d = [np.pi, np.nextafter(np.float32(np.pi), np.float32(4.0))]
    found = on_all(lambda e: e.check_ranks_agree([8.0], 7), made)
    assert [type(error) for error in found] == [RankDisagreementError] * SIZE
    for error in found:
        assert told in str(error)
    # Compared is what the others have; nobody's parameters change.
    assert made[2].parameters["p0"].d[1] > np.float32(np.pi)


def test_a_number_that_is_none_is_told_where_others_of_its_name_are() -> None:
    made, own = exchanges(), {"a": [1.0, np.nan]}
    for _ in range(2):
        told = on_all(lambda exchange: exchange.sum_with(own, CpuKernels(), average=False), made)
        assert all([str(one) for one in rows] == ["{'a': [1.0, nan]}"] * SIZE for rows, _ in told)


def test_flags_without_a_communicator_are_those_of_this_rank() -> None:
    two_layers(constant(np.ones((2, 3))))
    assert GradientExchange(None, None, solver_of()).any([True, False]) == [True, False]


def exchange_of(chosen: Sequence[str], other: float) -> Tuple[GradientExchange, Pair]:
    """An exchange of the gradients of some parameters, with a rank whose flags are `other`."""
    two_layers(constant(np.ones((2, 3))))
    for v in nn.get_parameters().values():
        v.g = 1.0
    comm = Pair(lambda own: np.full_like(own, other))
    grads = [nn.get_parameters()[name].grad for name in chosen]
    return GradientExchange(comm, grads, solver_of()), comm


@pytest.mark.parametrize(
    ("own", "other", "finite"), [(1.0, 1.0, False), (1.0, 0.0, True), (np.inf, 0.0, False)]
)
def test_ranks_tell_each_other_whether_gradients_are_finite_that_they_keep_to_themselves(
    own: float, other: float, finite: bool
) -> None:
    exchange, comm = exchange_of(["a/affine/W"], other)
    nn.get_parameters()["a/affine/b"].g = own
    assert exchange.sum_with({}, CpuKernels(), average=False)[1] is finite
    assert comm.shapes[-1] == (1,)


@pytest.mark.parametrize("every", [False, True])
def test_nothing_is_said_where_all_gradients_are_exchanged(every: bool) -> None:
    two_layers(constant(np.ones((2, 3))))
    exchange, comm = exchange_of([*nn.get_parameters()] if every else [], 0.0)
    assert exchange.sum_with({}, CpuKernels(), average=False)[1]
    nn.get_parameters()["a/affine/b"].g = np.nan
    assert not exchange.sum_with({}, CpuKernels(), average=False)[1]
    assert [count for _, _, count in comm.asked] == [len(nn.get_parameters()) + 1] * 2


class InHalf(Pair):
    """A communicator of a half context: it converts what it sends, in place."""

    def __init__(self) -> None:
        super().__init__(size=1)

    def bcast(self, arrays: Sequence[nn.NdArray], src: int, inplace: bool = False) -> None:
        super().bcast(arrays, src, inplace)
        for array in arrays:
            array.cast(np.float16)


def test_a_communicator_that_sends_float16_is_refused_before_it_has_any_parameter() -> None:
    loss, comm = two_layers(constant(np.ones((2, 3)))), InHalf()
    updater = updater_of(loss, comm=comm)
    before, state = snapshot(), updater.state_dict()
    for _ in range(2):
        with pytest.raises(ValueError, match="comm was made in a half context.* float context, as in"):
            updater.update()
    assert [count for _, _, count in comm.asked] == [1, 1]
    assert_equal(snapshot(), before)
    assert {v.data.dtype for v in nn.get_parameters().values()} == {np.dtype(np.float32)}
    assert updater.state_dict() == state
