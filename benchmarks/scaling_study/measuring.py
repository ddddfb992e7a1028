# SPDX-License-Identifier: Apache-2.0
"""What it costs to look at arrays in one of n iterations, and what is missed in the others."""

from __future__ import annotations

import time
from statistics import fmean, median
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater

from .experiment import Experiment
from .jumps import AT, JUMPS, jumping
from .measuring_picture import draw
from .measuring_table import markdown
from .methods import Job, Loop, adaptive
from .trace import Trace
from .training import LoopMaker, Run, Trainee, train

_EVERY = (1, 4, 8, 16, 32, 64)
_METHODS = ("approx_range", "amax_history")
_CALM = (
    ("lenet", "float16"),
    ("gan", "float16"),
    ("mlp8", "float16"),
    ("lenet", "e4m3_stored"),
    ("mlp8", "e4m3_stored"),
)
_JUMPING = "lenet"
_SEEDS = 2
_ITERATIONS = 800
_WEIGHT = 1e-3
# Nothing is emulated: what is timed is what nnabla takes without the package's rounding.
_NATIVE = "native"


class MeasuringJob(NamedTuple):
    """One training."""

    net: str
    storage: str
    method: str
    every: int
    jump: str
    seed: int


def experiment(only: Optional[Sequence[str]]) -> Experiment:
    """Times first, then a seed of all cells, the jumps, and the other seed."""
    nets = only or dict.fromkeys(net for net, _ in _CALM)
    cells = [cell for cell in _CALM if cell[0] in nets]
    # Both kinds of iterations take turns, so that they can be compared on a machine that does other things.
    jobs = [MeasuringJob(net, _NATIVE, method, 2, "none", 0) for net in nets for method in _METHODS]
    for seed in range(_SEEDS):
        jobs += _trainings(cells, ["none"], seed)
        if seed == 0 and _JUMPING in nets:
            jobs += _trainings([(_JUMPING, "float16")], [jump for jump in JUMPS if jump != "none"], seed)
    return Experiment("measuring", jobs, work, markdown, draw)


def _trainings(cells: Sequence[Tuple[str, str]], jumps: Sequence[str], seed: int) -> List[MeasuringJob]:
    return [
        MeasuringJob(net, storage, method, every, jump, seed)
        for net, storage in cells
        for method in _METHODS
        for jump in jumps
        for every in _EVERY
    ]


def work(job: MeasuringJob) -> Dict[str, Any]:
    """Train, look at every gradient in every iteration, and count."""
    trace, clock = Trace(), _Clock()

    def watch(trainee: Trainee) -> None:
        clock(trainee)
        if job.storage != _NATIVE:
            trace(trainee)
        clock.start()

    config = AdaLossConfig(loss_scale_method=job.method, measure_every=job.every, delay=0)
    native = job.storage == _NATIVE
    make = _native(config) if native else adaptive(config=config)
    run = Run(job.net, "float16" if native else job.storage, _WEIGHT, job.method, job.seed, _ITERATIONS)
    result = train(run, jumping(job.jump, make), watch)
    kept = ("score", "batches", "lost", "repeats", "overflows", "seconds", "error")
    after = [share for fed, share in zip(trace.fed, trace.underflow) if AT < fed <= 2 * AT]
    return {
        **job._asdict(),
        **{name: getattr(result, name) for name in kept},
        "underflow": fmean(trace.underflow or [0.0]),
        "underflow_after": fmean(after or [0.0]),
        "scales": _changes(trace) if job.net == _JUMPING else [],
        **clock.as_dict(),
    }


def _native(config: AdaLossConfig) -> LoopMaker:
    def make(job: Job) -> Loop:
        updater = AdaptiveLossScalingUpdater(job.solver, job.loss, job.feed, config=config)
        return Loop(updater, None, updater.scaling)

    return make


def _changes(trace: Trace) -> List[List[float]]:
    """Batches with another scale than the one before, with its exponent."""
    pairs = list(zip(trace.fed, trace.exponents))
    before = [None, *trace.exponents]
    return [[fed, exponent] for (fed, exponent), last in zip(pairs, before) if exponent != last]


class _Clock:
    """Counts iterations that measure, and times them and the others."""

    def __init__(self) -> None:
        self._seconds: Dict[bool, List[float]] = {True: [], False: []}
        self.start()

    def start(self) -> None:
        """Another iteration begins."""
        self._start = time.perf_counter()

    def __call__(self, trainee: Trainee) -> None:
        """It has ended."""
        scaling = trainee.loop.scaling
        assert scaling is not None
        measured = scaling.result.kind == "measuring"
        self._seconds[measured].append(time.perf_counter() - self._start)

    def as_dict(self) -> Dict[str, Any]:
        """The share of iterations that measured, and how long the others took as a share of their time."""
        measuring, holding = self._seconds[True], self._seconds[False]
        return {
            "measured": len(measuring) / max(1, len(measuring) + len(holding)),
            "holding_over_measuring": median(holding) / median(measuring) if measuring and holding else None,
        }
