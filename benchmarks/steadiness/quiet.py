# SPDX-License-Identifier: Apache-2.0
"""Trainings whose gradients change slowly: after the first batches nothing should overflow."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn
from scaling_study.experiment import Experiment
from scaling_study.table import paragraph, rows

from .nets import IN_HALF, NETS
from .true_gradients import WINDOW, TrueGradients
from .ways import REFERENCE, Tally, Trainee, longest_row, spans, train

FIRST = 20
"""Batches in which scales may still be looked for."""

MARGIN = 4.0
"""How much larger than any remembered a gradient may become before it overflows, by default."""

EMULATED, NATIVE = "emulated", "native"
_WAYS = ("default", "next", "GradScaler", "dynamic")
_HALF = nn.Context(["cpu:half", "cpu:float"], "CpuCachedArray", "0")
_FLOAT = nn.Context(["cpu:float"], "CpuCachedArray", "0")


class QuietJob(NamedTuple):
    """One training."""

    net: str
    half: str
    way: str
    seed: int
    batches: int


def experiment(batches: Optional[int] = None) -> Experiment:
    """All ways of a network after the other, the reference first.

    Args:
        batches: how many in each training; None: as many as the network asks for.
    """
    jobs = [
        QuietJob(name, half, way, 0, net.iterations if batches is None else batches)
        for half in (EMULATED, NATIVE)
        for name, net in NETS.items()
        for way in ((REFERENCE, *_WAYS) if half == EMULATED else _WAYS)
        if half == EMULATED or name in IN_HALF
    ]
    return Experiment("steady_quiet", jobs, work, markdown)


def work(job: QuietJob) -> Dict[str, Any]:
    """Train; and where something overflows late, once more, to see how large gradients were."""
    start = time.perf_counter()
    found, _ = _train(job, look=False)
    seconds = round(time.perf_counter() - start, 2)
    late = [overflow for tally in found["tallies"] for overflow in tally.overflows if overflow.batch > FIRST]
    growths: List[Optional[float]] = []
    if late and late[0].layer:
        again, growths = _train(job, look=True)
        if [t.overflows for t in again["tallies"]] != [t.overflows for t in found["tallies"]]:
            raise RuntimeError(f"{job}: to look at gradients has changed the training")
    tallies = found["tallies"]
    lost = [[batch for batch in tally.lost if batch > FIRST] for tally in tallies]
    return {
        **job._asdict(),
        "score": found["score"] if math.isfinite(found["score"]) else None,
        "early": sum(o.batch <= FIRST for tally in tallies for o in tally.overflows),
        "late": len(late),
        "late_lost": sum(map(len, lost)),
        "lost_in_a_row": max(map(longest_row, lost)),
        "batches_of_late": [overflow.batch for overflow in late],
        "layers_of_late": [overflow.layer for overflow in late],
        "growth_of_late": growths,
        "warnings": found["warnings"],
        "seconds": seconds,
    }


def _train(job: QuietJob, *, look: bool) -> Tuple[Dict[str, Any], List[Optional[float]]]:
    """What became of a training, and how much gradients had grown at each late overflow, if asked for."""
    net = NETS[job.net]
    nn.seed(job.seed)
    with nn.parameter_scope("", OrderedDict()):
        with nn.context_scope(_HALF if job.half == NATIVE else _FLOAT):
            players = net.build(job.seed).players
        # The same network again, in fp32: it has the score, and is what true gradients are computed with.
        twin = net.build(job.seed)
        looks = [TrueGradients(player.loss, player.feed) if look else None for player in twin.players]
        trainees = [
            _trainee(player, net.solver(net.learning_rate), seen) for player, seen in zip(players, looks)
        ]
        storage = "float16" if job.half == EMULATED else None
        warned = train(job.way, trainees, storage, job.batches)
        score = twin.score()
    growths = [
        _rounded(seen.growth(overflow.batch, overflow.layer))
        for trainee, seen in zip(trainees, looks)
        if seen is not None
        for overflow in trainee.tally.overflows
        if overflow.batch > FIRST
    ]
    return {"tallies": [t.tally for t in trainees], "warnings": warned, "score": score}, growths


def _rounded(number: Optional[float]) -> Optional[float]:
    return None if number is None else float(f"{number:.4g}")


def _trainee(player: Any, solver: Any, look: Optional[TrueGradients]) -> Trainee:
    solver.set_parameters(player.parameters)

    def feed() -> None:
        player.feed()
        if look is not None:
            look()

    return Trainee(player.loss, solver, Tally(feed))


def markdown(_picture: str, records: List[Dict[str, Any]]) -> str:
    """A row for each training."""
    text = (
        f"Made by `python benchmarks/steady.py`. Overflows are repeated or lost batches; the first {FIRST} "
        "batches may have some, as scales are looked for there (those of a GradScaler's first batch are not "
        "seen). *Batches* are those with later ones, the first six. *Growth* says how many times larger true "
        "gradients were than in any of the "
        f"{WINDOW} batches before, in the components that the first function writes whose gradients were not "
        "finite: least, median and largest of all late overflows. Up to "
        f"{MARGIN:g} the scale should have had room: those are *unexplained*."
    )
    scores = {r["net"]: r["score"] for r in records if r["way"] == REFERENCE}
    head = [
        "",
        "half",
        "way",
        f"overflows up to {FIRST}",
        "later",
        "lost later",
        "in a row",
        "batches",
        "growth",
        "unexplained",
        "score",
        "fp32",
    ]
    body = [_row(record, scores.get(record["net"])) for record in records]
    return "\n".join(["# Trainings that should be quiet\n", paragraph(text), rows(head, body)])


def _row(record: Dict[str, Any], fp32: Optional[float]) -> Sequence[str]:
    growths = sorted(growth for growth in record["growth_of_late"] if growth is not None)
    growth = unexplained = ""
    if growths:
        three = growths[0], growths[len(growths) // 2], growths[-1]
        growth = " ".join(f"{number:.2g}" for number in three)
        unexplained = str(sum(number <= MARGIN for number in growths))
    return [
        record["net"],
        "" if record["way"] == REFERENCE else record["half"],
        record["way"],
        str(record["early"]),
        str(record["late"]),
        str(record["late_lost"]),
        str(record["lost_in_a_row"]),
        spans(record["batches_of_late"]),
        growth,
        unexplained,
        _shown(record["score"]),
        _shown(fp32),
    ]


def _shown(score: Optional[float]) -> str:
    return "none" if score is None else f"{score:.3f}"
