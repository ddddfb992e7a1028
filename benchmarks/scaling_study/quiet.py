# SPDX-License-Identifier: Apache-2.0
"""Trainings whose gradients change slowly: after the first batches nothing should overflow."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn

from .experiment import Experiment, Line
from .methods import METHODS, REFERENCE, Trainee, longest_row, train
from .nets import QUIET
from .text import paragraph, rows
from .true_gradients import WINDOW, TrueGradients

FIRST = 20
"""Batches in which scales may still be looked for."""

MARGIN = 4.0
"""How much larger than any remembered a gradient may become before it overflows, by default."""

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
    """Train; and where something overflows late, once more, to see how large gradients were."""
    start = time.perf_counter()
    trainees, score, warned, _ = _train(job, look=False)
    late = [overflow for t in trainees for overflow in t.overflows if overflow.batch > FIRST]
    growths: List[Optional[float]] = []
    if late and late[0].layer:
        again, _, _, growths = _train(job, look=True)
        if [t.overflows for t in again] != [t.overflows for t in trainees]:
            raise RuntimeError(f"{job}: to look at gradients has changed the training")
    lost = [[batch for batch in t.lost if batch > FIRST] for t in trainees]
    return {
        "score": score if math.isfinite(score) else None,
        "early": sum(o.batch <= FIRST for t in trainees for o in t.overflows),
        "late": len(late),
        "late_lost": sum(map(len, lost)),
        "lost_in_a_row": max(map(longest_row, lost)),
        "batches_of_late": [overflow.batch for overflow in late],
        "layers_of_late": [overflow.layer for overflow in late],
        "growth_of_late": growths,
        "warnings": warned,
        "seconds": round(time.perf_counter() - start, 2),
    }


def _train(job: QuietJob, *, look: bool) -> Tuple[List[Trainee], float, List[str], List[Optional[float]]]:
    """What became of a training, and how much gradients had grown at each late overflow, if asked for."""
    net = QUIET[job.net]
    nn.seed(job.seed)
    with nn.parameter_scope("", OrderedDict()):
        with nn.context_scope(_HALF if job.half == NATIVE else _FLOAT):
            players = net.build(job.seed).players
        # The same network again, in fp32: it has the score, and is what true gradients are computed with.
        twin = net.build(job.seed)
        looks = [TrueGradients(player.loss, player.feed) if look else None for player in twin.players]
        trainees = []
        for player, seen in zip(players, looks):
            solver = net.solver(net.learning_rate)
            solver.set_parameters(player.parameters)
            trainees.append(Trainee(player.loss, solver, _feed_both(player.feed, seen)))
        storage = "float16" if job.half == EMULATED else None
        warned = train(METHODS[job.method], trainees, storage, job.batches)
        score = twin.score()
    growths = [
        _rounded(seen.growth(overflow.batch, overflow.layer))
        for trainee, seen in zip(trainees, looks)
        if seen is not None
        for overflow in trainee.overflows
        if overflow.batch > FIRST
    ]
    return trainees, score, warned, growths


def _feed_both(feed: Callable[[], Any], look: Optional[TrueGradients]) -> Callable[[], None]:
    def both() -> None:
        feed()
        if look is not None:
            look()

    return both


def _rounded(number: Optional[float]) -> Optional[float]:
    return None if number is None else float(f"{number:.4g}")


def table(lines: List[Line]) -> str:
    """A row for each training."""
    text = (
        f"Made by `python benchmarks/study.py quiet`. Overflows are repeated or lost batches; the first "
        f"{FIRST} batches may have some, as scales are looked for there (those of a "
        "GradScaler's first batch are not "
        "seen). *Batches* are those with later ones, the first six. *Growth* says how many times larger true "
        "gradients were than in any of the "
        f"{WINDOW} batches before, in the components that the first function writes whose gradients were not "
        "finite: least, median and largest of all late overflows. Up to "
        f"{MARGIN:g} the scale should have had room: those are *unexplained*."
    )
    scores = {line["net"]: line["score"] for line in lines if line["method"] == REFERENCE}
    head = ["", "half", "method", f"overflows up to {FIRST}", "later", "lost later", "in a row", "batches"]
    head += ["growth", "unexplained", "score", "fp32"]
    body = [_row(line, scores.get(line["net"])) for line in lines]
    return "\n".join(["# Trainings that should be quiet\n", paragraph(text), rows(head, body)])


def _row(line: Dict[str, Any], fp32: Optional[float]) -> Sequence[str]:
    growths = sorted(growth for growth in line["growth_of_late"] if growth is not None)
    growth = unexplained = ""
    if growths:
        three = growths[0], growths[len(growths) // 2], growths[-1]
        growth = " ".join(f"{number:.2g}" for number in three)
        unexplained = str(sum(number <= MARGIN for number in growths))
    late = sorted(set(line["batches_of_late"]))
    return [
        line["net"],
        "" if line["method"] == REFERENCE else line["half"],
        line["method"],
        *(str(line[name]) for name in ("early", "late", "late_lost", "lost_in_a_row")),
        ", ".join([*map(str, late[:6]), *["..."] * (len(late) > 6)]),
        growth,
        unexplained,
        *("none" if score is None else f"{score:.3f}" for score in (line["score"], fp32)),
    ]
