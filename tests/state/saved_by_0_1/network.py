# SPDX-License-Identifier: Apache-2.0
"""The training that the states in this folder are of; it runs with version 0.1 and with this one."""

from __future__ import annotations

from typing import Any, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater


def make(delay: int) -> Tuple[Any, AdaptiveLossScalingUpdater]:
    """A shared weight, a product of two activations, and layers with names; data follows from the number."""
    nn.clear_parameters()
    rng = np.random.RandomState(0)
    x = nn.Variable((4, 3, 6))
    h = x
    for _ in range(3):
        h = F.tanh(PF.affine(h, 6, base_axis=2, name="rnn", rng=rng))
    q, k = (PF.affine(h, 6, base_axis=2, name=name, rng=rng) for name in "qk")
    h = F.batch_matmul(F.softmax(F.batch_matmul(q, k, transpose_b=True)), h)
    loss = F.mean(PF.affine(h, 2, base_axis=2, name="out", rng=rng) ** 2) * 1e-4
    solver = S.Sgd(100.0)
    solver.set_parameters(nn.get_parameters())

    def feed() -> None:
        x.d = np.random.default_rng(updater.iteration).standard_normal(x.shape)

    config = AdaLossConfig(delay=delay, loss_scale_method="approx_range")
    updater = AdaptiveLossScalingUpdater(
        solver,
        loss,
        feed,
        storage="float16",
        N=3,
        config=config,
        global_scale="dynamic",
        on_overflow="next",
    )
    return solver, updater
