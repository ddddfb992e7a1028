# SPDX-License-Identifier: Apache-2.0
"""Verdict on cells: a pass needs a mean score within the spread of fp32's."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Dict, List, Mapping, NamedTuple, Optional, Tuple

from .methods import REFERENCE
from .task import Net
from .training import Result, Run

RULE = (
    "A cell passes when none of its trainings ended with an error or with a score that is no number, and its "
    "mean score is at least the mean of fp32's, less twice the standard deviation of fp32's, or less the "
    "network's resolution where that is more."
)


class Key(NamedTuple):
    """Cell of the table."""

    net: str
    storage: str
    method: str


class Reference(NamedTuple):
    """Scores of single precision."""

    mean: float
    deviation: float
    seeds: int
    wanted: float


class Cell(NamedTuple):
    """Results of a cell's seeds."""

    passes: bool
    score: Optional[float]
    results: List[Result]

    def total(self, field: str) -> float:
        """Sum a field over all results."""
        return float(sum(getattr(result, field) for result in self.results))

    def per_batch(self, field: str) -> float:
        """Sum a field over all results, divided by the number of batches."""
        return self.total(field) / self.total("batches")

    @property
    def underflow(self) -> float:
        """Mean underflow of the results."""
        return mean(result.underflow for result in self.results)


Results = Mapping[Run, Result]


def references(results: Results, nets: Mapping[str, Net]) -> Dict[str, Reference]:
    """Compute the scores of each network in fp32, for networks with two seeds or more."""
    found: Dict[str, Reference] = {}
    for net, description in nets.items():
        of_net = [r.score for run, r in results.items() if (run.net, run.method) == (net, REFERENCE)]
        scores = [score for score in of_net if score is not None]
        if len(scores) >= 2:
            middle, deviation = mean(scores), stdev(scores)
            wanted = middle - max(2.0 * deviation, description.resolution)
            found[net] = Reference(middle, deviation, len(scores), wanted)
    return found


def cells(results: Results, nets: Mapping[str, Net]) -> Dict[Key, Cell]:
    """List all cells with a training and a reference."""
    known = references(results, nets)
    grouped: Dict[Key, List[Result]] = {}
    for run, result in results.items():
        if run.method != REFERENCE and run.net in known:
            grouped.setdefault(Key(run.net, run.storage, run.method), []).append(result)
    return {key: _cell(group, known[key.net].wanted) for key, group in grouped.items()}


def _cell(results: List[Result], wanted: float) -> Cell:
    scores = [r.score for r in results if r.score is not None]
    score = mean(scores) if len(scores) == len(results) else None
    return Cell(score is not None and score >= wanted, score, results)


def count(found: Mapping[Key, Cell], storage: str, method: str) -> Tuple[int, int]:
    """Count the passing cells of a storage and method, and all of them."""
    mine = [cell for key, cell in found.items() if (key.storage, key.method) == (storage, method)]
    return sum(cell.passes for cell in mine), len(mine)
