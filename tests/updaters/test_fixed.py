# SPDX-License-Identifier: Apache-2.0
"""One scale that never changes, with or without dropped updates."""

from __future__ import annotations

from collections import Counter
from typing import Any, List, Optional, Tuple

import nnabla as nn
import numpy as np
import pytest

from nnabla_adaloss import (
    AdaptiveLossScalingUpdater,
    BatchThrownAway,
    FixedLossScalingUpdater,
    FormatEmulation,
    Overflowed,
    Recorder,
    UpdateEnded,
)
from tests.worlds.ranks import Pair
from tests.worlds.trainings import Training, training
from tests.worlds.values import FLOAT, HALF, Values, assert_equal, constant, snapshot


def updater_on(train: Training, **options: Any) -> FixedLossScalingUpdater:
    return FixedLossScalingUpdater(train.solver, train.loss, train.feed, **options)


Results = Tuple[List[Tuple[Any, ...]], Values]


def by_hand(
    train: Training, scale: float, storage: Optional[str], weight_decay: Optional[float], accum_grad: int
) -> Results:
    """A plain loop with one loss scale, and what it returns and leaves."""
    solver, loss, results = train.solver, train.loss, []
    if storage is not None:
        loss = FormatEmulation(loss, storage, float_tail=True)
    for _ in range(8):
        solver.zero_grad()
        for _ in range(accum_grad):
            train.feed()
            loss.forward(clear_no_need_grad=True)
            loss.backward(scale, clear_buffer=True)
        dropped = solver.check_inf_or_nan_grad()
        if not dropped:
            solver.scale_grad(1.0 / scale)
            if weight_decay is not None:
                solver.weight_decay(weight_decay)
            solver.update()
        cause = "nonfinite_loss" if np.isnan(train.loss.d) else "overflow"
        results.append((not dropped, scale, 0, cause if dropped else "updated"))
    return results, snapshot(train.parameters)


@pytest.mark.parametrize("bad", [{}, {"overflow": [2], "nan": [5]}])
@pytest.mark.parametrize(("weight", "scale"), [(1.0, 2.0**17), (1.0, 100.0), (1e-4, 2.0**15), (1e3, 128.0)])
@pytest.mark.parametrize("storage", [None, "float16", "native"])
def test_it_is_a_plain_loop_bit_for_bit(
    storage: Optional[str], weight: float, scale: float, bad: Any
) -> None:
    """No gradient has a scale above or below, whatever the loss weight."""
    found: List[Results] = []
    emulated = None if storage == "native" else storage
    for plain in (True, False):
        with nn.context_scope(HALF if storage == "native" else FLOAT):
            train = training(**bad)
            train = train._replace(loss=train.loss * weight)
            if plain:
                found.append(by_hand(train, scale, emulated, 1e-3, 1))
                continue
            # A plain loop in native half has no functions in float.
            options: Any = {"storage": emulated, "weight_decay": 1e-3, "float_tail": storage != "native"}
            updater = updater_on(train, scale=scale, **options)
            results = [updater.update()[:4] for _ in range(8)]
            assert {*updater.scaling.accumulated_scales.values()} == {scale}
            found.append((results, snapshot(train.parameters)))
    assert found[0][0] == found[1][0]
    assert_equal(found[0][1], found[1][1])


@pytest.mark.parametrize("overflow", [[], [4]])
def test_accumulated_gradients_are_those_of_a_plain_loop(overflow: List[int]) -> None:
    """In fp32 a power of two changes no bit; other scales round each batch by itself."""
    expected = by_hand(training(overflow=overflow), 64.0, None, 1e-2, 3)
    train = training(overflow=overflow)
    updater = updater_on(train, scale=64.0, accum_grad=3, weight_decay=1e-2)
    assert [updater.update()[:4] for _ in range(8)] == expected[0]
    assert_equal(snapshot(train.parameters), expected[1])


def test_an_overflow_is_dropped_and_the_scale_stays() -> None:
    train = training(overflow=[1])
    updater = updater_on(train)
    assert updater.update().updated
    before = snapshot(train.parameters)
    result = updater.update()
    assert result[:4] == (False, 128.0, 0, "overflow")
    assert "output/affine" in result.overflow_layers
    assert_equal(snapshot(train.parameters), before)
    assert updater.update().updated
    assert updater.counters.lost == {"overflow": 1}


@pytest.mark.parametrize("bad", [{"nan": [1]}, {"overflow": [1]}])
def test_a_dropped_batch_stays_in_no_running_statistics(bad: Any) -> None:
    found = []
    for batches, given in ((2, bad), (1, {})):
        updater = updater_on(training(**given))
        for _ in range(batches):
            updater.update()
        statistics = nn.get_parameters(grad_only=False)
        found.append({name: statistics[f"bn/bn/{name}"].d.copy() for name in ("mean", "var")})
    assert_equal(*found)


def test_no_overflow_lowers_a_fixed_scale_or_raises() -> None:
    updater = updater_on(training(overflow=range(40), nan=[3]))
    results = [updater.update() for _ in range(40)]
    assert {result[:3] for result in results} == {(False, 128.0, 0)}
    # The reason of each result is the cause under which its batch counts.
    assert Counter(result.reason for result in results) == updater.counters.lost
    assert updater.counters.lost == {"overflow": 39, "nonfinite_loss": 1}
    assert {updater.on_nonfinite_loss, updater.on_nonfinite_forward, updater.on_scale_floor} == {"skip"}


def test_a_scale_that_is_assigned_is_used() -> None:
    updater = updater_on(training())
    updater.update()
    updater.scale = 16.0
    assert updater.update()[:2] == (True, 16.0)
    assert {*updater.scaling.accumulated_scales.values()} == {16.0}


@pytest.mark.parametrize("storage", [None, "float16"])
def test_the_scale_stays_whatever_loss_weight_a_batch_has(storage: Optional[str]) -> None:
    train, weight, weights = training(), constant(1.0), [4.0, 4.0, 2.0, 0.5, 0.0, 16.0, 8.0]
    taken = iter(weights)

    def feed() -> None:
        train.feed()
        weight.d = next(taken)

    updater = updater_on(train._replace(loss=train.loss * weight, feed=feed), storage=storage)
    for _ in weights:
        assert updater.update().updated
        assert {*updater.scaling.accumulated_scales.values(), updater.scaling.loss_scale} == {128.0}


def test_a_scale_that_the_feeder_assigns_stays_when_its_batch_is_dropped() -> None:
    train = training(overflow=[1])
    scales, kept = iter([16.0, 32.0, 64.0]), []

    def feed() -> None:
        train.feed()
        updater.scale = next(scales)

    updater = updater_on(train._replace(feed=feed))
    for _ in range(3):
        result = updater.update()
        kept.append((result.updated, result.scale, updater.scale))
    assert kept == [(True, 16.0, 16.0), (False, 32.0, 32.0), (True, 64.0, 64.0)]


def test_a_copy_by_its_state_goes_on_as_the_original() -> None:
    train = training()
    updater = updater_on(train, scale=32.0)
    updater.update()
    copy = FixedLossScalingUpdater(train.solver, train.loss, train.feed)
    copy.load_state_dict(updater.state_dict())
    assert (copy.scale, copy.iteration, copy.counters) == (32.0, 1, updater.counters)
    with pytest.raises(ValueError, match="state was saved with"):
        AdaptiveLossScalingUpdater(train.solver, train.loss).load_state_dict(updater.state_dict())


def test_an_overflow_is_not_dropped_when_one_does_not_want_it() -> None:
    train = training(overflow=[0])
    assert updater_on(train, drop_overflow_update=False).update().updated
    assert not np.isfinite(train.parameters["output/affine/W"].d).all()


def test_an_overflow_on_another_rank_alone_is_dropped_and_counted_here_too() -> None:
    train = training()
    shapes = {v.shape for v in train.parameters.values()}
    other = Pair(lambda own: np.inf if own.shape in shapes else 0.0)
    updater, before = updater_on(train, comm=other), snapshot(train.parameters)
    assert updater.update()[:4] == (False, 128.0, 0, "overflow")
    assert updater.counters.lost == {"overflow": 1}
    assert_equal(snapshot(train.parameters), before)


def test_monitors_are_told_of_updates_and_dropped_batches() -> None:
    train, recorder, losses = training(overflow=[1], nan=[3]), Recorder(), []
    updater = updater_on(train, storage="float16", monitors=[recorder])
    for _ in range(5):
        updater.update()
        losses.append(float(train.loss.d))
    recording = recorder.recording
    ends = recording.of(UpdateEnded)
    reasons = ["updated", "overflow", "updated", "nonfinite_loss", "updated"]
    assert [(e.iteration, e.updated, e.reason) for e in ends] == [
        (i, reason == "updated", reason) for i, reason in enumerate(reasons, 1)
    ]
    np.testing.assert_array_equal([e.loss for e in ends], losses)
    assert {e.scale for e in ends} == {128.0}
    causes = [(2, "overflow"), (4, "nonfinite_loss")]
    assert [(e.iteration, e.cause) for e in recording.of(Overflowed)] == causes
    thrown_away = [(e.iteration, e.cause, e.batches) for e in recording.of(BatchThrownAway)]
    assert thrown_away == [(*cause, 1) for cause in causes]
    assert recording.layers == ["output/affine", "hidden/affine"]


@pytest.mark.parametrize("chosen", [None, ["output/affine/W", "conv/conv/W"]])
def test_gradients_are_summed_over_the_ranks(chosen: Optional[List[str]]) -> None:
    train, summed = training(), []

    class Noting(Pair):
        def all_reduce(self, arrays: Any, division: bool = False, inplace: bool = False) -> None:
            summed.extend(array for array in arrays if array in gradients)
            assert not division
            super().all_reduce(arrays, division, inplace)

    gradients = [v.grad for v in train.parameters.values()]
    trained = sorted(name for name, v in train.parameters.items() if v.need_grad)
    grads = None if chosen is None else [train.parameters[name].grad for name in chosen]
    updater_on(train, comm=Noting(), grads=grads).update()
    assert summed == [train.parameters[name].grad for name in chosen or trained]
