# SPDX-License-Identifier: Apache-2.0
"""Experiments, with files of results from which they can be resumed."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from tqdm import tqdm

Line = Dict[str, Any]


class Experiment(NamedTuple):
    """List of jobs, and the table of their results."""

    jobs: Sequence[Any]  # NamedTuples, whose fields come first in each line of results
    work: Callable[[Any], Line]  # computes the rest of the line of a job; a function of a module
    table: Callable[[List[Line]], str]
    draw: Optional[Callable[[Path, List[Line]], None]] = None


def read(path: Path) -> List[Line]:
    """Read the objects of all complete lines; skip a truncated one."""
    found = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def lines_of(jobs: Sequence[Any], lines: Sequence[Line]) -> Dict[Any, Line]:
    """Map jobs to their lines; jobs without one are missing."""
    known = {tuple(line.get(field) for field in jobs[0]._fields): line for line in lines} if jobs else {}
    return {job: known[tuple(job)] for job in jobs if tuple(job) in known}


def run(jobs: Sequence[Any], work: Callable[[Any], Line], path: Path, processes: int) -> None:
    """Run the jobs without a line in the file of results, and append each one's line when it is done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = lines_of(jobs, read(path))
    missing = [job for job in jobs if job not in done]
    # Small networks are no faster with two threads.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Spawned, because a fork of a process with threads may hang.
    pool = multiprocessing.get_context("spawn").Pool(processes, _be_quiet)
    with path.open("a", encoding="utf-8") as file, pool:
        if file.tell() and not path.read_bytes().endswith(b"\n"):
            file.write("\n")
        results = pool.imap_unordered(partial(_line, work), missing)
        for line in tqdm(results, total=len(missing), desc=path.stem, unit=" jobs", disable=None):
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
    print(f"{len(done)} of {len(jobs)} were there, {len(missing)} were done now: {path}")


def _line(work: Callable[[Any], Line], job: Any) -> Line:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {**job._asdict(), **work(job)}


def _be_quiet() -> None:
    for name in ("nnabla", "nnabla_adaloss"):
        logging.getLogger(name).setLevel(logging.WARNING)
