# SPDX-License-Identifier: Apache-2.0
"""Overflows: who is named, what backs off, what is dropped, and that training goes on."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater, LossScaleError
from nnabla_adaloss.core import memory
from tests.worlds.monitors import Records
from tests.worlds.tampering import Gate
from tests.worlds.trainings import AS_THE_BASELINE, training, updater_of, updater_on
from tests.worlds.values import assert_equal, data, snapshot

pytestmark = pytest.mark.any_context

BATCH = 4

Network = Callable[[nn.Variable, Dict[str, Gate]], nn.Variable]


def gated(h: nn.Variable, name: str, gates: Dict[str, Gate]) -> nn.Variable:
    gates[name] = Gate()
    return gates[name](h)


def mlp(x: nn.Variable, gates: Dict[str, Gate]) -> nn.Variable:
    h = x
    for name in "abcd":
        h = F.tanh(gated(PF.affine(h, 6, name=name), f"{name}/affine", gates))
    return h


def shared(x: nn.Variable, gates: Dict[str, Gate]) -> nn.Variable:
    h = PF.affine(x, 6, name="stem")
    # Uses of one weight are numbered in forward order.
    for label in ("loop/affine", "loop/affine#2", "loop/affine#3"):
        h = F.tanh(gated(PF.affine(h, 6, name="loop"), label, gates))
    return h


class Planted:
    """A network whose gradients can be spoilt anywhere, and its updater."""

    def __init__(
        self, network: Network, events: Optional[Callable[[Planted], None]] = None, **options: Any
    ) -> None:
        nn.clear_parameters()
        nn.seed(0)
        self.gates: Dict[str, Gate] = {}
        self.batches = 0
        x, rng = nn.Variable((BATCH, 16)), np.random.default_rng(0)

        def feed() -> None:
            x.d = rng.standard_normal(x.shape)
            if events is not None:
                events(self)
            self.batches += 1

        loss = F.mean(network(x, self.gates) ** 2)
        self.updater = updater_of(loss, feed, solver=S.Momentum(0.001), **AS_THE_BASELINE, **options)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(("storage", "value"), [("float16", math.inf), (None, math.nan)])
@pytest.mark.parametrize("network", [mlp, shared])
def test_the_first_bad_layer_is_named(
    network: Network, value: float, delay: int, storage: Optional[str]
) -> None:
    def plant(planted: Planted, bad: str) -> None:
        planted.gates[bad].first = value if planted.batches == 2 else 1.0

    config = AdaLossConfig(delay=delay, measure_every=1)
    layers: Dict[str, Gate] = {}
    network(nn.Variable((BATCH, 16)), layers)
    for layer in layers:
        planted = Planted(network, partial(plant, bad=layer), config=config, max_retries=0, storage=storage)
        for _ in range(2):
            assert planted.updater.update().overflow_layers == ()
        before = snapshot()
        result = planted.updater.update()
        assert (result.updated, result.reason) == (False, "overflow")
        assert result.overflow_layers[0] == layer
        assert_equal(snapshot(), before)
        assert planted.updater.update().updated


def jump(factor: float, *batches: int, gate: str = "c/affine") -> Callable[[Planted], None]:
    def event(planted: Planted) -> None:
        planted.gates[gate].factor = factor if planted.batches in batches else 1.0

    return event


ONES = AdaLossConfig(loss_scale_method="fixed")
DELAYED = AdaLossConfig(
    loss_scale_method="approx_range",
    delay=1,
    measure_every=1,
    n_uf_threshold=1e-7,
    scale_upper_bound=2.0**12,
    accum_upper_bound=2.0**40,
)


def test_a_layers_own_scale_backs_off_beside_the_global_one_and_both_recover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients that jump from one iteration to the next overflow under a scale made for the last one."""
    monkeypatch.setattr(memory, "_REMEMBERED", 60)
    small = 2.0**-20
    planted = Planted(
        mlp,
        lambda p: setattr(p.gates["d/affine"], "factor", 1.0 if p.batches == 3 else small),
        config=DELAYED,
        N=3,
        max_scale=8.0,
    )
    updater = planted.updater
    for _ in range(3):
        result = updater.update()
    before = updater.scaling.layer_scales
    assert max(before.values()) > 1.0
    scale = result.scale
    result = updater.update()
    assert result.updated
    assert result.retries >= 1
    assert result.overflow_layers
    assert result.scale == scale / 2.0
    # S0 grows again after N updates.
    while updater.scale < scale:
        assert updater.update().retries == 0
        assert updater.counters.updates < 10
    for _ in range(55):
        assert updater.update()[:3] == (True, scale, 0)
        assert updater.scaling.layer_scales != before
    # As long as the lost batch is remembered, and no longer.
    for _ in range(20):
        assert updater.update()[:3] == (True, scale, 0)
    assert updater.scaling.layer_scales == before


def test_the_global_scale_goes_down_once_for_each_batch_that_is_lost() -> None:
    config = AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=8.0, include=("d/*",))
    planted = Planted(mlp, jump(math.inf, *range(1, 6)), config=config)
    planted.updater.update()
    result = planted.updater.update()
    assert (result.updated, result.scale, result.retries) == (True, 8.0 / 2.0**5, 5)
    # No scale would have helped.
    assert planted.updater.scaling.layer_scales["d/affine"] == 8.0
    assert all(np.abs(v.g).max() > 0.0 for v in nn.get_parameters().values())


def test_the_floor_is_an_error_that_says_where() -> None:
    planted = Planted(mlp, jump(math.inf, *range(2, 500), gate="b/affine"), min_scale=2.0)
    planted.updater.update()
    planted.updater.update()
    told = (
        "iteration 3 at the smallest loss scale, 2; first bad layer: b/affine.*NaNs.*infinit"
        ".*last good scale: 8.*No scale helps.*diagnose"
    )
    with pytest.raises(LossScaleError, match=told):
        planted.updater.update()
    assert planted.updater.scale == 8.0


@pytest.mark.parametrize(("micro_batch", "delay"), [(0, 0), (1, 1), (2, 0)])
def test_an_overflow_in_any_micro_batch_drops_the_whole_window(micro_batch: int, delay: int) -> None:
    def run(bad: Sequence[int], skip: int) -> Dict[str, np.ndarray]:
        train = training(overflow=bad)
        for _ in range(skip):
            train.feed()
        config = AdaLossConfig(loss_scale_method="fixed", delay=delay)
        options = {"scale": 4.0 if skip else 8.0, "accum_grad": 3, "config": config, **AS_THE_BASELINE}
        updater = updater_on(train, storage=None, **options)
        result = updater.update()
        assert result.updated
        assert result.retries == len(bad)
        return snapshot(train.parameters)

    assert_equal(run([micro_batch], 0), run([], 3))


@pytest.mark.parametrize(
    ("accum_grad", "expected"),
    [
        # Batches 1 and 2 overflow; all others run twice, but for what is left of a window that is lost.
        (1, [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3), (3, 0), (3, 1)]),
        (2, [(1, n) for n in range(9)] + [(i, n) for i in (2, 3) for n in range(4)]),
    ],
)
def test_records_tell_tries_and_micro_batches_apart(accum_grad: int, expected: List[Any]) -> None:
    train, monitor = training(overflow=[1, 2]), Records()
    config, records = AdaLossConfig(measure_every=1, delay=0), monitor.records
    updater = updater_on(train, config=config, accum_grad=accum_grad, monitors=[monitor], **AS_THE_BASELINE)
    for _ in range(3):
        assert updater.update().updated
    found = list(dict.fromkeys((record.iteration, record.attempt) for record in records))
    assert found == expected
    assert len({(record.iteration, record.attempt, record.layer) for record in records}) == len(records)


def test_an_overflow_during_retries_ends_after_max_retries() -> None:
    planted = Planted(mlp, jump(math.inf, *range(100)), config=ONES, max_retries=4)
    result = planted.updater.update()
    assert (result.updated, result.retries, result.reason) == (False, 5, "overflow")
    assert planted.batches == 5
    assert result.scale == 8.0 / 2**5
    # The last batch overflowed, too.
    assert result.nonfinite_layers == result.overflow_layers != ()
    assert result.component


def test_methods_of_ones_own_that_are_too_large_get_the_room_there_is() -> None:
    sizes = itertools.cycle([2.0**40, 1.0, 2.0**-30, 2.0**100])

    def method(g: Any, W: Any, *, config: AdaLossConfig, fan_in: float) -> float:
        return next(sizes)

    planted = Planted(mlp, config=AdaLossConfig(loss_scale_method=method, use_bound=False))
    for _ in range(20):
        result = planted.updater.update()
        assert (result.updated, result.overflow_layers) == (True, ())


def test_the_layer_that_overflowed_comes_before_harmless_ones_of_an_earlier_batch() -> None:
    """Gradients that the solver does not use may be infinite in one batch, and its own in the next."""
    x, factors = data(4, 3), {name: nn.Variable((1, 1)) for name in ("trained", "frozen")}
    heads = [F.mean(PF.affine(x, 2, name=name) * F.broadcast(v, (4, 2))) for name, v in factors.items()]
    batches = iter([(1.0, 1.0), (1.0, 1.0), (1.0, 1e4), (1e4, 1.0)])

    def feed() -> None:
        for v, value in zip(factors.values(), next(batches)):
            v.d = value

    solver = S.Sgd(1e-6)
    solver.set_parameters({n: v for n, v in nn.get_parameters().items() if n.startswith("trained")})
    updater = AdaptiveLossScalingUpdater(solver, F.add2(*heads), feed, storage="float16", accum_grad=2)
    updater.update()
    result = updater.update()
    assert (result.updated, result.retries > 0) == (True, True)
    assert result.overflow_layers == ("trained/affine",)
    assert result.nonfinite_layers == ("frozen/affine",)
