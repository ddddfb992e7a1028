# SPDX-License-Identifier: Apache-2.0
"""What a pass means for its batch, for every combination of facts and rules."""

from __future__ import annotations

from itertools import product
from typing import Any, Iterator, List, Optional

import pytest

from nnabla_adaloss.core.verdict import Facts, PassVerdict, Rules, judge

pytestmark = pytest.mark.any_context

FINAL = [*PassVerdict][[*PassVerdict].index(PassVerdict.GOOD) :]
ACTIONS = [verdict for verdict in PassVerdict if verdict not in FINAL and verdict is not PassVerdict.RERUN]
REPEAT, LOSE = Rules(True, 5), Rules(False, 5)
LOST = REPEAT._replace(update_lost=True)
TRUTHS: List[Optional[bool]] = [None, False, True]


def all_facts() -> Iterator[Facts]:
    for flags, answers in product(product([False, True], repeat=6), product(TRUTHS, repeat=4)):
        for repeats in (0, 3, 5):
            yield Facts(repeats, *flags, *answers)


def overflow(repeats: int = 0, **facts: Any) -> Facts:
    return Facts(repeats, overflowed=True, **facts)


def answered(facts: Facts, verdict: PassVerdict, answer: bool) -> Facts:
    """What is known when what a verdict asks for was done."""
    fields = {
        PassVerdict.MEASURE: "fits",
        PassVerdict.CHECK_FORWARD: "fault",
        PassVerdict.PROBE: "fits_smallest",
        PassVerdict.LOWER: "lowered",
    }
    return facts._replace(**{fields[verdict]: answer})


@pytest.mark.parametrize("rules", [REPEAT, LOSE, LOST, REPEAT._replace(check_after=0)])
def test_nothing_is_asked_twice_and_each_way_ends(rules: Rules) -> None:
    for facts in all_facts():
        ways = [facts]
        for _ in range(5):
            found = [(one, judge(one, rules)) for one in ways]
            asked = [(one, verdict) for one, verdict in found if verdict in ACTIONS]
            ways = [answered(*one, answer) for one in asked for answer in (False, True)]
        assert not ways


def test_good_are_gradients_that_are_finite_and_no_others() -> None:
    for rules in (REPEAT, LOSE):
        for facts in all_facts():
            verdict = judge(facts, rules)
            assert facts.overflowed or verdict in (PassVerdict.GOOD, PassVerdict.RERUN)
            assert not (facts.overflowed and verdict is PassVerdict.GOOD)
            if not facts.overflowed:
                again = not facts.calibrated and facts.repeats < rules.max_repeats
                assert verdict is (PassVerdict.RERUN if again else PassVerdict.GOOD)


def test_a_batch_that_is_lost_runs_again_for_nothing_but_to_be_measured() -> None:
    for facts in all_facts():
        verdict = judge(facts, LOSE)
        if facts.overflowed:
            assert verdict not in (PassVerdict.RERUN, PassVerdict.RETRIES)
            assert (verdict is PassVerdict.HOPELESS) <= (facts.fits_smallest is False)
    assert judge(overflow(can_measure_more=True), LOSE) is PassVerdict.MEASURE
    assert judge(overflow(can_measure_more=True, fits=True), LOSE) is PassVerdict.OVERFLOW
    # In a window that is lost already, too: what it shows counts for the next one.
    assert judge(overflow(can_measure_more=True), LOSE._replace(update_lost=True)) is PassVerdict.MEASURE
    # Whatever was wrong in it, the window is lost.
    verdicts = {judge(facts, LOST) for facts in all_facts()}
    assert verdicts == {PassVerdict.GOOD, PassVerdict.MEASURE, PassVerdict.OVERFLOW}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        # Lower scales show by themselves whether they were the cause.
        (overflow(), PassVerdict.LOWER),
        (overflow(lowered=True), PassVerdict.RERUN),
        (overflow(can_measure_more=True), PassVerdict.LOWER),
        # Where they have not helped, it is looked into; so where no scale was left.
        (overflow(3, lowered=True), PassVerdict.CHECK_FORWARD),
        (overflow(3, lowered=True, fault=""), PassVerdict.PROBE),
        (overflow(3, lowered=True, fault="", fits_smallest=True), PassVerdict.RERUN),
        (overflow(3, lowered=True, fault="", fits_smallest=False), PassVerdict.HOPELESS),
        (overflow(lowered=False), PassVerdict.CHECK_FORWARD),
        (overflow(lowered=False, fault=""), PassVerdict.HOPELESS),
        # What is not finite in forward is no matter of the scale, unless gradients are finite behind it.
        (overflow(forward_is_suspect=True), PassVerdict.CHECK_FORWARD),
        (overflow(forward_is_suspect=True, fault="c"), PassVerdict.PROBE),
        (overflow(fault="c", fits_smallest=False), PassVerdict.NONFINITE_FORWARD),
        (overflow(fault="c", fits_smallest=True), PassVerdict.LOWER),
        (overflow(loss_is_nan=True, forward_is_suspect=True, fault="c"), PassVerdict.NONFINITE_LOSS),
        (overflow(loss_is_nan=True, forward_is_suspect=True, fault=""), PassVerdict.NONFINITE_LOSS),
        # An infinite loss may only exceed the format: its gradients are finite at a lower scale.
        (overflow(loss_is_infinite=True, forward_is_suspect=True), PassVerdict.CHECK_FORWARD),
        (overflow(loss_is_infinite=True, fault="c"), PassVerdict.PROBE),
        (overflow(loss_is_infinite=True, fault="c", fits_smallest=True), PassVerdict.LOWER),
        (overflow(loss_is_infinite=True, fault="c", fits_smallest=False), PassVerdict.NONFINITE_LOSS),
        (overflow(loss_is_infinite=True, fault="", fits_smallest=False), PassVerdict.NONFINITE_LOSS),
        # The last pass is measured, to name what was bad; what fits then was only too large for old scales.
        (overflow(5, can_measure_more=True), PassVerdict.MEASURE),
        (overflow(can_measure_more=True, loss_is_nan=True, forward_is_suspect=True), PassVerdict.MEASURE),
        (overflow(5, can_measure_more=True, fits=True), PassVerdict.RETRIES),
        (overflow(5, lowered=True, fault=""), PassVerdict.RETRIES),
        # Before it is lost, it is tried whether any scale helps, if scales are low for another one.
        (overflow(4, lost_recently=True), PassVerdict.LOWER),
        (overflow(5, lost_recently=True), PassVerdict.CHECK_FORWARD),
        (overflow(5, lost_recently=True, fault=""), PassVerdict.PROBE),
        (overflow(5, fault="", fits_smallest=False), PassVerdict.HOPELESS),
        (overflow(5, fault="", fits_smallest=True), PassVerdict.LOWER),
    ],
)
def test_actions_for_a_batch_that_may_run_again(facts: Facts, expected: PassVerdict) -> None:
    assert judge(facts, REPEAT) is expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (overflow(), PassVerdict.CHECK_FORWARD),
        (overflow(fault=""), PassVerdict.LOWER),
        (overflow(fault="", lowered=False), PassVerdict.OVERFLOW),
        # A single loss lowers a scale by one step; further ones only where that may help.
        (overflow(lost_recently=True), PassVerdict.CHECK_FORWARD),
        (overflow(lost_recently=True, fault=""), PassVerdict.PROBE),
        (overflow(fault="", fits_smallest=True), PassVerdict.LOWER),
        (overflow(fault="", fits_smallest=False), PassVerdict.HOPELESS),
        (overflow(fault="c"), PassVerdict.PROBE),
        (overflow(fault="c", fits_smallest=False), PassVerdict.NONFINITE_FORWARD),
        (Facts(calibrated=False), PassVerdict.RERUN),
    ],
)
def test_actions_for_a_lost_batch(facts: Facts, expected: PassVerdict) -> None:
    assert judge(facts, LOSE) is expected
