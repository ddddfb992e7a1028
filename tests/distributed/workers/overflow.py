# SPDX-License-Identifier: Apache-2.0
"""What happens on one rank alone is answered by all ranks, in the same iteration and alike. Each repeats its
own batches without asking, and all go on with the same scales.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any, Dict, Mapping, Tuple

import numpy as np
import pytest

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScalingUpdater,
    LossScaleError,
    LossScaleWarning,
    MPICommunicator,
    load_checkpoint,
    save_checkpoint,
)
from tests.distributed.workers.task import Parameters, decisions, from_all, is_last, same_on_all, task
from tests.worlds.trainings import AS_THE_BASELINE
from tests.worlds.warned import warned

Case = Tuple[str, str, int, int]
# Half of all combinations: each pair of settings is among them.
CASES: Tuple[Case, ...] = (
    ("history", "approx_range", 0, 1),
    ("history", "approx_range", 1, 2),
    ("history", "amax_history", 0, 2),
    ("history", "amax_history", 1, 1),
    ("dynamic", "approx_range", 0, 2),
    ("dynamic", "approx_range", 1, 1),
    ("dynamic", "amax_history", 0, 1),
    ("dynamic", "amax_history", 1, 2),
)
# The large batch is the second of its window where there are two.
LARGE = 7


def options(case: Case) -> Dict[str, Any]:
    global_scale, method, delay, accum_grad = case
    return {
        "global_scale": global_scale,
        "config": AdaLossConfig(loss_scale_method=method, delay=delay),
        "accum_grad": accum_grad,
        "storage": "float16",
        "average": True,
        "check_every": 1,
        # Where the scale is searched for, it is one at which a large batch overflows.
        "scale": 2.0**14,
    }


def scales(updater: AdaptiveLossScalingUpdater) -> Tuple[Any, ...]:
    """What decides the next scales and is no matter of one rank."""
    components = updater.scaling.components.next_memory().state_dict()
    return updater.scale_state, updater.scaling.components.unit_amaxes(), components


def check_an_overflow_on_one_rank_is_repeated_there(comm: MPICommunicator) -> None:
    for case in CASES:
        work = task(comm, spoiled={LARGE: "large"})
        updater = work.updater(**options(case))
        for iteration in range(10):
            result = updater.update()
            assert result.updated, case
            assert same_on_all(comm, scales(updater)), (case, iteration)
            retries = from_all(comm, result.retries)
            if iteration == LARGE // updater.accum_grad:
                assert retries[-1] > 0, case
                assert not any(retries[:-1]), case
            elif iteration and updater.scaling.delay:
                # Where none runs a batch again, nor knows one of its own alone, all have the same scales.
                assert not any(retries), case
                assert same_on_all(comm, updater.scaling.accumulated_scales), (case, iteration)
        assert same_on_all(comm, work.bits()), case


def check_ranks_that_do_not_repeat_have_the_same_scales(comm: MPICommunicator) -> None:
    for case in CASES:
        work = task(comm, spoiled={LARGE: "large"})
        updater = work.updater(on_overflow="next", **options(case))
        results = [(updater.update(), same_on_all(comm, scales(updater))) for _ in range(10)]
        assert all(result.updated and same for result, same in results), case
        assert any(result.retries for result, _ in results), case
        assert same_on_all(comm, work.bits()), case


def trained(comm: MPICommunicator, spoiled: Mapping[int, str], **given: Any) -> Parameters:
    work = task(comm, spoiled=spoiled)
    updater = work.updater(**given)
    for _ in range(5):
        assert updater.update().updated
    return work.snapshot()


def check_no_batch_is_lost(comm: MPICommunicator) -> None:
    """The weights are those of training in fp32, in which nothing overflows, to the rounding of float16."""
    exact: Dict[int, Parameters] = {}
    fixed = AdaLossConfig(loss_scale_method="fixed", dtype="float32")
    # An update of weights by the large batch outweighs all others a hundred times: it is the last but one.
    large = {3: "large"}
    for case in CASES:
        accum_grad = case[-1]
        if accum_grad not in exact:
            plain = {"config": fixed, "accum_grad": accum_grad, "average": True, "scale": 1.0}
            exact[accum_grad] = trained(comm, large, global_scale="dynamic", **plain)
        found = trained(comm, large, **options(case))
        for name, expected in exact[accum_grad].items():
            error = np.linalg.norm(found[name] - expected)
            assert error < 0.02 * np.linalg.norm(expected) + 1e-4, (case, name, error)


def check_a_batch_that_no_scale_helps_is_thrown_away_by_all(comm: MPICommunicator) -> None:
    for case in CASES:
        work = task(comm, spoiled={4: "gradient"})
        updater = work.updater(**options(case))
        bad = 4 // updater.accum_grad
        for _ in range(bad):
            updater.update()
        before = updater.scale
        with pytest.warns(LossScaleWarning, match="not finite at any loss scale"):
            result = updater.update()
        assert result.updated
        assert updater.counters.lost == {"hopeless": updater.accum_grad}
        # The bad batch has lowered nothing; what the good one behind it has shown may.
        assert before / 4.0 <= updater.scale <= before, (case, before, updater.scale)
        assert same_on_all(comm, (scales(updater), work.bits())), case


def check_a_floor_on_one_rank_is_an_error_on_all(comm: MPICommunicator) -> None:
    for case in CASES[::2]:
        bad = range(4 * case[-1], 29 * case[-1])
        work = task(comm, spoiled=dict.fromkeys(bad, "gradient"))
        updater = work.updater(**options(case))
        for _ in range(4):
            assert updater.update().updated
        before, weights = scales(updater), work.bits()
        at_floor = pytest.raises(LossScaleError, match="iteration 5 at the smallest loss scale")
        with warned(), at_floor as caught:
            updater.update()
        assert ("on another rank" in str(caught.value)) != is_last(comm)
        assert (scales(updater), work.bits()) == (before, weights), case
        assert updater.update().updated
        assert same_on_all(comm, (scales(updater), work.bits())), case


def check_ranks_go_on_from_what_they_saved(comm: MPICommunicator) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint")
        for case in CASES:
            large = {LARGE: "large", LARGE + 6: "large"}
            work = task(comm, spoiled=large)
            updater = work.updater(**options(case))
            for _ in range(5):
                updater.update()
            save_checkpoint(path, updater)
            found = [(updater.update(), scales(updater)) for _ in range(5)]
            last = work.bits()

            of_rank_0 = from_all(comm, path)[0]
            for own in (True, False):
                work = task(comm, spoiled=large)
                updater = work.updater(**options(case))
                load_checkpoint(path if own else of_rank_0, updater)
                for _ in range(updater.counters.fed):
                    work.feed()
                again = [(updater.update(), scales(updater)) for _ in range(5)]
                # What a rank alone has seen of its batches is in its own file.
                assert again == found or not own, case
                assert all(result.updated for result, _ in again), case
                assert work.bits() == last, case
            comm.barrier()


def check_ranks_go_on_between_lost_batches(comm: MPICommunicator) -> None:
    spoiled = {4: "large", 7: "gradient", 11: "large"}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint")
        for case in CASES[1:4:2]:
            given = {**options(case), "on_overflow": "next", "accum_grad": 1}
            work = task(comm, spoiled=spoiled)
            updater = work.updater(**given)
            with warned():
                before = [updater.update() for _ in range(9)]
                lost = updater.scaling.components.memory.lost
                assert lost
                assert same_on_all(comm, lost)
                assert updater.counters.lost == {"overflow": 1, "hopeless": 1}, before
                save_checkpoint(path, updater)
                found = [(updater.update(), scales(updater)) for _ in range(5)]
                last = work.bits()
                work = task(comm, spoiled=spoiled)
                updater = work.updater(**given)
                load_checkpoint(path, updater)
                for _ in range(updater.counters.fed):
                    work.feed()
                assert [(updater.update(), scales(updater)) for _ in range(5)] == found, case
            assert same_on_all(comm, (scales(updater), last, work.bits())), case
            assert work.bits() == last, case
            comm.barrier()


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
        with warned() as texts:
            decisions(updater, 5)
        assert len(texts) == 1

        # An infinite loss whose gradients are finite is no reason to skip.
        work = task(comm, spoiled={1: "loss"})
        found = decisions(work.updater(on_nonfinite_loss="skip", **options), 3)
        assert same_on_all(comm, (found, work.bits()))
        assert [(decided.scale, decided.reason) for decided in found] == [(8.0, "updated")] * 3
