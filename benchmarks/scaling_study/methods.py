# SPDX-License-Identifier: Apache-2.0
"""Storages and loss scaling methods to compare, each with its defaults."""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence

import nnabla as nn

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScaling,
    AdaptiveLossScalingUpdater,
    BatchRepeated,
    BatchThrownAway,
    DynamicLossScalingUpdater,
    FixedLossScalingUpdater,
    FormatEmulation,
    GradScaler,
    Overflowed,
    Precision,
)

STORAGES: Dict[str, Precision] = {
    "float16": Precision("float16"),
    "fp8_hybrid": Precision(
        "float8_e4m3", "float8_e5m2", saturate=True, operands_only=True, otherwise="float16"
    ),
    "e4m3_stored": Precision("float16", "float8_e4m3"),
    "e5m2_stored": Precision("float16", "float8_e5m2"),
}
STORAGE_TITLES = {
    "float16": "float16: everything stored in fp16",
    "fp8_hybrid": "fp8_hybrid: matrix products read E4M3, their output gradients E5M2; the rest is fp16",
    "e4m3_stored": "e4m3_stored: fp16, but every gradient is stored in E4M3, not saturating",
    "e5m2_stored": "e5m2_stored: fp16, but every gradient is stored in E5M2",
}


class Trainee:
    """Loss with its trainer and counts of its batches; also a monitor of its updater."""

    def __init__(self, loss: nn.Variable, solver: Any, feed: Callable[[], Any]) -> None:
        self.loss, self.solver, self._feed = loss, solver, feed
        self.fed = self.repeats = self.overflows = self.lost = 0

    def feed(self) -> None:
        """Feed the next batch."""
        self.fed += 1
        self._feed()

    def on_overflowed(self, event: Overflowed) -> None:
        """A pass of the present batch overflowed."""
        self.overflows += 1

    def on_batch_repeated(self, event: BatchRepeated) -> None:
        """The present batch is about to run again."""
        self.repeats += 1

    def on_batch_thrown_away(self, event: BatchThrownAway) -> None:
        """The present batch is lost."""
        self.lost += 1


class Loop(NamedTuple):
    """Training loop."""

    update: Callable[[], Any]
    emulation: Optional[FormatEmulation] = None
    scaling: Optional[AdaptiveLossScaling] = None


Method = Callable[[Trainee, Any], Loop]
"""Makes the loop of a training; the storage is one to emulate, or None for that of the context."""


def plain(on_gradients: Callable[[Any], Any] = lambda solver: None) -> Method:
    """Make a loop without loss scaling; gradients may be clipped before the solver updates."""

    def make(trainee: Trainee, storage: Any) -> Loop:
        def update() -> None:
            trainee.solver.zero_grad()
            trainee.feed()
            trainee.loss.forward(clear_no_need_grad=True)
            trainee.loss.backward(clear_buffer=True)
            on_gradients(trainee.solver)
            trainee.solver.update()

        return Loop(update)

    return make


def without_monitors(updater: Any, **arguments: Any) -> Method:
    """Make a loop of an updater that does not report lost batches.

    The loss gets the float tail that the package's updaters give it by default, so that only scales differ.
    """

    def make(trainee: Trainee, storage: Any) -> Loop:
        stored = trainee.loss if storage is None else FormatEmulation(trainee.loss, storage, float_tail=True)
        made = updater(trainee.solver, stored, trainee.feed, **arguments)

        def update() -> None:
            before = trainee.fed
            made.update()
            # After a skipped update, its gradients are still stored.
            lost = trainee.fed - before - 1 + bool(trainee.solver.check_inf_or_nan_grad())
            trainee.lost += lost
            trainee.overflows += lost

        return Loop(update, None if storage is None else stored)

    return make


def adaptive(**arguments: Any) -> Method:
    """Make an adaptive loop with these arguments of its updater."""

    def make(trainee: Trainee, storage: Any) -> Loop:
        updater = AdaptiveLossScalingUpdater(
            trainee.solver, trainee.loss, trainee.feed, storage=storage, monitors=[trainee], **arguments
        )
        stored = updater.scaling.loss
        return Loop(updater.update, stored if isinstance(stored, FormatEmulation) else None, updater.scaling)

    return make


def grad_scaler(on_gradients: Callable[[Any], Any] = lambda solver: None) -> Method:
    """Make a loop with a `GradScaler`, which skips the step of a batch that overflows."""

    def make(trainee: Trainee, storage: Any) -> Loop:
        scaler = GradScaler(trainee.solver, storage=storage)

        def update() -> None:
            trainee.solver.zero_grad()
            trainee.feed()
            scaler.forward(trainee.loss)
            scaler.backward(trainee.loss)
            scaler.unscale_(trainee.solver)
            on_gradients(trainee.solver)
            scaler.step(trainee.solver)
            scaler.update()
            trainee.lost = trainee.overflows = scaler.skipped_steps

        return Loop(update)

    return make


REFERENCE = "fp32"
METHODS: Dict[str, Method] = {
    REFERENCE: plain(),
    "none": without_monitors(FixedLossScalingUpdater, scale=1.0),
    "fixed_128": without_monitors(FixedLossScalingUpdater, scale=128.0),
    "dynamic_8": without_monitors(DynamicLossScalingUpdater),
    "dynamic_65536": without_monitors(DynamicLossScalingUpdater, scale=65536.0, N=2000),
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


def train(
    method: Method,
    trainees: Sequence[Trainee],
    storage: Any,
    batches: int,
    before: Callable[[int], Any] = lambda batch: None,
    after: Callable[[int, Sequence[Loop]], Any] = lambda batch, loops: None,
) -> None:
    """Train on this many batches of each loss, in turn."""
    loops = [method(trainee, storage) for trainee in trainees]
    for batch in range(1, batches + 1):
        before(batch)
        for trainee, loop in zip(trainees, loops):
            # An update that lost batches has consumed later ones.
            if trainee.fed < batch:
                loop.update()
        after(batch, loops)


def rounded(emulation: FormatEmulation) -> Any:
    """Count the elements of gradients in the last backward, and those that became zero."""
    elements = flushed = 0
    for found in emulation.emulated_storage.gradients.values():
        count, zeros = found.statistics.count, found.statistics.zeros
        elements += count
        # After a gradient that was lost entirely, no later one can be flushed.
        flushed += count if zeros == count else found.underflowed
    return elements, flushed
