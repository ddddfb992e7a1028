# SPDX-License-Identifier: Apache-2.0
"""A loss that is multiplied by 2^10 from one batch to the next: how soon the scale is right again."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import nnabla as nn

from .experiment import Experiment
from .methods import Job, Loop, make_loop
from .table import paragraph, percent, rows, weight_label
from .training import Run, Trainee, rounded, train

_NETS = ("lenet", "mlp8", "detector")
_METHODS = ("dynamic_65536", "approx_range", "amax_history")
_WEIGHTS = (1.0, 1e-6)
_AT = 100
_ITERATIONS = 300
# What the loss is multiplied by in batch `_AT`, and in those that follow.
_JUMPS = {
    "none": (1.0, 1.0),
    "2^10, one batch": (2.0**10, 1.0),
    "2^10, for good": (2.0**10, 2.0**10),
    "2^-10, for good": (2.0**-10, 2.0**-10),
}
# A scale is right that differs by no more than this from that of a training without a jump.
_NEAR = 4.0


class PlantedJob(NamedTuple):
    """One training."""

    net: str
    weight: float
    method: str
    jump: str
    seed: int


def experiment(only: Optional[Sequence[str]]) -> Experiment:
    """All jumps of a network after the other."""
    jobs = [
        PlantedJob(net, weight, method, jump, 0)
        for net in only or _NETS
        for weight in _WEIGHTS
        for method in _METHODS
        for jump in _JUMPS
    ]
    return Experiment("planted", jobs, work, markdown)


def work(job: PlantedJob) -> Dict[str, Any]:
    """Train in float16 and note each update's scale and what it lost."""
    exponents: List[float] = []
    underflow: List[float] = []
    fed: List[int] = []

    def watch(trainee: Trainee) -> None:
        emulation = trainee.loop.emulation
        assert emulation is not None
        elements, flushed = rounded(emulation)
        exponents.append(math.log2(trainee.loop.updater.scale))
        underflow.append(flushed / elements)
        fed.append(trainee.fed)

    run = Run(job.net, "float16", job.weight, job.method, job.seed, _ITERATIONS)
    result = train(run, lambda made: _with_jump(made, job), watch)
    return {
        **job._asdict(),
        "exponents": exponents,
        "underflow": underflow,
        "fed": fed,
        "lost": result.lost,
        "repeats": result.repeats,
        "overflows": result.overflows,
        "score": result.score,
        "seconds": result.seconds,
        "error": result.error,
    }


def _with_jump(job: Job, planted: PlantedJob) -> Loop:
    factor = nn.Variable(job.loss.shape)
    return make_loop(
        planted.method, job._replace(loss=job.loss * factor, feed=_Jumping(job, factor, planted))
    )


class _Jumping:
    """Feeds, multiplies the loss, and divides the learning rate likewise: steps stay what they are."""

    def __init__(self, job: Job, factor: nn.Variable, planted: PlantedJob) -> None:
        self._feed: Callable[[], Any] = job.feed
        self._solver, self._factor = job.solver, factor
        self._at_once, self._later = _JUMPS[planted.jump]
        self._count = 0
        self._set: Optional[float] = None
        self._rate = 0.0

    def __call__(self) -> None:
        rate = self._solver.learning_rate()
        if rate != self._set:
            # Somebody else has set it since.
            self._rate = rate
        factor = 1.0 if self._count < _AT else self._at_once if self._count == _AT else self._later
        self._solver.set_learning_rate(self._rate / factor)
        self._set = self._solver.learning_rate()
        self._factor.d = factor
        self._count += 1
        self._feed()


def markdown(_picture: str, records: List[Dict[str, Any]]) -> str:
    """A row for each training, compared with the one without a jump."""
    known = {tuple(r[field] for field in PlantedJob._fields): r for r in records}
    body = []
    for record in records:
        calm = known.get((record["net"], record["weight"], record["method"], "none", record["seed"]))
        if record["jump"] != "none" and calm is not None:
            body.append(_row(record, calm))
    head = [
        "",
        "loss weight",
        "method",
        "jump",
        "batches until right",
        "lost",
        "repeats",
        "underflow before",
        "most after",
        "mean after",
    ]
    text = (
        f"Made by `python benchmarks/study.py --planted`: float16; the loss of batch {_AT} is multiplied, or "
        "that of all batches from there on, and the learning rate divided, so that the steps are the same. "
        f"The scale is right again when from there on it stays within a factor of {_NEAR:g} of that of a "
        "training without a jump, less the jump. Lost and repeats are those beyond that training's. Underflow"
        " is the share of elements of gradients that became zero: in the 20 batches before the jump, and from"
        " it until the scale is right, 20 batches at least."
    )
    return "\n".join(["# A loss that jumps\n", paragraph(text), rows(head, body)])


def _row(record: Dict[str, Any], calm: Dict[str, Any]) -> List[str]:
    until = _until_right(record, calm)
    after = [u for u, fed in zip(record["underflow"], record["fed"]) if fed > _AT][
        : None if until is None else max(20, until)
    ]
    before = [u for u, fed in zip(record["underflow"], record["fed"]) if _AT - 20 < fed <= _AT]
    return [
        record["net"],
        weight_label(record["weight"]),
        record["method"],
        record["jump"],
        "not within this training" if until is None else str(until),
        str(record["lost"] - calm["lost"]),
        str(record["repeats"] - calm["repeats"]),
        percent(sum(before) / max(1, len(before))),
        percent(max(after, default=0.0)),
        percent(sum(after) / max(1, len(after))),
    ]


def _until_right(record: Dict[str, Any], calm: Dict[str, Any]) -> Optional[int]:
    """After how many batches from the jump on the scale is right and stays so; None: not to the end."""
    at_once, later = (math.log2(factor) for factor in _JUMPS[record["jump"]])
    wanted = dict(zip(calm["fed"], calm["exponents"]))
    until = 0
    for fed, exponent in zip(record["fed"], record["exponents"]):
        if fed <= _AT or fed not in wanted:
            continue
        jump = at_once if fed == _AT + 1 else later
        if abs(exponent - (wanted[fed] - jump)) > math.log2(_NEAR):
            until = fed - _AT
    return None if until >= record["fed"][-1] - _AT else until
