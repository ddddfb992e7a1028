# SPDX-License-Identifier: Apache-2.0
"""Training of a network, from initialization to score."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from typing import Any, Dict, NamedTuple, Optional, Sequence

import nnabla as nn

from .methods import METHODS, STORAGES, Loop, Method, Trainee, rounded
from .methods import train as train_in_turn
from .task import Net

_SAMPLE_EVERY = 20


class Run(NamedTuple):
    """Key of a training in the results."""

    net: str
    storage: str
    weight: float
    method: str
    seed: int
    iterations: int


class Result(NamedTuple):
    """Outcome of a training."""

    score: Optional[float]  # None: it ended with an error, or the score is not finite
    batches: int  # over all players
    lost: int  # batches that changed nothing
    repeats: int
    overflows: int  # backward passes whose gradients were not finite
    underflow: float  # share of the elements of gradients that became zero; a gradient of zeros counts whole
    seconds: float
    error: str


def train(run: Run, net: Net, method: Optional[Method] = None) -> Result:
    """Train a network and return its outcome.

    The learning rate is divided by the loss weight, which cancels in the steps of SGD, and falls to zero
    linearly.
    """
    nn.seed(run.seed)
    error, elements, flushed = "", 0, 0
    rate = net.learning_rate / run.weight
    with nn.parameter_scope("", OrderedDict()):
        task = net.build(run.seed)
        trainees = []
        for player in task.players:
            solver = net.solver(rate)
            solver.set_parameters(player.parameters)
            trainees.append(Trainee(player.loss * run.weight, solver, player.feed))

        def before(batch: int) -> None:
            for trainee in trainees:
                trainee.solver.set_learning_rate(rate * (1.0 - (batch - 1) / run.iterations))

        def after(batch: int, loops: Sequence[Loop]) -> None:
            nonlocal elements, flushed
            for loop in loops:
                if loop.emulation is not None and batch % _SAMPLE_EVERY == 0:
                    counted, lost = rounded(loop.emulation)
                    elements, flushed = elements + counted, flushed + lost

        start = time.perf_counter()
        try:
            storage = STORAGES.get(run.storage)
            train_in_turn(method or METHODS[run.method], trainees, storage, run.iterations, before, after)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        seconds = time.perf_counter() - start
        score = task.score()
    return Result(
        None if error or not math.isfinite(score) else score,
        sum(t.fed for t in trainees),
        sum(t.lost for t in trainees),
        sum(t.repeats for t in trainees),
        sum(t.overflows for t in trainees),
        flushed / max(1, elements),
        round(seconds, 3),
        error,
    )


def results_of(lines: Sequence[Dict[str, Any]]) -> Dict[Run, Result]:
    """Read the trainings from lines of results."""
    return {
        Run(*(line[field] for field in Run._fields)): Result(*(line[field] for field in Result._fields))
        for line in lines
    }
