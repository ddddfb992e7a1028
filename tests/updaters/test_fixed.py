# SPDX-License-Identifier: Apache-2.0
"""One scale that never changes, with or without dropped updates."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import (
    BatchThrownAway,
    FixedLossScalingUpdater,
    FormatEmulation,
    Overflowed,
    Recorder,
    UpdateEnded,
)
from tests.worlds.ranks import Pair
from tests.worlds.trainings import Training, training
from tests.worlds.values import assert_equal, data, snapshot


def updater_on(train: Training, **options: Any) -> FixedLossScalingUpdater:
    return FixedLossScalingUpdater(train.solver, train.loss, train.feed, **options)


def by_hand(scale: float, accum_grad: int, weight_decay: Optional[float]) -> Dict[str, Any]:
    train = training()
    for _ in range(5):
        train.solver.zero_grad()
        for _ in range(accum_grad):
            train.feed()
            train.loss.forward(clear_no_need_grad=True)
            train.loss.backward(scale, clear_buffer=True)
        train.solver.scale_grad(1.0 / scale)
        if weight_decay is not None:
            train.solver.weight_decay(weight_decay)
        train.solver.update()
    return snapshot(train.parameters)


@pytest.mark.parametrize(
    ("scale", "accum_grad", "weight_decay"), [(64.0, 1, None), (64.0, 3, 1e-2), (1.0, 1, None)]
)
def test_it_is_the_loop_one_would_write(scale: float, accum_grad: int, weight_decay: Optional[float]) -> None:
    """In fp32 the scale changes no bit."""
    expected = by_hand(scale, accum_grad, weight_decay)
    train = training()
    updater = updater_on(train, scale=64.0, accum_grad=accum_grad, weight_decay=weight_decay)
    for _ in range(5):
        assert updater.update()[:5] == (True, 64.0, 0, "updated", ())
    assert_equal(snapshot(train.parameters), expected)


def test_an_overflow_is_dropped_and_the_scale_stays() -> None:
    train = training(overflow=[1])
    updater = updater_on(train)
    assert updater.update().updated
    before = snapshot(train.parameters)
    assert updater.update() == (False, 128.0, 0, "overflow", (), (), "", "")
    assert_equal(snapshot(train.parameters), before)
    assert updater.update().updated


def test_an_overflow_in_one_of_several_batches_drops_them_all() -> None:
    updater = updater_on(training(overflow=[1]), accum_grad=3)
    assert not updater.update().updated
    assert updater.update().updated


def test_an_overflow_is_not_dropped_when_one_does_not_want_it() -> None:
    train = training(overflow=[0])
    assert updater_on(train, drop_overflow_update=False).update().updated
    assert not np.isfinite(train.parameters["output/affine/W"].d).all()


def test_storage_is_emulated() -> None:
    updater = updater_on(training(), storage="float16", scale=2.0**10)
    assert isinstance(updater.loss, FormatEmulation)
    assert updater.update().updated
    # In float16 the loss gradient itself is infinite.
    assert not updater_on(training(), storage="float16", scale=2.0**17).update().updated


def test_a_loss_of_several_elements_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        FixedLossScalingUpdater(training().solver, PF.affine(data(2, 3), 2, name="vector"))


def test_monitors_are_told_of_updates_and_dropped_batches() -> None:
    train, recorder, losses = training(overflow=[1], nan=[3]), Recorder(), []
    updater = updater_on(train, storage="float16", monitors=[recorder])
    for _ in range(5):
        updater.update()
        losses.append(float(train.loss.d))
    recording = recorder.recording
    ends = recording.of(UpdateEnded)
    assert [(e.iteration, e.updated, e.reason) for e in ends] == [
        (i, i % 2 == 1, "updated" if i % 2 else "overflow") for i in range(1, 6)
    ]
    np.testing.assert_array_equal([e.loss for e in ends], losses)
    assert {e.scale for e in ends} == {128.0}
    causes = [(2, "overflow"), (4, "nonfinite_loss")]
    assert [(e.iteration, e.cause) for e in recording.of(Overflowed)] == causes
    thrown_away = [(e.iteration, e.cause, e.batches) for e in recording.of(BatchThrownAway)]
    assert thrown_away == [(*cause, 1) for cause in causes]
    assert recording.layers == []


@pytest.mark.parametrize("chosen", [None, ["output/affine/W", "conv/conv/W"]])
def test_gradients_are_summed_over_the_ranks(chosen: Optional[List[str]]) -> None:
    train, messages = training(), []

    class Noting(Pair):
        def all_reduce(self, arrays: Any, division: bool = False, inplace: bool = False) -> None:
            messages.append((list(arrays), division))

    grads = None if chosen is None else [train.parameters[name].grad for name in chosen]
    updater_on(train, comm=Noting(), grads=grads).update()
    trained = sorted(name for name, v in train.parameters.items() if v.need_grad)
    assert messages == [([train.parameters[name].grad for name in chosen or trained], False)]
