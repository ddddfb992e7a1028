# SPDX-License-Identifier: Apache-2.0
"""Updates leave nothing for the garbage collector: what they made is freed when it is not needed any more."""

from __future__ import annotations

import gc
from typing import Any, Dict, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater, Recorder


def network(x: nn.Variable) -> nn.Variable:
    h = PF.affine(x, 8, name="first")
    h = PF.batch_normalization(F.tanh(h), name="norm")
    return F.mean(PF.affine(h, 8, name="second") ** 2)


@pytest.mark.parametrize("rebuilt", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"storage": "float16"},
        {"storage": "fp8_hybrid"},
        {"accum_grad": 2},
        {"monitors": [Recorder()]},
        {"config": AdaLossConfig(measure_every=1)},
        {"config": AdaLossConfig(delay=1)},
        {"config": AdaLossConfig(loss_scale_method="amax_history")},
        {"global_scale": "dynamic", "on_overflow": "next"},
    ],
    ids=lambda options: ",".join(f"{name}={type(value).__name__}" for name, value in options.items()),
)
@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_updates_leave_no_garbage(options: Dict[str, Any], rebuilt: bool) -> None:
    x = nn.Variable.from_numpy_array(np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32))
    loss, solver = network(x), S.Sgd(1e-3)
    solver.set_parameters(nn.get_parameters())
    updaters: List[AdaptiveLossScalingUpdater] = []

    def feed() -> None:
        if rebuilt and updaters:
            updaters[0].loss = network(x)

    updaters.append(AdaptiveLossScalingUpdater(solver, loss, feed, **options))
    for _ in range(10):
        updaters[0].update()
    # What other tests left behind may take several rounds: nnabla lets go of Python's objects in between.
    for _ in range(10):
        if not gc.collect():
            break
    gc.disable()
    try:
        for _ in range(10):
            updaters[0].update()
        assert gc.collect() == 0
    finally:
        gc.enable()
