# SPDX-License-Identifier: Apache-2.0
"""Iterations of a training with a progress bar and checkpoints."""

from __future__ import annotations

import argparse
import signal
import sys
from types import TracebackType
from typing import Any, Callable, Iterator, Optional, Type

import nnabla as nn
from tqdm import tqdm

from nnabla_adaloss import load_checkpoint, save_checkpoint

from .ranks import ALONE, Ranks


class Session:
    """Counts the iterations of a training; resumes it, and saves its state.

    Ctrl-C ends the training after the running iteration, with a checkpoint; twice, at once.

    Args:
        options: those of `common.options`.
        updaters: the updaters that take turns; their data feeders are `Feeder`s.
        ranks: the training's processes; the first one draws the bar and saves.

    Example:
        with Session(options, updater) as session:
            for iteration in session:
                session.show(updater.update().scale, loss)
    """

    def __init__(self, options: argparse.Namespace, *updaters: Any, ranks: Ranks = ALONE) -> None:
        self._total, self._every = options.iterations, options.checkpoint_every
        self._ranks = ranks
        self._updaters, self._file = updaters, options.checkpoint
        # nnabla's own updater has no state except its scale.
        self._parts = [each if hasattr(each, "state_dict") else each.solver for each in updaters]
        self._done = self._load() if options.resume and self._file.exists() else 0
        self._stopped = False
        self._handler: Any = None

    def __enter__(self) -> Session:
        self._bar = tqdm(
            initial=self._done,
            total=self._total,
            disable=self._ranks.rank > 0,
            mininterval=0.5,
            unit=" updates",
        )
        if self._ranks.size == 1:  # other ranks would wait for a rank that stops by itself
            self._handler = signal.signal(signal.SIGINT, self._stop)
        return self

    def __iter__(self) -> Iterator[int]:
        while self._done < self._total and not self._stopped:
            yield self._done
            self._done += 1
            self._bar.update()
            if self._done % self._every == 0 or self._done == self._total or self._stopped:
                self._save()

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self._bar.close()
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        if self._stopped and kind is None:
            saved = "go on with --resume" if self._file is not None else "nothing is saved"
            sys.exit(f"Stopped after {self._done} of {self._total} updates: {saved}.")

    def show(self, scale: float, loss: nn.Variable) -> None:
        """Show loss scale and loss beside the bar, not each time: reading the loss synchronizes a GPU."""
        if self._done % 10 == 0 or self._done == self._total - 1:
            self._bar.set_postfix_str(f"loss {float(loss.d):.4g}, scale {scale:.4g}", refresh=False)

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        if self._ranks.rank == 0:
            tqdm.write(line)

    def _save(self) -> None:
        if self._file is None or self._ranks.rank:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        extra = {
            "iteration": self._done,
            "batches": [updater.data_feeder.count for updater in self._updaters],
            "scales": [updater.scale for updater in self._updaters],
        }
        save_checkpoint(self._file, *self._parts, extra=extra)

    def _load(self) -> int:
        extra = load_checkpoint(self._file, *self._parts)
        for updater, count, scale in zip(self._updaters, extra["batches"], extra["scales"]):
            updater.data_feeder.count = count
            if updater not in self._parts:
                updater.scale = scale
        return int(extra["iteration"])

    def _stop(self, *_: Any) -> None:
        if self._stopped:
            raise KeyboardInterrupt
        self._stopped = True


def run(
    options: argparse.Namespace, updater: Any, rate: Callable[[int], float], ranks: Ranks = ALONE
) -> None:
    """Train with one updater from its present state to the end.

    Args:
        options: those of `common.options`.
        updater: an adaptive one; its data feeder is a `Feeder`.
        rate: the learning rate of an iteration.
        ranks: the training's processes.
    """
    with Session(options, updater, ranks=ranks) as session:
        for iteration in session:
            updater.solver.set_learning_rate(rate(iteration))
            updater.update()
            session.show(updater.scale, updater.loss)
