# SPDX-License-Identifier: Apache-2.0
"""The storages and the ways to scale a loss that are compared, each with its defaults."""

from __future__ import annotations

import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

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


class Overflow(NamedTuple):
    """Gradients of a batch that were not finite."""

    batch: int  # from 1 on
    layer: str  # the first function in backward order where they were not; empty where nobody says


class Trainee:
    """A loss and what trains it, and what becomes of its batches; also a monitor of its updater."""

    def __init__(self, loss: nn.Variable, solver: Any, feed: Callable[[], Any]) -> None:
        self.loss, self.solver, self._feed = loss, solver, feed
        self.fed = self.repeats = 0
        self.overflows: List[Overflow] = []
        self.lost: List[int] = []

    def feed(self) -> None:
        """Feed the next batch."""
        self.fed += 1
        self._feed()

    def lose(self, batch: int, layers: Sequence[str] = ()) -> None:
        """A batch overflowed and was thrown away, by a loop that has no monitors."""
        self.overflows.append(Overflow(batch, next(iter(layers), "")))
        self.lost.append(batch)

    def on_overflowed(self, event: Overflowed) -> None:
        """A pass of the present batch overflowed."""
        self.overflows.append(Overflow(self.fed, next(iter(event.layers), "")))

    def on_batch_repeated(self, event: BatchRepeated) -> None:
        """The present batch is about to run again."""
        self.repeats += 1

    def on_batch_thrown_away(self, event: BatchThrownAway) -> None:
        """The present batch is lost."""
        self.lost.append(self.fed)


class Loop(NamedTuple):
    """A training loop."""

    update: Callable[[], Any]
    emulation: Optional[FormatEmulation] = None
    scaling: Optional[AdaptiveLossScaling] = None


Method = Callable[[Trainee, Any], Loop]
"""Makes the loop of a training; the storage is one to emulate, or None for that of the context."""


def _fp32(trainee: Trainee, storage: Any) -> Loop:
    """The loop one writes without loss scaling."""

    def update() -> None:
        trainee.solver.zero_grad()
        trainee.feed()
        trainee.loss.forward(clear_no_need_grad=True)
        trainee.loss.backward(clear_buffer=True)
        trainee.solver.update()

    return Loop(update)


def _without_monitors(updater: Any, **arguments: Any) -> Method:
    """An updater that does not say which batches it throws away.

    The loss gets the float tail that the package's updaters give it by default, so that only scales differ.
    """

    def make(trainee: Trainee, storage: Any) -> Loop:
        stored = trainee.loss if storage is None else FormatEmulation(trainee.loss, storage, float_tail=True)
        made = updater(trainee.solver, stored, trainee.feed, **arguments)

        def update() -> None:
            before = trainee.fed
            made.update()
            # After a skipped update, the gradients that caused it are still there.
            for batch in range(before + 1, trainee.fed + bool(trainee.solver.check_inf_or_nan_grad())):
                trainee.lose(batch)

        return Loop(update, None if storage is None else stored)

    return make


def adaptive(**arguments: Any) -> Method:
    """An adaptive loop with these arguments of its updater."""

    def make(trainee: Trainee, storage: Any) -> Loop:
        updater = AdaptiveLossScalingUpdater(
            trainee.solver, trainee.loss, trainee.feed, storage=storage, monitors=[trainee], **arguments
        )
        stored = updater.scaling.loss
        return Loop(updater.update, stored if isinstance(stored, FormatEmulation) else None, updater.scaling)

    return make


def _grad_scaler(trainee: Trainee, storage: Any) -> Loop:
    """A loop of one's own. It repeats the first batch unseen, and no other."""
    scaler = GradScaler(trainee.solver, storage=storage)

    def update() -> None:
        trainee.solver.zero_grad()
        trainee.feed()
        scaler.forward(trainee.loss, clear_no_need_grad=True)
        scaler.backward(trainee.loss, clear_buffer=True)
        layers = scaler.scaling(trainee.loss).found_inf
        if not scaler.step(trainee.solver):
            trainee.lose(trainee.fed, layers)
        scaler.update()

    return Loop(update)


REFERENCE = "fp32"
METHODS: Dict[str, Method] = {
    REFERENCE: _fp32,
    "none": _without_monitors(FixedLossScalingUpdater, scale=1.0),
    "fixed_128": _without_monitors(FixedLossScalingUpdater, scale=128.0),
    "dynamic_8": _without_monitors(DynamicLossScalingUpdater),
    "dynamic_65536": _without_monitors(DynamicLossScalingUpdater, scale=65536.0, N=2000),
    "one_scale": adaptive(config=AdaLossConfig(loss_scale_method="fixed")),
    "approx_range": adaptive(config=AdaLossConfig(loss_scale_method="approx_range")),
    "amax_history": adaptive(),
    # As a user may set the updater or write the loop, in trainings that should stay quiet.
    "next": adaptive(on_overflow="next"),
    "skip": adaptive(on_overflow="next", max_retries=0),
    "GradScaler": _grad_scaler,
    # Halved until it fits, in the first batches: from then on the largest scale that does not overflow.
    "halving": _without_monitors(DynamicLossScalingUpdater, scale=2.0**40),
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
"""Those that are compared by what networks learn with them."""


def train(
    method: Method,
    trainees: Sequence[Trainee],
    storage: Any,
    batches: int,
    before: Callable[[int], Any] = lambda batch: None,
    after: Callable[[int, Sequence[Loop]], Any] = lambda batch, loops: None,
) -> List[str]:
    """Train on so many batches of each loss, in turn."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loops = [method(trainee, storage) for trainee in trainees]
        for batch in range(1, batches + 1):
            before(batch)
            for trainee, loop in zip(trainees, loops):
                # An update that threw batches away has used up later ones.
                if trainee.fed < batch:
                    loop.update()
            after(batch, loops)
    return list(dict.fromkeys(str(warning.message) for warning in caught))


def rounded(emulation: FormatEmulation) -> Any:
    """How many elements of gradients the last backward stored, and how many of them it lost to zero."""
    elements = flushed = 0
    for found in emulation.emulated_storage.gradients.values():
        count, zeros = found.statistics.count, found.statistics.zeros
        elements += count
        # Behind a gradient that was lost whole, nothing is left to be flushed.
        flushed += count if zeros == count else found.underflowed
    return elements, flushed


def longest_row(batches: Sequence[int]) -> int:
    """How many of these numbers follow each other at most."""
    longest, row, before = 0, 0, None
    for batch in batches:
        row = row + 1 if before is not None and batch == before + 1 else 1
        longest, before = max(longest, row), batch
    return longest
