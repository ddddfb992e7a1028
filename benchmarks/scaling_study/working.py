# SPDX-License-Identifier: Apache-2.0
"""Does a list of jobs in processes of their own, until all are done or time is up."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, Callable, Dict, Optional, Sequence, Set, TypeVar

from tqdm import tqdm

J = TypeVar("J")


def do_all(
    jobs: Sequence[J],
    work: Callable[[J], Dict[str, Any]],
    done: Callable[[Dict[str, Any]], Any],
    *,
    processes: int,
    budget: Optional[float],
    expected: Callable[[J], float],
    title: str,
) -> int:
    """Do jobs in their order and return how many were done.

    Args:
        jobs: what is to be done.
        work: does one; a function of a module.
        done: gets what `work` returned, in this process, as soon as it is there.
        processes: how many jobs at a time.
        budget: seconds after which nothing should be running any more; None for no limit. No job is begun
            that would, by what is expected of it, end later.
        expected: seconds that a job may take.
        title: what the progress bar shows.
    """
    # One thread for each: what is small is no faster with two.
    os.environ["OMP_NUM_THREADS"] = "1"
    start, count = time.monotonic(), 0
    waiting = iter(jobs)
    running: Set[Future[Dict[str, Any]]] = set()
    # Spawned, because a fork of a process that has threads may hang.
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(processes, mp_context=context, initializer=_be_quiet) as pool,
        tqdm(total=len(jobs), desc=title, unit=" runs", dynamic_ncols=True, disable=None) as bar,
    ):
        while True:
            while len(running) < processes:
                job = next(waiting, None)
                if job is None:
                    break
                if budget is not None and time.monotonic() - start + expected(job) > budget:
                    waiting = iter(())
                    break
                running.add(pool.submit(work, job))
            if not running:
                return count
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                done(future.result())
                count += 1
                bar.update()


def _be_quiet() -> None:
    for name in ("nnabla", "nnabla_adaloss"):
        logging.getLogger(name).setLevel(logging.WARNING)
