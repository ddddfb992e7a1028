# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training by several processes."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple, Optional


class Ranks(NamedTuple):
    """Processes of a training.

    Attributes:
        comm: the communicator, for the updater; None for a single process.
        rank: the number of this process.
        size: number of processes.
    """

    comm: Optional[Any]
    rank: int
    size: int

    def share(self, batch: Any) -> Any:
        """Slice of a batch for this process."""
        return batch[self.rank :: self.size]

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.comm is not None:
            self.comm.barrier()


ALONE = Ranks(None, 0, 1)


def add_option(made: argparse.ArgumentParser) -> None:
    """Add --distributed to a sample's options."""
    made.add_argument(
        "--distributed",
        action="store_true",
        help="started by mpirun: each process takes its share of every batch (NCCL on GPUs, MPI on CPUs)",
    )


def join(options: argparse.Namespace) -> Ranks:
    """Connect to the other processes, if any; call it before building the network."""
    if not options.distributed:
        return ALONE
    comm = _mpi() if options.context == "cpu" else _nccl(options)
    if options.batch_size % comm.size:
        raise SystemExit(f"--batch-size {options.batch_size} cannot be shared by {comm.size} ranks")
    return Ranks(comm, comm.rank, comm.size)


def _mpi() -> Any:
    from nnabla_adaloss import MPICommunicator

    comm = MPICommunicator(timeout_s=600)
    comm.init()
    return comm


def _nccl(options: argparse.Namespace) -> Any:
    import nnabla as nn
    from nnabla.communicators import MultiProcessCommunicator
    from nnabla.ext_utils import get_extension_context

    # A communicator of half would round the fp32 gradients that it sums to half.
    comm = MultiProcessCommunicator(get_extension_context(options.context, type_config="float"))
    comm.init()
    own = get_extension_context(
        options.context, type_config=options.type_config, device_id=str(comm.local_rank)
    )
    nn.set_default_context(own)
    return comm
