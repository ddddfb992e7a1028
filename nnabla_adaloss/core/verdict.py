# SPDX-License-Identifier: Apache-2.0
"""Verdict on a pass, `judge`: its gradients are used, it runs again, is examined, or is lost.

    gradients finite           GOOD; RERUN while scales are far too low
    not finite                 LOWER the scales that overflowed, and RERUN it
      several times            CHECK_FORWARD, and PROBE the smallest scale
      without repeats          MEASURE the scales that it needs, and CHECK_FORWARD; then it is lost

A batch that is not finite at the smallest scale is HOPELESS and lowers no scale. Before a batch is lost, the
smallest scale is tried only while another loss is remembered: a single loss lowers scales by one step.
`nnabla_adaloss.engine.batch_loop` carries verdicts out.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Optional

CHECK_AFTER = 3  # number of repeats after which forward is checked


class PassVerdict(Enum):
    """Verdict on a pass; the last six are final."""

    RERUN = "run the batch again"
    MEASURE = "run it once more, and measure every gradient"
    LOWER = "lower the scales that overflowed"
    CHECK_FORWARD = "look for the first function of forward that is not finite"
    PROBE = "try the smallest scale"

    GOOD = "good"
    OVERFLOW = "overflow"
    RETRIES = "retries"  # repeated as often as allowed
    HOPELESS = "hopeless"  # at any scale
    NONFINITE_FORWARD = "nonfinite_forward"
    NONFINITE_LOSS = "nonfinite_loss"

    @property
    def of_forward(self) -> bool:
        """True if forward was not finite, so that no loss scale is the cause."""
        return self in (PassVerdict.NONFINITE_LOSS, PassVerdict.NONFINITE_FORWARD)

    @property
    def lowers_nothing(self) -> bool:
        """True if no scale helps, so that the scales stay as before the batch."""
        return self.of_forward or self is PassVerdict.HOPELESS


class Rules(NamedTuple):
    """Policy for batches that overflow."""

    repeat: bool  # True if they run again; else they are lost
    max_repeats: int
    check_after: int = CHECK_AFTER
    update_lost: bool = False  # True if an earlier batch, accumulated for the same update, is lost


class Facts(NamedTuple):
    """Facts about a batch after its last pass; None: unknown yet."""

    repeats: int = 0
    calibrated: bool = True  # False if its scales were far too low
    overflowed: bool = False  # True if gradients that the solver uses are not finite, or the loss is NaN
    can_measure_more: bool = False  # True if a pass that measures all would add measurements
    loss_is_nan: bool = False
    loss_is_infinite: bool = False
    forward_is_suspect: bool = False  # True if a value in forward is known not to be finite
    lost_recently: bool = False  # True if scales are still low because of an earlier lost batch
    fits: Optional[bool] = None  # True if the batch is finite with scales from its own gradients
    lowered: Optional[bool] = None  # True if a scale could be lowered
    fault: Optional[str] = None  # first function of forward with a nonfinite array, in words; empty: none
    fits_smallest: Optional[bool] = None  # True if gradients are finite at the smallest scale


def judge(facts: Facts, rules: Rules) -> PassVerdict:
    """Decide the next step of a batch, which adds a fact or another pass, or its final outcome."""
    repeats_left = facts.repeats < rules.max_repeats
    if not facts.overflowed:
        rerun = repeats_left and not (facts.calibrated or rules.update_lost)
        return PassVerdict.RERUN if rerun else PassVerdict.GOOD
    may_repeat = rules.repeat and repeats_left
    # Before a batch is given up, as lost or for its loss, scales from its own gradients are tried.
    if facts.can_measure_more and facts.fits is None and (facts.loss_is_nan or not may_repeat):
        return PassVerdict.MEASURE
    if rules.update_lost:
        return PassVerdict.OVERFLOW  # a repeat could not save the update
    lost = PassVerdict.RETRIES if rules.repeat else PassVerdict.OVERFLOW
    again_or_lost = PassVerdict.RERUN if may_repeat else lost
    if facts.fits:
        return again_or_lost  # too high scales were the only fault
    # A fault in forward is searched for if forward is suspect, or before the batch is lost.
    if facts.fault is None and (facts.forward_is_suspect or not may_repeat):
        return PassVerdict.CHECK_FORWARD
    if facts.loss_is_nan:
        return PassVerdict.NONFINITE_LOSS
    # Finite gradients at the smallest scale show that a fault is harmless, such as the minus infinity of an
    # attention mask, or a loss beyond the format. Otherwise no scale helps: lost batches in a row would lower
    # scales further and further.
    if facts.fits_smallest is None and (facts.fault or (facts.lost_recently and not may_repeat)):
        return PassVerdict.PROBE
    if facts.fits_smallest is False:
        if facts.loss_is_infinite:
            return PassVerdict.NONFINITE_LOSS
        return PassVerdict.NONFINITE_FORWARD if facts.fault else PassVerdict.HOPELESS
    if facts.lowered is None:
        return PassVerdict.LOWER
    if not rules.repeat:
        return again_or_lost  # lost: forward was examined above
    # If no scale could be lowered, or after several repeats, forward is examined once.
    check_is_due = facts.repeats == rules.check_after
    if facts.fault is None and (check_is_due or not facts.lowered):
        return PassVerdict.CHECK_FORWARD
    if not facts.lowered:
        return PassVerdict.HOPELESS
    return PassVerdict.PROBE if check_is_due and facts.fits_smallest is None else again_or_lost
