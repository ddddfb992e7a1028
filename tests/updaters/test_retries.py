# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any, Dict, List

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnabla_adaloss import LossScaleError
from nnabla_adaloss.updaters import Counters
from tests.updaters.networks import AS_THE_BASELINE, snapshot, training, updater_on

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
    fed = [0]

    def feed() -> None:
        fed[0] += 1
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
    assert counters.batches == fed[0]
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
    assert updater.counters == Counters(updates=1, batches=2, repeats=1, lost={"nonfinite_loss": 1})


@pytest.mark.parametrize(
    "change", [{"updates": -1}, {"lost": {"overflow": -1}}, {"batches": 1.5}, {"lost": 3}, {"repeats": None}]
)
def test_damaged_counters_are_refused(change: Dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError)):
        Counters.from_dict({**Counters(3, 7, 2).as_dict(), **change})
