# SPDX-License-Identifier: Apache-2.0
"""Ranks train until the last one fails in the way it is told."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from nnabla_adaloss import MPICommunicator
from tests.distributed.workers.task import is_last, task

FAILS_IN = 5


class Killed(MPICommunicator):
    """Kills the last rank where the others wait for its gradients."""

    def all_reduce(self, *arguments: Any, **options: Any) -> None:
        if self.iteration == FAILS_IN and is_last(self):
            tell_the_time()
            os.kill(os.getpid(), signal.SIGKILL)
        super().all_reduce(*arguments, **options)


def tell_the_time() -> None:
    """So that the test knows how long it takes for the job to end."""
    print(f"failed at {time.time()}", flush=True)


def main(way: str) -> None:
    comm = Killed() if way == "kill" else MPICommunicator()
    comm.init()
    work = task(comm, spoiled={FAILS_IN - 1: "nan"} if way == "nan" else {})
    updater = work.updater()

    def feed() -> None:
        if way == "feeder" and updater.iteration == FAILS_IN and is_last(comm):
            tell_the_time()
            raise OSError("the disk with the images is gone")
        work.feed()

    updater.data_feeder = feed
    for _ in range(2 * FAILS_IN):
        updater.update()
    print("went on to the end", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
