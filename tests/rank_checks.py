# SPDX-License-Identifier: Apache-2.0
"""Runs every check of the modules it is told on all ranks, and prints the names of those that passed."""

from __future__ import annotations

import importlib
import sys
from typing import Sequence

from nnabla_adaloss.communicators import MPICommunicator


def main(modules: Sequence[str]) -> None:
    comm = MPICommunicator(timeout_s=60.0)
    comm.init()
    with comm.abort_on_exception():
        for module in modules:
            for name, check in list(vars(importlib.import_module(module)).items()):
                if name.startswith("check_"):
                    check(comm)
                    if comm.rank == 0:
                        print(name, flush=True)
        comm.barrier()


if __name__ == "__main__":
    main(sys.argv[1:])
