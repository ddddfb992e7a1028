# SPDX-License-Identifier: Apache-2.0
"""The ways to scale a loss that are compared, each as a training loop with `update()`."""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Protocol

import nnabla as nn

from nnabla_adaloss import (
    AdaptiveLossScalingUpdater,
    DynamicLossScalingUpdater,
    FixedLossScalingUpdater,
    FormatEmulation,
    LossLike,
)

STORAGE = "float16"


class Updater(Protocol):
    """What all training loops have in common."""

    scale: float

    def update(self) -> Any:
        """Train on one batch, or throw batches away."""


class PlainUpdater:
    """The loop one writes without loss scaling."""

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
    """What a training loop is made for.

    Attributes:
        solver: the solver, with its parameters set.
        loss: the loss in fp32.
        feeder: fills the input with the next batch.
        growth_interval: after how many updates without overflow dynamic and adaptive double the scale.
    """

    solver: Any
    loss: nn.Variable
    feeder: Callable[[], Any]
    growth_interval: int


class Loop(NamedTuple):
    """A training loop, and the loss whose `backward(scale, ...)` it calls."""

    updater: Updater
    loss: LossLike


def _fp32(job: Job) -> Loop:
    return Loop(PlainUpdater(job.solver, job.loss, job.feeder), job.loss)


def _no_scaling(job: Job) -> Loop:
    loss = FormatEmulation(job.loss, STORAGE)
    return Loop(FixedLossScalingUpdater(job.solver, loss, job.feeder, scale=1.0), loss)


def _fixed(job: Job) -> Loop:
    loss = FormatEmulation(job.loss, STORAGE)
    return Loop(FixedLossScalingUpdater(job.solver, loss, job.feeder, scale=128.0), loss)


def _dynamic(job: Job) -> Loop:
    loss = FormatEmulation(job.loss, STORAGE)
    return Loop(DynamicLossScalingUpdater(job.solver, loss, job.feeder, N=job.growth_interval), loss)


def _adaptive(job: Job) -> Loop:
    loss = FormatEmulation(job.loss, STORAGE)
    updater = AdaptiveLossScalingUpdater(job.solver, loss, job.feeder, N=job.growth_interval)
    return Loop(updater, updater.scaling)


METHODS: Dict[str, Callable[[Job], Loop]] = {
    "fp32": _fp32,
    "no scaling": _no_scaling,
    "fixed (128)": _fixed,
    "dynamic": _dynamic,
    "adaptive": _adaptive,
}
