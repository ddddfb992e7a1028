# SPDX-License-Identifier: Apache-2.0
"""The table of waits and launches in docs/gpu.md, counted again; where it differs, the new one is shown."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import (
    AdaptiveLossScaling,
    AdaptiveLossScalingUpdater,
    FixedLossScalingUpdater,
    GradScaler,
)
from tests.counted_device.alone import Alone
from tests.counted_device.device import CountedDevice, CountingSolver, Counts
from tests.worlds.trainings import scaler_step, solver_of
from tests.worlds.warned import warned

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
FLOAT32 = np.dtype(np.float32)


class Training(NamedTuple):
    """A small network on the device, whose loss weight and largest gradient can be fed."""

    device: CountedDevice
    loss: nn.Variable
    solvers: List[Any]
    weight: nn.Variable
    divisor: nn.Variable

    def updater(self, make: Any = AdaptiveLossScalingUpdater, **options: Any) -> Any:
        """An updater after six updates: all is known by then, and nothing runs twice."""
        with warned():
            # In a float context, nothing is stored in half precision.
            updater = make(self.solvers[0], self.loss, **options)
        for _ in range(6):
            assert updater.update().updated
        return updater

    def counted(self, call: Callable[[], Any]) -> Counts:
        with self.device as counts:
            call()
        return counts


def training(device: CountedDevice, type_config: str, solvers: int = 1) -> Training:
    nn.clear_parameters()
    rng = np.random.default_rng(0)
    x, t, divisor, weight = (nn.Variable(shape) for shape in ((4, 1, 8, 8), (4, 1), (4, 1), ()))
    x.d, t.d = rng.standard_normal(x.shape), rng.integers(0, 10, t.shape)
    divisor.d, weight.d = np.ones(divisor.shape), 1.0
    with nn.context_scope(device.context(type_config)):
        h = PF.convolution(x, 4, (3, 3), name="first", rng=np.random.RandomState(0))
        h = F.relu(PF.batch_normalization(h, name="first"))
        y = PF.affine(h, 10, name="second", rng=np.random.RandomState(1))
        # The gradient between the two grows with the inverse of the divisor; nothing else does.
        loss = F.mean(F.softmax_cross_entropy(y * divisor / divisor, t)) * weight
        parts = [nn.get_parameters()]
        if solvers == 2:
            parts = [
                {k: v for k, v in parts[0].items() if k.startswith(part)} for part in ("first", "second")
            ]
        made = [CountingSolver(solver_of(S.Momentum(1e-3), part), device) for part in parts]
    return Training(device, loss, made, weight, divisor)


def first(device: CountedDevice, kind: str) -> Counts:
    train = training(device, kind)
    with warned():
        updater = AdaptiveLossScalingUpdater(train.solvers[0], train.loss)
    return train.counted(updater.update)


def two_cycles(device: CountedDevice, kind: str) -> List[Counts]:
    """Counts of sixteen updates: two cycles, in each of which scales are chosen once."""
    train = training(device, kind)
    updater = train.updater()
    return [train.counted(updater.update) for _ in range(16)]


def steady(device: CountedDevice, kind: str) -> Counts:
    return min(two_cycles(device, kind), key=launches)


def choosing(device: CountedDevice, kind: str) -> Counts:
    return max(two_cycles(device, kind), key=launches)


def overflow(device: CountedDevice, kind: str, **options: Any) -> Counts:
    train = training(device, kind)
    updater = train.updater(**options)
    train.divisor.d = np.full(train.divisor.shape, 2.0**-8)
    counts = train.counted(updater.update)
    # As the first update is repeated, too, unless batches are lost.
    assert (updater.counters.repeats, updater.counters.lost) in ((2, {}), (0, {"overflow": 1}))
    return counts


def lost(device: CountedDevice, kind: str) -> Counts:
    return overflow(device, kind, on_overflow="next", max_retries=0)


def zeros(device: CountedDevice, kind: str) -> Counts:
    train = training(device, kind)
    updater = train.updater()
    train.weight.d = 0.0
    return train.counted(lambda: updater.update().reason == "zero_gradients")


def fed_weight(device: CountedDevice, kind: str) -> Counts:
    train = training(device, kind)
    updater = train.updater()
    train.weight.d = 0.5
    counts = train.counted(updater.update)
    assert updater.scaling.result.schedule.loss_weights[-1] == 0.5
    return counts


def with_a_scaler(device: CountedDevice, kind: str, solvers: int = 1, seed: Any = None) -> Counts:
    train = training(device, kind, solvers)
    step = partial(scaler_step, GradScaler(*train.solvers), train.solvers, train.loss, seed)
    assert all(step() for _ in range(6))
    return train.counted(step)


def with_a_seed(device: CountedDevice, kind: str) -> Counts:
    seed = nn.NdArray(())
    seed.fill(3.0)
    seed.data_ptr(FLOAT32, device.context("float"))
    return with_a_scaler(device, kind, seed=seed)


def fixed(device: CountedDevice, kind: str) -> Counts:
    train = training(device, kind)
    return train.counted(train.updater(FixedLossScalingUpdater).update)


def with_a_communicator(device: CountedDevice, kind: str) -> Counts:
    train = training(device, kind)
    return train.counted(train.updater(comm=Alone(device.context("float"))).update)


def not_zeroed(device: CountedDevice, kind: str) -> Counts:
    """Counts of a backward after one that left all gradients NaN."""
    train = training(device, kind)
    scaling = AdaptiveLossScaling(train.loss)
    for weight in (1.0, math.nan, 1.0):
        train.weight.d = weight
        scaling.forward(clear_no_need_grad=True)
        with device as counts:
            scaling.backward(clear_buffer=True, iteration=0)
    assert scaling._nonfinite.keys == scaling._graph.current().leaves.keys()
    return counts


def launches(counts: Counts) -> int:
    return sum(counts.launches.values())


ROWS: Dict[str, Callable[[CountedDevice, str], Counts]] = {
    "steady: neither measured nor chosen": steady,
    "a slice is measured": choosing,
    "the first batch, which runs twice": first,
    "an overflow, and the batch again": overflow,
    'an overflow with `on_overflow="next"`': lost,
    "all gradients are zero": zeros,
    "a loss weight is fed, as in `w.d = 0.5`": fed_weight,
    "`GradScaler`, one solver": with_a_scaler,
    "`GradScaler`, two solvers": partial(with_a_scaler, solvers=2),
    "`GradScaler`, and `backward(grad=)` with an NdArray": with_a_seed,
    "`FixedLossScalingUpdater`": fixed,
    "a communicator": with_a_communicator,
}
# In float, the gradients of this network cannot overflow.
IN_HALF_ALONE = overflow, lost


def row(device: CountedDevice, name: str) -> str:
    """The row of the table in docs/gpu.md."""
    cells = []
    for kind in ("float", "half"):
        if kind == "float" and ROWS[name] in IN_HALF_ALONE:
            cells += ["", ""]
            continue
        counts = ROWS[name](device, kind)
        assert not counts.reductions
        cells += [str(counts.waits), str(launches(counts))]
    return f"| {name} | {' | '.join(cells)} |"


@pytest.mark.parametrize("name", ROWS)
def test_the_table_tells_the_waits_and_launches_of(on_device: CountedDevice, name: str) -> None:
    assert row(on_device, name) in PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("kind", ["float", "half"])
def test_gradients_that_were_left_nan_cost_one_wait(on_device: CountedDevice, kind: str) -> None:
    assert not_zeroed(on_device, kind).waits == 2


@pytest.mark.parametrize("kind", ["float", "half"])
def test_the_cause_of_a_fault_in_forward_is_found_with_few_waits(on_device: CountedDevice, kind: str) -> None:
    train = training(on_device, kind)
    updater = train.updater(on_nonfinite_loss="skip")
    train.divisor.d = np.array([[1.0], [math.inf], [1.0], [1.0]])
    with on_device as counts:
        result = updater.update()
    read = "reads an input of shape (4, 1) that holds 1 infinity or NaN, the first at [1, 0]"
    assert result.cause.endswith(read)
    # All arrays of forward once, then those of one function.
    assert counts.fetches <= 5
