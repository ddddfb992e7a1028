# SPDX-License-Identifier: Apache-2.0
"""Loss scaling methods, each as a training loop with `update()`."""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Protocol

import nnabla as nn

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScalingUpdater,
    DynamicLossScalingUpdater,
    FixedLossScalingUpdater,
    FormatEmulation,
    LossLike,
)

STORAGE = "float16"
NNABLAS_GROWTH_INTERVAL = 2000


class Updater(Protocol):
    """Interface of all training loops."""

    scale: float

    def update(self) -> Any:
        """Train on one batch, or throw batches away."""


class PlainUpdater:
    """Training loop without loss scaling."""

    scale = 1.0

    def __init__(self, solver: Any, loss: nn.Variable, data_feeder: Callable[[], Any]) -> None:
        self.solver = solver
        self.loss = loss
        self.data_feeder = data_feeder

    def update(self) -> None:
        """Train on one batch."""
        self.solver.zero_grad()
        self.data_feeder()
        self.loss.forward(clear_no_need_grad=True)
        self.loss.backward(clear_buffer=True)
        self.solver.update()


class Job(NamedTuple):
    """Arguments of a training loop.

    Attributes:
        solver: the solver, with its parameters set.
        loss: the loss in fp32.
        feeder: fills the input with the next batch.
        growth_interval: number of updates without overflow after which dynamic scaling doubles its scale.
    """

    solver: Any
    loss: nn.Variable
    feeder: Callable[[], Any]
    growth_interval: int = NNABLAS_GROWTH_INTERVAL


class Loop(NamedTuple):
    """Training loop, and the loss whose `backward(scale, ...)` it calls."""

    updater: Updater
    loss: LossLike


def _fp32(job: Job) -> Loop:
    return Loop(PlainUpdater(job.solver, job.loss, job.feeder), job.loss)


def _stored(job: Job) -> FormatEmulation:
    # Scalar functions at the loss stay in fp32, as with adaptive scaling: methods differ only in scales.
    return FormatEmulation(job.loss, STORAGE, float_tail=True)


def _fixed(scale: float) -> Callable[[Job], Loop]:
    def make(job: Job) -> Loop:
        loss = _stored(job)
        return Loop(FixedLossScalingUpdater(job.solver, loss, job.feeder, scale=scale), loss)

    return make


def _dynamic(start_scale: float) -> Callable[[Job], Loop]:
    def make(job: Job) -> Loop:
        loss = _stored(job)
        updater = DynamicLossScalingUpdater(
            job.solver, loss, job.feeder, scale=start_scale, N=job.growth_interval
        )
        return Loop(updater, loss)

    return make


def _adaptive(**settings: Any) -> Callable[[Job], Loop]:
    def make(job: Job) -> Loop:
        updater = AdaptiveLossScalingUpdater(
            job.solver, job.loss, job.feeder, storage=STORAGE, config=AdaLossConfig(**settings)
        )
        return Loop(updater, updater.scaling)

    return make


METHODS: Dict[str, Callable[[Job], Loop]] = {
    "fp32": _fp32,
    "no scaling": _fixed(1.0),
    "fixed (128)": _fixed(128.0),
    "dynamic": _dynamic(8.0),
    "dynamic (65536)": _dynamic(65536.0),
    "one measured": _adaptive(loss_scale_method="fixed"),
    "adaptive": _adaptive(),
}
