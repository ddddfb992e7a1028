# SPDX-License-Identifier: Apache-2.0
"""A loss that is multiplied by 2^10 from one batch to the next: how soon the scale is right again."""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from .experiment import Experiment
from .jumps import AT, JUMPS, NEAR, STAYS, jumping, until_right
from .methods import make_loop
from .table import paragraph, percent, rows, weight_label
from .trace import Trace
from .training import Run, train

_NETS = ("lenet", "mlp8", "detector")
_METHODS = ("dynamic_65536", "approx_range", "amax_history")
_WEIGHTS = (1.0, 1e-6)
_ITERATIONS = 300


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
        for jump in JUMPS
    ]
    return Experiment("planted", jobs, work, markdown)


def work(job: PlantedJob) -> Dict[str, Any]:
    """Train in float16 and note each update's scale and what it lost."""
    trace = Trace()
    run = Run(job.net, "float16", job.weight, job.method, job.seed, _ITERATIONS)
    result = train(run, jumping(job.jump, partial(make_loop, job.method)), trace)
    return {
        **job._asdict(),
        **trace.as_dict(),
        "lost": result.lost,
        "repeats": result.repeats,
        "overflows": result.overflows,
        "score": result.score,
        "seconds": result.seconds,
        "error": result.error,
    }


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
        f"Made by `python benchmarks/study.py --planted`: float16; the loss of batch {AT} is multiplied, or "
        "that of all batches from there on, and the learning rate divided, so that the steps are the same. "
        f"The scale is right again when for {STAYS} batches it is within a factor of {NEAR:g} of that of a "
        "training without a jump, less the jump. Lost and repeats are those beyond that training's. Underflow"
        " is the share of elements of gradients that became zero: in the 20 batches before the jump, and from"
        " it until the scale is right, 20 batches at least."
    )
    return "\n".join(["# A loss that jumps\n", paragraph(text), rows(head, body)])


def _row(record: Dict[str, Any], calm: Dict[str, Any]) -> List[str]:
    until = until_right(record, calm)
    after = [u for u, fed in zip(record["underflow"], record["fed"]) if fed > AT][
        : None if until is None else max(20, until)
    ]
    before = [u for u, fed in zip(record["underflow"], record["fed"]) if AT - 20 < fed <= AT]
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
