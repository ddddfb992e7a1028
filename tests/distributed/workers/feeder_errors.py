# SPDX-License-Identifier: Apache-2.0
"""A data feeder that fails on one rank, whose script tries again: the others wait in the same iteration."""

from __future__ import annotations

import itertools
from typing import Any, Collection, List, Mapping

import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater, LossScaleError, MPICommunicator
from tests.distributed.workers.task import Decision, Task, decisions, is_last, same_on_all, task
from tests.worlds.trainings import AS_THE_BASELINE

DELAYS = (0, 1)


class Flaky:
    """A training whose feeder fails on the last rank, at calls of these numbers; its script tries again."""

    def __init__(
        self, comm: MPICommunicator, fails: Collection[int], spoiled: Mapping[int, str] = {}, **options: Any
    ) -> None:
        self.work: Task = task(comm, spoiled=spoiled)
        self.updater: AdaptiveLossScalingUpdater = self.work.updater(**AS_THE_BASELINE, **options)
        self.updater.data_feeder = self._feed
        self.errors = 0
        self._calls = itertools.count()
        self.fails: Collection[int] = fails if is_last(comm) else ()

    def _feed(self) -> None:
        if next(self._calls) in self.fails:
            raise OSError("no connection to the images")
        self.work.feed()

    def update(self) -> Any:
        while True:
            iteration = self.updater.iteration
            try:
                return self.updater.update()
            except OSError:
                self.errors += 1
                assert self.updater.iteration == iteration

    def decisions(self, iterations: int) -> List[Decision]:
        return decisions(self.updater, iterations, self.update)


def goes_on_as_without_errors(
    comm: MPICommunicator, fails: Collection[int], errors: int, iterations: int = 9, **options: Any
) -> List[Decision]:
    """Assert that ranks stay equal, to each other and to those of a training in which no feeder fails."""
    for delay in DELAYS:
        config = AdaLossConfig(delay=delay)
        smooth = Flaky(comm, (), config=config, check_every=4, **options)
        expected, bits = smooth.decisions(iterations), smooth.work.bits()
        flaky = Flaky(comm, fails, config=config, check_every=4, **options)
        found = flaky.decisions(iterations)
        assert flaky.errors == (errors if is_last(comm) else 0)
        state = found, flaky.updater.scale_state, flaky.updater.iteration, flaky.work.bits()
        assert same_on_all(comm, state)
        assert found == expected
        assert flaky.work.bits() == bits
        assert all(np.isfinite(array).all() for array in flaky.work.snapshot().values())
    return found


def check_an_error_in_any_iteration(comm: MPICommunicator) -> None:
    """In the first, where parameters are sent; in some; several in a row; where ranks are compared."""
    found = goes_on_as_without_errors(comm, (0, 3, 5, 6, 7, 9), errors=6)
    assert [decided.iteration for decided in found] == list(range(1, 10))


def check_an_error_in_the_middle_of_a_window(comm: MPICommunicator) -> None:
    """The whole window is fed again: what was fed of it before is lost, so that only ranks are compared."""
    for delay in DELAYS:
        flaky = Flaky(comm, (1, 5, 6), config=AdaLossConfig(delay=delay), accum_grad=2, check_every=2)
        found = flaky.decisions(8)
        assert flaky.errors == (3 if is_last(comm) else 0)
        assert same_on_all(comm, (found, flaky.updater.scale_state, flaky.work.bits()))
        assert [decided.iteration for decided in found] == list(range(1, 9))


def check_an_error_in_a_retry(comm: MPICommunicator) -> None:
    """Tries before the error count: ranks give up together."""
    spoiled = {2: "gradient", 3: "gradient", 7: "gradient"}
    # Call 3 is the second try of iteration 3.
    found = goes_on_as_without_errors(comm, (3, 4), errors=2, spoiled=spoiled)
    assert [decided.lost for decided in found] == [0, 0, 2, 2, 2, 3, 3, 3, 3]
    found = goes_on_as_without_errors(comm, (3,), errors=1, spoiled=spoiled, max_retries=1)
    assert [decided.updated for decided in found] == [True, True, False, *[True] * 6]


def check_an_error_in_a_retry_before_the_floor(comm: MPICommunicator) -> None:
    """All ranks go back to the scale before the iteration, not before the error."""
    # S0 is at the floor after two batches, and a batch that no scale helps lowers no component.
    spoiled = dict.fromkeys(range(2, 6), "gradient")
    options = {"spoiled": spoiled, "min_scale": 2.0}
    goes_on_as_without_errors(comm, (4,), errors=1, on_scale_floor="skip", **options)
    for fails in ((3,), (4, 5)):
        flaky = Flaky(comm, fails, **options)
        flaky.decisions(2)
        with pytest.raises(LossScaleError, match=r"at the smallest loss scale, 2.*The scale is 8 again"):
            flaky.update()
        assert flaky.errors == (len(fails) if is_last(comm) else 0)
        assert flaky.updater.scale == 8.0
        assert same_on_all(comm, (flaky.decisions(4), flaky.updater.scale_state, flaky.work.bits()))


def check_what_is_loaded_after_an_error_begins_anew(comm: MPICommunicator) -> None:
    """All ranks fail in a retry, and go back to a state: nothing is left of the iteration."""
    flaky = Flaky(comm, (), {2: "gradient", 3: "gradient"}, max_retries=1)
    flaky.decisions(2)
    state = flaky.updater.state_dict()
    flaky.fails = {3}
    with pytest.raises(OSError, match="no connection"):
        flaky.updater.update()
    assert flaky.updater.scale == 4.0
    flaky.updater.load_state_dict(state)
    result, lost = flaky.update(), flaky.updater.counters.lost
    assert (result.updated, result.scale, lost) == (True, 4.0, {"overflow": 1})
    assert same_on_all(comm, (flaky.updater.iteration, flaky.work.bits()))
    assert flaky.updater.iteration == 3
