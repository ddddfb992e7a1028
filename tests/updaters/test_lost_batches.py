# SPDX-License-Identifier: Apache-2.0
"""Batches that are lost: what they teach, for how long, and those that no scale helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import GradScaler, HistoryPolicy, load_checkpoint, save_checkpoint
from tests.worlds.trainings import Training, scaler_step, training, updater_of, updater_on
from tests.worlds.values import HALF, snapshot

pytestmark = [
    pytest.mark.any_context,
    pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning"),
]

# It forgets after two measurements, of eight iterations each.
SHORT = HistoryPolicy(window=2)


class Trained:
    """A training that loses batches, one way or the other."""

    def __init__(self, way: str, train: Training, **options: Any) -> None:
        self._train = train
        self._scaler: Optional[GradScaler] = None
        if way == "GradScaler":
            self._scaler = GradScaler(train.solver, storage="float16", history=SHORT)
        else:
            self._updater = updater_on(train, on_overflow=way, global_scale=SHORT, **options)

    def batch(self) -> int:
        """Train on a batch, or on those up to the next good one; the number of batches lost or repeated."""
        if self._scaler is None:
            return self._updater.update().retries
        self._train.feed()
        return int(not scaler_step(self._scaler, self._train.solver, self._train.loss))

    @property
    def lost(self) -> int:
        """Batches that were lost so far."""
        if self._scaler is not None:
            return self._scaler.skipped_steps
        return sum(self._updater.counters.lost.values())

    @property
    def scales(self) -> List[float]:
        """The scales of the last pass."""
        engine = self._updater.scaling if self._scaler is None else self._scaler.engines[-1]
        return list(engine.result.schedule.component_scales)

    @property
    def saved(self) -> List[Any]:
        """What a checkpoint holds of it."""
        return [self._updater] if self._scaler is None else [self._scaler, self._train.solver]

    @property
    def remembered(self) -> Dict[str, Any]:
        """What is remembered of components."""
        engine = self._updater.scaling if self._scaler is None else self._scaler.engines[-1]
        return engine.components.next_memory().state_dict()


@pytest.mark.parametrize("way", ["next", "GradScaler"])
def test_a_term_that_comes_rarely_is_lost_a_few_times_and_no_more(way: str) -> None:
    trained = Trained(way, training(factors=dict.fromkeys(range(29, 300, 30), 2.0**8)))
    for _ in range(290):
        trained.batch()
    # Each lowers scales by 2**4.
    assert trained.lost == 2


@pytest.mark.parametrize("way", ["next", "GradScaler"])
def test_batches_that_no_scale_helps_lower_scales_only_once(way: str) -> None:
    trained = Trained(way, training(overflow=range(9, 150, 5)))
    for _ in range(100):
        trained.batch()
    low = min(trained.scales)
    trained.batch()
    assert trained.lost >= 18
    for _ in range(20):
        trained.batch()
    assert min(trained.scales) == low
    plain = Trained(way, training())
    for _ in range(100):
        plain.batch()
    assert low >= min(plain.scales) / 2.0**6


def test_a_batch_that_no_scale_helps_is_no_error_without_retries() -> None:
    trained = Trained("next", training(overflow=range(5, 30, 5)), max_retries=0)
    assert sum(trained.batch() for _ in range(30)) == 5


@pytest.mark.parametrize(("on_overflow", "lost"), [("repeat", 0), ("next", 1)])
def test_a_kind_of_batch_that_overflows_within_a_normalization_costs_one_pass(
    on_overflow: str, lost: int
) -> None:
    rng = np.random.default_rng(0)
    with nn.context_scope(HALF):
        x = nn.Variable((16, 32))
        h = PF.affine(x, 16, name="e", rng=np.random.RandomState(1))
        h = PF.batch_normalization(h, eps=1e-7, name="n")
        h = F.tanh(PF.affine(h, 16, name="m", rng=np.random.RandomState(2)))
        loss = F.mean((PF.affine(h, 1, name="o", rng=np.random.RandomState(3)) - 1.0) ** 2)
        updater = updater_of(loss, solver=S.Sgd(1e-3), storage=None, on_overflow=on_overflow)
        retries = []
        for number in range(60):
            x.d = rng.standard_normal(x.shape) * (0.1 if number % 10 == 9 else 1.0)
            retries.append(updater.update().retries)
    assert sum(retries[1:]) == 1
    assert sum(updater.counters.lost.values()) == lost


@pytest.mark.parametrize("way", ["next", "GradScaler"])
def test_it_goes_on_bit_for_bit_between_lost_batches(way: str, tmp_path: Path) -> None:
    def begun() -> Training:
        return training(factors=dict.fromkeys((20, 50, 80), 2.0**12), overflow=[35, 65])

    def rest_of(trained: Trained) -> List[Any]:
        found = [(trained.batch(), trained.scales, trained.lost) for _ in range(50)]
        return [found, trained.remembered, snapshot()]

    trained = Trained(way, begun())
    for _ in range(40):
        trained.batch()
    save_checkpoint(tmp_path / "saved", *trained.saved)
    fed = 40 + (trained.lost if way == "next" else 0)
    remembered = trained.remembered
    assert trained.lost == 2
    assert remembered["lost"]
    expected = rest_of(trained)
    train = begun()
    for _ in range(fed):
        train.feed()
    resumed = Trained(way, train)
    load_checkpoint(tmp_path / "saved", *resumed.saved)
    np.testing.assert_equal(rest_of(resumed), expected)
    assert resumed.lost > 2
