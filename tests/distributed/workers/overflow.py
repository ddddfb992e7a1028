# SPDX-License-Identifier: Apache-2.0
"""What happens on one rank alone is answered by all ranks, in the same iteration and alike."""

from __future__ import annotations

import warnings
from typing import Any, Dict

import pytest

from nnabla_adaloss import AdaLossConfig, LossScaleError, LossScaleWarning
from nnabla_adaloss.communicators import MPICommunicator
from tests.distributed.workers.task import decisions, same_on_all, task
from tests.worlds.trainings import AS_THE_BASELINE

DELAYS = (0, 1)


def check_an_infinity_on_one_rank_backs_off_all(comm: MPICommunicator) -> None:
    for delay in DELAYS:
        work = task(comm, spoiled={2: "gradient", 3: "gradient", 7: "gradient"})
        updater = work.updater(**AS_THE_BASELINE, config=AdaLossConfig(delay=delay))
        found = decisions(updater, 6)
        assert same_on_all(comm, (found, work.bits()))
        assert [decided[:3] for decided in found] == [
            (True, 8.0, 0),
            (True, 8.0, 0),
            (True, 2.0, 2),
            (True, 2.0, 2),
            (True, 2.0, 2),
            (True, 1.0, 3),
        ]


def check_nan_in_the_data_of_one_rank_is_answered_by_policy(comm: MPICommunicator) -> None:
    for delay in DELAYS:
        options: Dict[str, Any] = {**AS_THE_BASELINE, "config": AdaLossConfig(delay=delay)}
        spoiled = {1: "nan", 3: "nan"}
        work = task(comm, spoiled=spoiled)
        found = decisions(work.updater(on_nonfinite_loss="skip", **options), 5)
        assert same_on_all(comm, (found, work.bits()))
        assert [decided.reason for decided in found] == ["updated", "nonfinite_loss"] * 2 + ["updated"]
        assert [decided.scale for decided in found] == [8.0] * 5

        updater = task(comm, spoiled=spoiled).updater(on_nonfinite_loss="raise", **options)
        updater.update()
        with pytest.raises(LossScaleError, match="not finite in iteration 2"):
            updater.update()
        assert updater.update().updated

        updater = task(comm, spoiled=spoiled).updater(on_nonfinite_loss="warn", **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            decisions(updater, 5)
        assert [w.category for w in caught] == [LossScaleWarning]

        # An infinite loss whose gradients are finite is no reason to skip.
        work = task(comm, spoiled={1: "loss"})
        found = decisions(work.updater(on_nonfinite_loss="skip", **options), 3)
        assert same_on_all(comm, (found, work.bits()))
        assert [(decided.scale, decided.reason) for decided in found] == [(8.0, "updated")] * 3
