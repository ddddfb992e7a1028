# SPDX-License-Identifier: Apache-2.0
"""The storages and the ways to scale a loss that are compared, each as a user meets it: with its defaults."""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Optional, Protocol

import nnabla as nn

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScaling,
    AdaptiveLossScalingUpdater,
    DynamicLossScalingUpdater,
    FixedLossScalingUpdater,
    FormatEmulation,
    Precision,
)

STORAGES: Dict[str, Precision] = {
    "float16": Precision("float16"),
    "fp8_hybrid": Precision(
        "float8_e4m3", "float8_e5m2", saturate=True, operands_only=True, otherwise="float16"
    ),
    "e4m3": Precision("float8_e4m3", "float8_e4m3", saturate=True, operands_only=True, otherwise="float16"),
    "e4m3_stored": Precision("float16", "float8_e4m3"),
    "e5m2_stored": Precision("float16", "float8_e5m2"),
}
STORAGE_TITLES = {
    "float16": "float16: everything stored in fp16",
    "fp8_hybrid": "fp8_hybrid: matrix products read E4M3, their output gradients E5M2; the rest is fp16",
    "e4m3": "e4m3: matrix products read E4M3, gradients too; the rest is fp16",
    "e4m3_stored": "e4m3_stored: fp16, but every gradient is stored in E4M3, not saturating",
    "e5m2_stored": "e5m2_stored: fp16, but every gradient is stored in E5M2",
}


class Updater(Protocol):
    """What all training loops have in common."""

    scale: float

    def update(self) -> Any:
        """Train on one batch, or throw batches away."""


class Job(NamedTuple):
    """What a training loop is made for."""

    solver: Any
    loss: nn.Variable
    feed: Callable[[], Any]
    storage: Precision


class Loop(NamedTuple):
    """A training loop with what can be looked at.

    Attributes:
        updater: its `update()` trains on a batch.
        emulation: knows what rounding did; None in fp32.
        scaling: knows the scales of layers, where they have some.
    """

    updater: Updater
    emulation: Optional[FormatEmulation] = None
    scaling: Optional[AdaptiveLossScaling] = None


class PlainUpdater:
    """The loop one writes without loss scaling."""

    scale = 1.0

    def __init__(self, solver: Any, loss: nn.Variable, feed: Callable[[], Any]) -> None:
        self.solver, self.loss, self.feed = solver, loss, feed

    def update(self) -> None:
        """Train on one batch."""
        self.solver.zero_grad()
        self.feed()
        self.loss.forward(clear_no_need_grad=True)
        self.loss.backward(clear_buffer=True)
        self.solver.update()


def _fp32(job: Job) -> Loop:
    return Loop(PlainUpdater(job.solver, job.loss, job.feed))


def _stored(job: Job) -> FormatEmulation:
    """The loss in its storage, with the float tail that the package's updaters give it by default.

    nnabla's dynamic scaling gets it as well, so that methods differ in their scales alone.
    """
    return FormatEmulation(job.loss, job.storage, float_tail=True)


def _fixed(scale: float) -> Callable[[Job], Loop]:
    def make(job: Job) -> Loop:
        loss = _stored(job)
        return Loop(FixedLossScalingUpdater(job.solver, loss, job.feed, scale=scale), loss)

    return make


def _dynamic(**arguments: Any) -> Callable[[Job], Loop]:
    def make(job: Job) -> Loop:
        loss = _stored(job)
        return Loop(DynamicLossScalingUpdater(job.solver, loss, job.feed, **arguments), loss)

    return make


def adaptive(**arguments: Any) -> Callable[[Job], Loop]:
    """What makes an adaptive loop with these arguments of its updater."""

    def make(job: Job) -> Loop:
        loss = _stored(job)
        updater = AdaptiveLossScalingUpdater(job.solver, loss, job.feed, **arguments)
        return Loop(updater, loss, updater.scaling)

    return make


METHODS: Dict[str, Callable[[Job], Loop]] = {
    "none": _fixed(1.0),
    "fixed_128": _fixed(128.0),
    "dynamic_8": _dynamic(),
    "dynamic_65536": _dynamic(scale=65536.0, N=2000),
    "one_scale": adaptive(config=AdaLossConfig(loss_scale_method="fixed")),
    "approx_range": adaptive(config=AdaLossConfig(loss_scale_method="approx_range")),
    "amax_history": adaptive(),
}
METHOD_TITLES = {
    "none": "no scaling",
    "fixed_128": "fixed 128",
    "dynamic_8": "dynamic, nnabla's defaults (8, N = 2000)",
    "dynamic_65536": "dynamic, torch's defaults (65536, N = 2000)",
    "one_scale": "one measured scale: adaptive, every alpha 1 (fixed)",
    "approx_range": "adaptive, approx_range",
    "amax_history": "adaptive, defaults (amax_history)",
}
REFERENCE = "fp32"


def make_loop(method: str, job: Job) -> Loop:
    """The loop of a method, or plain training where that is `REFERENCE`."""
    return _fp32(job) if method == REFERENCE else METHODS[method](job)
