# SPDX-License-Identifier: Apache-2.0
"""Underflow and overflows where only one iteration in n measures."""

from __future__ import annotations

from statistics import fmean
from typing import List, NamedTuple

from nnabla_adaloss import AdaLossConfig

from .experiment import Experiment, Line
from .methods import adaptive
from .nets import NETS
from .text import paragraph, percent, rows
from .training import Run, train

EVERY = (1, 4, 8, 16, 32)
_NETS = ("lenet", "mlp8")
_STORAGES = ("float16", "e4m3_stored")
_ITERATIONS = 400
_WEIGHT = 1e-3


class MeasuringJob(NamedTuple):
    """One training."""

    net: str
    storage: str
    every: int
    seed: int
    iterations: int


def experiment(quick: bool) -> Experiment:
    """Define the jobs: all intervals of a network after each other."""
    iterations = 32 if quick else _ITERATIONS
    cells = [(net, storage) for storage in _STORAGES for net in _NETS]
    jobs = [MeasuringJob(*cell, every, 0, iterations) for cell in cells for every in EVERY]
    return Experiment(jobs, work, table)


def work(job: MeasuringJob) -> Line:
    """Train with the defaults except the interval."""
    run = Run(job.net, job.storage, _WEIGHT, "amax_history", job.seed, job.iterations)
    method = adaptive(config=AdaLossConfig(measure_every=job.every))
    return train(run, NETS[job.net], method)._asdict()


def table(lines: List[Line]) -> str:
    """Write a row for each interval."""
    text = (
        "Made by `python benchmarks/study.py measuring`: `AdaLossConfig(measure_every=n)` on LeNet and an "
        f"MLP of eight layers, {_ITERATIONS} iterations, loss weight {_WEIGHT:g}. Underflow is the share "
        "of the "
        "elements of gradients that became zero, where a gradient that consists of zeros counts whole; then "
        "how many of 1000 batches overflowed; each was repeated. Then the scores of both networks."
    )
    body = []
    for every in EVERY:
        row = [str(every)]
        for storage in _STORAGES:
            mine = [line for line in lines if (line["every"], line["storage"]) == (every, storage)]
            if mine:
                over = 1e3 * fmean(line["overflows"] / line["batches"] for line in mine)
                underflow = percent(fmean(line["underflow"] for line in mine))
                scores = " ".join("none" if r["score"] is None else f"{r['score']:.3f}" for r in mine)
                row.append(f"{underflow}, {over:.1f}; {scores}")
            else:
                row.append("")
        body.append(row)
    return "\n".join(["# How often to measure\n", paragraph(text), rows(["n", *_STORAGES], body)])
