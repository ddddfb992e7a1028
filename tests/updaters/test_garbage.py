# SPDX-License-Identifier: Apache-2.0
"""Updates leave nothing for the garbage collector: what they made is freed when it is not needed any more."""

from __future__ import annotations

import gc
from typing import Any, Dict

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest

from nnabla_adaloss import AdaLossConfig, Recorder
from tests.worlds.trainings import AS_THE_BASELINE, updater_of
from tests.worlds.values import data


def network(x: nn.Variable) -> nn.Variable:
    h = PF.batch_normalization(F.tanh(PF.affine(x, 8, name="first")), name="norm")
    return F.mean(PF.affine(h, 8, name="second") ** 2)


@pytest.mark.parametrize(
    ("options", "rebuilt"),
    [
        ({}, False),
        ({}, True),
        ({"storage": "fp8_hybrid"}, True),
        ({"accum_grad": 2}, True),
        ({"monitors": [Recorder()]}, True),
        ({"config": AdaLossConfig(measure_every=1)}, True),
        ({"config": AdaLossConfig(delay=0)}, True),
        (AS_THE_BASELINE, True),
    ],
)
@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_updates_leave_no_garbage(options: Dict[str, Any], rebuilt: bool) -> None:
    x, updaters = data(4, 8), []

    def feed() -> None:
        if rebuilt and updaters:
            updaters[0].loss = network(x)

    updaters.append(updater_of(network(x), feed, **options))
    for _ in range(10):
        updaters[0].update()
    gc.collect()
    # What other tests left behind may take several rounds: nnabla lets go of Python's objects in between.
    gc.freeze()
    gc.disable()
    try:
        for _ in range(10):
            updaters[0].update()
        assert gc.collect() == 0
    finally:
        gc.enable()
        gc.unfreeze()
