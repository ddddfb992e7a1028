# SPDX-License-Identifier: Apache-2.0
"""Trainings whose gradients change slowly: after the first batches nothing should overflow."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from typing import List, NamedTuple, Optional, Sequence

import nnabla as nn

from .experiment import Experiment, Line
from .methods import METHODS, REFERENCE, Trainee, longest_row, train
from .nets import QUIET
from .text import paragraph, rows

FIRST = 20
"""Batches in which scales may still be looked for."""

EMULATED, NATIVE = "emulated", "native"
IN_HALF = ("classifier", "focal", "gcn")
"""Those that are small enough for nnabla's half precision on a CPU."""

_METHODS = ("amax_history", "next", "GradScaler")
_HALF = nn.Context(["cpu:half", "cpu:float"], "CpuCachedArray", "0")
_FLOAT = nn.Context(["cpu:float"], "CpuCachedArray", "0")


class QuietJob(NamedTuple):
    """One training."""

    net: str
    half: str
    method: str
    seed: int
    batches: int


def experiment(quick: bool) -> Experiment:
    """All ways of a network after each other, the reference first."""
    jobs = [
        QuietJob(name, half, method, 0, 150 if quick else net.iterations)
        for half in ((EMULATED,) if quick else (EMULATED, NATIVE))
        for name, net in QUIET.items()
        for method in ((REFERENCE, *_METHODS) if half == EMULATED else _METHODS)
        if half == EMULATED or name in IN_HALF
    ]
    return Experiment(jobs, work, table)


def work(job: QuietJob) -> Line:
    """Train, and list what overflows after the first batches."""
    net = QUIET[job.net]
    nn.seed(job.seed)
    start = time.perf_counter()
    with nn.parameter_scope("", OrderedDict()):
        with nn.context_scope(_HALF if job.half == NATIVE else _FLOAT):
            players = net.build(job.seed).players
        # The same network again, in fp32: it has the score.
        score = net.build(job.seed).score
        trainees = []
        for player in players:
            solver = net.solver(net.learning_rate)
            solver.set_parameters(player.parameters)
            trainees.append(Trainee(player.loss, solver, player.feed))
        storage = "float16" if job.half == EMULATED else None
        warned = train(METHODS[job.method], trainees, storage, job.batches)
        reached = score()
    late = [overflow for t in trainees for overflow in t.overflows if overflow.batch > FIRST]
    lost = [[batch for batch in t.lost if batch > FIRST] for t in trainees]
    return {
        "score": reached if math.isfinite(reached) else None,
        "early": sum(o.batch <= FIRST for t in trainees for o in t.overflows),
        "late": len(late),
        "late_lost": sum(map(len, lost)),
        "lost_in_a_row": max(map(longest_row, lost)),
        "batches_of_late": [overflow.batch for overflow in late],
        "layers_of_late": [overflow.layer for overflow in late],
        "warnings": warned,
        "seconds": round(time.perf_counter() - start, 2),
    }


def table(lines: List[Line]) -> str:
    """A row for each training."""
    text = (
        "Made by `python benchmarks/study.py quiet`. Overflows are repeated or lost batches; the first "
        f"{FIRST} batches may have some, as scales are looked for there (those of a GradScaler's first batch "
        "are not seen). *Batches* are those with later ones, the first six, and the layers where they began."
    )
    scores = {line["net"]: line["score"] for line in lines if line["method"] == REFERENCE}
    head = ["", "half", "method", f"overflows up to {FIRST}", "later", "lost later", "in a row", "batches"]
    body = [_row(line, scores.get(line["net"])) for line in lines]
    head += ["score", "fp32"]
    return "\n".join(["# Trainings that should be quiet\n", paragraph(text), rows(head, body)])


def _row(line: Line, fp32: Optional[float]) -> Sequence[str]:
    late = sorted(set(zip(line["batches_of_late"], line["layers_of_late"])))
    return [
        line["net"],
        "" if line["method"] == REFERENCE else line["half"],
        line["method"],
        *(str(line[name]) for name in ("early", "late", "late_lost", "lost_in_a_row")),
        ", ".join([*(f"{batch} {layer}" for batch, layer in late[:6]), *["..."] * (len(late) > 6)]),
        *("none" if score is None else f"{score:.3f}" for score in (line["score"], fp32)),
    ]
