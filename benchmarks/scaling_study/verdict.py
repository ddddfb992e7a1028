# SPDX-License-Identifier: Apache-2.0
"""Which cells pass: those whose mean score is within the spread of single precision's."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Dict, List, Mapping, NamedTuple, Optional, Tuple

from .methods import REFERENCE
from .nets import NETS
from .training import Result, Run

RULE = (
    "A cell passes when none of its trainings ended with an error or with a score that is no number, and its "
    "mean score is at least the mean of fp32's, less twice the standard deviation of fp32's, or less the "
    "network's resolution where that is more."
)


class Key(NamedTuple):
    """A cell of the table."""

    net: str
    storage: str
    weight: float
    method: str


class Reference(NamedTuple):
    """What single precision comes to."""

    mean: float
    deviation: float
    seeds: int
    wanted: float


class Cell(NamedTuple):
    """What the seeds of a cell came to.

    Attributes:
        passes: whether it is as good as single precision.
        score: mean over the seeds; None where a training has none.
        seeds: how many there are.
        lost: share of the batches that were thrown away.
        repeated: how many batches were run again, of 1000.
        overflows: backward passes that overflowed, of 1000 batches.
        underflow: mean share of gradient elements that became zero.
        errors: what trainings ended with.
    """

    passes: bool
    score: Optional[float]
    seeds: int
    lost: float
    repeated: float
    overflows: float
    underflow: float
    errors: List[str]


Results = Mapping[Run, Result]


def references(results: Results) -> Dict[str, Reference]:
    """What each network comes to in single precision; of networks with two seeds or more."""
    found: Dict[str, Reference] = {}
    for net, description in NETS.items():
        scores = [
            r.score
            for run, r in results.items()
            if run.net == net and run.method == REFERENCE and r.score is not None
        ]
        if len(scores) >= 2:
            middle, deviation = mean(scores), stdev(scores)
            wanted = middle - max(2.0 * deviation, description.resolution)
            found[net] = Reference(middle, deviation, len(scores), wanted)
    return found


def cells(results: Results) -> Dict[Key, Cell]:
    """All cells of which there is a training and a reference."""
    known = references(results)
    grouped: Dict[Key, List[Result]] = {}
    for run, result in results.items():
        if run.method != REFERENCE and run.net in known:
            grouped.setdefault(Key(run.net, run.storage, run.weight, run.method), []).append(result)
    return {key: _cell(group, known[key.net].wanted) for key, group in grouped.items()}


def _cell(results: List[Result], wanted: float) -> Cell:
    scores = [r.score for r in results if r.score is not None]
    score = mean(scores) if len(scores) == len(results) else None
    batches = sum(r.batches for r in results)
    return Cell(
        score is not None and score >= wanted,
        score,
        len(results),
        sum(r.lost for r in results) / batches,
        1e3 * sum(r.repeats for r in results) / batches,
        1e3 * sum(r.overflows for r in results) / batches,
        mean(r.underflow for r in results),
        [r.error for r in results if r.error],
    )


def count(found: Mapping[Key, Cell], storage: str, method: str) -> Tuple[int, int]:
    """How many cells of a storage and method pass, and how many there are."""
    mine = [cell for key, cell in found.items() if (key.storage, key.method) == (storage, method)]
    return sum(cell.passes for cell in mine), len(mine)
