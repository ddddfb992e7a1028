# SPDX-License-Identifier: Apache-2.0
"""The schedules in use, and in which iterations they are measured and chosen again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

from .power_of_two import is_power_of_two
from .schedule import ScaleSchedule
from .validation import integer, number

# Number of loss-weight tuples with a cached schedule.
_KEPT = 64

# Start of a cycle that no iteration goes on with.
_ENDED = -(2**31)


@dataclass(frozen=True)
class ScheduleCache:
    """The schedules in use, one for each set of loss weights, and the cycle of measuring for the next ones.

    With `delay=1` each iteration measures another slice of the arrays: when scales are chosen anew, all have
    been measured once. The topologies of a network share this cycle. With `delay=0` the iteration that
    chooses measures all of them.
    """

    iterations: int  # a schedule is used in so many
    constant: bool  # whether layers have one scale for good, so that where S0 is given nothing is measured
    delayed: bool
    # By loss weights, each with the iteration in which it was chosen, and the origin of the choice if it can
    # be compared; the last one chosen is the last.
    chosen: Mapping[Tuple[float, ...], Tuple[int, ScaleSchedule, Any]] = field(default_factory=dict)
    since: int = _ENDED  # the iteration that measured the first slice

    def last(self, weights: Tuple[float, ...]) -> Optional[ScaleSchedule]:
        """The schedule that was chosen last for these loss weights, whether it is still in use or not."""
        return self.chosen[weights][1] if weights in self.chosen else None

    def current(
        self, iteration: int, given_scale: Optional[float], weights: Tuple[float, ...]
    ) -> Optional[ScaleSchedule]:
        """The schedule for this iteration; None: it is to be chosen."""
        chosen_in, schedule, _ = self.chosen.get(weights, (0, None, None))
        if schedule is None or schedule.given_scale != given_scale:
            return None
        # With delay=0, every batch of a measuring iteration measures.
        first, age = int(not self.delayed), iteration - self.since
        in_use = first <= age < self.iterations and chosen_in >= self.since
        return schedule if in_use or self.for_good(given_scale) else None

    def moved(
        self, iteration: int, given_scale: Optional[float], weights: Tuple[float, ...], max_scale: float
    ) -> Optional[ScaleSchedule]:
        """The schedule that was chosen last, if it only has to be moved to these loss weights."""
        before = next(reversed([*self.chosen]), None)
        if before is None or self.current(iteration, given_scale, before) is None:
            return None
        found, known = self.chosen[before][1].moved_to(weights, max_scale), self.last(weights)
        # Mostly it is what it was.
        return known if found is not None and known is not None and known.is_applied_as(found) else found

    def slice_number(self, iteration: int) -> Optional[int]:
        """Number of the slice of the arrays that an iteration measures, of `iterations`; None: nothing."""
        if not (self.delayed and self.chosen):
            return None
        # Each cycle begins with another slice, so that of batches that take turns all are measured in time.
        return (iteration - self.since - self.since // self.iterations) % self.iterations

    def keep(self, schedule: ScaleSchedule, iteration: int, origin: Any = None) -> ScheduleCache:
        """Use the schedule that was chosen in this iteration."""
        since = self.since if 0 <= iteration - self.since < self.iterations else iteration
        chosen = {weights: one for weights, one in self.chosen.items() if weights != schedule.loss_weights}
        if len(chosen) == _KEPT:
            del chosen[next(iter(chosen))]
        _, before, its_origin = self.chosen.get(schedule.loss_weights, (0, None, None))
        if origin is None and before is schedule:
            origin = its_origin
        chosen[schedule.loss_weights] = iteration, schedule, origin
        return replace(self, chosen=chosen, since=since)

    def drop(self) -> ScheduleCache:
        """Have scales chosen again, with which another cycle begins."""
        return replace(self, chosen={}, since=_ENDED)

    def within(self, cycle: int) -> ScheduleCache:
        """These schedules in the cycle, by its `since`, of another topology of the network."""
        # With delay=0, where nothing is measured by slices, each choice ends a cycle.
        return replace(self, since=cycle) if self.delayed else self

    def for_good(self, given_scale: Optional[float]) -> bool:
        """Whether nothing is measured: neither layers nor S0."""
        return self.constant and given_scale is not None

    def state_dict(self) -> Dict[str, Any]:
        """The schedules and their age, as plain numbers and lists."""
        chosen = [
            {
                "iteration": iteration,
                "weights": list(weights),
                "scales": list(one.component_scales),
                "fixed_scale": one.given_scale,
                "joined": one.joined is not None,
            }
            for weights, (iteration, one, _) in self.chosen.items()
        ]
        return {"since": self.since, "chosen": chosen}

    def loaded(
        self, state: Mapping[str, Any], make: Callable[..., ScaleSchedule], *, power_of_two: bool = False
    ) -> ScheduleCache:
        """Restore the result of `state_dict`, with schedules that `make` makes; KeyError, TypeError or
        ValueError if it is damaged, as where scales must be powers of two and are not.
        """
        chosen: Dict[Tuple[float, ...], Tuple[int, ScaleSchedule, Any]] = {}
        for saved in state["chosen"]:
            given = saved["fixed_scale"]
            key = tuple([number("weight", weight) for weight in saved["weights"]])
            given = None if given is None else _scale(given)
            # States of before have no joined components.
            schedule = make(list(map(_scale, saved["scales"])), given, key, saved.get("joined", False))
            counts = {len(schedule.component_scales), len(key), len(schedule.components.names)}
            if len(counts) != 1:
                raise ValueError(f"{len(key)} components; the network has {len(schedule.components.names)}")
            root = schedule.component_scales[schedule.components.root]
            for scale in schedule.component_scales if power_of_two else ():
                # A given S0 need be none; a scale at the end of float32's range is one itself.
                if not (is_power_of_two(scale / root) or is_power_of_two(scale)):
                    raise ValueError(f"scale={scale!r} is no power of two, as with power_of_two=True all are")
            chosen[key] = integer("iteration", saved["iteration"]), schedule, None
        return replace(self, chosen=chosen, since=integer("since", state["since"]))


def _scale(value: Any) -> float:
    scale = number("scale", value)
    if not 2.0**-126 <= scale < 2.0**126:
        raise ValueError(f"scale={scale!r} must be in [2**-126, 2**126)")
    return scale
