# SPDX-License-Identifier: Apache-2.0
"""The ways to scale a loss that are watched, and what becomes of each batch in them."""

from __future__ import annotations

import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import nnabla as nn
from scaling_study.methods import PlainUpdater

from nnabla_adaloss import (
    AdaptiveLossScalingUpdater,
    DynamicLossScalingUpdater,
    FormatEmulation,
    GradScaler,
)


class Overflow(NamedTuple):
    """Gradients of a batch that were not finite.

    Attributes:
        batch: its number, from 1 on.
        layer: the first function in backward order where they were not; empty where nobody says.
    """

    batch: int
    layer: str


class Tally:
    """What becomes of the batches of one loss; also a monitor of its updater.

    Args:
        feed: fills the inputs with the next batch.

    Attributes:
        fed: how many batches there were.
        overflows: in their order; a batch that is repeated may have several.
        lost: the numbers of the batches that changed nothing.
    """

    def __init__(self, feed: Callable[[], Any]) -> None:
        self._feed = feed
        self.fed = 0
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

    def on_overflowed(self, event: Any) -> None:
        """A pass of the present batch overflowed."""
        self.overflows.append(Overflow(self.fed, next(iter(event.layers), "")))

    def on_batch_thrown_away(self, event: Any) -> None:
        """The present batch is lost."""
        self.lost.append(self.fed)


class Trainee(NamedTuple):
    """A loss and what trains it; a GAN has two, everything else one."""

    loss: nn.Variable
    solver: Any
    tally: Tally


Turn = Callable[[int], None]
"""Trains until each loss has had so many batches."""

Way = Callable[[Sequence[Trainee], Optional[str]], Turn]
"""Makes the loop of a training; the storage is one to emulate, or None for that of the context."""


def _in_turn(trainees: Sequence[Trainee], updaters: Sequence[Any]) -> Turn:
    """One batch of each loss in turn, unless an update has used it up already."""

    def turn(number: int) -> None:
        for trainee, updater in zip(trainees, updaters):
            if trainee.tally.fed < number:
                updater.update()

    return turn


def _fp32(trainees: Sequence[Trainee], storage: Optional[str]) -> Turn:
    return _in_turn(trainees, [PlainUpdater(t.solver, t.loss, t.tally.feed) for t in trainees])


def _adaptive(**arguments: Any) -> Way:
    def make(trainees: Sequence[Trainee], storage: Optional[str]) -> Turn:
        updaters = [
            AdaptiveLossScalingUpdater(
                t.solver, t.loss, t.tally.feed, storage=storage, monitors=[t.tally], **arguments
            )
            for t in trainees
        ]
        return _in_turn(trainees, updaters)

    return make


def _grad_scaler(trainees: Sequence[Trainee], storage: Optional[str]) -> Turn:
    """One scaler for all losses and solvers. It repeats the first batch unseen, and no other."""
    scaler = GradScaler(*(t.solver for t in trainees), storage=storage)

    def turn(number: int) -> None:
        for loss, solver, tally in trainees:
            solver.zero_grad()
            tally.feed()
            scaler.forward(loss, clear_no_need_grad=True)
            scaler.backward(loss, clear_buffer=True)
            layers = scaler.scaling(loss).found_inf
            if not scaler.step(solver):
                tally.lose(tally.fed, layers)
        scaler.update()

    return turn


class _Dynamic:
    """nnabla's updater, which says nothing of the batches that it throws away."""

    def __init__(self, trainee: Trainee, storage: Optional[str], scale: float) -> None:
        self._trainee = trainee
        # With the float tail that the package's updaters have, so that only scales differ.
        loss = trainee.loss
        stored = loss if storage is None else FormatEmulation(loss, storage, float_tail=True)
        self._updater = DynamicLossScalingUpdater(trainee.solver, stored, trainee.tally.feed, scale=scale)

    def update(self) -> None:
        """Train on one batch, or throw batches away."""
        _, solver, tally = self._trainee
        before = tally.fed
        self._updater.update()
        # Whoever skips an update leaves the gradients that made it do so.
        for batch in range(before + 1, tally.fed + bool(solver.check_inf_or_nan_grad())):
            tally.lose(batch)


def dynamic(scale: float) -> Way:
    """nnabla's updater, from this scale on."""

    def make(trainees: Sequence[Trainee], storage: Optional[str]) -> Turn:
        return _in_turn(trainees, [_Dynamic(t, storage, scale) for t in trainees])

    return make


REFERENCE = "fp32"
WAYS: Dict[str, Way] = {
    REFERENCE: _fp32,
    "default": _adaptive(),
    "next": _adaptive(on_overflow="next"),
    "skip": _adaptive(on_overflow="next", max_retries=0),
    "GradScaler": _grad_scaler,
    "dynamic": dynamic(65536.0),
    # Halved until it fits, in the quiet batches: from then on the largest scale that does not overflow.
    "halving": dynamic(2.0**40),
}


def train(
    way: str,
    trainees: Sequence[Trainee],
    storage: Optional[str],
    batches: int,
    watch: Callable[[], Any] = lambda: None,
) -> List[str]:
    """Train on so many batches of each loss.

    Args:
        way: key of `WAYS`.
        trainees: what is trained.
        storage: as a `Way` takes it.
        batches: how many.
        watch: called after each turn.

    Returns:
        What was warned of, each text once.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        turn = WAYS[way](trainees, storage)
        for number in range(1, batches + 1):
            turn(number)
            watch()
    return list(dict.fromkeys(str(warning.message) for warning in caught))


def longest_row(batches: Sequence[int]) -> int:
    """How many of these numbers follow each other at most."""
    longest, row, before = 0, 0, None
    for batch in batches:
        row = row + 1 if before is not None and batch == before + 1 else 1
        longest, before = max(longest, row), batch
    return longest


def spans(batches: Sequence[int], shown: int = 6) -> str:
    """The first of these numbers, in words."""
    several = sorted(set(batches))
    text = ", ".join(map(str, several[:shown]))
    return f"{text}, ..." if len(several) > shown else text
