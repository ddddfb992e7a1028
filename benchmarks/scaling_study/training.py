# SPDX-License-Identifier: Apache-2.0
"""One training of the study, from nothing to its score."""

from __future__ import annotations

import math
import time
import warnings
from collections import OrderedDict
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

import nnabla as nn

from nnabla_adaloss import AdaptiveLossScaling, FormatEmulation, UpdateResult

from .methods import REFERENCE, STORAGES, Job, Loop, make_loop
from .nets import NETS
from .task import Net, Player

_SAMPLE_EVERY = 20


class Run(NamedTuple):
    """Which training; its key in the results.

    Attributes:
        net: key of `NETS`.
        storage: key of `STORAGES`; `"float32"` for the reference.
        weight: what the loss is multiplied by.
        method: key of `METHODS`, or `REFERENCE`.
        seed: decides initial weights and batches.
        iterations: batches of each player.
    """

    net: str
    storage: str
    weight: float
    method: str
    seed: int
    iterations: int


class Result(NamedTuple):
    """How a training went.

    Attributes:
        score: None where it ended with an error, or the score is no number.
        batches: how many were fed, over all players.
        lost: how many of these changed nothing: thrown away.
        repeats: how often a batch was run again.
        overflows: backward passes whose gradients were not finite.
        underflow: share of the elements of gradients, as they were to be stored, that were not zero and
            became zero. A gradient that consists of zeros counts as lost whole.
        scale: the loss scale at the end, of the first player.
        seconds: how long the training took.
        error: what it ended with; empty where it did not.
    """

    score: Optional[float]
    batches: int
    lost: int
    repeats: int
    overflows: int
    underflow: float
    scale: float
    seconds: float
    error: str


LoopMaker = Callable[[Job], Loop]


def train(
    run: Run,
    make: Optional[LoopMaker] = None,
    watch: Optional[Callable[[Trainee], Any]] = None,
    nets: Mapping[str, Net] = NETS,
) -> Result:
    """Train a network and return how that went.

    Args:
        run: what to train, and how.
        make: makes the loop; None for that of `run.method`.
        watch: called after each update.
        nets: what `run.net` is a key of.
    """
    net = nets[run.net]
    nn.seed(run.seed)
    error = ""
    with nn.parameter_scope("", OrderedDict()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        task = net.build(run.seed)
        trainees = [Trainee(player, run, net, make) for player in task.players]
        start = time.perf_counter()
        try:
            for turn in range(run.iterations):
                for trainee in trainees:
                    trainee.take_turn(turn)
                    if watch is not None:
                        watch(trainee)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        seconds = time.perf_counter() - start
        score = task.score()
    return Result(
        None if error or not math.isfinite(score) else score,
        sum(t.fed for t in trainees),
        sum(t.fed - t.updates for t in trainees),
        sum(t.repeats for t in trainees),
        sum(t.overflows for t in trainees),
        sum(t.flushed for t in trainees) / max(1, sum(t.elements for t in trainees)),
        trainees[0].loop.updater.scale,
        round(seconds, 3),
        error,
    )


class Trainee:
    """A player with its loop, and what is counted of it."""

    def __init__(self, player: Player, run: Run, net: Net, make: Optional[LoopMaker]) -> None:
        # SGD moves weights by learning rate times gradient: this takes the loss weight out again.
        self._learning_rate = net.learning_rate / run.weight
        self._iterations = run.iterations
        self._solver = net.solver(self._learning_rate)
        self._solver.set_parameters(player.parameters)
        self.player = player
        self.fed = self.updates = self.repeats = self.overflows = 0
        self.elements = self.flushed = 0
        self.last: Optional[UpdateResult] = None
        loss = player.loss * run.weight
        storage = STORAGES["float16" if run.method == REFERENCE else run.storage]
        job = Job(self._solver, loss, self._next, storage)
        self.loop = make_loop(run.method, job) if make is None else make(job)
        if self.loop.scaling is not None:
            self._count_overflows(self.loop.scaling)

    def take_turn(self, turn: int) -> None:
        """Train on one batch, unless an earlier turn has used up this turn's batch."""
        if self.fed > turn:
            return
        self._solver.set_learning_rate(self._learning_rate * (1.0 - turn / self._iterations))
        before = self.fed
        result = self.loop.updater.update()
        if isinstance(result, UpdateResult):
            self.last = result
            self.updates += result.updated
        else:
            # Whoever skips an update leaves the gradients that made it do so.
            self.updates += not self._solver.check_inf_or_nan_grad()
        if self.loop.scaling is None:
            self.overflows = self.fed - self.updates
        else:
            batches = self.fed - before
            # Of an update that was not made, the last batch was thrown away and not run again.
            self.repeats += result.retries - (batches - 1)
        if self.loop.emulation is not None and turn % _SAMPLE_EVERY == _SAMPLE_EVERY - 1:
            self._look_at_rounding(self.loop.emulation)

    def _next(self) -> None:
        self.fed += 1
        self.player.feed()

    def _count_overflows(self, scaling: AdaptiveLossScaling) -> None:
        lower = scaling.after_overflow

        def counted() -> bool:
            self.overflows += 1
            return lower()

        scaling.after_overflow = counted  # type: ignore[method-assign]

    def _look_at_rounding(self, emulation: FormatEmulation) -> None:
        elements, flushed = rounded(emulation)
        self.elements += elements
        self.flushed += flushed


def rounded(emulation: FormatEmulation) -> Tuple[int, int]:
    """How many elements of gradients the last backward stored, and how many of them it lost to zero."""
    elements = flushed = 0
    for found in emulation.emulated_storage.gradients.values():
        count, zeros = found.statistics.count, found.statistics.zeros
        elements += count
        # Behind a gradient that was lost whole, nothing is left to be flushed.
        flushed += count if zeros == count else found.underflowed
    return elements, flushed


def work(run: Run) -> Dict[str, Any]:
    """Do one training and return its line of the results file."""
    return {**run._asdict(), **train(run)._asdict()}


def runs_of(records: List[Dict[str, Any]]) -> Dict[Run, Result]:
    """The trainings that lines of the results file tell of."""
    return {
        Run(*(record[field] for field in Run._fields)): Result(*(record[field] for field in Result._fields))
        for record in records
    }
