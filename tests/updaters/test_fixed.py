# SPDX-License-Identifier: Apache-2.0
"""One scale that never changes, with or without dropped updates."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import (
    AdaptiveLossScaling,
    BatchThrownAway,
    FixedLossScalingUpdater,
    FormatEmulation,
    Overflowed,
    Recorder,
    UpdateEnded,
)
from tests.updaters.networks import Training, snapshot, training


def updater_on(train: Training, **options: Any) -> FixedLossScalingUpdater:
    return FixedLossScalingUpdater(train.solver, train.loss, train.feed, **options)


def by_hand(iterations: int, scale: float, accum_grad: int, weight_decay: Optional[float]) -> Dict[str, Any]:
    train = training()
    for _ in range(iterations):
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


@pytest.mark.parametrize("accum_grad", [1, 3])
@pytest.mark.parametrize("weight_decay", [None, 1e-2])
def test_it_is_the_loop_one_would_write(accum_grad: int, weight_decay: Optional[float]) -> None:
    expected = by_hand(5, 64.0, accum_grad, weight_decay)
    train = training()
    updater = updater_on(train, scale=64.0, accum_grad=accum_grad, weight_decay=weight_decay)
    for _ in range(5):
        assert updater.update()[:5] == (True, 64.0, 0, "updated", ())
    for name, value in snapshot(train.parameters).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_the_scale_changes_no_bit_in_fp32() -> None:
    expected = by_hand(3, 1.0, 1, None)
    train = training()
    updater = updater_on(train)
    for _ in range(3):
        assert updater.update().scale == 128.0
    for name, value in snapshot(train.parameters).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_an_overflow_is_dropped_and_the_scale_stays() -> None:
    train = training(overflow=[1])
    updater = updater_on(train)
    assert updater.update().updated
    before = snapshot(train.parameters)
    result = updater.update()
    assert result == (False, 128.0, 0, "overflow", (), (), "", "")
    for name, value in before.items():
        if not name.startswith("bn/bn/mean") and not name.startswith("bn/bn/var"):
            np.testing.assert_array_equal(train.parameters[name].d, value, err_msg=name)
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


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"scale": 0.0}, ValueError, "scale"),
        ({"scale": math.inf}, ValueError, "scale"),
        ({"scale": None}, TypeError, "scale"),
        ({"accum_grad": 0}, ValueError, "accum_grad"),
        ({"weight_decay": "much"}, TypeError, "weight_decay"),
        ({"storage": "float12"}, ValueError, "storage"),
        ({"data_feeder": 3}, TypeError, "data_feeder"),
        ({"comm": object()}, TypeError, "comm"),
        ({"grads": [nn.NdArray((1,))]}, ValueError, "grads"),
    ],
)
def test_bad_arguments_are_named(options: Dict[str, Any], error: type, named: str) -> None:
    train = training()
    with pytest.raises(error, match=f"^{named}"):
        FixedLossScalingUpdater(train.solver, train.loss, **options)


def test_monitors_are_told_of_updates_and_dropped_batches() -> None:
    train, recorder = training(overflow=[1], nan=[3]), Recorder()
    updater = updater_on(train, storage="float16", monitors=[recorder])
    losses = []
    for _ in range(5):
        updater.update()
        losses.append(float(train.loss.d))
    recording = recorder.recording
    ends = recording.of(UpdateEnded)
    assert [(e.iteration, e.updated, e.reason) for e in ends] == [
        (1, True, "updated"),
        (2, False, "overflow"),
        (3, True, "updated"),
        (4, False, "overflow"),
        (5, True, "updated"),
    ]
    np.testing.assert_array_equal([e.loss for e in ends], losses)
    assert {e.scale for e in ends} == {128.0}
    causes = [(2, "overflow"), (4, "nonfinite_loss")]
    assert [(e.iteration, e.cause) for e in recording.of(Overflowed)] == causes
    assert [(e.iteration, e.cause, e.batches) for e in recording.of(BatchThrownAway)] == [
        (*cause, 1) for cause in causes
    ]
    assert recording.layers == []


def test_every_of_a_monitor_holds_for_a_fixed_scale() -> None:
    recorder = Recorder(every=2)
    updater = updater_on(training(), monitors=[recorder], accum_grad=2)
    for _ in range(4):
        updater.update()
    assert [e.iteration for e in recorder.recording.of(UpdateEnded)] == [2, 4]
    assert updater.iteration == 4


def test_what_is_no_monitor_is_refused() -> None:
    with pytest.raises(TypeError, match="none of the methods on_layer_scaled"):
        updater_on(training(), monitors=[print])


def test_a_loss_of_several_elements_is_refused() -> None:
    train = training()
    x = nn.Variable.from_numpy_array(np.ones((2, 3), np.float32))
    with pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        FixedLossScalingUpdater(train.solver, PF.affine(x, 2, name="vector"))
    with pytest.raises(ValueError, match="needs no gradient"):
        FixedLossScalingUpdater(train.solver, F.mean(x))


class Recording:
    """A communicator of one rank that keeps what it is given."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.messages: List[Any] = []

    def all_reduce(self, arrays: Sequence[nn.NdArray], division: bool = False, inplace: bool = False) -> None:
        self.messages.append((list(arrays), division))


@pytest.mark.parametrize("chosen", [None, ["output/affine/W", "conv/conv/W"]])
def test_gradients_are_summed_over_the_ranks(chosen: Optional[List[str]]) -> None:
    train, comm = training(), Recording()
    grads = None if chosen is None else [train.parameters[name].grad for name in chosen]
    updater = updater_on(train, comm=comm, grads=grads)
    assert updater.comm is comm
    updater.update()
    trained = sorted(name for name, v in train.parameters.items() if v.need_grad)
    ((arrays, division),) = comm.messages
    assert arrays == [train.parameters[name].grad for name in chosen or trained]
    assert division is False


def test_a_loss_that_unscales_by_itself_is_refused_with_the_cure() -> None:
    train = training()
    cure = "give the loss that was wrapped in it, or train with AdaptiveLossScalingUpdater$"
    with pytest.raises(TypeError, match=f"^loss is an AdaptiveLossScaling, .*{cure}"):
        FixedLossScalingUpdater(train.solver, AdaptiveLossScaling(train.loss))
