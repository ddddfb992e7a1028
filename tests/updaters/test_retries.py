# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import asdict
from typing import Any, Dict, List

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnabla_adaloss import LossScaleError
from nnabla_adaloss.updaters import Counters
from tests.worlds.trainings import AS_THE_BASELINE, training, updater_on
from tests.worlds.values import snapshot

numbers = st.lists(st.integers(0, 7), max_size=3, unique=True)


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
@settings(max_examples=8, deadline=None)
@given(
    overflow=numbers,
    nan=numbers,
    accum_grad=st.integers(1, 2),
    way=st.sampled_from([{}, AS_THE_BASELINE]),
)
def test_every_batch_is_part_of_an_update_or_lost(
    overflow: List[int], nan: List[int], accum_grad: int, way: Dict[str, Any]
) -> None:
    train = training(overflow=overflow, nan=nan)
    fed: List[int] = []

    def feed() -> None:
        fed.append(updater.counters.fed)
        train.feed()

    policies = dict.fromkeys(("on_nonfinite_loss", "on_nonfinite_forward", "on_scale_floor"), "skip")
    updater = updater_on(train._replace(feed=feed), accum_grad=accum_grad, **policies, **way)
    results = []
    for _ in range(4):
        before = snapshot()
        results.append(updater.update())
        # A schedule of learning rates advances when parameters have changed.
        changed = any((value != before[name]).any() for name, value in snapshot().items())
        assert changed == results[-1].updated
    counters = updater.counters
    assert counters.updates == sum(result.updated for result in results)
    assert fed == list(range(counters.batches))
    assert counters.fed == len(fed)
    assert counters.batches == counters.updates * accum_grad + sum(counters.lost.values())
    thrown_away = sum(counters.lost.values()) // accum_grad
    assert sum(r.retries for r in results) + sum(not r.updated for r in results) >= thrown_away
    for result in results:
        if result.reason.startswith("nonfinite"):
            assert counters.lost[result.reason]


def test_a_batch_that_ends_in_an_error_is_lost_as_well() -> None:
    updater = updater_on(training(nan=[1]))
    updater.update()
    with pytest.raises(LossScaleError):
        updater.update()
    assert updater.counters == Counters(1, 2, 1, {"nonfinite_loss": 1}, fed=2)


@pytest.mark.parametrize(
    "change",
    [
        {"updates": -1},
        {"lost": {"overflow": -1}},
        {"batches": 1.5},
        {"lost": 3},
        {"repeats": None},
        {"fed": -1},
    ],
)
def test_damaged_counters_are_refused(change: Dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError)):
        Counters.from_dict({**asdict(Counters(3, 7, 2)), **change})


def test_a_batch_that_was_not_fed_is_asked_for_again() -> None:
    train, asked = training(), []

    def feed() -> None:
        asked.append(updater.counters.fed)
        if len(asked) == 4:
            raise ConnectionError
        train.feed()

    updater = updater_on(train._replace(feed=feed), accum_grad=2)
    updater.update()
    with pytest.raises(ConnectionError):
        updater.update()
    updater.update()
    assert asked == [0, 1, 2, 3, 2, 3]
    assert updater.state_dict()["counters"]["fed"] == 4


def test_counters_of_an_earlier_version_have_fed_what_they_count() -> None:
    saved = asdict(Counters(3, 7, 2))
    del saved["fed"]
    assert Counters.from_dict(saved).fed == 7
