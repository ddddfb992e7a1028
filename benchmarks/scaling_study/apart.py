# SPDX-License-Identifier: Apache-2.0
"""Trainings in which gradients lie so far apart that one scale might not do, with every way of scaling."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence

from .apart_cells import CELLS, IN_EIGHT_BITS
from .apart_table import markdown
from .experiment import Experiment
from .layer_underflow import LayerUnderflow
from .methods import METHODS, REFERENCE
from .plan import REFERENCE_SEEDS, REFERENCE_STORAGE, SEEDS
from .training import Run, train


class ApartJob(NamedTuple):
    """One training."""

    net: str
    storage: str
    method: str
    seed: int


def experiment(only: Optional[Sequence[str]]) -> Experiment:
    """A seed after the other; in it a cell after the other."""
    return Experiment("apart", list(_jobs(list(only or CELLS))), work, markdown)


def _jobs(nets: Sequence[str]) -> Iterator[ApartJob]:
    for seed in range(REFERENCE_SEEDS):
        for net in nets:
            yield ApartJob(net, REFERENCE_STORAGE, REFERENCE, seed)
    for seed in range(SEEDS):
        for net in nets:
            for storage in ("float16", *IN_EIGHT_BITS.get(net, ())):
                for method in METHODS:
                    yield ApartJob(net, storage, method, seed)


def work(job: ApartJob) -> Dict[str, Any]:
    """Train, and count by layers what of the gradients is lost."""
    run = Run(job.net, job.storage, 1.0, job.method, job.seed, CELLS[job.net].iterations)
    lost = LayerUnderflow()
    result = train(run, watch=lost, nets=CELLS)
    layers: Dict[str, Any] = {"layers": lost.shares()}
    kept: List[str] = [
        "score",
        "batches",
        "lost",
        "repeats",
        "overflows",
        "underflow",
        "scale",
        "seconds",
        "error",
    ]
    return {**job._asdict(), **{field: getattr(result, field) for field in kept}, **layers}
