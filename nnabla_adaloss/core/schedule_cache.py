# SPDX-License-Identifier: Apache-2.0
"""Schedules in use, and the cycle of measuring and choosing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Tuple

from .power_of_two import is_power_of_two
from .schedule import ScaleSchedule
from .validation import integer, limited, number

_CAPACITY = 64  # number of schedules
_ENDED = -(2**31)  # start of a cycle that ended long ago, so that the next schedule begins another

# Check of a saved scale: float32 must hold it and its reciprocal.
_scale = limited(number, lambda scale: 2.0**-126 <= scale < 2.0**126, "must be in [2**-126, 2**126)")


class CacheEntry(NamedTuple):
    """Schedule of one set of loss weights."""

    iteration: int  # in which it was chosen
    schedule: ScaleSchedule


@dataclass(frozen=True)
class ScheduleCache:
    """Schedules in use, one for each set of loss weights, and the cycle of measuring for the next ones."""

    # With `delay=1` each iteration measures another slice of the arrays, in a cycle that all topologies of
    # the network share. With `delay=0` the iteration that chooses measures all of them.

    iterations: int  # number of iterations that use a schedule
    by_layer: bool  # False: layers do not scale (alpha is always 1), so that a given S0 needs no measurement
    delayed: bool  # True for delay=1
    entries: Mapping[Tuple[float, ...], CacheEntry] = field(default_factory=dict)  # by loss weights, in order
    cycle_start: int = _ENDED  # first iteration of the cycle

    def last(self, loss_weights: Tuple[float, ...]) -> Optional[ScaleSchedule]:
        """Latest schedule for these loss weights, in use or not."""
        return self.entries[loss_weights].schedule if loss_weights in self.entries else None

    def current(
        self, iteration: int, given_scale: Optional[float], loss_weights: Tuple[float, ...]
    ) -> Optional[ScaleSchedule]:
        """Schedule in use for these arguments; None: it must be chosen."""
        entry = self.entries.get(loss_weights)
        if entry is None or entry.schedule.given_scale != given_scale:
            return None
        # With delay=0, the first iteration of a cycle measures each of its batches, for a choice of its own.
        first = self.cycle_start if self.delayed else self.cycle_start + 1
        in_cycle = first <= iteration < self.cycle_start + self.iterations
        is_of_cycle = in_cycle and entry.iteration >= self.cycle_start
        # Constant scales stay in use: a new choice, without measurements, would be equal.
        return entry.schedule if is_of_cycle or self.measures_nothing(given_scale) else None

    def convert_latest(
        self, loss_weights: Tuple[float, ...], iteration: int, given_scale: Optional[float], max_scale: float
    ) -> Optional[ScaleSchedule]:
        """Convert the latest of all schedules to these loss weights; None if not in use, or not possible."""
        latest = self.current(iteration, given_scale, list(self.entries)[-1]) if self.entries else None
        converted = latest and latest.with_loss_weights(loss_weights, max_scale)
        own = self.last(loss_weights)
        # If the last schedule for these loss weights is equal, its cached `steps` need not be made again.
        return own if converted and own and own.component_scales == converted.component_scales else converted

    def slice_number(self, iteration: int) -> Optional[int]:
        """Number of the slice of the arrays, of `iterations`, that an iteration measures; None: nothing."""
        if not (self.delayed and self.entries):
            return None
        # Each cycle begins with another slice: else, with eight batches in turn, each would meet one slice.
        cycle = self.cycle_start // self.iterations
        return (iteration - self.cycle_start - cycle) % self.iterations

    def keep(self, schedule: ScaleSchedule, iteration: int) -> ScheduleCache:
        """Add a schedule as the latest: it joins the running cycle, or begins one in this iteration."""
        in_cycle = 0 <= iteration - self.cycle_start < self.iterations
        entries = {**self.entries}
        entries.pop(schedule.loss_weights, None)  # the new one comes last
        if len(entries) == _CAPACITY:
            del entries[next(iter(entries))]
        entries[schedule.loss_weights] = CacheEntry(iteration, schedule)
        return replace(self, entries=entries, cycle_start=self.cycle_start if in_cycle else iteration)

    def drop(self) -> ScheduleCache:
        """Request a new choice of scales, which begins another cycle."""
        return replace(self, entries={}, cycle_start=_ENDED)

    def moved_to_cycle(self, start: int) -> ScheduleCache:
        """Move these schedules to the cycle of another topology, which began in iteration `start`."""
        # With delay=0 there are no slices, and each topology has its own cycle.
        return replace(self, cycle_start=start) if self.delayed else self

    def measures_nothing(self, given_scale: Optional[float]) -> bool:
        """True if nothing is measured: neither layers nor S0."""
        return not self.by_layer and given_scale is not None

    def state_dict(self) -> Dict[str, Any]:
        """Schedules and their age, as plain numbers and lists; some keys are words of earlier versions."""
        chosen = [
            {
                "iteration": iteration,
                "weights": list(loss_weights),
                "scales": list(schedule.component_scales),
                "fixed_scale": schedule.given_scale,
                "joined": schedule.is_merged,
            }
            for loss_weights, (iteration, schedule) in self.entries.items()
        ]
        return {"since": self.cycle_start, "chosen": chosen}

    def with_state(
        self, state: Mapping[str, Any], make: Callable[..., ScaleSchedule], *, power_of_two: bool = False
    ) -> ScheduleCache:
        """Restore a `state_dict`, or raise if it is damaged; `make` makes schedules from the saved fields."""
        entries: Dict[Tuple[float, ...], CacheEntry] = {}
        for saved in state["chosen"]:
            loss_weights = tuple([number("weight", weight) for weight in saved["weights"]])
            given_scale = None if saved["fixed_scale"] is None else _scale("scale", saved["fixed_scale"])
            scales = [_scale("scale", scale) for scale in saved["scales"]]
            # Older states have no merged components.
            schedule = make(scales, given_scale, loss_weights, is_merged=bool(saved.get("joined")))
            components = len(schedule.components.names)
            if not len(loss_weights) == len(scales) == components:
                raise ValueError(
                    f"{len(loss_weights)} loss weights and {len(scales)} scales; the network has "
                    f"{components} components"
                )
            root = scales[schedule.components.root]
            for scale in scales if power_of_two else ():
                # Scales are S0 times powers of two. S0 may be any number: given, or a bound of the policy.
                if not is_power_of_two(scale / root):
                    raise ValueError(
                        f"scale={scale!r} must be S0={root!r} times a power of two, as power_of_two is True"
                    )
            entries[loss_weights] = CacheEntry(integer("iteration", saved["iteration"]), schedule)
        return replace(self, entries=entries, cycle_start=integer("since", state["since"]))
