# SPDX-License-Identifier: Apache-2.0
"""Ranks exchange gradients until the last one fails in the way it is told."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
from nnabla import NdArray

from nnabla_adaloss import MPICommunicator

FAILS_AT = 5


def fail(way: str) -> None:
    if way == "raise":
        raise ValueError("the data are gone")
    if way == "exit":
        sys.exit(3)
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if way == "stall":
        time.sleep(3600)
    if way == "pause":
        time.sleep(3)


def train(comm: MPICommunicator, way: str) -> None:
    gradients = [NdArray((1000,)) for _ in range(10)]
    failing = comm.rank == comm.size - 1
    for iteration in range(FAILS_AT + 1):
        comm.iteration = iteration
        if failing and iteration == FAILS_AT:
            fail(way)
            if way == "mismatch":
                gradients.pop()
        for gradient in gradients:
            gradient.data = np.ones(1000, np.float32)
        comm.all_reduce(gradients)


def main(way: str, guard: str) -> None:
    comm = MPICommunicator(timeout_s=1.0 if "stall" in way else None)
    if way == "stall_before_init" and comm.rank == comm.size - 1:
        fail("stall")
    comm.init()
    if guard == "context":
        with comm.abort_on_exception():
            train(comm, way)
    else:
        train(comm, way)


if __name__ == "__main__":
    main(*sys.argv[1:])
