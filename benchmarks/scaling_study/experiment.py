# SPDX-License-Identifier: Apache-2.0
"""What an experiment is made of, so that all of them are run, stopped and gone on with alike."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from . import records
from .working import do_all


class Experiment(NamedTuple):
    """A list of jobs, and what to make of their results.

    Attributes:
        name: what its files are called.
        jobs: what is to be done, in this order: tuples with names, which come first in each line of results.
        work: does one job and returns the rest of its line, `"seconds"` among it; a function of a module.
        table: the text of all lines, in Markdown, from the name of the picture's file and the lines.
        draw: draws the lines into the file of the picture; None where there is none to draw.
    """

    name: str
    jobs: Sequence[Any]
    work: Callable[[Any], Dict[str, Any]]
    table: Callable[[str, List[Dict[str, Any]]], str]
    draw: Optional[Callable[[Path, List[Dict[str, Any]]], Any]] = None


def run(experiment: Experiment, path: Path, *, processes: int, budget: Optional[float]) -> None:
    """Do the jobs that are not in the file of results yet."""
    with records.appending(path) as file:
        there = records.read(path)
        missing = missing_of(experiment.jobs, there)
        seconds: Dict[Any, List[float]] = {}

        def remember(record: Dict[str, Any]) -> None:
            seconds.setdefault(record["net"], []).append(record["seconds"])

        def done(record: Dict[str, Any]) -> None:
            remember(record)
            file.add(record)

        def expected(job: Any) -> float:
            # The first training of a process may have to compile kernels.
            return 1.5 * median(seconds.get(job.net, [0.0]))

        for record in there:
            remember(record)
        count = do_all(
            missing,
            experiment.work,
            done,
            processes=processes,
            budget=budget,
            expected=expected,
            title=experiment.name,
        )
    total = len(experiment.jobs)
    print(f"{total - len(missing)} of {total} were there, {count} were done now: {path}")


def missing_of(jobs: Sequence[Any], there: Sequence[Dict[str, Any]]) -> List[Any]:
    """The jobs that no record tells of."""
    if not jobs:
        return []
    fields = jobs[0]._fields
    known = {tuple(record.get(field) for field in fields) for record in there}
    return [job for job in jobs if tuple(job) not in known]
