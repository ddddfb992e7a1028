# SPDX-License-Identifier: Apache-2.0
"""nnabla's own updater with the communicator, against one process that is given all ranks' data."""

from __future__ import annotations

import numpy as np
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater

from nnabla_adaloss import MPICommunicator
from tests.distributed.workers.task import task


def train(comm):
    """The parameters after some updates with this rank's share of each batch."""
    made = task(comm, seed=comm.rank, weight=1 / comm.size) if comm else task(None)
    parameters = made.solver.get_parameters()
    if comm:  # they differ until they are sent
        comm.bcast([p.data for p in parameters.values()], 0)
        comm.check_agreement({name: p.data for name, p in parameters.items()})
    grads = [p.grad for p in parameters.values()]
    updater = DynamicLossScalingUpdater(
        made.solver, made.loss, made.feed, scale=256.0, comm=comm, grads=grads
    )
    for _ in range(10):
        updater.update()
    return made.snapshot()


if __name__ == "__main__":
    communicator = MPICommunicator()
    communicator.init()
    together = train(communicator)
    communicator.check_agreement(together)
    for name, array in train(None).items():
        np.testing.assert_allclose(together[name], array, rtol=0, atol=1e-6, err_msg=name)
    communicator.barrier()
    if communicator.rank == 0:
        print("equal")
