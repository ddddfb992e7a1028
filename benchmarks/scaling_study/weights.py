# SPDX-License-Identifier: Apache-2.0
"""How right gradients are, and how well a network trains, over sixteen decades of the loss weight."""

from __future__ import annotations

from statistics import mean, median
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater, FormatEmulation

from .experiment import Experiment
from .methods import Job, Loop
from .plan import iterations
from .table import paragraph, rows, weight_label
from .training import Run, train

_SEEDS = 3
_METHOD = "approx_range"
_LOOK_EVERY = 20


class WeightJob(NamedTuple):
    """One training."""

    net: str
    weight: float
    seed: int


def experiment(only: Optional[Sequence[str]]) -> Experiment:
    """Decades from 1e-12 to 1e4, all of a seed after the other."""
    nets = list(only or ("lenet",))
    exponents = range(-12, 5)
    jobs = [
        WeightJob(net, float(f"1e{e}"), seed) for seed in range(_SEEDS) for net in nets for e in exponents
    ]
    return Experiment("weights", jobs, work, markdown)


def work(job: WeightJob) -> Dict[str, Any]:
    """Train in float16 with approx_range, no float tail, and compare gradients with fp32's now and then."""
    errors: List[float] = []
    run = Run(job.net, "float16", job.weight, _METHOD, job.seed, iterations(job.net))
    result = train(run, lambda made: _compared(made, errors))
    return {
        **job._asdict(),
        "score": result.score,
        "lost": result.lost,
        "repeats": result.repeats,
        "overflows": result.overflows,
        "underflow": result.underflow,
        "relative_error": median(errors) if errors else None,
        "largest_relative_error": max(errors) if errors else None,
        "scale": result.scale,
        "seconds": result.seconds,
        "error": result.error,
    }


def _compared(job: Job, errors: List[float]) -> Loop:
    calls = 0

    def compare(solver: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % _LOOK_EVERY:
            return
        parameters = list(solver.get_parameters().values())
        found = [p.g.copy() for p in parameters]
        for parameter in parameters:
            parameter.grad.zero()
        # The same weights and batch, in single precision.
        job.loss.forward(clear_no_need_grad=True)
        job.loss.backward(clear_buffer=True)
        squares = difference = 0.0
        for parameter, g in zip(parameters, found):
            # In double precision, because squares of 1e-20 are not in single.
            right = parameter.g.astype(np.float64)
            squares += float((right**2).sum())
            difference += float(((g - right) ** 2).sum())
            parameter.g = g
        errors.append(float(np.sqrt(difference / squares)) if squares else 0.0)

    # Without the float tail, so that it is seen what the storage itself makes of a loss weight.
    loss = FormatEmulation(job.loss, job.storage)
    config = AdaLossConfig(loss_scale_method=_METHOD)
    updater = AdaptiveLossScalingUpdater(job.solver, loss, job.feed, on_gradients=compare, config=config)
    return Loop(updater, loss, updater.scaling)


def markdown(_picture: str, records: List[Dict[str, Any]]) -> str:
    """A row for each loss weight."""
    body = []
    keys = sorted({(r["net"], r["weight"]) for r in records})
    for net, weight in keys:
        mine = [r for r in records if (r["net"], r["weight"]) == (net, weight)]
        scores = [r["score"] for r in mine if r["score"] is not None]
        compared = [r for r in mine if r["relative_error"] is not None]
        body.append(
            [
                net,
                weight_label(weight),
                f"{mean(scores):.3f}" if len(scores) == len(mine) else "error",
                f"{mean(r['relative_error'] for r in compared):.1e}" if compared else "",
                f"{max(r['largest_relative_error'] for r in compared):.1e}" if compared else "",
                str(sum(r["lost"] for r in mine)),
                f"2^{np.log2(mine[-1]['scale']):.0f}",
                str(len(mine)),
            ]
        )
    head = ["", "loss weight", "accuracy", "error of gradients", "largest", "batches lost", "scale", "seeds"]
    errors = sorted({f"- {weight_label(r['weight'])}: {r['error']}\n" for r in records if r["error"]})
    text = (
        "Made by `python benchmarks/study.py --weights`: float16, AdaptiveLossScalingUpdater with "
        "approx_range and without the float tail. The error of gradients is the norm of the difference from "
        "fp32's on the same weights and batch, "
        f"relative to the norm of fp32's, over all parameters: the median over every {_LOOK_EVERY}th "
        "update, and the largest."
    )
    return "\n".join(["# Sixteen decades of the loss weight\n", paragraph(text), rows(head, body), *errors])
