# SPDX-License-Identifier: Apache-2.0
"""Trainings in several processes with one progress bar."""

from __future__ import annotations

import logging
import multiprocessing
import queue
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from typing import Any, Callable, List, Sequence, Tuple


def run_all(
    work: Callable[..., Any], cases: Sequence[Tuple[Any, ...]], jobs: int, batches: int, title: str
) -> List[Any]:
    """Run `work(*case, progress)` for each case and return the results in order.

    Args:
        work: a function that other processes can import; it calls `progress(n)` after every `n` batches.
        cases: its arguments.
        jobs: number of processes.
        batches: of all cases together, the length of the bar.
        title: stands before the bar.
    """
    from tqdm import tqdm

    # Spawned, because a fork of a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    with (
        context.Manager() as manager,
        ProcessPoolExecutor(jobs, mp_context=context, initializer=silence_nnabla) as pool,
    ):
        done = manager.Queue()
        futures = [pool.submit(work, *case, done.put) for case in cases]
        with tqdm(total=batches, desc=title, unit=" batches", disable=None) as bar:
            while not all(future.done() for future in futures):
                with suppress(queue.Empty):
                    bar.update(done.get(timeout=0.2))
            bar.update(batches - bar.n)
        return [future.result() for future in futures]


def silence_nnabla() -> None:
    """Keep nnabla from logging its import in every process."""
    logging.getLogger("nnabla").setLevel(logging.WARNING)
