# SPDX-License-Identifier: Apache-2.0
"""A recurrent state that is carried from batch to batch advances once per batch, however often that runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest
from nnabla.parameter import get_parameter_or_create

from nnabla_adaloss import AdaptiveLossScalingUpdater, FormatEmulation
from tests.worlds.tampering import Gate
from tests.worlds.trainings import solver_of
from tests.worlds.values import HALF

BATCHES = 5


Carry = Callable[[nn.Variable, nn.Variable], Any]


def net(
    carry: Carry = lambda first, last: None,
    feeder: Carry = lambda first, last: None,
    *,
    rate: float = 0.1,
    keep: bool = False,  # the last state, to be read between updates
    named: bool = False,  # whether the first state is a parameter
) -> SimpleNamespace:
    """A recurrent net of two steps, whose last state becomes its first one: `carry` makes it so, once, and
    returns what is added to the loss; or `feeder` does, before each batch. `factors` multiply gradients.
    """
    nn.clear_parameters()
    rng = np.random.RandomState(0)
    x, grown = nn.Variable((2, 4, 3)), Gate()
    first = h = get_parameter_or_create("h0", (4, 3), need_grad=False) if named else nn.Variable((4, 3))
    first.data.zero()
    for x_t in F.split(x, axis=0):
        h = F.tanh(PF.affine(x_t, 3, name="x", rng=rng) + PF.affine(h, 3, name="h", rng=rng))
    h.persistent = keep
    loss = F.mean(grown(PF.affine(h, 2, name="out", rng=rng)) ** 2)
    added = carry(first, h)
    if added is not None:
        loss = loss + F.sum(added) * 0.0
    solver = solver_of(S.Sgd(rate))
    factors: Dict[int, float] = {}
    batches: List[int] = []

    def feed() -> None:
        index = len(batches)
        batches.append(index)
        if index:
            feeder(first, h)
        x.d = np.random.RandomState(index).randn(*x.shape)
        grown.factor = factors.get(index, 1.0)

    return SimpleNamespace(loss=loss, solver=solver, first=first, last=h, feed=feed, factors=factors, x=x)


def state_of(n: SimpleNamespace) -> np.ndarray:
    return np.array(n.first.d, np.float32)


def share(first: nn.Variable, last: nn.Variable) -> None:
    first.data = last.data


def share_a_reshaped_output(first: nn.Variable, last: nn.Variable) -> nn.Variable:
    flat = F.reshape(last, (12,), inplace=True)
    back = F.reshape(flat, first.shape, inplace=True)
    first.data = back.data
    return back


def assign(first: nn.Variable, last: nn.Variable) -> nn.Variable:
    return F.assign(first, last)


def copy_values(first: nn.Variable, last: nn.Variable) -> None:
    first.d = last.d.copy()


WAYS: Dict[str, Dict[str, Any]] = {
    "shared": {"carry": share},
    "shared by a parameter": {"carry": share, "named": True},
    "reshaped in place": {"carry": share_a_reshaped_output},
    "assigned": {"carry": assign},
    "shared later": {"feeder": share, "keep": True},
    "copied": {"feeder": copy_values, "keep": True},
}


def updater_of(n: SimpleNamespace, **options: Any) -> AdaptiveLossScalingUpdater:
    return AdaptiveLossScalingUpdater(n.solver, n.loss, n.feed, **{"storage": "float16", **options})


def parameters() -> np.ndarray:
    return np.concatenate([v.d.ravel() for v in nn.get_parameters().values()])


@pytest.mark.parametrize(
    ("way", "storage"),
    [*((way, "float16") for way in WAYS.values()), (WAYS["shared"], None)],
    ids=[*WAYS, "shared in a half context"],
)
def test_a_batch_that_overflows_is_repeated_from_the_state_it_began_with(
    way: Dict[str, Any], storage: Optional[str]
) -> None:
    with nn.context_scope(nn.Context() if storage else HALF):
        n = net(**way, rate=0.0)
        n.factors[2] = 2.0**12
        loss = FormatEmulation(n.loss, storage, float_tail=True) if storage else n.loss
        expected = []
        for _ in range(BATCHES):
            n.feed()
            loss.forward()
            expected.append(state_of(n))
        n = net(**way, rate=0.0)
        n.factors[2] = 2.0**12
        updater, retries = updater_of(n, storage=storage), []
        for state in expected:
            retries.append(updater.update().retries)
            np.testing.assert_array_equal(state_of(n), state)
    assert retries[0] > 0
    assert retries[2] > 0


def trajectory(count: int) -> List[np.ndarray]:
    """The state before each of `count` batches that run once, as stored, and after the last."""
    n = net(share, rate=0.0)
    emulation, states = FormatEmulation(n.loss, "float16", float_tail=True), [state_of(n)]
    for _ in range(count):
        n.feed()
        emulation.forward()
        states.append(state_of(n))
    return states


@pytest.mark.parametrize(("on_overflow", "accum_grad"), [("repeat", 1), ("repeat", 3), ("next", 2)])
def test_micro_batches_go_on_from_each_other(accum_grad: int, on_overflow: str) -> None:
    states = trajectory(2 * accum_grad)
    n = net(share, rate=0.0)
    updater = updater_of(n, accum_grad=accum_grad, on_overflow=on_overflow)
    for index in (1, 2):
        updater.update()
        np.testing.assert_array_equal(state_of(n), states[index * accum_grad])


@pytest.mark.parametrize("nan", [True, False])
@pytest.mark.parametrize("accum_grad", [1, 2])
@pytest.mark.parametrize("on_overflow", ["repeat", "next"])
def test_batches_that_are_lost_leave_the_state_as_it_was(
    on_overflow: str, accum_grad: int, nan: bool
) -> None:
    n = net(share)
    policies = dict.fromkeys(("on_nonfinite_loss", "on_nonfinite_forward", "on_scale_floor"), "skip")
    updater = updater_of(n, accum_grad=accum_grad, on_overflow=on_overflow, max_retries=2, **policies)
    updater.update()
    before, weights, feed = state_of(n), parameters(), n.feed
    calls: List[int] = []

    def feed_a_bad_batch() -> None:
        calls.append(1)
        n.factors.update(dict.fromkeys(range(60), 1.0 if nan else 1e30))
        feed()
        if nan and len(calls) % accum_grad == 0:
            n.x.d[0, 0, 0] = np.nan

    updater.data_feeder = feed_a_bad_batch
    for _ in range(2):
        result = updater.update()
        assert not result.updated
        assert ("reads an input of shape (2, 4, 3)" in result.cause) == nan
        np.testing.assert_array_equal(state_of(n), before)
        np.testing.assert_array_equal(parameters(), weights)
    n.factors.clear()
    updater.data_feeder = feed
    assert updater.update().updated


@pytest.mark.filterwarnings("ignore:gradients of a batch in iteration 3 are not finite at any loss scale")
def test_a_state_that_a_feeder_sets_is_that_of_its_batch_after_a_lost_one_too() -> None:
    def fed(n: SimpleNamespace, index: int) -> None:
        n.feed()
        n.first.d = 0.1 * index

    n = net(share, rate=0.0)
    for index in range(4):
        fed(n, index)
    FormatEmulation(n.loss, "float16", float_tail=True).forward()
    expected = state_of(n)
    n = net(share, rate=0.0)
    # One that no scale helps, and one that runs again.
    n.factors.update({2: np.inf, 3: 2.0**12})
    updater = updater_of(n)
    updater.data_feeder = lambda: fed(n, updater.counters.fed)
    for _ in range(3):
        result = updater.update()
    assert result.updated
    assert (updater.counters.fed, updater.counters.lost) == (4, {"hopeless": 1})
    assert result.retries > 4
    np.testing.assert_array_equal(state_of(n), expected)


@pytest.mark.parametrize("on_overflow", ["repeat", "next"])
def test_a_copy_behind_each_update_goes_on_from_the_last_batch_that_was_used(on_overflow: str) -> None:
    n = net(keep=True)
    updater = updater_of(n, on_overflow=on_overflow, on_nonfinite_loss="skip")
    feed, updated = n.feed, []

    def feed_a_bad_batch_at_times() -> None:
        feed()
        if updater.counters.fed % 3 == 1:
            n.x.d[0, 0, 0] = np.nan

    updater.data_feeder = feed_a_bad_batch_at_times
    for _ in range(9):
        updated.append(updater.update().updated)
        if updated[-1]:
            n.first.d = n.last.d
    assert updated == [True, False, True] * 3


def test_a_fault_is_looked_for_from_the_state_that_the_batch_began_with() -> None:
    """The state itself holds a NaN by then, which is not where the trouble starts."""
    n = net(share)
    updater = updater_of(n, on_nonfinite_loss="skip")
    updater.update()
    weights = nn.get_parameters()["x/affine/W"]
    good = weights.d.copy()
    weights.d = 3e38
    fault = updater.update().cause
    assert fault.startswith("x/affine (Affine) computes") or "x/affine/W" in fault, fault
    weights.d = good
    assert updater.update().updated


def test_cleared_buffers_do_not_free_the_state() -> None:
    n = net(share)
    updater = updater_of(n, clear_buffer=True)
    updater.update()
    assert not n.first.data.clear_called
    assert n.last.persistent


def test_a_state_that_was_freed_before_it_was_shared_is_refused() -> None:
    n = net()
    updater = updater_of(n)
    updater.update()
    share(n.first, n.last)
    weights = parameters()
    with pytest.raises(RuntimeError, match=r"an input of shape \(4, 3\) shares its data with an output"):
        updater.update()
    np.testing.assert_array_equal(parameters(), weights)
    n.first.data.zero()
    assert updater.update().updated


every_way = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))


@pytest.mark.filterwarnings("ignore:nothing is stored in half precision")
@every_way
def test_carried_state_trains_in_fp32_bit_for_bit_as_in_a_bare_loop(way: Dict[str, Any]) -> None:
    n = net(**way)
    expected: List[Tuple[float, np.ndarray]] = []
    for _ in range(BATCHES):
        n.feed()
        n.solver.zero_grad()
        n.loss.forward()
        n.loss.backward()
        n.solver.update()
        expected.append((float(n.loss.d), parameters()))
    n = net(**way)
    updater = updater_of(n, storage=None)
    retries = 0
    for loss, trained in expected:
        retries += updater.update().retries
        assert float(n.loss.d) == loss
        np.testing.assert_array_equal(parameters(), trained)
    assert retries > 0
